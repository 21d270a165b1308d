#include "transport/network.h"

#include <algorithm>
#include <sstream>

#include "core/error.h"
#include "transport/mixed/mixed_transport.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace pycoll {
namespace {

constexpr TransportRow kTransports[] = {
    {"shm", "shared memory between processes of one host",
     []() -> std::unique_ptr<Connector> { return std::make_unique<shm::ShmConnector>(); }},
    {"tcp", "TCP between processes of any hosts",
     []() -> std::unique_ptr<Connector> { return std::make_unique<tcp::TcpConnector>(); }},
};

std::string transport_names() {
  std::string names;
  for (const TransportRow& row : kTransports) {
    names += (names.empty() ? "" : ", ") + std::string(row.name);
  }
  return names;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

// The names in PYCOLL_TRANSPORT, best first.
std::vector<std::string> preferred(const Config& config) {
  std::vector<std::string> names;
  if (config.transport == "auto") {
    for (const TransportRow& row : kTransports) names.emplace_back(row.name);
    return names;
  }
  names = split(config.transport, ',');
  for (const std::string& name : names) {
    const auto is_name = [&](const TransportRow& row) { return row.name == name; };
    if (std::none_of(std::begin(kTransports), std::end(kTransports), is_name)) {
      fail(ErrorKind::invalid_argument, "PYCOLL_TRANSPORT=", config.transport, ": '", name,
           "' is no transport; there are: auto, or a list of ", transport_names());
    }
  }
  if (names.empty()) fail(ErrorKind::invalid_argument, "PYCOLL_TRANSPORT names no transport");
  return names;
}

// Offers are separated by tabs, so that a description is one line.
std::string one_field(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '\t' || c == '\n'; }, ' ');
  return text;
}

std::string settings_of(const Config& config) {
  return concat(config.transport, "\n", config.socket_ifname, "\n", config.tcp_connections, "\n",
                config.heartbeat);
}

}  // namespace

std::span<const TransportRow> transports() {
  return kTransports;
}

// ---- What a rank offers ----

// In a description: "name=+description" or "name=-reason".
struct Network::Offer {
  std::string name;
  bool usable = false;
  std::string text;
};

struct Network::Verdict {
  int offer = -1;       // index of the one that both ranks use
  std::string reasons;  // of all, when there is none
};

Network::Network(std::vector<std::unique_ptr<Connector>> connectors)
    : connectors_(std::move(connectors)) {}

Connector* Network::find(const std::string& name) const {
  for (const auto& connector : connectors_) {
    if (connector->name() == name) return connector.get();
  }
  return nullptr;
}

std::string Network::describe(const Config& config) {
  std::string line;
  for (const std::string& name : preferred(config)) {
    Connector* connector = find(name);
    std::string offer;
    try {
      offer = connector == nullptr ? "-not there" : "+" + connector->describe(config);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::invalid_argument) throw;  // the user's to correct
      offer = std::string("-") + error.what();
    }
    line += (line.empty() ? "" : "\t") + name + "=" + one_field(offer);
  }
  return line;
}

std::vector<Network::Offer> Network::parse(const std::string& description) {
  std::vector<Offer> offers;
  for (const std::string& field : split(description, '\t')) {
    const size_t at = field.find('=');
    if (at == std::string::npos || at + 1 >= field.size()) continue;
    offers.push_back({field.substr(0, at), field[at + 1] == '+', field.substr(at + 2)});
  }
  return offers;
}

Network::Verdict Network::judge(const std::vector<Offer>& mine,
                                const std::vector<Offer>& theirs) const {
  Verdict verdict;
  for (size_t i = 0; i < mine.size() && i < theirs.size(); ++i) {
    const Offer& a = mine[i];
    const Offer& b = theirs[i];
    Connector* connector = find(a.name);
    std::string reason;
    if (a.name != b.name || connector == nullptr) {
      reason = "not offered by both ranks";
    } else if (!a.usable || !b.usable) {
      reason = a.usable ? b.text : a.text;
    } else {
      reason = connector->why_not(a.text, b.text);
    }
    if (reason.empty()) return {static_cast<int>(i), ""};
    verdict.reasons += concat(verdict.reasons.empty() ? "" : "; ", a.name, ": ", reason);
  }
  if (verdict.reasons.empty()) verdict.reasons = "no transport is offered";
  return verdict;
}

std::string Network::why_not(const std::string& description, const std::string& other) {
  return judge(parse(description), parse(other)).reasons;
}

// ---- Connecting ----

