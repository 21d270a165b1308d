#include "runtime/host_codec_call.h"

#include <algorithm>
#include <map>

#include "runtime/codec_group.h"

namespace pycoll {
namespace {

// Values of a segment. Of a vector there are some four, so that what happens inside of hosts
// overlaps with the network; below half a million, three more operations cost more than that saves.
constexpr uint64_t kSegments = 4;
constexpr uint64_t kLeastSegment = uint64_t{1} << 19;
constexpr uint64_t kMostSegment = uint64_t{1} << 23;

}  // namespace

bool has_host_lanes(const std::vector<int32_t>& hosts) {
  std::map<int32_t, int> ranks;
  for (const int32_t host : hosts) ++ranks[host];
  const int each = ranks.begin()->second;
  return ranks.size() > 1 && each > 1 &&
         std::ranges::all_of(ranks, [each](const auto& host) { return host.second == each; });
}

HostLanes HostLanes::make(Communicator& group, const Interrupt& interrupt) {
  const std::vector<int32_t>& hosts = group.hosts();
  const int32_t host = hosts[static_cast<size_t>(group.rank())];
  const auto place = std::count(hosts.begin(), hosts.begin() + group.rank(), host);
  HostLanes lanes;
  lanes.scatter = group.split(host, interrupt);
  lanes.gather = group.split(host, interrupt);
  lanes.across = group.split(static_cast<int>(place), interrupt);
  lanes.codecs = CodecGroup::make(lanes.across);
  lanes.codecs->connect(interrupt);
  return lanes;
}

void HostLanes::close() const {
  if (!scatter) return;
  // Completions of each submit to the next.
  scatter->close();
  codecs->close();
  across->close();
  gather->close();
}

void HostLanes::abort(const std::string& reason) const {
  for (const auto& lane : {scatter, across, gather}) {
    if (lane && !lane->dead()) lane->abort(reason);
  }
}

HostCodecCall::HostCodecCall(CodecRequest request, int rank, const HostLanes& lanes,
                             std::shared_ptr<CallHome> home)
    : CompressedCall(std::move(request), rank, std::move(home)),
      lanes_(lanes),
      place_(lanes.scatter->rank()) {}

void HostCodecCall::begin() {
  const uint64_t count = request().input.count();
  // Whole units for each rank of the host.
  const auto ranks = static_cast<uint64_t>(lanes_.scatter->world_size());
  const uint64_t about = std::clamp(count / kSegments, kLeastSegment, kMostSegment);
  const uint64_t length = whole_units((about + ranks - 1) / ranks) * ranks;
  uint64_t begin = 0;
  do {
    const Range segment{begin, std::min(length, count - begin)};
    scatter(segment);
    begin += segment.count;
  } while (begin < count);
}

Range HostCodecCall::part_of(const Range& segment, int place) const {
  const Range share = share_of(segment.count, lanes_.scatter->world_size(), place);
  return {segment.begin + share.begin, share.count};
}

Block HostCodecCall::block_of(const VectorView& vector, const Range& range) const {
  return {vector.blocks[0].data + range.begin * size_of(request().dtype), range.count};
}

void HostCodecCall::scatter(const Range& segment) {
  CallRequest call;
  call.collective = Collective::reduce_scatter;
  call.dtype = request().dtype;
  // The mean of the hosts' means is the mean: they have as many ranks.
  call.reduce_op = request().reduce_op;
  for (int place = 0; place < lanes_.scatter->world_size(); ++place) {
    call.input.blocks.push_back(block_of(request().input, part_of(segment, place)));
  }
  call.output.blocks.push_back(block_of(request().output, part_of(segment, place_)));
  const auto crossing = std::make_shared<std::shared_ptr<CompressedCall>>();
  submit(
      *lanes_.scatter, std::move(call), [this, segment, crossing] { *crossing = cross(segment); },
      [crossing] {
        if (*crossing) (*crossing)->started();
      });
}

// Begun in the order of `scatter`, by the thread that drives it: it must not end there.
std::shared_ptr<CompressedCall> HostCodecCall::cross(const Range& segment) {
  const Range part = part_of(segment, place_);
  CodecRequest call;
  call.collective = Collective::all_reduce;
  call.codec = request().codec;
  call.dtype = request().dtype;
  call.reduce_op = request().reduce_op;
  call.seed = request().seed;
  call.step = request().step;
  call.first = request().first + part.begin;
  call.output.blocks.push_back(block_of(request().output, part));
  call.input = call.output;
  const auto residual_of = [&part](const VectorView& residual) {
    VectorView mine;
    if (residual.blocks.empty()) return mine;
    mine.blocks.push_back({residual.blocks[0].data + part.begin * sizeof(float), part.count});
    return mine;
  };
  call.residual = residual_of(request().residual);
  call.sum_residual = residual_of(request().sum_residual);
  adopt(call, {nullptr, nullptr, [across = lanes_.across] { across->throw_if_dead(); }});
  call.in_order = [this, segment] { gather(segment); };
  if (!enter()) return nullptr;
  try {
    return lanes_.codecs->begin_part(std::move(call));
  } catch (...) {
    note(std::current_exception());
    withdraw();
    return nullptr;
  }
}

void HostCodecCall::gather(const Range& segment) {
  CallRequest call;
  call.collective = Collective::all_gather;
  call.dtype = request().dtype;
  for (int place = 0; place < lanes_.scatter->world_size(); ++place) {
    call.output.blocks.push_back(block_of(request().output, part_of(segment, place)));
  }
  call.input.blocks.push_back(block_of(request().output, part_of(segment, place_)));
  submit(*lanes_.gather, std::move(call), nullptr);
}

}  // namespace pycoll
