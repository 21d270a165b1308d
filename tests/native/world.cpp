#include "world.h"

#include <thread>

#include "transport/shm/shm_transport.h"

namespace pycoll::stress {

void MemoryStore::set(const std::string& key, const std::string& value) {
  const std::lock_guard lock(mutex_);
  values_[key] = value;
  change_.notify_all();
}

std::optional<std::string> MemoryStore::get(const std::string& key, Nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  change_.wait_for(lock, timeout, [&] { return values_.count(key) != 0; });
  const auto found = values_.find(key);
  if (found == values_.end()) return std::nullopt;
  return found->second;
}

void MemoryStore::remove(const std::string& key) {
  const std::lock_guard lock(mutex_);
  values_.erase(key);
}

Config tiny_config() {
  Config config;
  config.slot_bytes = 64;
  config.fifo_depth = 2;
  config.window_bytes = 4096;
  config.connect_timeout = 30;
  return config;
}

namespace {

// What each rank needs before there is a communicator.
struct Meeting {
  MemoryStore store;
  std::shared_ptr<shm::SegmentMapper> mapper = std::make_shared<shm::SegmentMapper>(true);

  BootstrapRequest request(const WorldOptions& options, int rank) {
    return {&store, "stress", rank, options.world_size, options.config, nullptr};
  }
  std::unique_ptr<Connector> connector(const WorldOptions& options, int rank) {
    const auto found = options.hooks.find(rank);
    ChaosOptions chaos = found == options.hooks.end() ? ChaosOptions{} : found->second;
    chaos.delays = options.delays;
    chaos.seed = mix(options.seed * 64 + static_cast<uint64_t>(rank));
    return with_chaos(std::make_unique<shm::ShmConnector>(mapper), std::move(chaos));
  }
};

}  // namespace

void run_threads(int world_size, const std::function<void(int)>& body) {
  std::vector<std::string> complaints(static_cast<size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        complaints[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string all;
  for (int rank = 0; rank < world_size; ++rank) {
    const std::string& text = complaints[static_cast<size_t>(rank)];
    if (!text.empty()) all += concat("\n  rank ", rank, ": ", text);
  }
  check(all.empty(), "world size ", world_size, all);
}

void run_world(const WorldOptions& options, const std::function<void(Rank&)>& body) {
  Meeting meeting;
  run_threads(options.world_size, [&](int rank) {
    const auto communicator = Communicator::make(meeting.request(options, rank),
                                                 meeting.connector(options, rank), options.timeout);
    const uint64_t own = mix(options.seed * 64 + 32 + static_cast<uint64_t>(rank));
    Rank self{rank,     options.world_size,     *communicator,
              Rng(own), Rng(mix(options.seed)), Delays(options.delays, own)};
    body(self);
    communicator->close();
  });
}

void run_transports(const WorldOptions& options, const std::function<void(int, Transport&)>& body) {
  Meeting meeting;
  run_threads(options.world_size, [&](int rank) {
    const auto connector = meeting.connector(options, rank);
    Agreement agreement;
    const auto transport = bootstrap(meeting.request(options, rank), *connector, agreement);
    body(rank, *transport);
    transport->leave();
  });
}

}  // namespace pycoll::stress
