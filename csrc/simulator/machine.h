// What the simulator knows of a machine: hosts that are alike, joined by one network.
//
// Units are seconds, bytes and bytes a second. A bandwidth may be infinite and a time may be zero:
// then that part costs nothing, which leaves the textbook's alpha-beta-gamma model (latency,
// 1 / bandwidth, 1 / reduce_bandwidth) to compare with.
#pragma once

#include <cstdint>
#include <limits>

namespace pycoll::simulator {

constexpr double kFree = std::numeric_limits<double>::infinity();

struct Host {
  double cores = 1;                 // ranks that run at full speed at the same time
  double cache_bandwidth = kFree;   // one core, what lies in its caches
  double peer_bandwidth = kFree;    // one core, reading what another core wrote last
  double core_bandwidth = kFree;    // one core, from and to memory
  double memory_bandwidth = kFree;  // all cores together, from and to memory
  double cache_bytes = 0;           // vectors of all ranks of the host that stay in its caches
  double reduce_bandwidth = kFree;  // one core, arithmetic alone
  double call_overhead = 0;         // before the first step of a call
  double step_overhead = 0;         // of each step, however short
  double flag_latency = 0;          // until another core sees a message, a credit or an arrival
  double switch_overhead = 0;       // of going on after a wait, where ranks outnumber cores
};

// Each host has one full-duplex port, which its ranks share: messages leave one after the other,
// and arrive one after the other.
struct Network {
  double bandwidth = kFree;      // of a port, in each direction
  double latency = 0;            // from the sender's port to the receiver's; of a credit, too
  double message_overhead = 0;   // CPU time of a message, at each end
  double cpu_bandwidth = kFree;  // one core, copying between a slot and the network, at each end
};

struct Machine {
  Host host;
  Network network;
  int32_t ranks_per_host = 0;  // rank r is on host r / ranks_per_host; 0: all on one
};

}  // namespace pycoll::simulator
