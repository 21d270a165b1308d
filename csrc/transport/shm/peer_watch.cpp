#include "transport/shm/peer_watch.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <cerrno>

#include "core/error.h"

namespace pycoll::shm {

PeerWatch::PeerWatch(std::vector<Link> links, std::function<void()> on_news)
    : links_(std::move(links)),
      on_news_(std::move(on_news)),
      states_(std::make_unique<std::atomic<PeerState>[]>(links_.size())),
      stop_(::eventfd(0, EFD_CLOEXEC)) {
  if (!stop_) fail(ErrorKind::system, errno_text("eventfd"));
  for (size_t i = 0; i < links_.size(); ++i) states_[i] = PeerState::alive;
  if (links_.size() > 1) thread_ = std::thread([this] { run(); });
}

PeerWatch::~PeerWatch() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof(one));
  thread_.join();
}

std::optional<std::string> PeerWatch::peer_abort() const {
  const std::lock_guard lock(mutex_);
  return abort_;
}

void PeerWatch::send_abort(const std::string& reason) const {
  for (const Link& link : links_) {
    if (link) link.send_note(Note::abort, reason);
  }
}

void PeerWatch::leave() {
  if (left_.exchange(true)) return;
  for (const Link& link : links_) {
    if (link) link.send_note(Note::leave, "");
  }
}

void PeerWatch::note_state(int peer, PeerState state) {
  auto& known = states_[static_cast<size_t>(peer)];
  if (known.load(std::memory_order_relaxed) != PeerState::alive) return;  // the first word stands
  known.store(state, std::memory_order_release);
  on_news_();
}

void PeerWatch::read_socket(int peer) {
  Note note{};
  std::string text;
  for (;;) {
    switch (links_[static_cast<size_t>(peer)].receive_note(note, text)) {
      case Link::Received::nothing:
        return;
      case Link::Received::closed:
        note_state(peer, PeerState::died);
        return;
      case Link::Received::note:
        if (note == Note::leave) note_state(peer, PeerState::left);
        if (note == Note::abort) {
          {
            const std::lock_guard lock(mutex_);
            if (!abort_) abort_ = text;
          }
          on_news_();
        }
        break;
    }
  }
}

void PeerWatch::run() {
  // Two entries a peer, and the stop event last. An entry is switched off (fd -1) when it has said
  // all.
  std::vector<pollfd> entries;
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    entries.push_back({links_[peer].socket(), POLLIN, 0});
    entries.push_back({links_[peer].pidfd(), POLLIN, 0});
  }
  entries.push_back({stop_.get(), POLLIN, 0});
  while (entries.back().revents == 0) {
    if (::poll(entries.data(), entries.size(), -1) < 0) {
      if (errno == EINTR) continue;
      return;  // too many descriptors for the process's limit: deaths are then seen by deadlines
               // only
    }
    for (size_t i = 0; i + 1 < entries.size(); ++i) {
      if (entries[i].revents == 0) continue;
      const int peer = static_cast<int>(i / 2);
      // What a process said last is read before its death is noted: an abort explains more.
      if (links_[static_cast<size_t>(peer)]) read_socket(peer);
      if (i % 2 == 1) note_state(peer, PeerState::died);
      if (state(peer) != PeerState::alive) entries[i].fd = -1;
    }
  }
}

}  // namespace pycoll::shm
