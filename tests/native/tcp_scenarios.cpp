// Scenarios of the TCP transport alone: ranks with a connector each, or all with one (a process
// that is its own peer), over loopback.
#include <sys/socket.h>

#include <cstring>
#include <thread>

#include "core/random.h"
#include "scenario.h"
#include "transport/tcp/link.h"
#include "transport/tcp/tcp_transport.h"

namespace pycoll::stress {
namespace {

struct TcpWorld {
  int world_size = 2;
  uint64_t seed = 0;
  Config config;
  int socket_buffer = 0;
  bool one_process = false;  // as far as the transport can tell
  Nanoseconds patience = std::chrono::seconds(20);
};

TcpWorld draw_world(uint64_t seed, Nanoseconds patience) {
  Rng rng(seed);
  TcpWorld world;
  world.seed = seed;
  world.world_size = 2 + static_cast<int>(rng.below(3));
  world.config.slot_bytes = rng.one_in(2) ? 64 : 20'480;
  world.config.fifo_depth = rng.one_in(2) ? 2 : 4;
  world.config.tcp_connections = 1 + rng.below(3);
  world.socket_buffer = rng.one_in(2) ? 0 : 8192;
  world.one_process = rng.one_in(3);
  world.patience = patience;
  return world;
}

using Connectors = std::vector<std::shared_ptr<tcp::TcpConnector>>;

Connectors connectors_of(const TcpWorld& world) {
  Connectors connectors;
  for (int rank = 0; rank < world.world_size; ++rank) {
    connectors.push_back(rank > 0 && world.one_process
                             ? connectors[0]
                             : std::make_shared<tcp::TcpConnector>(world.socket_buffer));
  }
  return connectors;
}

std::vector<std::string> descriptions_of(const TcpWorld& world, const Connectors& connectors) {
  std::vector<std::string> descriptions;
  for (const auto& each : connectors) descriptions.push_back(each->describe(world.config));
  return descriptions;
}

// One group: body(rank, transport) on every rank, each in a thread.
void run_group(const TcpWorld& world, const Connectors& connectors,
               const std::vector<std::string>& descriptions,
               const std::function<void(int, Transport&)>& body) {
  const std::string key = random_name();
  std::vector<std::string> complaints(connectors.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world.world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ConnectRequest request;
        request.rank = rank;
        request.world_size = world.world_size;
        request.job_key = key;
        request.descriptions = descriptions;
        request.geometry = {world.config.slot_bytes, static_cast<uint32_t>(world.config.fifo_depth),
                            0};
        request.deadline = Deadline::after(world.patience);
        const auto transport = connectors[static_cast<size_t>(rank)]->connect(request);
        body(rank, *transport);
        transport->leave();
      } catch (const std::exception& error) {
        complaints[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string all;
  for (size_t rank = 0; rank < complaints.size(); ++rank) {
    if (!complaints[rank].empty()) all += concat("\n  rank ", rank, ": ", complaints[rank]);
  }
  check(all.empty(), "seed ", world.seed, ", world size ", world.world_size, all);
}

// ---- Messages between all pairs, in both directions ----

struct Stream {  // one FIFO's content, as both ends know it
  uint64_t seed = 0;
  uint64_t slot_bytes = 0;

  uint32_t bytes(uint32_t message) const {
    const uint64_t draw = mix(seed + message);
    if (draw % 7 == 0) return 0;
    return static_cast<uint32_t>(draw % 3 == 0 ? slot_bytes : draw % (slot_bytes + 1));
  }
  std::byte at(uint32_t message, uint32_t i) const {
    return static_cast<std::byte>(mix(seed ^ message) + i * 31);
  }
};

Stream stream_of(const TcpWorld& world, int from, int to, int channel) {
  return {mix(world.seed * 4096 + static_cast<uint64_t>((from * 64 + to) * 8 + channel)),
          world.config.slot_bytes};
}

class Exchange {
 public:
  Exchange(const TcpWorld& world, int rank, Transport& transport, uint32_t messages)
      : world_(world), transport_(transport), messages_(messages) {
    for (int peer = 0; peer < world.world_size; ++peer) {
      if (peer == rank) continue;
      for (const int channel : {0, 1, kMessageChannel}) {
        lanes_.push_back({peer, channel, stream_of(world, rank, peer, channel),
                          stream_of(world, peer, rank, channel)});
      }
    }
  }

  void run() {
    while (!done()) {
      if (advance()) continue;
      wait_on(transport_, world_.patience, [&] { return advance() || done(); });
    }
  }

 private:
  struct Lane {
    int peer;
    int channel;
    Stream out;
    Stream in;
    uint32_t sent = 0;
    uint32_t received = 0;
  };

  bool done() const {
    for (const Lane& lane : lanes_) {
      if (lane.sent < messages_ || lane.received < messages_) return false;
    }
    return true;
  }

  bool advance() {
    bool moved = false;
    for (Lane& lane : lanes_) {
      check(transport_.peer_state(lane.peer) != PeerState::died, "rank ", lane.peer, " died");
      moved |= send(lane);
      moved |= receive(lane);
    }
    return moved;
  }

  bool send(Lane& lane) {
    if (lane.sent == messages_) return false;
    SendEnd& end = transport_.sender(lane.peer, lane.channel);
    std::byte* slot = end.acquire();
    if (slot == nullptr) return false;
    const uint32_t bytes = lane.out.bytes(lane.sent);
    for (uint32_t i = 0; i < bytes; ++i) slot[i] = lane.out.at(lane.sent, i);
    end.publish({lane.sent, bytes, lane.sent % 2 == 0 ? Wire::value : Wire::partial});
    ++lane.sent;
    return true;
  }

  bool receive(Lane& lane) {
    if (lane.received == messages_) return false;
    RecvEnd& end = transport_.receiver(lane.peer, lane.channel);
    const auto message = end.peek();
    if (!message) return false;
    const uint32_t bytes = lane.in.bytes(lane.received);
    check(message->tag.fingerprint == lane.received && message->tag.bytes == bytes, "message ",
          lane.received, " of rank ", lane.peer, ": got number ", message->tag.fingerprint, ", ",
          message->tag.bytes, " bytes, expected ", bytes);
    for (uint32_t i = 0; i < bytes; ++i) {
      check(message->data[i] == lane.in.at(lane.received, i), "message ", lane.received,
            " of rank ", lane.peer, ", channel ", lane.channel, ": byte ", i, " of ", bytes,
            " is wrong");
    }
    end.release();
    ++lane.received;
    return true;
  }

  const TcpWorld& world_;
  Transport& transport_;
  uint32_t messages_;
  std::vector<Lane> lanes_;
};

void messages(const Settings& settings) {
  uint64_t episode = settings.seed * 1000;
  do {
    const TcpWorld world = draw_world(episode++, settings.patience);
    const Connectors connectors = connectors_of(world);
    run_group(world, connectors, descriptions_of(world, connectors),
              [&](int rank, Transport& transport) { Exchange(world, rank, transport, 60).run(); });
  } while (!settings.until.passed());
}

// ---- Groups that come and go on shared links ----

void groups(const Settings& settings) {
  uint64_t episode = settings.seed * 1000;
  do {
    TcpWorld world = draw_world(episode++, settings.patience);
    world.config.slot_bytes = 64;
    const Connectors connectors = connectors_of(world);
    const auto descriptions = descriptions_of(world, connectors);
    std::vector<std::string> complaints(3);
    std::vector<std::thread> threads;
    for (size_t line = 0; line < complaints.size(); ++line) {
      threads.emplace_back([&, line] {
        try {
          for (uint32_t i = 0; i < 4; ++i) {
            run_group(world, connectors, descriptions, [&](int rank, Transport& transport) {
              Exchange(world, rank, transport, 1 + i * 3).run();
            });
          }
        } catch (const std::exception& error) {
          complaints[line] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& each : complaints) check(each.empty(), each);
  } while (!settings.until.passed());
}

// ---- Connections that break ----

// Every TCP connection of this process, whoever's it is: all ranks are here.
void break_connections(Rng& rng, bool all) {
  for (int fd = 3; fd < 1024; ++fd) {
    int listens = 0;
    socklen_t length = sizeof(listens);
    int family = 0;
    socklen_t family_length = sizeof(family);
    if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &family_length) != 0) continue;
    if (family != AF_INET && family != AF_INET6) continue;
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || listens) continue;
    if (all || rng.one_in(3)) ::shutdown(fd, SHUT_RDWR);
  }
}

void resets(const Settings& settings) {
  uint64_t episode = settings.seed * 1000;
  do {
    const TcpWorld world = draw_world(episode++, settings.patience);
    const Connectors connectors = connectors_of(world);
    run_group(world, connectors, descriptions_of(world, connectors),
              [&](int rank, Transport& transport) {
                Rng rng(world.seed * 8 + static_cast<uint64_t>(rank));
                transport.say_ready(1);
                wait_on(transport, world.patience, [&] {
                  for (int peer = 0; peer < world.world_size; ++peer) {
                    if (peer != rank && transport.ready_stage(peer) < 1 &&
                        transport.peer_state(peer) == PeerState::alive) {
                      return false;
                    }
                  }
                  return true;
                });
                std::jthread breaker;
                if (rank == 0) {
                  breaker = std::jthread([&world, wait = rng.below(3000)] {
                    Rng own(world.seed);
                    std::this_thread::sleep_for(std::chrono::microseconds(wait));
                    break_connections(own, false);
                    std::this_thread::sleep_for(std::chrono::milliseconds(2));
                    break_connections(own, true);
                  });
                }
                // Those who saw it first leave in good order, over what is not broken yet.
                const auto someone_went = [&] {
                  for (int peer = 0; peer < world.world_size; ++peer) {
                    if (peer != rank && transport.peer_state(peer) != PeerState::alive) return true;
                  }
                  return false;
                };
                // Garbage in a slot is no message; what matters is that all ends see the end.
                wait_on(transport, world.patience, [&] {
                  for (int peer = 0; peer < world.world_size; ++peer) {
                    if (peer == rank) continue;
                    if (transport.sender(peer, 0).acquire() != nullptr) {
                      transport.sender(peer, 0).publish({1, 64});
                    }
                    if (transport.receiver(peer, 0).peek()) transport.receiver(peer, 0).release();
                  }
                  return someone_went();
                });
                // On a broken group everything still returns.
                transport.send_abort("broken");
                transport.inquire();
              });
  } while (!settings.until.passed());
}

// ---- A session that is asked for again ----

struct NoOwner final : tcp::LinkOwner {
  void on_open(const std::shared_ptr<tcp::Link>&, const tcp::OpenBody&) override {}
  void on_opened(const std::shared_ptr<tcp::Link>&, const tcp::OpenBody&) override {}
  void on_end(const std::shared_ptr<tcp::Link>&) override {}
  void park(std::shared_ptr<tcp::Connection>) override {}
};

// The link over which it was asked for ends before the answer, it opens over another one, and only
// then the first is taken apart.
void asked_again(const Settings& /*settings*/) {
  NoOwner owner;
  const auto make_link = [&] {
    return std::make_shared<tcp::Link>(owner, tcp::Id{}, std::chrono::seconds(10));
  };
  const auto session =
      std::make_shared<tcp::Session>(tcp::SessionKey{"group", 0, 1}, 7, TransportGeometry{64, 2, 0},
                                     std::make_shared<tcp::Board>());
  auto first = make_link();
  const auto second = make_link();
  check(first->attach(session), "a fresh link refused a session");
  first->close();
  check(session->take_refusal(), "nobody told the session that its link had ended");
  check(second->attach(session), "a fresh link refused a session");
  session->open(second, 1);
  first->close();
  first.reset();
  check(session->state() == PeerState::alive, "the end of a link ended a session of another one");
  second->close();
  check(session->state() == PeerState::died, "nobody told the session that its link had ended");
}

// ---- Calls and aborts ----

void news(const Settings& settings) {
  uint64_t episode = settings.seed * 1000;
  do {
    const TcpWorld world = draw_world(episode++, settings.patience);
    const Connectors connectors = connectors_of(world);
    run_group(
        world, connectors, descriptions_of(world, connectors), [&](int rank, Transport& transport) {
          CallHeader call;
          call.sequence = 5 + static_cast<uint64_t>(rank);
          call.count = 100 + static_cast<uint64_t>(rank);
          transport.announce(call);
          transport.say_ready(1);
          const auto all = [&](const std::function<bool(int)>& holds) {
            for (int peer = 0; peer < world.world_size; ++peer) {
              if (peer != rank && !holds(peer)) return false;
            }
            return true;
          };
          wait_on(transport, world.patience,
                  [&] { return all([&](int peer) { return transport.ready_stage(peer) >= 1; }); });
          transport.inquire();
          wait_on(transport, world.patience, [&] {
            return all([&](int peer) { return transport.latest_call_of(peer).has_value(); });
          });
          check(all([&](int peer) {
                  const auto theirs = transport.call_of(peer, 5 + static_cast<uint64_t>(peer));
                  return theirs && theirs->count == 100 + static_cast<uint64_t>(peer);
                }),
                "a call came over wrong");
          transport.say_ready(2);
          wait_on(transport, world.patience,
                  [&] { return all([&](int peer) { return transport.ready_stage(peer) >= 2; }); });
          if (rank == 0) return transport.send_abort("the reason");
          wait_on(transport, world.patience, [&] { return transport.peer_abort().has_value(); });
          check(*transport.peer_abort() == "the reason", *transport.peer_abort());
          wait_on(transport, world.patience,
                  [&] { return transport.peer_state(0) != PeerState::alive; });
          check(transport.peer_state(0) == PeerState::left, "rank 0 did not say goodbye");
        });
  } while (!settings.until.passed());
}

}  // namespace

std::vector<Scenario> tcp_scenarios() {
  return {
      {"tcp_messages", "all pairs, both directions, short writes", messages},
      {"tcp_groups", "groups that come and go on shared links", groups},
      {"tcp_resets", "connections that break in the middle", resets},
      {"tcp_asked_again", "a session whose first link ended before it opened", asked_again},
      {"tcp_news", "calls, stages, aborts, goodbyes", news},
  };
}

}  // namespace pycoll::stress
