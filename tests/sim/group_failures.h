// Groups that end: what tests of that have in common.
#pragma once

#include <unistd.h>

#include <string>

#include "core/error.h"
#include "group_world.h"
#include "scenario.h"
#include "transport/cuda_ipc/runtime_api.h"

namespace pycoll::sim::tests {

constexpr auto kSoon = std::chrono::seconds(10);

// An all_reduce in place. Behind the vector there is as much memory again.
struct FailureCall {
  static constexpr uint64_t kCount = 1024;
  CallRequest request;
  cuda::DeviceMemory memory;
  cuda::Stream stream;

  explicit FailureCall(uint64_t count = kCount) : memory(2 * count * sizeof(float)) {
    request.collective = Collective::all_reduce;
    request.dtype = DType::float32;
    request.reduce_op = ReduceOp::sum;
    request.input = request.output = {{{memory.data(), count}}};
  }
};

// What check() says in the end, while work is under way.
Error error_of(GroupRank& rank);

// A group with an error has let go of its streams, and says the same ever after.
void check_dead(GroupRank& rank, FailureCall& call, const std::string& said);

inline void check_says(const std::string& said, const std::string& part) {
  check(said.find(part) != std::string::npos, "no '" + part + "' in: " + said);
}

}  // namespace pycoll::sim::tests
