// An all_reduce over a codec between hosts of several ranks each: what travels inside of a host
// stays exact, and only one rank of each host sends a part of the vector over the network.
//
// A segment of the vector passes through three groups:
//
//   scatter   reduce_scatter among the ranks of a host: each gets the host's sum of its part
//   across    all_reduce over the codec of that part, among the ranks of that place on all hosts
//   gather    all_gather among the ranks of a host
//
// so that there are two quantisations as without hosts, and all ranks end with the same bits.
// Segments are under way at once. They enter `across` from where results of `scatter` are taken,
// and `gather` from where those of `across` are: by whoever drives that lane, in its order, which
// is one on all ranks. (Callbacks of operations have no order.)
//
// Sums of 16-bit types are rounded once more, after that of each host. The residual of a rank is
// that of its parts of its host's sum (of its mean, under AVG), and is zero elsewhere.
#pragma once

#include <memory>
#include <vector>

#include "runtime/codec_layout.h"
#include "runtime/compressed_call.h"

namespace pycoll {

class CodecGroup;

// The same number of ranks, two or more, on each of several hosts; hosts by rank.
bool has_host_lanes(const std::vector<int32_t>& hosts);

struct HostLanes {
  std::shared_ptr<Communicator> scatter;
  std::shared_ptr<Communicator> across;
  std::shared_ptr<CodecGroup> codecs;  // of `across`
  std::shared_ptr<Communicator> gather;

  // Collective over the group.
  static HostLanes make(Communicator& group, const Interrupt& interrupt, const OverCodec& over);
  void close() const;
  void abort(const std::string& reason) const;
};

class HostCodecCall final : public CompressedCall {
 public:
  HostCodecCall(CodecRequest request, int rank, const HostLanes& lanes,
                std::shared_ptr<CallHome> home);

 private:
  void begin() override;
  void settle() override { lanes_ = {}; }
  // A rank's share of a segment.
  Block part_of(const VectorView& vector, const Range& segment, int place) const;
  void scatter(const Range& segment);
  std::shared_ptr<CompressedCall> cross(const Range& segment);
  void gather(const Range& segment);

  HostLanes lanes_;
  const int place_;  // among the ranks of the host
};

}  // namespace pycoll
