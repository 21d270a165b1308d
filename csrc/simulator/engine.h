// The discrete-event engine.
//
//   * A rank is one thread: it runs the steps of its lanes one at a time, in the executor's order
//     (runtime/executor.cpp: a lane as far as it gets, then the next), with as many rounds under
//     way as the executor has.
//   * The steps that a host's ranks are at share its cores and its memory: with k of them at work,
//     each advances at min(1, cores / k, memory_bandwidth / what they ask for) of full speed.
//   * A message takes effect when its step ends. Inside a host it is seen after `flag_latency`. To
//     another host it leaves through the sender's port when that is free, its head arrives after
//     `latency`, and it is there when the receiver's port, free at last, has taken it all in: the
//     ports of both hosts are busy for bytes / bandwidth each.
//   * A FIFO holds `depth` messages, from the step that sends one to the sender's hearing that it
//     was received.
//
// Events at one time are ordered by what they are and by places inside their host, never by the
// number of a host: hosts that see the same events see them in the same order (see symmetry.h).
#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "simulator/machine.h"
#include "simulator/system.h"

namespace pycoll::simulator {

struct EngineResult {
  std::vector<double> finished;  // seconds, of each rank
  uint64_t steps = 0;            // that were executed
  uint64_t events = 0;
  double network_bytes = 0;
  uint64_t network_messages = 0;
};

class Engine {
 public:
  Engine(const System& system, const Machine& machine, uint32_t depth);

  // `tick` is called now and then and may throw. Throws Error(invalid_argument) for a deadlock.
  EngineResult run(const std::function<void()>& tick);

 private:
  enum class EventKind : uint32_t { head_arrives, seen, work_done, wake };
  struct Event {
    double time;
    uint32_t order;  // among events at one time
    int32_t index;   // FIFO, process, host or rank
    uint32_t bytes;
    bool operator>(const Event& other) const {
      if (time != other.time) return time > other.time;
      return order != other.order ? order > other.order : index > other.index;
    }
  };
  struct FifoState {
    uint64_t sent = 0;
    uint64_t arriving = 0;  // messages whose time of arrival is known
    uint64_t received = 0;
    bool sender_waits = false;  // for a credit or a message whose time is not known yet
    bool receiver_waits = false;
  };
  struct LaneState {
    uint64_t step = 0;
    uint64_t round = 0;
    double wakes_at = -1;
    uint32_t barriers = 0;   // passed
    uint32_t seen = 0;       // arrivals that others have seen
    uint32_t looked_at = 0;  // members of the current barrier that have come
    bool announced = false;
    bool done = false;
    int32_t next_watcher = -1;
    int32_t first_watcher = -1;  // processes that wait for this one's next arrival
  };
  struct RankState {
    int32_t lane = 0;  // that it looks at first
    int32_t lanes_left = 0;
    bool busy = false;
    bool waited = false;
  };
  struct Job {
    double end;  // on the host's own clock
    int32_t rank;
    bool operator>(const Job& other) const {
      return end != other.end ? end > other.end : rank > other.rank;
    }
  };
  struct HostState {
    double clock = 0;  // advances at `speed`: the work that each job has had
    double at = 0;     // when it was read last
    double speed = 1;
    double demand = 0;    // for memory, in cores
    double due = -1;      // of the event that is pending; -1: none
    double port_out = 0;  // free from then on
    double port_in = 0;
    std::priority_queue<Job, std::vector<Job>, std::greater<>> jobs;
  };

  void push(double time, EventKind kind, uint32_t local, int32_t index, uint32_t bytes = 0);
  void handle(const Event& event);
  void advance(int32_t rank, double now);
  bool ready(int32_t process, double now);
  bool message_ready(int32_t process, int32_t fifo, double now);
  bool slot_ready(int32_t process, int32_t fifo, double now);
  bool members_ready(int32_t process, int32_t barrier);
  void wake_at(int32_t process, double time);
  void wake_rank(int32_t process, double time);

  double work_of(int32_t rank, const CompiledStep& step, uint64_t elements, double& memory) const;
  void finish_step(int32_t process, double now);
  void next_step(int32_t process, double now);
  void go_on(int32_t process);
  void skip_empty(int32_t process);
  void announce(int32_t process, double now);
  void seen(int32_t process, double now);
  void release(int32_t fifo, double now);
  void publish(int32_t fifo, uint32_t bytes, double now);
  void head_arrives(int32_t fifo, uint32_t bytes, double now);
  void arrives(int32_t fifo, double time);

  void begin_work(int32_t rank, double work, double memory, double now);
  void work_done(int32_t host, double now);
  void settle(HostState& host, double now) const;
  void schedule(int32_t host, double now);

  uint64_t elements_of(int32_t process) const;
  const CompiledStep& step_of(int32_t process) const;
  int32_t host_of(int32_t process) const;
  uint32_t local_of(int32_t rank) const;
  [[noreturn]] void report_deadlock() const;

  const System& system_;
  const Machine& machine_;
  uint32_t depth_;
  double memory_cores_;  // cores that memory keeps busy
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<FifoState> fifos_;
  std::vector<double> arrivals_;  // of the last `depth` messages of each FIFO
  std::vector<double> credits_;   // of the last `depth` receives of each FIFO
  std::vector<LaneState> lanes_;
  std::vector<RankState> ranks_;
  std::vector<double> demands_;  // of each rank's current step
  std::vector<HostState> hosts_;
  std::vector<int32_t> ranks_on_;  // of each host
  size_t ranks_left_ = 0;
  EngineResult result_;
};

}  // namespace pycoll::simulator
