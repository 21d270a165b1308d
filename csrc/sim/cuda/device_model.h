// What a simulated device is like: compute capability 9.0, and the limits that go with it.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "sim/cuda/settings.h"

namespace pycoll::sim::cuda {

inline constexpr int kThreadsPerBlock = 1024;
inline constexpr int kThreadsPerMultiprocessor = 2048;
inline constexpr int kBlocksPerMultiprocessor = 32;
inline constexpr int kSharedPerBlock = 48 << 10;  // without cudaFuncSetAttribute
inline constexpr int kSharedPerBlockOptin = 227 << 10;
inline constexpr int kSharedPerMultiprocessor = 228 << 10;
inline constexpr int kSharedReserved = 1 << 10;  // of each block, by the system

// 132, or as many as blocks may be resident where PYCOLL_SIM_RESIDENT limits them.
int multiprocessors(const Settings& settings);
// Blocks of that shape that one multiprocessor holds at a time.
int occupancy(const Settings& settings, int block_threads, size_t shared_bytes);

// Empty: an attribute that is not known.
std::optional<int> attribute_of(int machine_device, const Settings& settings,
                                cudaDeviceAttr attribute);
cudaDeviceProp properties_of(int machine_device, const Settings& settings);
std::string pci_bus_id(int machine_device);

}  // namespace pycoll::sim::cuda
