// Kernels that wait in vain end, say for whom they waited, and write no output.
#include "device_scenarios.h"

namespace pycoll::sim::tests {
namespace {

using stress::Rng;

// Simulated time: a kernel that waits sees it pass.
constexpr uint64_t kSoon = 200'000;

struct Attempt {
  CallShape shape;
  const char* algorithm;  // nullptr: the kernel by hand
  uint64_t limit_ns;
};

using Launch = void (*)(DeviceGroup&, const CallData&, int32_t rank, const cuda::Call&, Keep&);

void launch_ring(DeviceGroup& group, const CallData& data, int32_t rank, const cuda::Call& call,
                 Keep& keep) {
  const Program program =
      build_program("ring", {Collective::all_reduce, rank, group.world_size(), 0, {}});
  const auto image = std::make_shared<cuda::ProgramImage>(cuda::compile(program));
  keep.push_back(image);
  cuda::ProgramCall program_call;
  program_call.call = call;
  program_call.arithmetic = {DType::float32, ReduceOp::sum, group.world_size()};
  program_call.input = data.input(rank);
  program_call.output = data.output(rank);
  program_call.image = image.get();
  program_call.steps = image->steps.data();
  check(cuda::run_program(group.view(rank), program_call, group.stream(rank)) == cudaSuccess,
        "launch");
}

template <auto kFunction>
void launch_by_hand(DeviceGroup& group, const CallData& data, int32_t rank, const cuda::Call& call,
                    Keep& /*keep*/) {
  cuda::AllReduceCall all_reduce;
  all_reduce.call = call;
  all_reduce.arithmetic = {DType::float32, ReduceOp::sum, group.world_size()};
  all_reduce.input = data.input(rank).block[0];
  all_reduce.output = data.output(rank).block[0];
  all_reduce.count = data.shape().count;
  check(kFunction(group.view(rank), all_reduce, group.stream(rank)) == cudaSuccess, "launch");
}

struct Row {
  const char* name;
  Launch launch;
};
constexpr Row kRows[] = {
    {"ring", launch_ring},
    {"one_shot", launch_by_hand<&cuda::all_reduce_one_shot>},
    {"two_shot", launch_by_hand<&cuda::all_reduce_two_shot>},
    {"one_shot_ll", launch_by_hand<&cuda::all_reduce_one_shot_ll>},
};

enum class Fault : uint8_t { late_peer, abort, mismatch };

void check_failure(const Settings& settings, const Row& row, Fault fault, int32_t world_size) {
  Options options = settings.options();
  options.external = true;  // waiting for somebody who is not there is what is tested
  DeviceGroup group(small_geometry(world_size), options);
  CallShape shape;
  shape.count = 40;
  const CallData data(shape, world_size);
  Keep keep;
  const int32_t odd_one = world_size - 1;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    cuda::Call call{11, 5, static_cast<uint32_t>(Collective::all_reduce), kSoon};
    if (fault != Fault::late_peer) call.timeout_ns = uint64_t{60} * 1000 * 1000 * 1000;
    // Who aborts is the host of everybody; it notices that the odd one never came.
    if (fault == Fault::abort) group.host(rank).abort = 1;
    if (fault == Fault::mismatch && rank == odd_one) call.fingerprint = 12;
    if (fault == Fault::mismatch) call.timeout_ns = kSoon * 100;
    if (fault == Fault::mismatch || rank != odd_one) row.launch(group, data, rank, call, keep);
  }
  group.run();
  const std::string what = std::string(row.name) + ", fault " +
                           std::to_string(static_cast<int>(fault)) + ", " +
                           std::to_string(world_size) + " ranks";
  data.check_untouched(what);
  bool named = false;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    const cuda::ErrorRecord& error = group.host(rank).error;
    if (fault != Fault::mismatch && rank == odd_one) {
      check(error.trouble == 0, what + ": a record of a rank that was not there");
      continue;
    }
    check(error.trouble != 0, what + ": no record of rank " + std::to_string(rank));
    check_equal(error.rank, static_cast<uint32_t>(rank), what + ": rank");
    check_equal(error.sequence, 5u, what + ": sequence");
    check(error.peer < static_cast<uint32_t>(world_size) && error.peer != error.rank,
          what + ": peer");
    const auto trouble = static_cast<cuda::Trouble>(error.trouble);
    if (fault == Fault::abort) check(trouble == cuda::Trouble::aborted, what + ": kind");
    if (fault == Fault::late_peer) check(trouble == cuda::Trouble::timed_out, what + ": kind");
    if (fault == Fault::mismatch && trouble == cuda::Trouble::mismatch) {
      named = true;
      check_equal(error.theirs, error.rank == static_cast<uint32_t>(odd_one) ? 11u : 12u,
                  what + ": their fingerprint");
    }
  }
  check(named || fault != Fault::mismatch, what + ": nobody saw the mismatch");
}

}  // namespace

uint64_t failure_suite(const Settings& settings, uint64_t /*cases*/) {
  uint64_t done = 0;
  for (const Row& row : kRows) {
    for (const Fault fault : {Fault::late_peer, Fault::abort, Fault::mismatch}) {
      for (const int32_t world_size : {2, 3}) {
        check_failure(settings, row, fault, world_size);
        ++done;
      }
    }
  }
  return done;
}

}  // namespace pycoll::sim::tests
