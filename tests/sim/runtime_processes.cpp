#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "processes.h"
#include "runtime.h"

namespace pycoll::sim::tests {
namespace {

constexpr int kN = 300;

void all_end_well(int size, const std::function<void(Meeting&)>& work) {
  REQUIRE(run_processes(size, work) == std::vector<int>(size, 0));
}

int* open_ints(const cudaIpcMemHandle_t& handle) {
  void* p = nullptr;
  OK(cudaIpcOpenMemHandle(&p, handle, cudaIpcMemLazyEnablePeerAccess));
  return static_cast<int*>(p);
}

// Rank 0 has memory that rank 1 reads and writes.
void memory_of_peer(Meeting& meeting) {
  cudaIpcMemHandle_t mine{};
  int* p = nullptr;
  if (meeting.rank == 0) {
    p = device_ints(kN);
    OK(launch_fill(p, 3, kN, nullptr));
    OK(cudaDeviceSynchronize());
    OK(cudaIpcGetMemHandle(&mine, p + 17));  // a pointer inside; the handle is for the whole
  }
  const cudaIpcMemHandle_t handle = meeting.exchange(mine)[0];
  if (meeting.rank == 1) {
    void* none = nullptr;
    FAILS(cudaIpcOpenMemHandle(&none, handle, 0), cudaErrorInvalidValue);
    int* theirs = open_ints(handle);
    REQUIRE(open_ints(handle) == theirs);
    REQUIRE(counters().imports == 1);
    REQUIRE(all_are(theirs, kN, 3));
    cudaIpcMemHandle_t again;
    FAILS(cudaIpcGetMemHandle(&again, theirs), cudaErrorInvalidValue);
    FAILS(cudaFree(theirs), cudaErrorInvalidValue);
    OK(launch_add(theirs + 17, 1, kN - 17, nullptr));
    OK(cudaDeviceSynchronize());
    OK(cudaIpcCloseMemHandle(theirs));
    REQUIRE(all_are(theirs, 17, 3));  // it was opened twice
    OK(cudaIpcCloseMemHandle(theirs));
    FAILS(cudaIpcCloseMemHandle(theirs), cudaErrorInvalidValue);
    REQUIRE(counters().imports == 0);
  } else {
    void* none = nullptr;
    FAILS(cudaIpcOpenMemHandle(&none, handle, cudaIpcMemLazyEnablePeerAccess),
          cudaErrorDeviceUninitialized);
  }
  meeting.barrier();
  if (meeting.rank == 0) {
    const std::vector<int> values = read_ints(p, kN);
    for (int i = 0; i < kN; ++i) REQUIRE(values[i] == (i < 17 ? 3 : 4));
    OK(cudaFree(p));
    device_ints(kN);  // may well get the descriptor that is in the handle
  }
  meeting.barrier();
  if (meeting.rank == 1) {
    void* none = nullptr;
    FAILS(cudaIpcOpenMemHandle(&none, handle, cudaIpcMemLazyEnablePeerAccess),
          cudaErrorMapBufferObjectFailed);
  }
}

__global__ void sum(device::Pack<const int*> from, int ranks, int* to, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    int total = 0;
    for (int r = 0; r < ranks; ++r) total += from.v[r][i];
    to[i] = total;
  }
}

struct SharedRank {
  cudaIpcMemHandle_t memory;
  cudaIpcEventHandle_t ready;
  cudaIpcEventHandle_t read;
};
struct Peer {
  int* memory;
  cudaEvent_t ready;  // its values are there
  cudaEvent_t read;   // it has read ours
};

constexpr unsigned kIpcEvent = cudaEventInterprocess | cudaEventDisableTiming;

std::vector<Peer> share(Meeting& meeting, const Peer& mine) {
  SharedRank exported;
  OK(cudaIpcGetMemHandle(&exported.memory, mine.memory));
  OK(cudaIpcGetEventHandle(&exported.ready, mine.ready));
  OK(cudaIpcGetEventHandle(&exported.read, mine.read));
  const auto all = meeting.exchange(exported);
  std::vector<Peer> peers(meeting.size);
  for (int r = 0; r < meeting.size; ++r) {
    if (r == meeting.rank) {
      peers[r] = mine;
      continue;
    }
    peers[r].memory = open_ints(all[r].memory);
    OK(cudaIpcOpenEventHandle(&peers[r].ready, all[r].ready));
    OK(cudaIpcOpenEventHandle(&peers[r].read, all[r].read));
  }
  return peers;
}

// Ranks that share a GPU sum their vectors: phases are ordered by events alone, no kernel waits.
void sum_by_events(Meeting& meeting) {
  static_assert(sizeof(int*) * 2 == 16, "two ranks in a pack");
  cudaStream_t stream = new_stream();
  int* result = device_ints(kN);
  const Peer mine{device_ints(kN), new_event(kIpcEvent), new_event(kIpcEvent)};
  const std::vector<Peer> peers = share(meeting, mine);
  for (int round = 0; round < 30; ++round) {
    if (round % 7 == meeting.rank) delay_stream(stream, std::chrono::milliseconds(3));
    for (const Peer& peer : peers) OK(cudaStreamWaitEvent(stream, peer.read, 0));
    OK(launch_fill(mine.memory, round * (meeting.rank + 1), kN, stream));
    OK(cudaEventRecord(mine.ready, stream));
    meeting.barrier();  // of the hosts: it has been posted
    for (const Peer& peer : peers) OK(cudaStreamWaitEvent(stream, peer.ready, 0));
    OK(device::launch(&sum, kBlock, stream,
                      device::Pack<const int*>{{peers[0].memory, peers[1].memory}}, meeting.size,
                      result, kN));
    OK(cudaEventRecord(mine.read, stream));
    meeting.barrier();
    if (round % 10 == 9) {
      OK(cudaEventSynchronize(peers[1 - meeting.rank].read));
      REQUIRE(all_are(result, kN, round * 3));
    }
  }
  OK(cudaStreamSynchronize(stream));
  meeting.barrier();
  if (std::getenv("PYCOLL_SIM_TIME_SLICE") != nullptr) {
    REQUIRE(counters().spins_across_processes == 0);
  }
  for (const Peer& peer : peers) {
    if (peer.memory != mine.memory) OK(cudaIpcCloseMemHandle(peer.memory));
  }
}

// What ranks that share a GPU must not do: a kernel that waits for another process.
__global__ void meet(unsigned* mine, unsigned* theirs, unsigned rounds) {
  for (unsigned round = 1; round <= rounds; ++round) {
    device::store_release<device::Scope::system>(mine, round);
    while (device::load_acquire<device::Scope::system>(theirs) < round) device::spin_pause();
  }
}

void spin_on_each_other(Meeting& meeting) {
  int* flag = device_ints(1);
  OK(cudaMemset(flag, 0, sizeof(int)));
  OK(cudaDeviceSynchronize());
  cudaIpcMemHandle_t handle;
  OK(cudaIpcGetMemHandle(&handle, flag));
  const auto handles = meeting.exchange(handle);
  int* theirs = open_ints(handles[1 - meeting.rank]);
  OK(device::launch(&meet, device::LaunchShape{dim3(1), dim3(1)}, nullptr,
                    reinterpret_cast<unsigned*>(flag), reinterpret_cast<unsigned*>(theirs), 5u));
  OK(cudaDeviceSynchronize());
  meeting.barrier();
  REQUIRE(counters().outside_spins > 0);
  const bool sliced = std::getenv("PYCOLL_SIM_TIME_SLICE") != nullptr;
  REQUIRE((counters().spins_across_processes > 0) == sliced);
}

void event_rules(Meeting& meeting) {
  cudaEvent_t event = nullptr;
  cudaIpcEventHandle_t handle{};
  FAILS(cudaEventCreateWithFlags(&event, cudaEventInterprocess), cudaErrorInvalidValue);
  FAILS(cudaIpcGetEventHandle(&handle, new_event()), cudaErrorInvalidResourceHandle);
  event = new_event(kIpcEvent);
  OK(cudaIpcGetEventHandle(&handle, event));
  const cudaIpcEventHandle_t other = meeting.exchange(handle)[1 - meeting.rank];
  cudaEvent_t opened = nullptr;
  FAILS(cudaIpcOpenEventHandle(&opened, handle), cudaErrorDeviceUninitialized);
  OK(cudaIpcOpenEventHandle(&opened, other));
  FAILS(cudaIpcGetEventHandle(&handle, opened), cudaErrorInvalidResourceHandle);
  cudaStream_t stream = new_stream();
  OK(cudaStreamWaitEvent(stream, opened, 0));  // never recorded
  OK(cudaStreamSynchronize(stream));
  OK(cudaEventQuery(opened));
  meeting.barrier();
  if (meeting.rank == 1) {  // records on the event of rank 0
    hold_stream(stream);
    OK(cudaEventRecord(opened, stream));
    meeting.barrier();
    meeting.barrier();
    release_stream(stream);
    OK(cudaStreamSynchronize(stream));
  } else {
    meeting.barrier();
    FAILS(cudaEventQuery(event), cudaErrorNotReady);
    OK(cudaStreamWaitEvent(stream, event, 0));
    REQUIRE(keeps_waiting(stream));
    meeting.barrier();
    OK(cudaStreamSynchronize(stream));
    OK(cudaEventQuery(event));
  }
  meeting.barrier();
}

// A process that is killed takes its handles with it, but not the memory that others have opened.
void killed(Meeting& meeting) {
  struct Shared {
    cudaIpcMemHandle_t memory, unopened;
    cudaIpcEventHandle_t event;
  } mine{};
  cudaEvent_t event = nullptr;
  cudaStream_t stream = new_stream();
  if (meeting.rank == 0) {
    int* p = device_ints(kN);
    OK(launch_fill(p, 8, kN, nullptr));
    OK(cudaDeviceSynchronize());
    OK(cudaIpcGetMemHandle(&mine.memory, p));
    OK(cudaIpcGetMemHandle(&mine.unopened, device_ints(kN)));
    event = new_event(kIpcEvent);
    OK(cudaIpcGetEventHandle(&mine.event, event));
    hold_stream(stream);
    OK(cudaEventRecord(event, stream));
  }
  const Shared shared = meeting.exchange(mine)[0];
  if (meeting.rank == 0) {
    meeting.barrier();
    kill_at_call("cudaStreamQuery", 0);
    static_cast<void>(cudaStreamQuery(stream));
  }
  int* theirs = open_ints(shared.memory);
  OK(cudaIpcOpenEventHandle(&event, shared.event));
  OK(cudaStreamWaitEvent(stream, event, 0));
  meeting.barrier();
  void* none = nullptr;
  cudaError_t error = cudaSuccess;
  for (int i = 0; i < 1000 && error == cudaSuccess; ++i) {
    error = cudaIpcOpenMemHandle(&none, shared.unopened, cudaIpcMemLazyEnablePeerAccess);
    if (error == cudaSuccess) OK(cudaIpcCloseMemHandle(none));
    ::usleep(10000);
  }
  REQUIRE(error == cudaErrorMapBufferObjectFailed);
  std::vector<int> values(kN);
  OK(cudaMemcpy(values.data(), theirs, kN * sizeof(int), cudaMemcpyDeviceToHost));
  REQUIRE(values == std::vector<int>(kN, 8));
  FAILS(cudaEventQuery(event), cudaErrorNotReady);  // for ever
  FAILS(cudaStreamQuery(stream), cudaErrorNotReady);
}

void killed_peer() {
  const std::vector<int> statuses = run_processes(2, killed);
  REQUIRE(WIFSIGNALED(statuses[0]) && WTERMSIG(statuses[0]) == SIGKILL);
  REQUIRE(statuses[1] == 0);
}

// Devices have the same number on the machine, whatever each process calls them.
void renumbered(Meeting& meeting) {
  ::setenv("CUDA_VISIBLE_DEVICES", meeting.rank == 0 ? "5,2" : "2,7,5", 1);
  OK(cudaSetDevice(meeting.rank));  // 5 and 7
  cudaIpcMemHandle_t handle;
  OK(cudaIpcGetMemHandle(&handle, device_ints(kN)));
  const int* theirs = open_ints(meeting.exchange(handle)[1 - meeting.rank]);
  cudaPointerAttributes attributes;
  OK(cudaPointerGetAttributes(&attributes, theirs));
  REQUIRE(attributes.type == cudaMemoryTypeDevice);
  // Rank 0 does not see device 7: the memory counts as the current device's.
  REQUIRE(attributes.device == (meeting.rank == 0 ? 0 : 2));
  meeting.barrier();
}

}  // namespace

std::vector<RuntimeScenario> process_scenarios() {
  const auto pair = [](void (*work)(Meeting&)) { return [work] { all_end_well(2, work); }; };
  return {
      {"memory", "memory of another process", pair(memory_of_peer)},
      {"events", "two ranks on one GPU, ordered by events", pair(sum_by_events)},
      {"event_rules", "which events can be shared, and how", pair(event_rules)},
      {"spin", "kernels of two processes that wait for each other", pair(spin_on_each_other)},
      {"killed", "a peer is killed", killed_peer},
      {"renumbered", "processes that see different devices", pair(renumbered)},
  };
}

}  // namespace pycoll::sim::tests
