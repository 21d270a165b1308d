#include "transport/tcp/description.h"

#include <algorithm>
#include <sstream>

#include "core/error.h"

namespace pycoll::tcp {

Id to_id(const std::string& text) {
  Id id{};
  std::copy_n(text.begin(), std::min(text.size(), id.size()), id.begin());
  return id;
}

std::string Description::to_text() const {
  std::string text =
      concat("tcp 1 ", std::string(process.begin(), process.end()), " ",
             std::string(secret.begin(), secret.end()), " ", host, " ",
             interfaces.empty() ? "*" : interfaces, " ", connections, " ", heartbeat_ms);
  for (const InterfaceAddress& each : addresses) {
    text += concat(" ", each.interface, "=", each.address.to_string());
  }
  return text;
}

Description Description::parse(const std::string& text) {
  std::istringstream in(text);
  std::string tag;
  std::string version;
  std::string process;
  std::string secret;
  Description result;
  in >> tag >> version >> process >> secret >> result.host >> result.interfaces >>
      result.connections >> result.heartbeat_ms;
  if (!in || tag != "tcp" || version != "1" || process.size() != Id{}.size() ||
      secret.size() != Id{}.size()) {
    return {};
  }
  result.process = to_id(process);
  result.secret = to_id(secret);
  if (result.interfaces == "*") result.interfaces.clear();
  for (std::string each; in >> each;) {
    // An interface's name may hold a '=', an address does not.
    const size_t equals = each.rfind('=');
    if (equals == std::string::npos) continue;
    std::string host = each.substr(equals + 1);
    // The scope of a link-local address is a number or name of the peer's host.
    const size_t percent = host.find('%');
    if (percent != std::string::npos) host.erase(percent, host.find(']') - percent);
    if (const auto address = Address::parse(host)) {
      result.addresses.push_back({each.substr(0, equals), *address});
    }
  }
  return result;
}

namespace {

bool has_family(const Description& description, int family) {
  return std::any_of(description.addresses.begin(), description.addresses.end(),
                     [&](const InterfaceAddress& each) { return each.address.family() == family; });
}

// A link-local address of another host is reached through whichever of this host's interfaces has
// one too.
void add_link_local(const Description& mine, const InterfaceAddress& theirs,
                    std::vector<Candidate>& all) {
  for (const InterfaceAddress& own : interface_addresses()) {
    if (own.address.family() != theirs.address.family() || !own.address.is_link_local()) continue;
    if (!mine.interfaces.empty() && !matches(mine.interfaces, own.interface)) continue;
    all.push_back({theirs.address.with_scope(own.interface), theirs.interface, own.interface});
  }
}

}  // namespace

std::vector<Candidate> candidates(const Description& mine, const Description& theirs) {
  std::vector<Candidate> loopback;
  std::vector<Candidate> direct;
  const bool same_host = mine.host == theirs.host;
  // With a wish for one interface, packets leave through it, not through what the routes say.
  const bool forced = !same_host && !mine.interfaces.empty();
  for (const InterfaceAddress& each : theirs.addresses) {
    if (each.address.is_loopback()) {
      if (same_host) loopback.push_back({each.address, each.interface, ""});
    } else if (each.address.is_link_local() && !same_host) {
      add_link_local(mine, each, direct);
    } else if (same_host || has_family(mine, each.address.family())) {
      const Address address = each.address.with_scope(each.interface);
      direct.push_back({address, each.interface, forced ? mine.interfaces : ""});
    }
  }
  loopback.insert(loopback.end(), direct.begin(), direct.end());
  return loopback;
}

std::string to_string(const Candidate& candidate) {
  std::string text = concat(candidate.address.to_string(), " (interface ", candidate.interface);
  if (!candidate.through.empty()) text += concat(", through ", candidate.through);
  return text + ")";
}

}  // namespace pycoll::tcp
