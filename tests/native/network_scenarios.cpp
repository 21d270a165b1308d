// Many groups over one connector a process: they connect, work and close at the same time, so that
// connections are opened, shared, dropped and opened again while others use them.
#include <thread>

#include "scenario.h"
#include "transport/network.h"
#include "transport/shm/shm_transport.h"

namespace pycoll::stress {
namespace {

// What stands for a process here: ranks of several groups, one in each.
struct Process {
  int rank;
  std::shared_ptr<Connector> network;
};

void barrier(Communicator& communicator) {
  CallRequest request;
  request.collective = Collective::barrier;
  communicator.run(std::move(request), nullptr);
}

// One after the other: while one process still closes a group, its peer opens the next.
void groups_in_turn(MemoryStore& store, const Process& self, const WorldOptions& options,
                    int thread, uint64_t seed) {
  Rng rng(mix(seed * 64 + static_cast<uint64_t>(self.rank * 8 + thread)));
  Delays delays(options.delays, rng.next());
  for (int group = 0; group < 12; ++group) {
    const BootstrapRequest request{&store,         concat("group", thread, ".", group),
                                   self.rank,      options.world_size,
                                   options.config, nullptr};
    const auto communicator = Communicator::make(request, self.network, options.timeout);
    for (uint64_t i = rng.below(3); i > 0; --i) delays.maybe();
    barrier(*communicator);
    if (rng.one_in(2)) communicator->close();  // else the destructor does
    if (rng.one_in(4)) std::this_thread::sleep_for(std::chrono::microseconds(rng.below(500)));
  }
}

std::shared_ptr<Connector> make_network(const std::shared_ptr<shm::SegmentMapper>& mapper) {
  std::vector<std::unique_ptr<Connector>> connectors;
  connectors.push_back(std::make_unique<shm::ShmConnector>(mapper));
  return std::make_shared<Network>(std::move(connectors));
}

void groups(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& given) {
    WorldOptions options = given;
    options.config.transport = "shm";
    options.config.connect_timeout = 10;
    MemoryStore store;
    const auto mapper = std::make_shared<shm::SegmentMapper>(true);
    std::mutex mutex;
    std::string complaints;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < options.world_size; ++rank) {
      const Process self{rank, make_network(mapper)};
      for (int thread = 0; thread < static_cast<int>(options.seed % 3) + 1; ++thread) {
        threads.emplace_back([&, self, thread] {
          try {
            groups_in_turn(store, self, options, thread, options.seed);
          } catch (const std::exception& error) {
            const std::lock_guard lock(mutex);
            complaints += concat("\n  rank ", self.rank, ": ", error.what());
          }
        });
      }
    }
    for (std::thread& thread : threads) thread.join();
    check(complaints.empty(), "world size ", options.world_size, complaints);
  });
}

// A group that only some ranks join fails on all of those, in time, and the next one works.
void half_groups(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& given) {
    WorldOptions options = given;
    options.config.transport = "shm";
    options.config.connect_timeout = 10;
    MemoryStore store;
    const auto mapper = std::make_shared<shm::SegmentMapper>(true);
    std::vector<std::thread> threads;
    std::vector<std::string> ends(static_cast<size_t>(options.world_size));
    for (int rank = 0; rank < options.world_size; ++rank) {
      threads.emplace_back([&, rank, network = make_network(mapper)] {
        std::string& end = ends[static_cast<size_t>(rank)];
        try {
          const BootstrapRequest kept{&store,         "kept", rank, options.world_size,
                                      options.config, nullptr};
          const auto communicator = Communicator::make(kept, network, options.timeout);
          // The first rank gives up while the others connect.
          int looks = 0;
          BootstrapRequest broken = kept;
          broken.prefix = "broken";
          broken.interrupt = [&] {
            const int patience = 2 + static_cast<int>(options.seed % 4);
            if (rank == 0 && ++looks > patience) fail(ErrorKind::aborted, "had enough");
          };
          broken.config.connect_timeout = 1;
          try {
            Communicator::make(broken, network, options.timeout);
          } catch (const Error&) {
            // Or it was quick enough, and the group came to be: then it is closed.
          }
          barrier(*communicator);
        } catch (const std::exception& error) {
          end = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& end : ends) check(end.empty(), "the group that was kept: ", end);
  });
}

}  // namespace

std::vector<Scenario> network_scenarios() {
  return {
      {"groups", "many groups open and close at once over shared connections", groups},
      {"half_groups", "a group that one rank gives up while it connects; another goes on",
       half_groups},
  };
}

}  // namespace pycoll::stress
