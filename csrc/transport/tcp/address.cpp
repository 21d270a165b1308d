#include "transport/tcp/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>
#include <set>
#include <sstream>

#include "core/error.h"
#include "core/fd.h"

namespace pycoll::tcp {
namespace {

const sockaddr_in& v4(const sockaddr* address) {
  return *reinterpret_cast<const sockaddr_in*>(address);
}
const sockaddr_in6& v6(const sockaddr* address) {
  return *reinterpret_cast<const sockaddr_in6*>(address);
}

std::string list_of(const std::vector<InterfaceAddress>& addresses) {
  std::string text;
  for (const InterfaceAddress& each : addresses) {
    // Without the port, which is 0.
    std::string host = each.address.to_string();
    host.resize(host.rfind(':'));
    text += concat(text.empty() ? "" : ", ", each.interface, " (", host, ")");
  }
  return text.empty() ? "none" : text;
}

// The local address from which packets to `host` leave, as the kernel's routes say. Nothing is
// sent: connecting a UDP socket only looks up the route.
std::optional<Address> source_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (host.empty() || ::getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> list(found, ::freeaddrinfo);
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    const UniqueFd fd(::socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!fd || ::connect(fd.get(), each->ai_addr, each->ai_addrlen) != 0) continue;
    sockaddr_storage storage{};
    socklen_t length = sizeof(storage);
    if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&storage), &length) != 0) continue;
    const Address source(reinterpret_cast<const sockaddr*>(&storage), length);
    // A name that /etc/hosts maps to loopback says nothing about where the peers are.
    if (!source.is_loopback()) return source;
  }
  return std::nullopt;
}

int preference(const InterfaceAddress& each) {
  if (each.address.is_loopback()) return 2;
  return each.address.is_link_local() ? 1 : 0;
}

}  // namespace

Address::Address(const sockaddr* address, socklen_t length) : length_(length) {
  std::memcpy(&storage_, address, std::min<size_t>(length, sizeof(storage_)));
}

std::optional<Address> Address::parse(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return std::nullopt;
  std::string host = text.substr(0, colon);
  uint16_t port = 0;
  const auto [end, error] =
      std::from_chars(text.data() + colon + 1, text.data() + text.size(), port);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), "0", &hints, &found) != 0) return std::nullopt;
  const Address address(found->ai_addr, found->ai_addrlen);
  ::freeaddrinfo(found);
  return address.with_port(port);
}

std::string Address::to_string() const {
  char host[NI_MAXHOST] = "?";
  if (::getnameinfo(get(), length_, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) != 0) {
    return "unknown address";
  }
  return family() == AF_INET6 ? concat("[", host, "]:", port()) : concat(host, ":", port());
}

bool Address::is_loopback() const {
  if (family() == AF_INET) return (ntohl(v4(get()).sin_addr.s_addr) >> 24) == 127;
  return IN6_IS_ADDR_LOOPBACK(&v6(get()).sin6_addr);
}

bool Address::is_link_local() const {
  if (family() == AF_INET) return (ntohl(v4(get()).sin_addr.s_addr) >> 16) == 0xA9FE;  // 169.254/16
  return IN6_IS_ADDR_LINKLOCAL(&v6(get()).sin6_addr);
}

Address Address::with_port(uint16_t port) const {
  Address result = *this;
  // The port lies at the same place in both families.
  reinterpret_cast<sockaddr_in*>(&result.storage_)->sin_port = htons(port);
  return result;
}

Address Address::with_scope(const std::string& interface) const {
  Address result = *this;
  if (family() == AF_INET6 && is_link_local()) {
    reinterpret_cast<sockaddr_in6*>(&result.storage_)->sin6_scope_id =
        ::if_nametoindex(interface.c_str());
  }
  return result;
}

uint16_t Address::port() const {
  return ntohs(v4(get()).sin_port);
}

bool Address::same_host_as(const Address& other) const {
  if (family() != other.family()) return false;
  if (family() == AF_INET) return v4(get()).sin_addr.s_addr == v4(other.get()).sin_addr.s_addr;
  return IN6_ARE_ADDR_EQUAL(&v6(get()).sin6_addr, &v6(other.get()).sin6_addr);
}

std::vector<InterfaceAddress> interface_addresses() {
  ifaddrs* found = nullptr;
  if (::getifaddrs(&found) != 0) fail(ErrorKind::system, errno_text("getifaddrs"));
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> list(found, ::freeifaddrs);
  std::vector<InterfaceAddress> all;
  for (const ifaddrs* each = found; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0) continue;
    const int family = each->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    all.push_back({each->ifa_name, Address(each->ifa_addr, length)});
  }
  return all;
}

bool matches(const std::string& interfaces, const std::string& name) {
  std::istringstream in(interfaces);
  for (std::string prefix; std::getline(in, prefix, ',');) {
    if (!prefix.empty() && name.compare(0, prefix.size(), prefix) == 0) return true;
  }
  return false;
}

std::vector<InterfaceAddress> choose_addresses(const std::string& interfaces,
                                               const std::string& store_host) {
  const std::vector<InterfaceAddress> all = interface_addresses();
  std::vector<InterfaceAddress> chosen;
  for (const InterfaceAddress& each : all) {
    if (interfaces.empty() || matches(interfaces, each.interface)) chosen.push_back(each);
  }
  if (chosen.empty()) {
    const std::string what =
        interfaces.empty() ? "this host has no network interface that is up and has an address"
                           : concat("PYCOLL_SOCKET_IFNAME=", interfaces,
                                    ": no interface of that name is up and has an address");
    // Only a wrong wish is the user's to correct: without a network there may be other transports.
    fail(interfaces.empty() ? ErrorKind::system : ErrorKind::invalid_argument, what,
         "; there are: ", list_of(all));
  }
  std::stable_sort(chosen.begin(), chosen.end(),
                   [](const auto& a, const auto& b) { return preference(a) < preference(b); });
  // Link-local addresses need a guess of the peer's interface: only where there is nothing better.
  if (preference(chosen.front()) == 0) {
    chosen.erase(std::remove_if(chosen.begin(), chosen.end(),
                                [](const auto& each) { return preference(each) == 1; }),
                 chosen.end());
  }
  if (const auto source = interfaces.empty() ? source_towards(store_host) : std::nullopt) {
    std::stable_sort(chosen.begin(), chosen.end(), [&](const auto& a, const auto& b) {
      return a.address.same_host_as(*source) > b.address.same_host_as(*source);
    });
  }
  return chosen;
}

}  // namespace pycoll::tcp
