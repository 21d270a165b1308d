// One group's part of the connections of this process: which of them lead to its peers, how far the
// exchange of segments has come, and what the peers have said.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/shm/endpoints.h"
#include "transport/transport.h"

namespace pycoll::shm {

class Port {
 public:
  // `peers`: the address of each rank; an empty id for those that are not reached this way.
  Port(std::shared_ptr<Endpoints> endpoints, const ConnectRequest& request,
       std::vector<Address> peers, Attachments memory);
  // Leaves, if nothing else was said.
  ~Port();
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;

  // Exchanges memory with all peers; gives each peer's to `map`. Throws Error that names who did
  // not come.
  void open(const std::function<void(int peer, const Attachments& memory)>& map);

  // Called by another thread, under the mutex of the endpoints, when a peer has left, died or
  // aborted.
  void on_news(std::function<void()> callback);

  PeerState state(int peer) const {
    // Acquire: pairs with the store in set_state(); a caller that sees "died" also sees, through
    // the peer's segment, everything the peer published before.
    return lines_[static_cast<size_t>(peer)].state.load(std::memory_order_acquire);
  }
  // A pidfd of the peer's process, which outlives the connection; nullptr where there is none. Once
  // open() has returned.
  std::shared_ptr<const UniqueFd> process(int peer) const {
    return lines_[static_cast<size_t>(peer)].process;
  }
  std::optional<std::string> peer_abort();
  void send_abort(const std::string& reason);
  void leave();

  const std::string& key() const { return key_; }

 private:
  friend class Endpoints;  // calls what follows, under its mutex

  void take_open(Endpoint& endpoint, const Packet& packet, Attachments memory);
  void take_goodbye(Endpoint& endpoint, const Packet& packet);
  // The connection has ended.
  void lose(Endpoint& endpoint, bool died);
  // The process with that id has died.
  void bury(const std::string& id);

  // What connects this rank with one peer.
  struct Line {
    Address address;
    Endpoint* endpoint = nullptr;
    std::shared_ptr<const UniqueFd> process;
    bool reused = false;    // it was there before: the peer may have dropped it
    int attempts = 0;       // connections of its own that ended before an answer
    bool sent = false;      // our open
    bool received = false;  // the peer's
    Attachments memory;     // received, not mapped yet
    bool mapped = false;
    std::atomic<PeerState> state{PeerState::alive};

    bool used() const { return !address.id.empty(); }
    bool complete() const { return !used() || (sent && received && mapped); }
  };

  int rank_of(const Endpoint& endpoint) const;
  bool dials(const Line& line) const;
  void advance(int peer);
  void use(Line& line, Endpoint& endpoint);
  void send_open(int peer);
  void set_state(Line& line, PeerState state);
  void set_abort(const std::string& reason);
  void tell_all(const Packet& packet);
  void check_progress() const;
  std::string missing() const;

  const std::shared_ptr<Endpoints> endpoints_;
  const std::string key_;
  const int rank_;
  const Deadline deadline_;
  const std::function<void()> interrupt_;
  // Guarded by the mutex of the endpoints, but for the states.
  std::vector<Line> lines_;                    // by rank
  std::shared_ptr<const Attachments> memory_;  // until all peers have it
  uint64_t starvations_ = 0;                   // of the endpoints, when this began
  std::function<void()> on_news_;
  std::optional<std::string> abort_;
  std::string
      last_word_;  // what the peers were told at the end; empty while they were told nothing
  std::atomic<bool> aborted_{false};  // abort_ is set
  bool left_ = false;
};

}  // namespace pycoll::shm
