// What GPUs and CUDA do to groups: failures of one rank's, captures that are none of theirs, work
// of others that theirs is behind.
#include <array>

#include "group_failures.h"
#include "sim/control.h"

namespace pycoll::sim::tests {
namespace {

void ok(cudaError_t error, const char* what) {
  check(error == cudaSuccess, std::string(what) + ": " + cudaGetErrorString(error));
}

void call_once(GroupRank& rank, FailureCall& call) {
  rank.group->enqueue(call.request, call.stream.get());
  while (cudaStreamQuery(call.stream.get()) == cudaErrorNotReady) rank.group->check();
  ok(cudaStreamSynchronize(call.stream.get()), "a call");
  rank.group->check();
}

constexpr auto kAtOnce = std::chrono::seconds(3);

// The last rank's GPU fails when the group is there: with work of all under way, or with none.
void check_failed_gpu(GroupRank& rank, bool under_way) {
  const int last = rank.ranks - 1;
  const int its_device = last % rank.library->device_count();
  FailureCall call;
  call_once(rank, call);
  rank.meeting.barrier();
  std::string said;
  const auto began = Clock::now();
  if (rank.rank == last) poison_device(rank.device, cudaErrorIllegalAddress);
  try {
    if (under_way) rank.group->enqueue(call.request, call.stream.get());
    said = error_of(rank).what();
  } catch (const Error& error) {
    said = error.what();
  }
  check(Clock::now() - began < kAtOnce, "it was not heard of at once: " + said);
  check_says(said, "rank " + std::to_string(last));
  check_says(said, "GPU " + std::to_string(its_device));
  check_says(said, "cudaErrorIllegalAddress");
  if (rank.rank != last) check_dead(rank, call, said);
  rank.meeting.barrier();
}

// The functions that opening a group calls, and what they may say.
struct Fault {
  const char* function;
  cudaError_t code;
};
constexpr Fault kFaults[] = {
    {"cudaMalloc", cudaErrorMemoryAllocation},
    {"cudaHostAlloc", cudaErrorMemoryAllocation},
    {"cudaEventCreateWithFlags", cudaErrorMemoryAllocation},
    {"cudaStreamCreateWithPriority", cudaErrorMemoryAllocation},
    {"cudaGetDeviceProperties", cudaErrorInitializationError},
    {"cudaIpcGetMemHandle", cudaErrorMemoryAllocation},
    {"cudaIpcOpenMemHandle", cudaErrorMapBufferObjectFailed},
    {"cudaStreamSynchronize", cudaErrorInitializationError},
};

// What every rank says when a group cannot be made.
std::string why_not(GroupRank& rank) {
  const auto began = Clock::now();
  try {
    rank.group = rank.library->open(rank.control, rank.device);
  } catch (const Error& error) {
    check(Clock::now() - began < kAtOnce, std::string("it took long: ") + error.what());
    return error.what();
  }
  return "";
}

void check_failed_open(GroupRank& rank) {
  const int last = rank.ranks - 1;
  for (const Fault& fault : kFaults) {
    if (rank.ranks == 1 && std::string(fault.function).starts_with("cudaIpc")) continue;
    if (rank.rank == last) fail_call(fault.function, 0, fault.code);
    const std::string said = why_not(rank);
    clear_faults();
    check_says(said, "failed on rank " + std::to_string(last));
    check_says(said, fault.function);
    check_says(said, cudaGetErrorName(fault.code));
  }
  // All that was taken is given back, and the ranks may try again.
  check_equal(counters().allocations, uint64_t{0}, "memory that is left");
  check_equal(counters().imports, uint64_t{0}, "mappings that are left");
  const std::string said = why_not(rank);
  check(said.empty(), "the next try: " + said);
  ok(cudaSetDevice(rank.device), "cudaSetDevice");
  FailureCall call;
  call_once(rank, call);
}

// Where processes cannot share memory, calls go through the host.
void check_unshareable(GroupRank& rank) {
  const int last = rank.ranks - 1;
  if (rank.rank == last) fail_call("cudaIpcOpenMemHandle", 0, cudaErrorInvalidResourceHandle);
  const std::string said = why_not(rank);
  check(said.empty(), said);
  check(rank.group->path() == std::string("staged"), "the path is another one");
  ok(cudaSetDevice(rank.device), "cudaSetDevice");
  FailureCall call;
  call_once(rank, call);
}

// A GPU that had failed before, or fails while the group is made: by the first of its functions.
void check_failed_before(GroupRank& rank, const char* function) {
  const int last = rank.ranks - 1;
  if (rank.rank == last && function == nullptr) poison_device(rank.device, cudaErrorIllegalAddress);
  if (rank.rank == last && function != nullptr) fail_call(function, 0, cudaErrorIllegalAddress);
  for (int tries = 0; tries < 2; ++tries) {
    const std::string said = why_not(rank);
    check_says(said, "failed on rank " + std::to_string(last));
    check_says(said, "cudaErrorIllegalAddress");
  }
}

}  // namespace

void failed_gpu_suite(const GroupSettings& settings) {
  for (const bool under_way : {false, true}) {
    run_group(settings, [&](GroupRank& rank) { check_failed_gpu(rank, under_way); });
  }
}

void failed_open_suite(const GroupSettings& settings) {
  run_without_group(settings, check_failed_open);
  run_without_group(settings, check_unshareable);
  for (const char* function : {static_cast<const char*>(nullptr), "cudaMalloc", "cudaHostAlloc"}) {
    run_without_group(settings, [&](GroupRank& rank) { check_failed_before(rank, function); });
  }
}

// A thread captures a stream, in the mode that forbids most, and calls on another one; and makes
// another group. The capture goes on.
void captures_suite(const GroupSettings& settings) {
  run_group(settings, [](GroupRank& rank) {
    constexpr uint64_t kLarge = 1 << 20;
    FailureCall captured, eager(kLarge), fresh;
    for (int time = 0; time < 3; ++time) {  // peers map the memory
      call_once(rank, eager);
      ::usleep(2000);
    }
    for (int time = 0; time < 3; ++time) {
      cudaGraph_t graph = nullptr;
      ok(cudaStreamBeginCapture(captured.stream.get(), cudaStreamCaptureModeGlobal), "begin");
      rank.group->enqueue(eager.request, eager.stream.get());
      GroupRank other = rank;
      other.group = rank.library->open(rank.control, rank.device);
      other.group->enqueue(fresh.request, fresh.stream.get());
      rank.group->check();
      ok(cudaStreamEndCapture(captured.stream.get(), &graph), "the end of the capture");
      ok(cudaGraphDestroy(graph), "cudaGraphDestroy");
      for (const FailureCall* call : {&eager, &fresh}) {
        while (cudaStreamQuery(call->stream.get()) == cudaErrorNotReady) other.group->check();
        ok(cudaStreamSynchronize(call->stream.get()), "a call");
      }
      rank.meeting.barrier();
    }
  });
}

// Whoever lets a group go is not held up for ever by work that it is behind, and nothing is freed
// under that.
void buried_suite(const GroupSettings& settings) {
  run_group(settings, [](GroupRank& rank) {
    FailureCall call;
    call_once(rank, call);
    const uint64_t before = counters().allocations;
    rank.meeting.barrier();
    hold_stream(call.stream.get());  // somebody's kernel that runs for long
    rank.group->enqueue(call.request, call.stream.get());
    rank.meeting.barrier();
    const auto began = Clock::now();
    rank.group.reset();
    check(Clock::now() - began < std::chrono::seconds(15), "it was held up");
    check_equal(counters().allocations, before, "memory that is in use");
    release_stream(call.stream.get());
    ok(cudaStreamSynchronize(call.stream.get()), "the rest");
    const Deadline deadline = Deadline::after(kSoon);
    while (counters().imports != 0 && !deadline.passed()) ::usleep(1000);
    check_equal(counters().imports, uint64_t{0}, "mappings that are left");
    rank.meeting.barrier();
  });
}

}  // namespace pycoll::sim::tests
