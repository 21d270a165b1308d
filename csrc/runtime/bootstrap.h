// How a group comes to be: every rank publishes what it can and wants through the store, reads what
// all others published, and reaches the same verdict from the same data.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "core/config.h"
#include "runtime/selector.h"
#include "runtime/store.h"
#include "transport/transport.h"

namespace pycoll {

class FlightRecorder;  // flight.h

struct BootstrapRequest {
  Store* store = nullptr;
  std::string prefix;  // of the keys in the store: one group's own
  int rank = 0;
  int world_size = 1;
  Config config;
  // Called now and then while waiting; may throw (a signal, say).
  std::function<void()> interrupt;
  std::vector<SelectionRule> table{};  // between PYCOLL_ALGO and the built-in rules
  // What else must be equal on all ranks: names without spaces to values of one line.
  std::map<std::string, std::string> agreed{};
  std::shared_ptr<FlightRecorder> recorder{};  // of the process; none: nothing is recorded
};

// What all ranks agreed on; and what this one has published of itself.
struct Agreement {
  std::string own_record;
  std::string job_key;
  std::vector<int32_t> hosts;             // of each rank, numbered by first appearance
  std::vector<std::string> descriptions;  // of the transport, by rank
};

// Publishes this rank's record, collects all, checks that they fit together. Throws
//   Error(timed_out)         naming the ranks that did not come;
//   Error(mismatch)          when versions or agreed variables differ, naming variable, ranks and
//                            values; when another process publishes as the same rank;
//   Error(peer_failed)       when no transport serves all pairs, with the reason of each.
Agreement agree(const BootstrapRequest& request, Connector& connector, const Deadline& deadline);

// agree(), connect, and tidy up the store. No rank returns before all have connected; one that
// gives up tells those that it has reached. `agreement` becomes what agree() returned.
std::unique_ptr<Transport> bootstrap(const BootstrapRequest& request, Connector& connector,
                                     Agreement& agreement);

}  // namespace pycoll
