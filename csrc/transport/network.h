// All transports of a process as one connector, and who shares it.
//
// A Network is kept by the groups that use it, and by nobody else: with the last one go its
// sockets, threads and descriptors.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace pycoll {

class Network final : public Connector {
 public:
  // In no particular order; Config::transport says what is preferred.
  explicit Network(std::vector<std::unique_ptr<Connector>> connectors);

  const char* name() const override { return "network"; }
  // What every transport that Config::transport names says of itself, best first, or why it cannot
  // be used. Throws Error(invalid_argument) when it names one that does not exist.
  std::string describe(const Config& config) override;
  // Empty when at least one transport serves the two; else the reason of each.
  std::string why_not(const std::string& description, const std::string& other) override;
  // Each peer by the first transport that serves the two.
  std::unique_ptr<Transport> connect(const ConnectRequest& request) override;

  void before_fork() override;
  void after_fork_parent() override;
  void after_fork_child() override;

 private:
  struct Offer;
  struct Verdict;
  struct Plan;

  static std::vector<Offer> parse(const std::string& description);
  Connector* find(const std::string& name) const;
  Verdict judge(const std::vector<Offer>& mine, const std::vector<Offer>& theirs) const;
  Plan plan(const ConnectRequest& request) const;

  std::vector<std::unique_ptr<Connector>> connectors_;
};

// One row a transport: for the doctor, and for what PYCOLL_TRANSPORT may name.
struct TransportRow {
  std::string_view name;
  std::string_view summary;
  std::unique_ptr<Connector> (*make)();
};
// Best first.
std::span<const TransportRow> transports();

// The networks of a process. Groups with the same transport settings share one, except for several
// ranks of one group in one process (ranks as threads): those are peers, and get one each.
class NetworkRegistry {
 public:
  // `group` is the group's name in the store. The group holds what it is given until it is closed.
  std::shared_ptr<Connector> network_for(const std::string& group, const Config& config);

  // Around fork(2), in the forking thread, which may release what guards it meanwhile (the GIL): a
  // second fork waits in before_fork() for the first. The child keeps none of the descriptors, and
  // makes networks of its own.
  void before_fork();
  void after_fork_parent();
  void after_fork_child();

 private:
  // What a group holds.
  struct Lease {
    std::shared_ptr<Network> network;
    std::string group;
  };
  struct Entry {
    std::string settings;
    std::weak_ptr<Network> network;
    std::vector<std::weak_ptr<Lease>> leases;
    bool has(const std::string& group) const;
  };

  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::vector<std::shared_ptr<Network>> forking_;  // those that are locked for a fork
};

}  // namespace pycoll