// Which transport serves which peer.
struct Network::Plan {
  struct Part {
    Connector* connector;
    ConnectRequest request;
  };
  std::vector<Part> parts;   // best first
  std::vector<int> of_peer;  // index into parts, -1 for this rank
};

Network::Plan Network::plan(const ConnectRequest& request) const {
  std::vector<std::vector<Offer>> offers;
  for (const std::string& description : request.descriptions) {
    offers.push_back(parse(description));
  }
  const auto& mine = offers[static_cast<size_t>(request.rank)];
  Plan plan;
  plan.of_peer.assign(request.descriptions.size(), -1);
  for (size_t i = 0; i < mine.size(); ++i) {
    Plan::Part part{find(mine[i].name), request};
    bool serves_any = false;
    for (size_t peer = 0; peer < offers.size(); ++peer) {
      part.request.serves[peer] =
          request.serves[peer] && judge(mine, offers[peer]).offer == static_cast<int>(i);
      part.request.descriptions[peer] = i < offers[peer].size() ? offers[peer][i].text : "";
      if (!part.request.serves[peer]) continue;
      plan.of_peer[peer] = static_cast<int>(plan.parts.size());
      serves_any = true;
    }
    // A group of one rank has no peers, and a transport all the same.
    const bool alone = request.world_size == 1 && mine[i].usable && plan.parts.empty();
    if (serves_any || alone) plan.parts.push_back(std::move(part));
  }
  return plan;
}

std::unique_ptr<Transport> Network::connect(const ConnectRequest& request) {
  Plan plan = this->plan(request);
  if (plan.parts.empty()) {
    const std::string& mine = request.descriptions[static_cast<size_t>(request.rank)];
    fail(ErrorKind::system, "rank ", request.rank,
         " has no transport: ", judge(parse(mine), parse(mine)).reasons);
  }
  std::vector<std::unique_ptr<Transport>> parts;
  try {
    for (Plan::Part& part : plan.parts) parts.push_back(part.connector->connect(part.request));
  } catch (const std::exception& error) {
    for (const auto& part : parts) part->send_abort(error.what());
    throw;
  }
  if (parts.size() == 1) return std::move(parts.front());
  return std::make_unique<MixedTransport>(std::move(parts), std::move(plan.of_peer));
}

void Network::before_fork() {
  for (const auto& connector : connectors_) connector->before_fork();
}

void Network::after_fork_parent() {
  for (const auto& connector : connectors_) connector->after_fork_parent();
}

void Network::after_fork_child() {
  for (const auto& connector : connectors_) connector->after_fork_child();
}

// ---- The networks of a process ----

bool NetworkRegistry::Entry::has(const std::string& group) const {
  return std::any_of(leases.begin(), leases.end(), [&](const auto& weak) {
    const auto lease = weak.lock();
    return lease != nullptr && lease->group == group;
  });
}

std::shared_ptr<Connector> NetworkRegistry::network_for(const std::string& group,
                                                        const Config& config) {
  const std::string settings = settings_of(config);
  auto lease = std::make_shared<Lease>();
  lease->group = group;
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [](const Entry& entry) { return entry.network.expired(); });
  for (Entry& entry : entries_) {
    std::erase_if(entry.leases, [](const auto& weak) { return weak.expired(); });
    if (entry.settings != settings || entry.has(group)) continue;
    lease->network = entry.network.lock();
    if (lease->network == nullptr) continue;
    entry.leases.push_back(lease);
    return {lease, lease->network.get()};
  }
  std::vector<std::unique_ptr<Connector>> connectors;
  for (const TransportRow& row : kTransports) connectors.push_back(row.make());
  lease->network = std::make_shared<Network>(std::move(connectors));
  entries_.push_back({settings, lease->network, {lease}});
  return {lease, lease->network.get()};
}

void NetworkRegistry::before_fork() {
  mutex_.lock();
  for (const Entry& entry : entries_) {
    if (auto network = entry.network.lock()) forking_.push_back(std::move(network));
  }
  for (const auto& network : forking_) network->before_fork();
}

void NetworkRegistry::after_fork_parent() {
  for (const auto& network : forking_) network->after_fork_parent();
  const auto let_go = std::move(forking_);
  forking_.clear();
  mutex_.unlock();
  // Here the last reference may go: taking a network apart joins threads.
}

void NetworkRegistry::after_fork_child() {
  for (const auto& network : forking_) network->after_fork_child();
  // Never taken apart here: the threads that it would join are the parent's.
  new std::vector(std::move(forking_));
  forking_.clear();
  entries_.clear();
  mutex_.unlock();
}

}  // namespace pycoll
