#include "cases.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "transport/shm/arena.h"
#include "world.h"

namespace pycoll::stress {
namespace {

// Integer values below 16 are exact in every type here, and so are their sums over a few ranks.
struct Codec {
  DType dtype;
  void (*put)(std::byte* to, int64_t value);
  int64_t (*get)(const std::byte* from);
};

template <typename T>
void put_as(std::byte* to, int64_t value) {
  const T element = static_cast<T>(value);
  std::memcpy(to, &element, sizeof(T));
}

template <typename T>
int64_t get_as(const std::byte* from) {
  T element;
  std::memcpy(&element, from, sizeof(T));
  return static_cast<int64_t>(element);
}

// bfloat16 is the upper half of a float32.
void put_bfloat16(std::byte* to, int64_t value) {
  const auto wide = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &wide, sizeof(bits));
  put_as<uint16_t>(to, bits >> 16);
}

int64_t get_bfloat16(const std::byte* from) {
  const uint32_t bits = static_cast<uint32_t>(get_as<uint16_t>(from)) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  // Garbage may hold any bits, and a NaN must not be converted.
  return wide >= -1e6f && wide <= 1e6f ? static_cast<int64_t>(wide) : -1;
}

int64_t get_float32(const std::byte* from) {
  float element;
  std::memcpy(&element, from, sizeof(element));
  return element >= -1e6f && element <= 1e6f ? static_cast<int64_t>(element) : -1;
}

constexpr Codec kCodecs[] = {
    {DType::int32, put_as<int32_t>, get_as<int32_t>},
    {DType::int64, put_as<int64_t>, get_as<int64_t>},
    {DType::float32, put_as<float>, get_float32},
    {DType::bfloat16, put_bfloat16, get_bfloat16},
};

const Codec& codec_of(DType dtype) {
  for (const Codec& codec : kCodecs) {
    if (codec.dtype == dtype) return codec;
  }
  throw CheckFailed("no codec");
}

constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::max, ReduceOp::min};

int64_t combine(ReduceOp op, int64_t a, int64_t b) {
  if (op == ReduceOp::max) return std::max(a, b);
  if (op == ReduceOp::min) return std::min(a, b);
  return a + b;
}

}  // namespace

std::string to_string(const Case& what) {
  return concat(name_of(what.algorithm->collective), " ", what.algorithm->name, ", ",
                name_of(what.op), ", ", what.count, " x ", name_of(what.dtype), ", root ",
                what.root, what.in_place ? ", in place" : "", what.uneven ? ", uneven" : "");
}

Case draw_case(const Algorithm& algorithm, int world_size, Rng& agreed) {
  Case drawn;
  drawn.algorithm = &algorithm;
  drawn.dtype = kCodecs[agreed.below(std::size(kCodecs))].dtype;
  if (reduces(algorithm.collective)) drawn.op = kOps[agreed.below(std::size(kOps))];
  drawn.root = static_cast<int>(agreed.below(static_cast<uint64_t>(world_size)));
  drawn.in_place = agreed.one_in(2);
  drawn.uneven = agreed.one_in(2);
  drawn.salt = agreed.next();
  // Sizes about a slice, about a few windows, and anything.
  const uint64_t slice = 64 / size_of(drawn.dtype);
  const uint64_t sizes[] = {agreed.below(4), slice * agreed.below(5) + agreed.below(3),
                            agreed.below(200), agreed.below(1500)};
  drawn.count = sizes[agreed.below(std::size(sizes))];
  if (algorithm.collective == Collective::barrier) drawn.count = 0;
  return drawn;
}

Vectors::Vectors(const Case& what, int rank, int world_size)
    : case_(what), rank_(rank), world_size_(world_size) {
  if (case_.algorithm->collective == Collective::barrier) return;
  const auto world = static_cast<size_t>(world_size);
  const size_t element = size_of(case_.dtype);
  const bool broadcasts = case_.algorithm->collective == Collective::broadcast;
  if (is_root() || broadcasts || !traits().input_at_root) {
    input_.resize(traits().input == Parts::world ? world : 1);
    for (size_t k = 0; k < input_.size(); ++k) input_[k].resize(input_length(k) * element);
  }
  if (is_root() || !traits().output_at_root) {
    output_.resize(traits().output == Parts::world ? world : 1);
    for (size_t k = 0; k < output_.size(); ++k) {
      output_[k].assign(output_length(k) * element, std::byte{0xA5});
    }
  }
  fill_input();
  // What has no partner at this rank is not in place here.
  if (input_.empty() || output_.empty()) case_.in_place = false;
  if (traits().lengths == Lengths::pairwise) case_.in_place = false;
  if (case_.in_place) share_memory();
}

uint64_t Vectors::length(size_t from, size_t to) const {
  if (!case_.uneven) return case_.count;
  if (traits().lengths == Lengths::pairwise)
    return mix(case_.salt ^ (from * 64 + to)) % (case_.count + 1);
  if (traits().lengths != Lengths::known) return case_.count;
  const size_t block = traits().input == Parts::one ? from : to;
  return mix(case_.salt ^ block) % (case_.count + 1);
}

uint64_t Vectors::input_length(size_t block) const {
  return length(static_cast<size_t>(rank_), block);
}

uint64_t Vectors::output_length(size_t block) const {
  return length(block, static_cast<size_t>(rank_));
}

