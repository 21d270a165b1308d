#include "device_call.h"

#include <sstream>
#include <stdexcept>

#include "native/random.h"
#include "scenario.h"

namespace pycoll::sim::tests {
namespace {

using stress::mix;

size_t parts_of(Parts parts, int32_t world_size) {
  return parts == Parts::world ? static_cast<size_t>(world_size) : 1;
}

}  // namespace

std::string CallShape::describe() const {
  std::ostringstream text;
  text << name_of(collective) << " of " << count << " " << name_of(dtype) << " " << name_of(op)
       << ", root " << root << (in_place ? ", in place" : "") << ", offset " << offset << ", seed "
       << seed;
  return text.str();
}

CallData::CallData(const CallShape& shape, int32_t world_size)
    : shape_(shape),
      world_size_(world_size),
      inputs_(static_cast<size_t>(world_size)),
      outputs_(static_cast<size_t>(world_size)) {
  make_inputs();
  make_outputs();
  place();
  fill();
}

void CallData::renew() {
  ++generation_;
  make_inputs();
  make_outputs();
  fill();
}

bool CallData::has(int32_t rank, bool input) const {
  const CollectiveTraits& traits = traits_of(shape_.collective);
  return rank == shape_.root || !(input ? traits.input_at_root : traits.output_at_root);
}

// What `from` has for `to`. Where blocks may differ some are empty.
uint64_t CallData::block_length(int32_t from, int32_t to) const {
  const auto drawn = [&](uint64_t key) {
    return mix(shape_.seed * 977 + key) % (shape_.count + 1);
  };
  switch (traits_of(shape_.collective).lengths) {
    case Lengths::cut:
    case Lengths::equal:
      return shape_.count;
    case Lengths::known:
      return drawn(static_cast<uint64_t>(shape_.collective == Collective::all_gather ? from : to));
    case Lengths::pairwise:
      return drawn(static_cast<uint64_t>(from * world_size_ + to));
  }
  return 0;
}

void CallData::make_inputs() {
  const CollectiveTraits& traits = traits_of(shape_.collective);
  for (int32_t rank = 0; rank < world_size_; ++rank) {
    Side& input = inputs_[static_cast<size_t>(rank)];
    input.blocks.clear();
    for (size_t block = 0; has(rank, true) && block < parts_of(traits.input, world_size_);
         ++block) {
      const uint64_t key =
          shape_.seed * 131 + static_cast<uint64_t>(rank) * 17 + block + generation_ * 7919;
      input.blocks.push_back(make_contents(shape_.dtype, shape_.op,
                                           block_length(rank, static_cast<int32_t>(block)), key,
                                           shape_.contents));
    }
  }
}

void CallData::make_outputs() {
  const CollectiveTraits& traits = traits_of(shape_.collective);
  for (int32_t rank = 0; rank < world_size_; ++rank) {
    outputs_[static_cast<size_t>(rank)].blocks.clear();
    if (!has(rank, false)) continue;
    for (size_t block = 0; block < parts_of(traits.output, world_size_); ++block) {
      outputs_[static_cast<size_t>(rank)].blocks.push_back(
          expected(rank, static_cast<int32_t>(block)));
    }
  }
}

Bytes CallData::expected(int32_t rank, int32_t block) const {
  const CollectiveTraits& traits = traits_of(shape_.collective);
  const auto mine = static_cast<size_t>(traits.input == Parts::world ? rank : 0);
  if (traits.reduces) {
    std::vector<Bytes> terms;
    for (const Side& input : inputs_) terms.push_back(input.blocks[mine]);
    return fold(shape_.dtype, shape_.op, terms);
  }
  const int32_t from = traits.output == Parts::world ? block : shape_.root;
  return inputs_[static_cast<size_t>(from)].blocks[mine];
}

void CallData::place() {
  const CollectiveTraits& traits = traits_of(shape_.collective);
  const size_t before = shape_.offset * size_of(shape_.dtype);
  const auto lay_out = [](Side& side) {
    for (const Bytes& block : side.blocks) {
      side.offsets.push_back(side.bytes);
      side.bytes += block.size();
    }
  };
  for (int32_t rank = 0; rank < world_size_; ++rank) {
    Side& input = inputs_[static_cast<size_t>(rank)];
    Side& output = outputs_[static_cast<size_t>(rank)];
    lay_out(input);
    lay_out(output);
    const bool both = !input.blocks.empty() && !output.blocks.empty();
    const bool one = both && shape_.in_place && shape_.collective != Collective::all_to_all;
    const auto own = static_cast<size_t>(rank);
    if (one && traits.input != Parts::world && traits.output == Parts::world) {
      output.vector = input.vector = std::make_shared<Buffer>(output.bytes, before);
      input.at = output.offsets[own];
    } else if (one && traits.input == Parts::world && traits.output != Parts::world) {
      output.vector = input.vector = std::make_shared<Buffer>(input.bytes, before);
      output.at = input.offsets[own];
    } else if (one) {
      output.vector = input.vector = std::make_shared<Buffer>(input.bytes, before);
    } else {
      if (!input.blocks.empty()) input.vector = std::make_shared<Buffer>(input.bytes, before);
      if (!output.blocks.empty()) output.vector = std::make_shared<Buffer>(output.bytes, before);
    }
  }
}

void CallData::fill() {
  for (const Side& output : outputs_) {
    if (output.vector != nullptr) output.vector->poison();
  }
  for (const Side& input : inputs_) {
    for (size_t block = 0; block < input.blocks.size(); ++block) {
      std::byte* to = input.vector->data() + input.at + input.offsets[block];
      std::copy(input.blocks[block].begin(), input.blocks[block].end(), to);
    }
  }
}

cuda::Vector CallData::view(int32_t rank, bool input) const {
  const Side& it = side(rank, input);
  cuda::Vector vector;
  vector.blocks = static_cast<int32_t>(it.blocks.size());
  for (size_t block = 0; block < it.blocks.size(); ++block) {
    vector.block[block] = it.vector->data() + it.at + it.offsets[block];
    vector.count[block] = it.blocks[block].size() / size_of(shape_.dtype);
  }
  return vector;
}

void CallData::check(const std::string& what) const {
  for (int32_t rank = 0; rank < world_size_; ++rank) check_rank(rank, what);
}

void CallData::check_rank(int32_t rank, const std::string& what) const {
  const Side& input = side(rank, true);
  const Side& output = side(rank, false);
  const auto compare = [&](const Side& it, size_t block, const char* name) {
    const std::byte* vector = it.seen != nullptr ? it.seen->data() : it.vector->data() + it.at;
    const std::byte* at = vector + it.offsets[block];
    const Bytes got(at, at + it.blocks[block].size());
    const std::string differs = difference(shape_.dtype, got, it.blocks[block]);
    tests::check(differs.empty(), what + ", " + shape_.describe() + ": " + name + " block " +
                                      std::to_string(block) + " of rank " + std::to_string(rank) +
                                      ": " + differs);
  };
  for (size_t block = 0; block < output.blocks.size(); ++block) compare(output, block, "output");
  const bool apart = input.vector != nullptr && input.vector != output.vector && !overwrites_;
  for (size_t block = 0; apart && block < input.blocks.size(); ++block) {
    compare(input, block, "input");
  }
}

std::vector<Buffer*> CallData::buffers(int32_t rank) const {
  Buffer* input = side(rank, true).vector.get();
  Buffer* output = side(rank, false).vector.get();
  std::vector<Buffer*> all;
  if (input != nullptr) all.push_back(input);
  if (output != nullptr && output != input) all.push_back(output);
  return all;
}

void CallData::check_untouched(const std::string& what) const {
  for (int32_t rank = 0; rank < world_size_; ++rank) {
    const Side& output = side(rank, false);
    if (output.vector == nullptr || output.vector == side(rank, true).vector) continue;
    for (const std::byte byte : output.vector->contents()) {
      tests::check(byte == std::byte{0xa5}, what + ", " + shape_.describe() +
                                                ": the output of rank " + std::to_string(rank) +
                                                " was written");
    }
  }
}

}  // namespace pycoll::sim::tests
