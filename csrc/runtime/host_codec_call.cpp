#include "runtime/host_codec_call.h"

#include <algorithm>
#include <map>

#include "runtime/codec_group.h"

namespace pycoll {
bool has_host_lanes(const std::vector<int32_t>& hosts) {
  std::map<int32_t, int> ranks;
  for (const int32_t host : hosts) ++ranks[host];
  const int each = ranks.begin()->second;
  return ranks.size() > 1 && each > 1 &&
         std::ranges::all_of(ranks, [each](const auto& host) { return host.second == each; });
}

HostLanes HostLanes::make(Communicator& group, const Interrupt& interrupt, const OverCodec& over) {
  const std::vector<int32_t>& hosts = group.hosts();
  const int32_t host = hosts[static_cast<size_t>(group.rank())];
  const auto place = std::count(hosts.begin(), hosts.begin() + group.rank(), host);
  HostLanes lanes;
  lanes.scatter = group.split(host, interrupt, over);
  lanes.gather = group.split(host, interrupt, over);
  lanes.across = group.split(static_cast<int>(place), interrupt, over);
  lanes.codecs = CodecGroup::make(lanes.across);
  lanes.codecs->connect(interrupt, over);
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
  const int ranks = lanes_.scatter->world_size();
  for (const Range& segment : host_segments(request().codec, request().input.count(), ranks)) {
    scatter(segment);
  }
}

Block HostCodecCall::part_of(const VectorView& vector, const Range& segment, int place) const {
  const Range share = share_of(request().codec, segment.count, lanes_.scatter->world_size(), place);
  return block_of(vector, size_of(request().dtype), {segment.begin + share.begin, share.count});
}

void HostCodecCall::scatter(const Range& segment) {
  CallRequest call;
  call.collective = Collective::reduce_scatter;
  call.dtype = request().dtype;
  call.reduce_op = request().reduce_op;
  // Exact, but here the ranks of a host compare what `across` compares between hosts.
  call.over = over_of(request());
  for (int place = 0; place < lanes_.scatter->world_size(); ++place) {
    call.input.blocks.push_back(part_of(request().input, segment, place));
  }
  call.output.blocks.push_back(part_of(request().output, segment, place_));
  const auto crossing = std::make_shared<std::shared_ptr<CompressedCall>>();
  submit(
      *lanes_.scatter, std::move(call), [this, segment, crossing] { *crossing = cross(segment); },
      [crossing] {
        if (*crossing) (*crossing)->started();
      });
}

// Begun in the order of `scatter`, by the thread that drives it: it must not end there.
std::shared_ptr<CompressedCall> HostCodecCall::cross(const Range& segment) {
  CodecRequest call = crossing_of(request(), segment, lanes_.scatter->world_size(), place_);
  adopt(call, {nullptr, nullptr, [across = lanes_.across.get()] { across->throw_if_dead(); }});
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
    call.output.blocks.push_back(part_of(request().output, segment, place));
  }
  call.input.blocks.push_back(part_of(request().output, segment, place_));
  submit(*lanes_.gather, std::move(call), nullptr);
}

}  // namespace pycoll