void Vectors::fill_input() {
  const Codec& codec = codec_of(case_.dtype);
  // What a rank that is not the root passes to a broadcast must not matter.
  const bool ignored = traits().input_at_root && !is_root();
  for (size_t block = 0; block < input_.size(); ++block) {
    for (uint64_t i = 0; i < input_length(block); ++i) {
      const int64_t value = ignored ? 99 : contribution(rank_, block, i);
      codec.put(input_[block].data() + i * size_of(case_.dtype), value);
    }
  }
}

// As program.h defines it: of a vector with a block a rank, this rank's is the other vector.
void Vectors::share_memory() {
  const auto own = static_cast<size_t>(rank_);
  if (traits().output == Parts::world) {
    output_[own] = input_[0];
  } else if (traits().input == Parts::world) {
    output_.clear();
  } else {
    output_ = input_;
  }
}

namespace {

size_t bytes_of(const std::vector<std::vector<std::byte>>& blocks) {
  size_t bytes = 0;
  for (const auto& block : blocks) bytes += block.size();
  return bytes;
}

}  // namespace

void Vectors::move_to_arena() {
  const auto arena = shm::process_arena();
  check(arena != nullptr, "no arena: ", shm::process_arena_problem());
  const size_t bytes = bytes_of(input_) + bytes_of(output_);
  auto* block = static_cast<std::byte*>(arena->allocate(bytes + 1));
  check(block != nullptr, "the arena has no room for ", bytes, " bytes");
  arena_block_ = {block, [arena](std::byte* p) { arena->free(p); }};
  for (const auto* blocks : {&input_, &output_}) {
    for (const Memory& each : *blocks) block = std::copy(each.begin(), each.end(), block);
  }
}

void Vectors::take_from_arena() {
  const std::byte* from = arena_block_.get();
  for (auto* blocks : {&input_, &output_}) {
    for (Memory& each : *blocks) {
      std::copy(from, from + each.size(), each.begin());
      from += each.size();
    }
  }
}

// `begin`: where the blocks lie in the arena.
VectorView Vectors::view(std::vector<Memory>& blocks, size_t begin) const {
  VectorView view;
  for (Memory& block : blocks) {
    std::byte* data = arena_block_ ? arena_block_.get() + begin : block.data();
    view.blocks.push_back({data, block.size() / size_of(case_.dtype)});
    begin += block.size();
  }
  return view;
}

CallRequest Vectors::request() {
  CallRequest request;
  request.collective = case_.algorithm->collective;
  request.algorithm = case_.algorithm->name;
  request.dtype = case_.dtype;
  request.reduce_op = case_.op;
  request.root = case_.root;
  if (case_.algorithm->needs_lease) move_to_arena();
  request.input = view(input_, 0);
  request.output = view(output_, bytes_of(input_));
  if (!case_.in_place || request.collective == Collective::barrier) return request;
  const auto own = static_cast<size_t>(rank_);
  if (traits().output == Parts::world) {
    request.input.blocks = {request.output.blocks[own]};
  } else if (traits().input == Parts::world) {
    request.output.blocks = {request.input.blocks[own]};
  } else {
    request.input = request.output;
  }
  return request;
}

int64_t Vectors::contribution(int rank, size_t block, uint64_t i) const {
  const uint64_t where = (static_cast<uint64_t>(rank) << 48) ^ (static_cast<uint64_t>(block) << 40);
  return static_cast<int64_t>(mix(case_.salt ^ where ^ i) % 16);
}

int64_t Vectors::expected(size_t block, uint64_t i) const {
  const size_t own = traits().input == Parts::world ? static_cast<size_t>(rank_) : 0;
  if (!traits().reduces) {
    const bool from_root = traits().rooted && traits().output != Parts::world;
    return contribution(from_root ? case_.root : static_cast<int>(block), own, i);
  }
  int64_t sum = contribution(0, own, i);
  for (int rank = 1; rank < world_size_; ++rank) {
    sum = combine(case_.op, sum, contribution(rank, own, i));
  }
  return sum;
}

void Vectors::check_block(size_t block) const {
  const Codec& codec = codec_of(case_.dtype);
  const Memory& result = output_.empty() ? input_[static_cast<size_t>(rank_)] : output_[block];
  for (uint64_t i = 0; i < output_length(block); ++i) {
    const int64_t got = codec.get(result.data() + i * size_of(case_.dtype));
    check(got == expected(block, i), to_string(case_), ": block ", block, ", element ", i, " is ",
          got, ", expected ", expected(block, i));
  }
}

void Vectors::check_result() const {
  if (case_.algorithm->collective == Collective::barrier) return;
  if (arena_block_ == nullptr) return check_values();
  // Into a copy: several threads may check one result.
  Vectors seen(*this);
  seen.take_from_arena();
  seen.check_values();
}

void Vectors::check_values() const {
  if (traits().output_at_root && !is_root()) {
    // Its vector is its own affair: partial sums must not have touched it.
    const Codec& codec = codec_of(case_.dtype);
    for (uint64_t i = 0; i < input_length(0); ++i) {
      const int64_t got = codec.get(input_[0].data() + i * size_of(case_.dtype));
      check(got == contribution(rank_, 0, i), to_string(case_), ": the input was written to");
    }
    return;
  }
  const size_t blocks = traits().output == Parts::world ? static_cast<size_t>(world_size_) : 1;
  for (size_t block = 0; block < blocks; ++block) check_block(block);
}

}  // namespace pycoll::stress
