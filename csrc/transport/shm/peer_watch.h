// A thread that sleeps on every peer's socket and pidfd and keeps what it learns.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/fd.h"
#include "transport/shm/link.h"
#include "transport/transport.h"

namespace pycoll::shm {

class PeerWatch {
 public:
  // The entry of this rank is empty. `on_news` is called from the watching thread after the state
  // has changed.
  PeerWatch(std::vector<Link> links, std::function<void()> on_news);
  ~PeerWatch();

  PeerState state(int peer) const {
    // Acquire: pairs with the store in note_state(); a caller that sees "died" also sees, through
    // the peer's segment, everything the peer published before.
    return states_[static_cast<size_t>(peer)].load(std::memory_order_acquire);
  }
  std::optional<std::string> peer_abort() const;

  void send_abort(const std::string& reason) const;
  void leave();

 private:
  void run();
  void read_socket(int peer);
  void note_state(int peer, PeerState state);

  std::vector<Link> links_;
  std::function<void()> on_news_;
  std::unique_ptr<std::atomic<PeerState>[]> states_;
  mutable std::mutex mutex_;
  std::optional<std::string> abort_;  // guarded by mutex_
  std::atomic<bool> left_{false};
  UniqueFd stop_;  // an eventfd
  std::thread thread_;
};

}  // namespace pycoll::shm
