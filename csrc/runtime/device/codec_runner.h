// Collectives over codecs on a stream: what runtime/codec_call.h does on the CPU, with the same
// pieces and random numbers, and so the same bits.
//
// A portion of each chunk, a few pieces, passes through three stages: this rank's values are
// encoded and the codes exchanged; those of its own chunk are summed in float32 by one kernel, in
// the order of ranks, encoded again and gathered; what is gathered is decoded. Other collectives
// than all_reduce have the first or the last of these. While a carrier's wire is the host's work,
// the stream makes codes for further portions.
#pragma once

#include <vector>

#include "runtime/codec_request.h"
#include "runtime/device/code_carrier.h"
#include "runtime/device/kept_memory.h"
#include "transport/cuda_ipc/runtime_api.h"

namespace pycoll::cuda {

class CodecRunner {
 public:
  // Throws Error(not_implemented) where a kernel cannot sum the codes of so many ranks.
  static void check(Collective collective, int ranks);

  // Puts the calls on the stream, one after the other in the carrier's group; steps are set.
  // Nothing waits. Calls run one at a time: they share memory.
  void run(const std::vector<CodecRequest>& calls, CodeCarrier& carrier, cudaStream_t stream);

 private:
  KeptMemory<DeviceMemory> scratch_;
};

}  // namespace pycoll::cuda
