// Devices: what they say about themselves, and access between them.
#include <charconv>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "sim/cuda/device_model.h"
#include "sim/cuda/runtime.h"

namespace pycoll::sim::cuda {
namespace {

constexpr int kVersion = CUDART_VERSION;

cudaError_t enable_peer(const Call& call, int peer, unsigned flags) {
  if (flags != 0) return cudaErrorInvalidValue;
  if (!call.runtime.is_device(peer) || peer == call.thread.device) return cudaErrorInvalidDevice;
  Device& device = call.device();
  if (device.impossible_peers.contains(peer)) return cudaErrorPeerAccessUnsupported;
  return device.enabled_peers.insert(peer).second ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled;
}

cudaError_t p2p_attribute(const Call& call, int* value, cudaDeviceP2PAttr attribute, int from,
                          int to) {
  if (!call.runtime.is_device(from) || !call.runtime.is_device(to) || from == to) {
    return cudaErrorInvalidDevice;
  }
  const bool possible = !call.runtime.devices[from].impossible_peers.contains(to);
  switch (attribute) {
    case cudaDevP2PAttrPerformanceRank:
      *value = 0;
      return cudaSuccess;
    case cudaDevP2PAttrAccessSupported:
    case cudaDevP2PAttrNativeAtomicSupported:
    case cudaDevP2PAttrCudaArrayAccessSupported:
      *value = possible ? 1 : 0;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace pycoll::sim::cuda

using namespace pycoll::sim::cuda;

cudaError_t cudaGetDeviceCount(int* count) {
  return api(__func__, Rule::question, [&](const Call& call) {
    *count = static_cast<int>(call.runtime.devices.size());
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return api(__func__, Rule::always, [&](const Call& call) {
    if (call.runtime.devices.empty()) return cudaErrorNoDevice;
    if (!call.runtime.is_device(device)) return cudaErrorInvalidDevice;
    call.thread.device = device;
    call.device().has_context = true;
    return call.device().poison;
  });
}

cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    return call.runtime.is_device(device) ? cudaSuccess : cudaErrorInvalidDevice;
  });
}

cudaError_t cudaGetDevice(int* device) {
  return api(__func__, Rule::always, [&](const Call& call) {
    *device = call.thread.device;
    return call.runtime.devices.empty() ? cudaErrorNoDevice : cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return api(__func__, Rule::question, [&](const Call& call) {
    if (!call.runtime.is_device(device)) return cudaErrorInvalidDevice;
    const auto found =
        attribute_of(call.runtime.devices[device].machine_device, call.runtime.settings, attribute);
    if (!found || value == nullptr) return cudaErrorInvalidValue;
    *value = *found;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return api(__func__, Rule::question, [&](const Call& call) {
    if (!call.runtime.is_device(device)) return cudaErrorInvalidDevice;
    *properties = properties_of(call.runtime.devices[device].machine_device, call.runtime.settings);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  return api(__func__, Rule::question, [&](const Call& call) {
    if (!call.runtime.is_device(device)) return cudaErrorInvalidDevice;
    const std::string id = pci_bus_id(call.runtime.devices[device].machine_device);
    if (length <= static_cast<int>(id.size())) return cudaErrorInvalidValue;
    std::memcpy(text, id.c_str(), id.size() + 1);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* text) {
  return api(__func__, Rule::question, [&](const Call& call) {
    for (size_t i = 0; i < call.runtime.devices.size(); ++i) {
      if (pci_bus_id(call.runtime.devices[i].machine_device) != std::string_view(text)) continue;
      *device = static_cast<int>(i);
      return cudaSuccess;
    }
    return cudaErrorInvalidDevice;
  });
}

cudaError_t cudaDeviceCanAccessPeer(int* possible, int device, int peer) {
  return api(__func__, Rule::question, [&](const Call& call) {
    if (!call.runtime.is_device(device) || !call.runtime.is_device(peer)) {
      return cudaErrorInvalidDevice;
    }
    const bool yes =
        device != peer && !call.runtime.devices[device].impossible_peers.contains(peer);
    *possible = yes ? 1 : 0;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  return api(__func__, Rule::no_capture,
             [&](const Call& call) { return enable_peer(call, peer, flags); });
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  return api(__func__, Rule::no_capture, [&](const Call& call) {
    if (!call.runtime.is_device(peer)) return cudaErrorInvalidDevice;
    return call.device().enabled_peers.erase(peer) != 0 ? cudaSuccess
                                                        : cudaErrorPeerAccessNotEnabled;
  });
}

cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attribute, int from, int to) {
  return api(__func__, Rule::question,
             [&](const Call& call) { return p2p_attribute(call, value, attribute, from, to); });
}

cudaError_t cudaDriverGetVersion(int* version) {
  return api(__func__, Rule::always, [&](const Call&) {
    *version = kVersion;
    return cudaSuccess;
  });
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  return api(__func__, Rule::always, [&](const Call&) {
    *version = kVersion;
    return cudaSuccess;
  });
}
