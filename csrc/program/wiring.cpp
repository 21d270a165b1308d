#include "program/wiring.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "core/error.h"

namespace pycoll::prover {
namespace {

class Wirer {
 public:
  explicit Wirer(std::span<const Program> programs) { wiring_.programs = programs; }

  Wiring run() {
    for (const Program& program : wiring_.programs) {
      wiring_.first_process.push_back(static_cast<int32_t>(wiring_.processes.size()));
      wiring_.lanes_of_rank.push_back(static_cast<int32_t>(program.lanes.size()));
      for (size_t lane = 0; lane < program.lanes.size(); ++lane) {
        wiring_.processes.push_back({program.rank, static_cast<int32_t>(lane), {}});
      }
    }
    for (size_t process = 0; process < wiring_.processes.size(); ++process) add_steps(process);
    return std::move(wiring_);
  }

 private:
  void add_steps(size_t index) {
    Process& process = wiring_.processes[index];
    const Program& program = wiring_.programs[static_cast<size_t>(process.rank)];
    const auto& steps = program.lanes[static_cast<size_t>(process.lane)].steps;
    const int32_t id = static_cast<int32_t>(index);
    process.steps.reserve(steps.size());
    for (const Step& step : steps) {
      WiredStep wired{.step = &step};
      if (traits_of(step.kind).receives) {
        wired.fifo_in = fifo(step.from, program.rank, step.channel);
        wiring_.fifos[static_cast<size_t>(wired.fifo_in)].receiver = id;
      }
      if (traits_of(step.kind).sends) {
        wired.fifo_out = fifo(program.rank, step.to, step.channel);
        wiring_.fifos[static_cast<size_t>(wired.fifo_out)].sender = id;
      }
      if (step.kind == StepKind::barrier) {
        wired.barrier = barrier(process.lane, program.groups[static_cast<size_t>(step.group)]);
      }
      process.steps.push_back(wired);
    }
  }

  int32_t fifo(int32_t from, int32_t to, int32_t channel) {
    const uint64_t world = wiring_.programs.size();
    const uint64_t key =
        (static_cast<uint64_t>(channel) * world + static_cast<uint64_t>(from)) * world +
        static_cast<uint64_t>(to);
    const auto [entry, is_new] =
        fifo_index_.try_emplace(key, static_cast<int32_t>(wiring_.fifos.size()));
    if (is_new) wiring_.fifos.push_back({.from = from, .to = to, .channel = channel});
    return entry->second;
  }

  int32_t barrier(int32_t lane, const std::vector<int32_t>& ranks) {
    const auto [entry, is_new] =
        barrier_index_.try_emplace({lane, ranks}, static_cast<int32_t>(wiring_.barriers.size()));
    if (is_new) {
      BarrierMembers members{.ranks = ranks, .processes = {}};
      for (int32_t rank : ranks) {
        const size_t r = static_cast<size_t>(rank);
        const bool has_lane = lane < wiring_.lanes_of_rank[r];
        members.processes.push_back(has_lane ? wiring_.first_process[r] + lane : -1);
      }
      wiring_.barriers.push_back(std::move(members));
    }
    return entry->second;
  }

