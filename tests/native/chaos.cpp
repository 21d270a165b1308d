#include "chaos.h"

#include <sched.h>

#include <thread>
#include <vector>

#include "random.h"
#include "runtime/wait.h"

namespace pycoll::stress {

void Delays::maybe() {
  if (!on_) return;
  const uint64_t dice = mix(state_++);
  switch (dice % 64) {
    case 0:
    case 1:
      ::sched_yield();
      break;
    case 2:
    case 3:
      for (uint64_t i = 0; i < (dice >> 32) % 2000; ++i) cpu_relax();
      break;
    case 4:
      if ((dice >> 8) % 8 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds((dice >> 32) % 200));
      }
      break;
    default:
      break;
  }
}

namespace {

struct ChaosSendEnd final : SendEnd {
  ChaosSendEnd(SendEnd& end, Delays& delays) : inner(end), delay(delays) {}
  std::byte* acquire() override {
    delay.maybe();
    return inner.acquire();
  }
  void publish(const MessageTag& tag) override {
    delay.maybe();
    inner.publish(tag);
    delay.maybe();
  }
  SendEnd& inner;
  Delays& delay;
};

struct ChaosRecvEnd final : RecvEnd {
  ChaosRecvEnd(RecvEnd& end, Delays& delays) : inner(end), delay(delays) {}
  std::optional<Message> peek() override {
    delay.maybe();
    return inner.peek();
  }
  void release() override {
    delay.maybe();
    inner.release();
  }
  RecvEnd& inner;
  Delays& delay;
};

struct ChaosWindow final : Window {
  ChaosWindow(Window& window, Delays& delays) : inner(window), delay(delays) {}
  std::byte* local(int lane, int parity) override { return inner.local(lane, parity); }
  const std::byte* peer(int rank, int lane, int parity) override {
    delay.maybe();
    return inner.peer(rank, lane, parity);
  }
  void arrive(int lane, Arrival arrival) override {
    delay.maybe();
    inner.arrive(lane, arrival);
  }
  Arrival arrival_of(int rank, int lane, Arrival mine) override {
    return inner.arrival_of(rank, lane, mine);
  }
  Window& inner;
  Delays& delay;
};

struct ChaosLeases final : Leases {
  ChaosLeases(Leases& leases, Delays& delays, const std::function<void()>& hook)
      : inner(leases), delay(delays), while_borrowing(hook) {}
  std::optional<uint64_t> offset_of(const std::byte* data, uint64_t bytes) override {
    return inner.offset_of(data, bytes);
  }
  bool usable() override { return inner.usable(); }
  void offer(uint64_t sequence, const LeaseOffer& offer) override {
    delay.maybe();
    inner.offer(sequence, offer);
  }
  std::optional<LeaseOffer> offer_of(int peer, uint64_t sequence) override {
    delay.maybe();
    return inner.offer_of(peer, sequence);
  }
  std::byte* address(int peer, uint64_t offset, uint64_t bytes) override {
    return inner.address(peer, offset, bytes);
  }
  bool enter() override {
    delay.maybe();
    return linger(inner.enter());
  }
  bool is_revoked() override {
    delay.maybe();
    return !linger(!inner.is_revoked());
  }
  void exit() override {
    delay.maybe();
    inner.exit();
  }
  std::vector<int> revokers() override { return inner.revokers(); }
  void revoke(const std::vector<LentRange>& lent) override { inner.revoke(lent); }
  // What it says is true no more when this rank acts on it.
  bool linger(bool goes_on) const {
    if (goes_on && while_borrowing) while_borrowing();
    return goes_on;
  }
  Leases& inner;
  Delays& delay;
  const std::function<void()>& while_borrowing;
};

class ChaosTransport final : public Transport {
 public:
  ChaosTransport(std::unique_ptr<Transport> inner, ChaosOptions options, int world_size)
      : inner_(std::move(inner)),
        options_(std::move(options)),
        delays_(options_.delays, options_.seed),
        window_(*inner_->window(), delays_),
        leases_(*inner_->leases(), delays_, options_.while_borrowing) {
    for (int peer = 0; peer < world_size; ++peer) {
      for (int channel = 0; channel < kFifoChannels; ++channel) {
        senders_.emplace_back(inner_->sender(peer, channel), delays_);
        receivers_.emplace_back(inner_->receiver(peer, channel), delays_);
      }
    }
  }

  const char* name() const override { return inner_->name(); }
  SendEnd& sender(int peer, int channel) override { return senders_[at(peer, channel)]; }
  RecvEnd& receiver(int peer, int channel) override { return receivers_[at(peer, channel)]; }
  Window* window() override { return &window_; }
  Leases* leases() override { return &leases_; }

  void announce(const CallHeader& call) override { inner_->announce(call); }
  void announce_elsewhere(const CallHeader& call) override { inner_->announce_elsewhere(call); }
  std::optional<CallHeader> call_of(int peer, uint64_t sequence) override {
    return inner_->call_of(peer, sequence);
  }
  std::optional<CallHeader> latest_call_of(int peer) override {
    return inner_->latest_call_of(peer);
  }
  void inquire() override { inner_->inquire(); }
  void say_ready(int stage) override { inner_->say_ready(stage); }
  int ready_stage(int peer) override { return inner_->ready_stage(peer); }

  void prepare_sleep() override {
    if (options_.before_prepare_sleep) options_.before_prepare_sleep();
    inner_->prepare_sleep();
    delays_.maybe();
  }
  void sleep(Nanoseconds at_most) override {
    if (options_.before_sleep) options_.before_sleep();
    delays_.maybe();
    inner_->sleep(at_most);
  }
  void cancel_sleep() override { inner_->cancel_sleep(); }
  void wake() override { inner_->wake(); }
  bool shares_cpu_with(int peer) override { return inner_->shares_cpu_with(peer); }

  PeerState peer_state(int peer) override { return inner_->peer_state(peer); }
  std::optional<std::string> peer_abort() override {
    auto text = inner_->peer_abort();
    if (options_.after_peer_abort) options_.after_peer_abort(*inner_);
    return text;
  }
  void send_abort(const std::string& reason) override { inner_->send_abort(reason); }
  void leave() override { inner_->leave(); }

 private:
  static size_t at(int peer, int channel) {
    return static_cast<size_t>(peer * kFifoChannels + channel);
  }

  std::unique_ptr<Transport> inner_;
  ChaosOptions options_;
  Delays delays_;
  ChaosWindow window_;
  ChaosLeases leases_;
  std::vector<ChaosSendEnd> senders_;
  std::vector<ChaosRecvEnd> receivers_;
};

class ChaosConnector final : public Connector {
 public:
  ChaosConnector(std::unique_ptr<Connector> inner, ChaosOptions options)
      : inner_(std::move(inner)), options_(std::move(options)) {}
  const char* name() const override { return inner_->name(); }
  std::string describe(const Config& config) override { return inner_->describe(config); }
  std::string why_not(const std::string& description, const std::string& other) override {
    return inner_->why_not(description, other);
  }
  std::unique_ptr<Transport> connect(const ConnectRequest& request) override {
    return std::make_unique<ChaosTransport>(inner_->connect(request), options_, request.world_size);
  }

 private:
  std::unique_ptr<Connector> inner_;
  ChaosOptions options_;
};

}  // namespace

std::unique_ptr<Connector> with_chaos(std::unique_ptr<Connector> inner, ChaosOptions options) {
  return std::make_unique<ChaosConnector>(std::move(inner), std::move(options));
}

}  // namespace pycoll::stress
