#include "simulator/system.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace pycoll::simulator {
namespace {

// Tables are looked up from the end: a step mostly has the price and the length of one just before.
template <typename Row>
uint16_t intern(std::vector<Row>& rows, const Row& row, const char* what) {
  const auto found = std::find(rows.rbegin(), rows.rend(), row);
  if (found != rows.rend()) return static_cast<uint16_t>(rows.rend() - found - 1);
  if (rows.size() > 0xFFFF) {
    fail(ErrorKind::not_implemented, "more than 65536 different ", what, " of steps");
  }
  rows.push_back(row);
  return static_cast<uint16_t>(rows.size() - 1);
}

}  // namespace

void Compiler::begin_rank(const Program& program) {
  system_.first_process.push_back(static_cast<int32_t>(system_.processes.size()));
  system_.host.push_back(hosts_[static_cast<size_t>(program.rank)]);
}

void Compiler::begin_lane(const Program& program, int32_t flight) {
  system_.processes.push_back({program.rank, flight, system_.steps.size(), 0});
}

void Compiler::add_step(const Program& program, int32_t lane, const Step& step, uint64_t length) {
  const StepTraits& traits = traits_of(step.kind);
  const int32_t process = static_cast<int32_t>(system_.processes.size()) - 1;
  // Flights have FIFOs of their own.
  const int32_t channel = system_.processes.back().flight * program.channels + step.channel;
  CompiledStep compiled;
  StepRoute route;
  if (step.group >= 0) {
    route.members = static_cast<int32_t>(program.groups[static_cast<size_t>(step.group)].size());
  }
  if (traits.receives) {
    compiled.in = fifo({step.from, program.rank, channel});
    FifoEnds& ends = system_.fifos[static_cast<size_t>(compiled.in)];
    ends.receiver = process;
    route.network_in = ends.network;
  }
  if (traits.sends) {
    compiled.out = fifo({program.rank, step.to, channel});
    FifoEnds& ends = system_.fifos[static_cast<size_t>(compiled.out)];
    ends.sender = process;
    route.network_out = ends.network;
  }
  const bool is_barrier = step.kind == StepKind::barrier;
  if (is_barrier) {
    compiled.in = barrier(lane, program.groups[static_cast<size_t>(step.group)]);
  }
  compiled.price = intern_price(price_of(step, route, machine_, call_), is_barrier);
  compiled.length = intern(system_.lengths, length, "lengths");
  system_.steps.push_back(compiled);
  ++system_.processes.back().count;
}

int32_t Compiler::fifo(Ends ends) {
  // The one of its orbit that ends on host 0.
  const int32_t g = symmetry_.mover_to(ends.to);
  const int32_t from = symmetry_.moved_back(ends.from, g);
  const int32_t to = symmetry_.moved_back(ends.to, g);
  const uint64_t key = static_cast<uint64_t>(ends.channel) << 62 |
                       static_cast<uint64_t>(from) << 31 | static_cast<uint64_t>(to);
  const auto [entry, is_new] = fifos_.try_emplace(key, static_cast<int32_t>(system_.fifos.size()));
  if (is_new) {
    const auto here = hosts_[static_cast<size_t>(ends.from)];
    const auto there = hosts_[static_cast<size_t>(ends.to)];
    const auto local = [&](int32_t rank) {
      const int32_t per_host = machine_.ranks_per_host;
      return static_cast<uint32_t>(per_host > 0 ? rank % per_host : rank);
    };
    const uint32_t order = (local(ends.to) & 0x3FFF) << 14 | (local(ends.from) & 0xFFF) << 2 |
                           static_cast<uint32_t>(ends.channel);
    system_.fifos.push_back({.network = here != there, .order = order});
  }
  return entry->second;
}

uint16_t Compiler::intern_price(const Price& price, bool barrier) {
  for (size_t i = system_.prices.size(); i-- > 0;) {
    if (system_.is_barrier[i] == barrier && system_.prices[i] == price) {
      return static_cast<uint16_t>(i);
    }
  }
  system_.prices.push_back(price);
  system_.is_barrier.push_back(barrier);
  return static_cast<uint16_t>(system_.prices.size() - 1);
}

int32_t Compiler::barrier(int32_t lane, const std::vector<int32_t>& group) {
  const auto [entry, is_new] =
      barriers_.try_emplace({lane, group}, static_cast<int32_t>(groups_.size()));
  if (is_new) groups_.emplace_back(lane, group);
  return entry->second;
}

System Compiler::finish(uint64_t slice, uint64_t rounds) {
  system_.first_process.push_back(static_cast<int32_t>(system_.processes.size()));
  system_.slice = slice;
  system_.rounds = rounds;
  system_.hosts = *std::max_element(system_.host.begin(), system_.host.end()) + 1;
  for (const FifoEnds& ends : system_.fifos) {
    if (ends.sender >= 0 && ends.receiver >= 0) continue;
    const int32_t known = ends.sender >= 0 ? ends.sender : ends.receiver;
    fail(ErrorKind::invalid_argument, "rank ", system_.processes[static_cast<size_t>(known)].rank,
         ends.sender >= 0 ? " sends messages that nobody receives"
                          : " waits for messages that nobody sends");
  }
  for (const auto& [lane, ranks] : groups_) {
    auto& members = system_.barriers.emplace_back();
    for (const int32_t rank : ranks) {
      const int32_t process = system_.first_process[static_cast<size_t>(rank)] + lane;
      if (process >= system_.first_process[static_cast<size_t>(rank) + 1]) {
        fail(ErrorKind::invalid_argument, "rank ", rank, " has no lane ", lane,
             " to come to a barrier");
      }
      members.push_back(process);
    }
  }
  return std::move(system_);
}

}  // namespace pycoll::simulator
