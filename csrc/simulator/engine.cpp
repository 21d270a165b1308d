#include "simulator/engine.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace pycoll::simulator {
namespace {

constexpr uint64_t kEventsATick = 1 << 18;
// Of a host's clock: what rounding may leave of a job that has ended.
constexpr double kRounding = 1e-12;

}  // namespace

Engine::Engine(const System& system, const Machine& machine, uint32_t depth)
    : system_(system),
      machine_(machine),
      depth_(depth),
      memory_cores_(machine.host.core_bandwidth == kFree
                        ? kFree
                        : machine.host.memory_bandwidth / machine.host.core_bandwidth),
      fifos_(system.fifos.size()),
      arrivals_(system.fifos.size() * depth),
      credits_(system.fifos.size() * depth),
      lanes_(system.processes.size()),
      ranks_(system.host.size()),
      demands_(system.host.size()),
      hosts_(static_cast<size_t>(system.hosts)),
      ranks_on_(static_cast<size_t>(system.hosts)) {
  result_.finished.assign(system.host.size(), machine.host.call_overhead);
  for (const int32_t host : system.host) ++ranks_on_[static_cast<size_t>(host)];
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    for (int32_t p = system.first_process[rank]; p < system.first_process[rank + 1]; ++p) {
      LaneState& lane = lanes_[static_cast<size_t>(p)];
      const Process& process = system.processes[static_cast<size_t>(p)];
      lane.round = static_cast<uint64_t>(process.flight);
      lane.done = process.count == 0;
      if (!lane.done) skip_empty(p);
      if (!lane.done) ++ranks_[rank].lanes_left;
    }
    if (ranks_[rank].lanes_left == 0) continue;
    ++ranks_left_;
    const auto index = static_cast<int32_t>(rank);
    push(machine.host.call_overhead, EventKind::wake, local_of(index), index);
  }
}

EngineResult Engine::run(const std::function<void()>& tick) {
  while (!events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    handle(event);
    if (++result_.events % kEventsATick == 0) tick();
  }
  if (ranks_left_ > 0) report_deadlock();
  return std::move(result_);
}

void Engine::push(double time, EventKind kind, uint32_t local, int32_t index, uint32_t bytes) {
  constexpr uint32_t kKindShift = 28;
  events_.push({time, static_cast<uint32_t>(kind) << kKindShift | local, index, bytes});
}

void Engine::handle(const Event& event) {
  switch (static_cast<EventKind>(event.order >> 28)) {
    case EventKind::head_arrives:
      return head_arrives(event.index, event.bytes, event.time);
    case EventKind::seen:
      return seen(event.index, event.time);
    case EventKind::work_done:
      return work_done(event.index, event.time);
    case EventKind::wake:
      return advance(event.index, event.time);
  }
}

// ---- a rank ------------------------------------------------------------------------------------

void Engine::advance(int32_t rank, double now) {
  RankState& state = ranks_[static_cast<size_t>(rank)];
  if (state.busy) return;
  const int32_t first = system_.first_process[static_cast<size_t>(rank)];
  const int32_t lanes = system_.first_process[static_cast<size_t>(rank) + 1] - first;
  for (int32_t stuck = 0; stuck < lanes;) {
    const int32_t process = first + state.lane;
    if (!ready(process, now)) {
      state.lane = (state.lane + 1) % lanes;
      ++stuck;
      continue;
    }
    stuck = 0;
    double memory = 0;
    const double work = work_of(rank, step_of(process), elements_of(process), memory);
    state.waited = false;
    if (work > 0) return begin_work(rank, work, memory, now);
    finish_step(process, now);
  }
  state.waited = true;
}

bool Engine::ready(int32_t process, double now) {
  const LaneState& lane = lanes_[static_cast<size_t>(process)];
  if (lane.done) return false;
  const CompiledStep& step = step_of(process);
  if (system_.is_barrier[step.price]) return !lane.announced || members_ready(process, step.in);
  return (step.in < 0 || message_ready(process, step.in, now)) &&
         (step.out < 0 || slot_ready(process, step.out, now));
}

bool Engine::message_ready(int32_t process, int32_t fifo, double now) {
  FifoState& state = fifos_[static_cast<size_t>(fifo)];
  if (state.received == state.arriving) {
    state.receiver_waits = true;
    return false;
  }
  const double time = arrivals_[static_cast<size_t>(fifo) * depth_ + state.received % depth_];
  if (time > now) wake_at(process, time);
  return time <= now;
}

bool Engine::slot_ready(int32_t process, int32_t fifo, double now) {
  FifoState& state = fifos_[static_cast<size_t>(fifo)];
  if (state.sent < depth_) return true;
  const uint64_t freed_by = state.sent - depth_;  // the receive that frees the slot
  if (freed_by >= state.received) {
    state.sender_waits = true;
    return false;
  }
  const double time = credits_[static_cast<size_t>(fifo) * depth_ + freed_by % depth_];
  if (time > now) wake_at(process, time);
  return time <= now;
}

