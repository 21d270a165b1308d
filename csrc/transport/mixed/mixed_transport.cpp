#include "transport/mixed/mixed_transport.h"

#include <algorithm>
#include <utility>

namespace pycoll {

MixedTransport::MixedTransport(std::vector<std::unique_ptr<Transport>> parts,
                               std::vector<int> part_of_peer)
    : parts_(std::move(parts)), part_of_peer_(std::move(part_of_peer)) {
  for (const auto& part : parts_) name_ += (name_.empty() ? "" : "+") + std::string(part->name());
  for (size_t i = 1; i < parts_.size(); ++i) {
    parts_[i]->set_waker([bed = parts_.front().get()] { bed->wake(); });
  }
  // This rank itself: nobody is reached, but a question must not fail.
  for (int& part : part_of_peer_) part = std::max(part, 0);
}

// Destroyed back to front: a part's threads may call the first one's wake() until they are gone.
MixedTransport::~MixedTransport() {
  while (!parts_.empty()) parts_.pop_back();
}

void MixedTransport::announce(const CallHeader& call) {
  for (const auto& part : parts_) part->announce(call);
}

void MixedTransport::announce_elsewhere(const CallHeader& call) {
  for (const auto& part : parts_) part->announce_elsewhere(call);
}

std::optional<CallHeader> MixedTransport::call_of(int peer, uint64_t sequence) {
  return to(peer).call_of(peer, sequence);
}

std::optional<CallHeader> MixedTransport::latest_call_of(int peer) {
  return to(peer).latest_call_of(peer);
}

void MixedTransport::inquire() {
  for (const auto& part : parts_) part->inquire();
}

void MixedTransport::say_ready(int stage) {
  for (const auto& part : parts_) part->say_ready(stage);
}

// The first part's announcement comes first: whoever sees another part's, and calls the waker, then
// sees the first's too (each announcement ends with a fence, and so does the waker's look begin).
void MixedTransport::prepare_sleep() {
  for (const auto& part : parts_) part->prepare_sleep();
}

// The others do not sleep; but their threads look after their peers from here on, as they do for
// one that sleeps.
void MixedTransport::sleep(Nanoseconds at_most) {
  for (size_t i = 1; i < parts_.size(); ++i) parts_[i]->sleep(Nanoseconds(0));
  parts_.front()->sleep(at_most);
  for (size_t i = 1; i < parts_.size(); ++i) parts_[i]->cancel_sleep();
}

void MixedTransport::cancel_sleep() {
  for (const auto& part : parts_) part->cancel_sleep();
}

std::optional<std::string> MixedTransport::peer_abort() {
  for (const auto& part : parts_) {
    if (auto reason = part->peer_abort()) return reason;
  }
  return std::nullopt;
}

void MixedTransport::send_abort(const std::string& reason) {
  for (const auto& part : parts_) part->send_abort(reason);
}

void MixedTransport::leave() {
  for (const auto& part : parts_) part->leave();
}

}  // namespace pycoll
