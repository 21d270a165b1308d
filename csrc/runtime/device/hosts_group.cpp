#include "runtime/device/hosts_group.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/kernels.h"
#include "kernels/reduce.h"
#include "runtime/codec_layout.h"

namespace pycoll::cuda {
namespace {

// Elements by which vectors are cut: shares keep the alignment of wholes.
constexpr uint64_t kCut = 64;
// As multiples of what the CPU path sends and stages at a time: 512 KiB, 4 MiB and 64 MiB unless
// somebody chose otherwise.
constexpr uint64_t kLeastPiece = 4;
constexpr uint64_t kMostPiece = 32;
constexpr uint64_t kScratchWindows = 128;

constexpr uint64_t round_up(uint64_t x, uint64_t to) {
  return (x + to - 1) / to * to;
}

// "rank 1" of a group of some of the ranks is rank members[1] here. Texts name ranks in no other
// way.
std::string renumbered(const std::string& text, const std::vector<int>& members) {
  constexpr std::string_view kRank = "rank ";
  std::string result;
  size_t done = 0;
  for (size_t at = text.find(kRank); at != std::string::npos; at = text.find(kRank, at)) {
    at += kRank.size();
    const size_t end = std::min(text.find_first_not_of("0123456789", at), text.size());
    if (end == at || end - at > 6) continue;
    const auto number = static_cast<size_t>(std::stoul(text.substr(at, end - at)));
    if (number >= members.size()) continue;
    result += text.substr(done, at - done) + std::to_string(members[number]);
    done = end;
  }
  return result + text.substr(done);
}

// An error of a group of `members`, in this group's numbers.
Error among(const std::vector<int>& members, const char* where, const Error& error) {
  return Error(error.kind(), concat(where, ": ", renumbered(error.what(), members)));
}

void copy(const void* from, void* to, uint64_t bytes, cudaStream_t stream) {
  require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
}

std::vector<std::vector<int>> ranks_by_host(const Peers& peers) {
  std::vector<std::vector<int>> hosts;
  for (int rank = 0; rank < peers.world_size(); ++rank) {
    const auto same = [&](const std::vector<int>& host) {
      return peers.of(host.front()).same_host(peers.of(rank));
    };
    const auto known = std::find_if(hosts.begin(), hosts.end(), same);
    if (known == hosts.end()) {
      hosts.push_back({rank});
    } else {
      known->push_back(rank);
    }
  }
  return hosts;
}

}  // namespace

HostsGroup::HostsGroup(GroupSeed seed, OpenHere open)
    : StagedGroup(std::move(seed)), open_(std::move(open)) {}

void HostsGroup::connect() {
  StagedGroup::connect();
  const std::vector<std::vector<int>> hosts = ranks_by_host(peers());
  const auto has_this = [&](const std::vector<int>& ranks) {
    return std::find(ranks.begin(), ranks.end(), rank()) != ranks.end();
  };
  const auto own = std::find_if(hosts.begin(), hosts.end(), has_this);
  here_ = *own;
  local_ = static_cast<int>(std::find(here_.begin(), here_.end(), rank()) - here_.begin());
  shares_ = static_cast<int>(here_.size());
  for (const auto& ranks : hosts) shares_ = std::min(shares_, static_cast<int>(ranks.size()));
  alike_ = shares_ > 1 && shares_ * static_cast<int>(hosts.size()) == world_size();
  if (local_ < shares_) {
    for (const auto& ranks : hosts) between_.push_back(ranks[static_cast<size_t>(local_)]);
  }
  // What one rank fails in, the ranks of its part hear of at once, and all others here.
  const Meeting meeting = meeting_of(control_pointer(), device());
  std::shared_ptr<Communicator> here;
  meeting.together("connecting the ranks of a host",
                   [&] { here = control().split(static_cast<int>(own - hosts.begin())); });
  meeting.together("connecting ranks of several hosts",
                   [&] { wire_ = control().split(local_ < shares_ ? local_ : -1); });
  meeting.together("making the group of its host", [&] {
    inside_ = open_(here);
    pieces_ = PinnedMemory(HostWork::kSlots * kMostPiece * control().config().slot_bytes);
  });
}

HostsGroup::~HostsGroup() {
  finish();
  host().stop();  // its work uses what goes now
}

std::optional<Error> HostsGroup::reported() {
  if (auto failure = StagedGroup::reported()) return failure;
  try {
    inside_->check();
    return std::nullopt;
  } catch (const Error& error) {
    return among(here_, "inside of a host", error);
  }
}

// The reasons name no ranks: the peers' numbers are others there, and they have heard of it
// already.
void HostsGroup::ended() {
  StagedGroup::ended();
  inside_->abort("the group of all hosts has ended");
  if (wire_ != nullptr) wire_->abort("the group of all hosts has ended");
}

// nullopt: the call is better off as a whole in host memory, or sums in a way that has no half.
std::optional<HostsGroup::Sum> HostsGroup::sum_for(const CallRequest& request) const {
  const Config& config = control().config();
  const bool chosen = !request.algorithm.empty() && request.algorithm != "auto";
  if (request.collective != Collective::all_reduce || chosen ||
      config.determinism == Determinism::algorithm ||
      request.input.count() * size_of(request.dtype) < config.slot_bytes) {
    return std::nullopt;
  }
  const ReduceKernels* kernels =
      find_reduce_kernels(request.dtype, request.reduce_op, Isa::baseline);
  if (kernels == nullptr) return std::nullopt;
  const bool narrow = kernels->acc != kernels->value;
  if (narrow && !has_fast_all_reduce(request.dtype, ReduceOp::sum)) return std::nullopt;
  Sum sum{kernels->acc, request.reduce_op, request.reduce_op};
  switch (request.reduce_op) {
    case ReduceOp::avg: {
      const DTypeKind kind = dtype_info(request.dtype).kind;
      if (kind != DTypeKind::floating && kind != DTypeKind::complex) return std::nullopt;
      sum.inside = sum.between = ReduceOp::sum;
      sum.divides = true;
      return sum;
    }
    case ReduceOp::premul_sum:
      if (narrow) return std::nullopt;
      sum.between = ReduceOp::sum;
      return sum;
    default:
      return sum;
  }
}

void HostsGroup::launch(const CallRequest& request, cudaStream_t stream) {
  const std::optional<Sum> sum = sum_for(request);
  if (!sum) return StagedGroup::launch(request, stream);
  const size_t element = size_of(request.dtype);
  const std::byte* input = request.input.blocks[0].data;
  std::byte* output = request.output.blocks[0].data;
  const uint64_t count = request.input.count();
  // Partial sums of another type take memory of this group's.
  const uint64_t room = kScratchWindows * control().config().window_bytes / size_of(sum->dtype);
  const uint64_t most = sum->dtype == request.dtype ? count : std::min(count, room);
  for (uint64_t begin = 0; begin < count; begin += most) {
    const uint64_t at = begin * element;
    all_reduce(request, *sum, {input + at, output + at, std::min(most, count - begin)}, stream);
  }
}

void HostsGroup::all_reduce(const CallRequest& request, const Sum& sum, const Part& part,
                            cudaStream_t stream) {
  const size_t element = size_of(sum.dtype);
  std::byte* from = const_cast<std::byte*>(part.input);
  std::byte* to = part.output;
  const bool wider = sum.dtype != request.dtype;
  CastCall widen{.from = request.dtype, .to = sum.dtype, .input = from, .count = part.count};
  if (wider) {
    widen.output = from = to = scratch_.room(part.count * element);
    require(cast(widen, stream), "widening the input");
  }
  scatter(request, sum, from, to, part.count, stream);
  const Block share = share_of(to, part.count, element, local_);
  sum_between(request, sum, share, stream);
  if (sum.divides) divide(sum.dtype, share, stream);
  if (wider) {
    const Block rounded = share_of(part.output, part.count, size_of(request.dtype), local_);
    const CastCall round{.from = sum.dtype,
                         .to = request.dtype,
                         .input = share.data,
                         .output = rounded.data,
                         .count = share.count};
    require(cast(round, stream), "rounding the sum");
  }
  gather(request, part.output, part.count, stream);
}

Block HostsGroup::share_of(std::byte* vector, uint64_t count, size_t element, int local) const {
  if (local >= shares_) return {vector + count * element, 0};
  const ChunkRange range = chunk_range(count, shares_, local, kCut);
  return {vector + range.begin * element, range.size()};
}

VectorView HostsGroup::shares_of(std::byte* vector, uint64_t count, size_t element) const {
  VectorView view;
  for (int local = 0; local < static_cast<int>(here_.size()); ++local) {
    view.blocks.push_back(share_of(vector, count, element, local));
  }
  return view;
}

void HostsGroup::scatter(const CallRequest& request, const Sum& sum, std::byte* from, std::byte* to,
                         uint64_t count, cudaStream_t stream) const {
  const size_t element = size_of(sum.dtype);
  CallRequest call;
  call.timeout = request.timeout;
  call.collective = Collective::reduce_scatter;
  call.dtype = sum.dtype;
  call.reduce_op = sum.inside;
  call.premul_factor = request.premul_factor;
  call.input = shares_of(from, count, element);
  call.output.blocks.push_back(share_of(to, count, element, local_));
  inside_->enqueue(call, stream);
}

void HostsGroup::gather(const CallRequest& request, std::byte* vector, uint64_t count,
                        cudaStream_t stream) const {
  const size_t element = size_of(request.dtype);
  CallRequest call;
  call.timeout = request.timeout;
  call.collective = Collective::all_gather;
  call.dtype = request.dtype;
  call.output = shares_of(vector, count, element);
  call.input.blocks.push_back(share_of(vector, count, element, local_));
  inside_->enqueue(call, stream);
}

// Runs calls between hosts, in the thread of the host's work.
std::function<void(CallRequest)> HostsGroup::wire() const {
  return [ranks = wire_, members = between_](CallRequest call) {
    try {
      ranks->run(std::move(call), nullptr);
    } catch (const Error& error) {
      throw among(members, "between hosts", error);
    }
  };
}

uint64_t HostsGroup::piece_for(uint64_t bytes) const {
  const uint64_t slot = control().config().slot_bytes;
  const uint64_t even = round_up((bytes + HostWork::kSlots - 1) / HostWork::kSlots, kCut * 16);
  return std::clamp(even, kLeastPiece * slot, kMostPiece * slot);
}

// The stream copies pieces out as long as there are slots, then takes the oldest back before each
// further one; meanwhile the host sums what is out, one piece after the other.
void HostsGroup::sum_between(const CallRequest& request, const Sum& sum, const Block& share,
                             cudaStream_t stream) {
  constexpr uint64_t kSlots = HostWork::kSlots;
  const size_t element = size_of(sum.dtype);
  const uint64_t most = piece_for(share.count * element) / element;
  const uint64_t pieces = (share.count + most - 1) / most;
  const auto piece_at = [&](uint64_t k) -> Block {
    return {share.data + k * most * element, std::min(most, share.count - k * most)};
  };
  for (uint64_t k = 0; k < pieces + kSlots; ++k) {
    const auto slot = static_cast<size_t>(k % kSlots);
    std::byte* const pinned = pieces_.data() + slot * most * element;
    if (k >= kSlots && k - kSlots < pieces) {
      const Block back = piece_at(k - kSlots);
      host().end(slot, stream);
      copy(pinned, back.data, back.count * element, stream);
    }
    if (k >= pieces) continue;
    const Block out = piece_at(k);
    copy(out.data, pinned, out.count * element, stream);
    CallRequest call;
    call.timeout = request.timeout;
    call.collective = Collective::all_reduce;
    call.dtype = sum.dtype;
    call.reduce_op = sum.between;
    call.input.blocks.push_back({pinned, out.count});
    call.output = call.input;
    const auto work = [run = wire(), call] { run(CallRequest(call)); };
    host().begin(slot, work, is_captured(), stream);
  }
}

// All that is inside of hosts comes before, and after, what crosses: so the network is busy from
// the first code to the last.
void HostsGroup::launch_over_codec(const CodecRequest& request, cudaStream_t stream) {
  if (request.collective != Collective::all_reduce || !alike_) {
    return StagedGroup::launch_over_codec(request, stream);
  }
  CodecRunner::check(request.collective, wire_->world_size());
  const size_t element = size_of(request.dtype);
  const std::vector<Range> segments = host_segments(request.codec, request.input.count(), shares_);
  const auto part_of = [&](const VectorView& vector, const Range& segment, int local) {
    const Range share = pycoll::share_of(request.codec, segment.count, shares_, local);
    return block_of(vector, element, {segment.begin + share.begin, share.count});
  };
  std::vector<CodecRequest> crossings;
  for (const Range& segment : segments) {
    CallRequest call;
    call.timeout = request.timeout;
    call.collective = Collective::reduce_scatter;
    call.dtype = request.dtype;
    call.reduce_op = request.reduce_op;
    for (int local = 0; local < shares_; ++local) {
      call.input.blocks.push_back(part_of(request.input, segment, local));
    }
    call.output.blocks.push_back(part_of(request.output, segment, local_));
    inside_->enqueue(call, stream);
    crossings.push_back(crossing_of(request, segment, shares_, local_));
  }
  StagedCarrier carrier = carrier_among(*wire_, wire());
  codecs().run(crossings, carrier, stream);
  for (const Range& segment : segments) {
    CallRequest call;
    call.timeout = request.timeout;
    call.collective = Collective::all_gather;
    call.dtype = request.dtype;
    for (int local = 0; local < shares_; ++local) {
      call.output.blocks.push_back(part_of(request.output, segment, local));
    }
    call.input.blocks.push_back(part_of(request.output, segment, local_));
    inside_->enqueue(call, stream);
  }
}

// In place, by the kernel that finishes sums: it has one term here.
void HostsGroup::divide(DType dtype, const Block& share, cudaStream_t stream) const {
  ReduceManyCall call;
  call.arithmetic = {dtype, ReduceOp::avg, world_size()};
  call.sources = call.targets = 1;
  call.input[0] = call.output[0] = share.data;
  call.end = share.count;
  require(reduce_many(call, stream), "dividing the sum");
}

}  // namespace pycoll::cuda
