// What tests may do to the simulated CUDA runtime of their own process. Real CUDA has none of it.
//
// Processes that a test cannot call into are set up by their environment:
//
//   PYCOLL_SIM_DEVICES=8      devices of the machine; CUDA_VISIBLE_DEVICES=2,0 chooses and
//   renumbers PYCOLL_SIM_MEMORY_MB=8192 memory of a device that one process can allocate
//   PYCOLL_SIM_SEED=7         random schedules, a function of the seed (unset: in order)
//   PYCOLL_SIM_RESIDENT=4     a device holds so many blocks at once; it then reports as many
//                             multiprocessors with room for one block each (unset: no limit)
//   PYCOLL_SIM_TIME_SLICE=1   grids of only one process run on a device at a time;
//   PYCOLL_SIM_SLICE_FILE     what all processes of the job name for that: `<file>.<device>` is
//   made,
//                             and holds the lock and the count of spins (sim/time_slice.h)
//   PYCOLL_SIM_TIMEOUT_S=60   kernels in which nothing moves for so long end the process
//   PYCOLL_SIM_FAULTS         `cudaMalloc:2=2,kernel:0=700,cudaIpcOpenMemHandle:1=kill`: call
//   number
//                             2 (from 0) of cudaMalloc returns error 2, the first kernel fails with
//                             700 and poisons its device, the second opening kills the process
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <string>

namespace pycoll::sim {

// The call of `function` that comes after `calls_before` others returns `code` and does nothing. A
// function name of the runtime API, or "kernel": then the kernel fails while it runs, and its
// device is unusable for this process ever after, as with CUDA.
void fail_call(const std::string& function, uint64_t calls_before, cudaError_t code);
// The same call ends the process with SIGKILL.
void kill_at_call(const std::string& function, uint64_t calls_before);
void clear_faults();
// As if a kernel had failed with that: what is on the device ends, and every later call returns it.
// (So does a call that fail_call() lets fail with an error of a kernel.)
void poison_device(int device, cudaError_t code);

// Nothing more starts on the stream until it is released; what runs already goes on.
void hold_stream(cudaStream_t stream);
void release_stream(cudaStream_t stream);
// Nothing more starts on the stream for so long.
void delay_stream(cudaStream_t stream, std::chrono::microseconds time);

// What cudaDeviceCanAccessPeer says; all devices can access each other until told otherwise.
void set_peer_access(int device, int peer, bool possible);

struct Counters {
  uint64_t calls;           // of the runtime API
  uint64_t launches;        // kernels that started, those of graphs too
  uint64_t copies;          // that ran: copies, fills, frees on a stream, values written
  uint64_t host_functions;  // that ran
  uint64_t graph_launches;
  uint64_t spins;  // turns of wait loops inside kernels
  // Those while every thread of every kernel of this process waited: for another process, or the
  // host.
  uint64_t outside_spins;
  // With PYCOLL_SIM_TIME_SLICE: those of all processes of the job that waited while another one
  // should have run. Zero, if ranks that share a GPU keep to the rule.
  uint64_t spins_across_processes;
  // Copies between devices of which neither has access to the other enabled. CUDA takes them
  // through host memory: legal and slow.
  uint64_t staged_peer_copies;
  uint64_t allocations;      // device allocations alive
  uint64_t allocated_bytes;  // in them
  uint64_t imports;          // mappings of other processes' memory alive
  uint64_t contexts;         // devices that this process has used
};

// Since the process began; what is alive, now.
Counters counters();

}  // namespace pycoll::sim
