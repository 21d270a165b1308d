// Addresses of this host, and which of them peers are told.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace pycoll::tcp {

// An IPv4 or IPv6 address with a port.
class Address {
 public:
  Address() = default;
  Address(const sockaddr* address, socklen_t length);
  // "10.0.0.1:4711", "[fd00::1]:4711", "[fe80::1%eth0]:4711"; no names.
  static std::optional<Address> parse(const std::string& text);

  // In brackets where it is IPv6, so that the port cannot be taken for a part of it.
  std::string to_string() const;
  int family() const { return storage_.ss_family; }
  bool is_loopback() const;
  // Means something only together with an interface of the host that uses it.
  bool is_link_local() const;
  Address with_port(uint16_t port) const;
  Address with_scope(const std::string& interface) const;
  uint16_t port() const;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const { return length_; }
  bool same_host_as(const Address& other) const;

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

struct InterfaceAddress {
  std::string interface;
  Address address;
};

// Addresses of all interfaces that are up.
std::vector<InterfaceAddress> interface_addresses();

// The addresses that peers should try, best first. `interfaces` is PYCOLL_SOCKET_IFNAME: names or
// beginnings of names, separated by commas; then only theirs. Else the one from which the store is
// reached comes first (`store_host` may be empty). The host's own name is never looked up: it often
// stands for a loopback address (127.0.1.1) in /etc/hosts.
// Throws Error that lists the interfaces there are: invalid_argument when none has such a name,
// system when there is none at all.
std::vector<InterfaceAddress> choose_addresses(const std::string& interfaces,
                                               const std::string& store_host);

// Whether `interfaces`, as above, names that one.
bool matches(const std::string& interfaces, const std::string& name);

}  // namespace pycoll::tcp
