#include "sim/cuda/device_model.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

namespace pycoll::sim::cuda {
namespace {

constexpr int kMultiprocessors = 132;
constexpr int kWarp = 32;
constexpr int kRegisters = 65536;
constexpr int kFirstBus = 0x17;

struct Attribute {
  cudaDeviceAttr attribute;
  int value;
};

// What does not depend on the device or the environment.
constexpr std::array kAttributes{
    Attribute{cudaDevAttrMaxThreadsPerBlock, kThreadsPerBlock},
    Attribute{cudaDevAttrMaxBlockDimX, 1024},
    Attribute{cudaDevAttrMaxBlockDimY, 1024},
    Attribute{cudaDevAttrMaxBlockDimZ, 64},
    Attribute{cudaDevAttrMaxGridDimX, 2147483647},
    Attribute{cudaDevAttrMaxGridDimY, 65535},
    Attribute{cudaDevAttrMaxGridDimZ, 65535},
    Attribute{cudaDevAttrMaxSharedMemoryPerBlock, kSharedPerBlock},
    Attribute{cudaDevAttrMaxSharedMemoryPerBlockOptin, kSharedPerBlockOptin},
    Attribute{cudaDevAttrMaxSharedMemoryPerMultiprocessor, kSharedPerMultiprocessor},
    Attribute{cudaDevAttrReservedSharedMemoryPerBlock, kSharedReserved},
    Attribute{cudaDevAttrWarpSize, kWarp},
    Attribute{cudaDevAttrMaxRegistersPerBlock, kRegisters},
    Attribute{cudaDevAttrMaxRegistersPerMultiprocessor, kRegisters},
    Attribute{cudaDevAttrMaxThreadsPerMultiProcessor, kThreadsPerMultiprocessor},
    Attribute{cudaDevAttrMaxBlocksPerMultiprocessor, kBlocksPerMultiprocessor},
    Attribute{cudaDevAttrComputeCapabilityMajor, 9},
    Attribute{cudaDevAttrComputeCapabilityMinor, 0},
    Attribute{cudaDevAttrL2CacheSize, 50 << 20},
    Attribute{cudaDevAttrClockRate, 1980000},
    Attribute{cudaDevAttrMemoryClockRate, 3201000},
    Attribute{cudaDevAttrGlobalMemoryBusWidth, 6144},
    Attribute{cudaDevAttrAsyncEngineCount, 3},
    Attribute{cudaDevAttrConcurrentKernels, 1},
    Attribute{cudaDevAttrCanMapHostMemory, 1},
    Attribute{cudaDevAttrUnifiedAddressing, 1},
    Attribute{cudaDevAttrStreamPrioritiesSupported, 1},
    Attribute{cudaDevAttrCooperativeLaunch, 1},
    Attribute{cudaDevAttrComputeMode, cudaComputeModeDefault},
    Attribute{cudaDevAttrComputePreemptionSupported, 1},
    Attribute{cudaDevAttrHostRegisterSupported, 1},
    Attribute{cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
    Attribute{cudaDevAttrHostNativeAtomicSupported, 0},
    Attribute{cudaDevAttrPageableMemoryAccess, 0},
    Attribute{cudaDevAttrManagedMemory, 0},
    Attribute{cudaDevAttrConcurrentManagedAccess, 0},
    Attribute{cudaDevAttrIntegrated, 0},
    Attribute{cudaDevAttrMemoryPoolsSupported, 1},
    Attribute{cudaDevAttrMemoryPoolSupportedHandleTypes, 0},
    Attribute{cudaDevAttrIpcEventSupport, 1},
    Attribute{cudaDevAttrClusterLaunch, 0},
    Attribute{cudaDevAttrPciDeviceId, 0},
    Attribute{cudaDevAttrPciDomainId, 0},
    Attribute{cudaDevAttrIsMultiGpuBoard, 0},
    Attribute{cudaDevAttrGPUDirectRDMASupported, 0},
};

}  // namespace

int multiprocessors(const Settings& settings) {
  return settings.resident > 0 ? static_cast<int>(settings.resident) : kMultiprocessors;
}

int occupancy(const Settings& settings, int block_threads, size_t shared_bytes) {
  if (block_threads <= 0 || block_threads > kThreadsPerBlock) return 0;
  if (shared_bytes > kSharedPerBlockOptin) return 0;
  if (settings.resident > 0) return 1;
  const int warps = (block_threads + kWarp - 1) / kWarp;
  const int by_threads = kThreadsPerMultiprocessor / (warps * kWarp);
  const int by_shared = kSharedPerMultiprocessor / static_cast<int>(shared_bytes + kSharedReserved);
  return std::min({by_threads, by_shared, kBlocksPerMultiprocessor});
}

std::optional<int> attribute_of(int machine_device, const Settings& settings,
                                cudaDeviceAttr attribute) {
  if (attribute == cudaDevAttrMultiProcessorCount) return multiprocessors(settings);
  if (attribute == cudaDevAttrPciBusId) return kFirstBus + machine_device;
  for (const Attribute& known : kAttributes) {
    if (known.attribute == attribute) return known.value;
  }
  return std::nullopt;
}

cudaDeviceProp properties_of(int machine_device, const Settings& settings) {
  cudaDeviceProp made{};
  const auto value = [&](cudaDeviceAttr attribute) {
    return *attribute_of(machine_device, settings, attribute);
  };
  std::snprintf(made.name, sizeof(made.name), "pycoll simulated GPU");
  std::snprintf(made.uuid.bytes, sizeof(made.uuid.bytes), "pycoll-sim-%d", machine_device);
  made.totalGlobalMem = settings.memory_bytes;
  made.sharedMemPerBlock = value(cudaDevAttrMaxSharedMemoryPerBlock);
  made.sharedMemPerBlockOptin = value(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  made.sharedMemPerMultiprocessor = value(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  made.reservedSharedMemPerBlock = value(cudaDevAttrReservedSharedMemoryPerBlock);
  made.regsPerBlock = value(cudaDevAttrMaxRegistersPerBlock);
  made.regsPerMultiprocessor = value(cudaDevAttrMaxRegistersPerMultiprocessor);
  made.warpSize = value(cudaDevAttrWarpSize);
  made.maxThreadsPerBlock = value(cudaDevAttrMaxThreadsPerBlock);
  made.maxThreadsPerMultiProcessor = value(cudaDevAttrMaxThreadsPerMultiProcessor);
  made.maxBlocksPerMultiProcessor = value(cudaDevAttrMaxBlocksPerMultiprocessor);
  made.maxThreadsDim[0] = value(cudaDevAttrMaxBlockDimX);
  made.maxThreadsDim[1] = value(cudaDevAttrMaxBlockDimY);
  made.maxThreadsDim[2] = value(cudaDevAttrMaxBlockDimZ);
  made.maxGridSize[0] = value(cudaDevAttrMaxGridDimX);
  made.maxGridSize[1] = value(cudaDevAttrMaxGridDimY);
  made.maxGridSize[2] = value(cudaDevAttrMaxGridDimZ);
  made.major = value(cudaDevAttrComputeCapabilityMajor);
  made.minor = value(cudaDevAttrComputeCapabilityMinor);
  made.multiProcessorCount = value(cudaDevAttrMultiProcessorCount);
  made.l2CacheSize = value(cudaDevAttrL2CacheSize);
  made.memoryBusWidth = value(cudaDevAttrGlobalMemoryBusWidth);
  made.asyncEngineCount = value(cudaDevAttrAsyncEngineCount);
  made.canMapHostMemory = made.unifiedAddressing = made.concurrentKernels = 1;
  made.streamPrioritiesSupported = made.cooperativeLaunch = made.hostRegisterSupported = 1;
  made.canUseHostPointerForRegisteredMem = made.memoryPoolsSupported = made.ipcEventSupported = 1;
  made.pciBusID = value(cudaDevAttrPciBusId);
  return made;
}

std::string pci_bus_id(int machine_device) {
  char text[16];
  std::snprintf(text, sizeof(text), "0000:%02X:00.0", kFirstBus + machine_device);
  return text;
}

}  // namespace pycoll::sim::cuda
