// What brings codes from rank to rank, on a stream.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/operation.h"

namespace pycoll::cuda {

// Collectives of bytes that are only moved, in two halves: where the wire is the host's work, it
// has calls to carry while the stream makes codes for the next ones. All of one group; the same
// halves in the same order on all ranks.
class CodeCarrier {
 public:
  CodeCarrier() = default;
  virtual ~CodeCarrier() = default;
  CodeCarrier(const CodeCarrier&) = delete;
  CodeCarrier& operator=(const CodeCarrier&) = delete;

  virtual int world_size() const = 0;
  virtual int rank() const = 0;
  // How many calls may be begun with the first not ended. Their slots are 0 to slots() - 1.
  virtual size_t slots() const = 0;
  // How many bytes one call should have, all ranks' codes together.
  virtual uint64_t portion() const = 0;

  // Begins after what is on the stream; `call` is in memory of the device. What comes after end()
  // on the stream sees its results.
  virtual void begin(size_t slot, const CallRequest& call, cudaStream_t stream) = 0;
  virtual void end(size_t slot, cudaStream_t stream) = 0;
};

}  // namespace pycoll::cuda