bool Engine::members_ready(int32_t process, int32_t barrier) {
  LaneState& lane = lanes_[static_cast<size_t>(process)];
  const auto& members = system_.barriers[static_cast<size_t>(barrier)];
  for (; lane.looked_at < members.size(); ++lane.looked_at) {
    const int32_t member = members[lane.looked_at];
    LaneState& other = lanes_[static_cast<size_t>(member)];
    if (member == process || other.seen > lane.barriers) continue;
    // Already in that member's list when it wakes up for another reason.
    if (lane.next_watcher == -1) {
      lane.next_watcher = other.first_watcher == -1 ? -2 : other.first_watcher;
      other.first_watcher = process;
    }
    return false;
  }
  return true;
}

void Engine::wake_at(int32_t process, double time) {
  LaneState& lane = lanes_[static_cast<size_t>(process)];
  if (lane.wakes_at == time) return;
  lane.wakes_at = time;
  wake_rank(process, time);
}

void Engine::wake_rank(int32_t process, double time) {
  const int32_t rank = system_.processes[static_cast<size_t>(process)].rank;
  push(time, EventKind::wake, local_of(rank), rank);
}

// ---- a step ------------------------------------------------------------------------------------

double Engine::work_of(int32_t rank, const CompiledStep& step, uint64_t elements,
                       double& memory) const {
  const Price& price = system_.prices[step.price];
  const RankState& state = ranks_[static_cast<size_t>(rank)];
  const int32_t host = system_.host[static_cast<size_t>(rank)];
  double work = price.fixed + static_cast<double>(elements) * price.element;
  memory = static_cast<double>(elements) * price.memory;
  if (state.waited && ranks_on_[static_cast<size_t>(host)] > machine_.host.cores) {
    work += machine_.host.switch_overhead;
  }
  return work;
}

void Engine::finish_step(int32_t process, double now) {
  ++result_.steps;
  const CompiledStep& step = step_of(process);
  if (system_.is_barrier[step.price]) {
    LaneState& lane = lanes_[static_cast<size_t>(process)];
    if (!lane.announced) return announce(process, now);
    ++lane.barriers;
    lane.announced = false;
    lane.looked_at = 0;
    return next_step(process, now);
  }
  if (step.in >= 0) release(step.in, now);
  if (step.out >= 0) {
    const Price& price = system_.prices[step.price];
    publish(step.out, static_cast<uint32_t>(elements_of(process) * price.bytes_out), now);
  }
  next_step(process, now);
}

void Engine::next_step(int32_t process, double now) {
  go_on(process);
  skip_empty(process);
  if (!lanes_[static_cast<size_t>(process)].done) return;
  const int32_t rank = system_.processes[static_cast<size_t>(process)].rank;
  if (--ranks_[static_cast<size_t>(rank)].lanes_left > 0) return;
  result_.finished[static_cast<size_t>(rank)] = now;
  --ranks_left_;
}

void Engine::go_on(int32_t process) {
  LaneState& lane = lanes_[static_cast<size_t>(process)];
  if (++lane.step < system_.processes[static_cast<size_t>(process)].count) return;
  lane.step = 0;
  lane.round += static_cast<uint64_t>(system_.flights);
  lane.done = lane.round >= system_.rounds;
}

// Empty slices travel in the first round only.
void Engine::skip_empty(int32_t process) {
  const LaneState& lane = lanes_[static_cast<size_t>(process)];
  while (!lane.done && lane.round > 0 && elements_of(process) == 0 &&
         !system_.is_barrier[step_of(process).price]) {
    go_on(process);
  }
}

void Engine::announce(int32_t process, double now) {
  lanes_[static_cast<size_t>(process)].announced = true;
  const int32_t rank = system_.processes[static_cast<size_t>(process)].rank;
  push(now + machine_.host.flag_latency, EventKind::seen, local_of(rank), process);
}

void Engine::seen(int32_t process, double now) {
  LaneState& lane = lanes_[static_cast<size_t>(process)];
  ++lane.seen;
  for (int32_t watcher = std::exchange(lane.first_watcher, -1); watcher >= 0;) {
    const int32_t next = std::exchange(lanes_[static_cast<size_t>(watcher)].next_watcher, -1);
    wake_rank(watcher, now);
    watcher = next;
  }
}

void Engine::release(int32_t fifo, double now) {
  FifoState& state = fifos_[static_cast<size_t>(fifo)];
  const FifoEnds& ends = system_.fifos[static_cast<size_t>(fifo)];
  const double heard = now + (ends.network ? machine_.network.latency : machine_.host.flag_latency);
  credits_[static_cast<size_t>(fifo) * depth_ + state.received % depth_] = heard;
  ++state.received;
  if (std::exchange(state.sender_waits, false)) wake_rank(ends.sender, heard);
}

