// What a process tells its peers through the store, and what they make of it.
#pragma once

#include <string>
#include <vector>

#include "core/clock.h"
#include "transport/tcp/address.h"
#include "transport/tcp/frame.h"

namespace pycoll::tcp {

// "tcp 1 <process> <secret> <host> <interfaces or *> <connections> <heartbeat ms> <name>=<address>
// ..."
struct Description {
  Id process{};
  Id secret{};
  std::string host;        // network_identity()
  std::string interfaces;  // PYCOLL_SOCKET_IFNAME
  uint32_t connections = 0;
  uint32_t heartbeat_ms = 0;
  std::vector<InterfaceAddress> addresses;

  bool is_valid() const { return connections > 0 && !addresses.empty(); }
  std::string to_text() const;
  // An invalid one when the text is none.
  static Description parse(const std::string& text);
};

// Where to dial, and from where.
struct Candidate {
  Address address;
  std::string interface;  // at the peer
  std::string through;    // this process's own interface, where it is to be a certain one
};

// What `mine` should try to reach `theirs`, best first; empty when there is no way.
std::vector<Candidate> candidates(const Description& mine, const Description& theirs);
std::string to_string(const Candidate& candidate);

Id to_id(const std::string& text);

}  // namespace pycoll::tcp