  Wiring wiring_;
  std::unordered_map<uint64_t, int32_t> fifo_index_;
  std::map<std::pair<int32_t, std::vector<int32_t>>, int32_t> barrier_index_;
};

struct Blocker {
  std::string reason;  // what the process waits for
  int32_t rank;        // whose move it would be
  int32_t process;     // of that rank; -1: none of its steps ever would
};

Blocker blocker(const Wiring& wiring, const ProcessState& state) {
  const size_t index = static_cast<size_t>(state.waits_for);
  if (state.wait == Wait::message) {
    const FifoEnds& fifo = wiring.fifos[index];
    return {concat("waits for a message from rank ", fifo.from, " on channel ", fifo.channel),
            fifo.from, fifo.sender};
  }
  if (state.wait == Wait::slot) {
    const FifoEnds& fifo = wiring.fifos[index];
    return {concat("waits for a free slot to rank ", fifo.to, " on channel ", fifo.channel),
            fifo.to, fifo.receiver};
  }
  const BarrierMembers& barrier = wiring.barriers[index];
  const int32_t rank = barrier.ranks[state.arrived];
  return {concat("waits in a barrier for rank ", rank), rank, barrier.processes[state.arrived]};
}

// From the first process that is stuck to where the chain closes or ends.
struct Chain {
  std::vector<std::string> links;
  std::string end;
};

Chain follow(const Wiring& wiring, std::span<const ProcessState> states) {
  int32_t process = 0;
  while (states[static_cast<size_t>(process)].done) ++process;
  Chain chain;
  std::vector<int32_t> path;
  while (true) {
    const ProcessState& state = states[static_cast<size_t>(process)];
    const Blocker next = blocker(wiring, state);
    path.push_back(process);
    chain.links.push_back(wiring.describe(process, state.next_step) + " " + next.reason);
    if (next.process < 0) {
      chain.end = concat("rank ", next.rank, " has no step for that");
      return chain;
    }
    if (states[static_cast<size_t>(next.process)].done) {
      chain.end = concat("rank ", next.rank, " has finished all its steps");
      return chain;
    }
    const auto seen = std::find(path.begin(), path.end(), next.process);
    if (seen != path.end()) {
      // What leads into a cycle is no part of it.
      chain.links.erase(chain.links.begin(), chain.links.begin() + (seen - path.begin()));
      chain.end = concat("which waits for rank ", next.rank, " again");
      return chain;
    }
    process = next.process;
  }
}

}  // namespace

const Program& Wiring::program_of(int32_t process) const {
  return programs[static_cast<size_t>(processes[static_cast<size_t>(process)].rank)];
}

std::string Wiring::describe(int32_t process, int32_t step) const {
  const int32_t lane = processes[static_cast<size_t>(process)].lane;
  return describe_step(program_of(process), static_cast<size_t>(lane), static_cast<size_t>(step));
}

Wiring wire(std::span<const Program> programs) {
  return Wirer(programs).run();
}

bool lanes_share_chunks(const Program& program, bool in_place) {
  if (program.lanes.size() < 2) return false;
  struct Users {
    int32_t first = -1;
    bool several = false;
    bool written = false;
  };
  std::vector<Users> users(static_cast<size_t>(program.output_chunks));
  const auto use = [&](int32_t chunk, size_t lane, bool writes) {
    Users& user = users[static_cast<size_t>(chunk)];
    const int32_t id = static_cast<int32_t>(lane);
    user.several = user.several || (user.first >= 0 && user.first != id);
    user.first = id;
    user.written = user.written || writes;
  };
  for (size_t lane = 0; lane < program.lanes.size(); ++lane) {
    for (const Step& step : program.lanes[lane].steps) {
      const StepTraits& traits = traits_of(step.kind);
      if (traits.stores && step.dst.space == Space::output) use(step.dst.chunk, lane, true);
      if (!traits.reads) continue;
      if (step.src.space == Space::output) use(step.src.chunk, lane, false);
      const bool input = step.src.space == Space::input && in_place;
      const int32_t alias = input ? output_in_place(program, step.src.chunk) : -1;
      if (alias >= 0) use(alias, lane, false);
    }
  }
  return std::any_of(users.begin(), users.end(),
                     [](const Users& user) { return user.several && user.written; });
}

std::string describe_deadlock(const Wiring& wiring, std::span<const ProcessState> states) {
  constexpr size_t kShown = 8;
  const Chain chain = follow(wiring, states);
  std::string text;
  for (size_t i = 0; i < std::min(kShown, chain.links.size()); ++i) text += chain.links[i] + "; ";
  if (chain.links.size() > kShown) text += concat(chain.links.size() - kShown, " more; ");
  return text + chain.end;
}

}  // namespace pycoll::prover