void Engine::publish(int32_t fifo, uint32_t bytes, double now) {
  const FifoEnds& ends = system_.fifos[static_cast<size_t>(fifo)];
  ++fifos_[static_cast<size_t>(fifo)].sent;
  if (!ends.network) return arrives(fifo, now + machine_.host.flag_latency);
  HostState& host = hosts_[static_cast<size_t>(host_of(ends.sender))];
  const double start = std::max(now, host.port_out);
  host.port_out = start + bytes / machine_.network.bandwidth;
  result_.network_bytes += bytes;
  ++result_.network_messages;
  push(start + machine_.network.latency, EventKind::head_arrives, ends.order, fifo, bytes);
}

void Engine::head_arrives(int32_t fifo, uint32_t bytes, double now) {
  const FifoEnds& ends = system_.fifos[static_cast<size_t>(fifo)];
  HostState& host = hosts_[static_cast<size_t>(host_of(ends.receiver))];
  host.port_in = std::max(now, host.port_in) + bytes / machine_.network.bandwidth;
  arrives(fifo, host.port_in);
}

void Engine::arrives(int32_t fifo, double time) {
  FifoState& state = fifos_[static_cast<size_t>(fifo)];
  arrivals_[static_cast<size_t>(fifo) * depth_ + state.arriving % depth_] = time;
  ++state.arriving;
  if (std::exchange(state.receiver_waits, false)) {
    wake_rank(system_.fifos[static_cast<size_t>(fifo)].receiver, time);
  }
}

// ---- a host ------------------------------------------------------------------------------------

void Engine::begin_work(int32_t rank, double work, double memory, double now) {
  const int32_t index = system_.host[static_cast<size_t>(rank)];
  HostState& host = hosts_[static_cast<size_t>(index)];
  settle(host, now);
  ranks_[static_cast<size_t>(rank)].busy = true;
  demands_[static_cast<size_t>(rank)] = memory / work;
  host.demand += memory / work;
  host.jobs.push({host.clock + work, rank});
  schedule(index, now);
}

void Engine::work_done(int32_t index, double now) {
  HostState& host = hosts_[static_cast<size_t>(index)];
  if (host.due != now || host.jobs.empty()) return;  // another event took its place
  host.due = -1;
  settle(host, now);
  const Job job = host.jobs.top();
  if (job.end - host.clock > kRounding * std::max(1e-6, host.clock)) return schedule(index, now);
  host.jobs.pop();
  host.clock = std::max(host.clock, job.end);
  host.demand = host.jobs.empty() ? 0 : host.demand - demands_[static_cast<size_t>(job.rank)];
  RankState& state = ranks_[static_cast<size_t>(job.rank)];
  state.busy = false;
  finish_step(system_.first_process[static_cast<size_t>(job.rank)] + state.lane, now);
  advance(job.rank, now);
  schedule(index, now);
}

void Engine::settle(HostState& host, double now) const {
  host.clock += (now - host.at) * host.speed;
  host.at = now;
}

void Engine::schedule(int32_t index, double now) {
  HostState& host = hosts_[static_cast<size_t>(index)];
  if (host.jobs.empty()) return;
  settle(host, now);
  host.speed = std::min(1.0, machine_.host.cores / static_cast<double>(host.jobs.size()));
  if (host.demand > 0) host.speed = std::min(host.speed, memory_cores_ / host.demand);
  const double due = now + std::max(0.0, host.jobs.top().end - host.clock) / host.speed;
  // When the work slows down, the event that is pending looks again.
  if (host.due >= now && host.due <= due) return;
  host.due = due;
  push(due, EventKind::work_done, 0, index);
}

// ---- lookups -----------------------------------------------------------------------------------

uint64_t Engine::elements_of(int32_t process) const {
  const uint64_t length = system_.lengths[step_of(process).length];
  const uint64_t begin = lanes_[static_cast<size_t>(process)].round * system_.slice;
  return begin >= length ? 0 : std::min(system_.slice, length - begin);
}

const CompiledStep& Engine::step_of(int32_t process) const {
  return system_.steps[system_.processes[static_cast<size_t>(process)].first +
                       lanes_[static_cast<size_t>(process)].step];
}

int32_t Engine::host_of(int32_t process) const {
  return system_.host[static_cast<size_t>(system_.processes[static_cast<size_t>(process)].rank)];
}

uint32_t Engine::local_of(int32_t rank) const {
  const int32_t per_host = machine_.ranks_per_host;
  return static_cast<uint32_t>(per_host > 0 ? rank % per_host : rank);
}

void Engine::report_deadlock() const {
  for (size_t p = 0; p < lanes_.size(); ++p) {
    if (lanes_[p].done) continue;
    fail(ErrorKind::invalid_argument, "deadlock: ", ranks_left_, " ranks wait for ever, rank ",
         system_.processes[p].rank, " in step ", lanes_[p].step, " of round ", lanes_[p].round,
         " with FIFOs of ", depth_, " slots");
  }
  fail(ErrorKind::invalid_argument, "deadlock");
}

}  // namespace pycoll::simulator
