// A group of ranks: the object that collectives are called on.
//
// Operations of a group run one after the other, in the order they were submitted, which is the
// same on every rank. Whoever needs the result drives: a caller that waits runs the queue in its
// own thread (a synchronous call on an idle group never changes threads); a progress thread does so
// when nobody waits. Exactly one thread drives at a time; it runs the oldest collective and all
// point-to-point messages side by side, so a stuck one holds up no other. Groups know nothing of
// each other, so they progress independently.
//
// There is one progress thread, unless a completion callback that it runs waits for a later
// operation: then another is started to drive that, so a callback may do whatever a caller may.
//
// After an error that peers cannot have missed (timeout, mismatch, dead peer, abort, interruption)
// the group is dead: this rank tells its peers why, and every later call raises the same error.
// Nobody writes into a caller's vector once its operation has ended, in whatever way.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#include "core/fork_mark.h"
#include "runtime/bootstrap.h"
#include "runtime/flight.h"
#include "runtime/messages.h"
#include "runtime/operation.h"
#include "runtime/selector.h"
#include "runtime/stall.h"
#include "runtime/turn.h"
#include "runtime/wait.h"

namespace pycoll {

struct Touched;  // overlap.h

// Called now and then by a waiting thread; may throw to give up (a Python signal handler did).
using Interrupt = std::function<void()>;

class Communicator {
 public:
  // Connects to all ranks; throws what bootstrap() throws. The connector lives at least as long as
  // the group, and may serve others.
  static std::shared_ptr<Communicator> make(const BootstrapRequest& request,
                                            std::shared_ptr<Connector> connector,
                                            Nanoseconds timeout);
  // Leaves in good order; operations that are still queued fail.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const Config& config() const { return config_; }
  // Of each rank, by first appearance.
  const std::vector<int32_t>& hosts() const { return agreement_.hosts; }
  const char* transport_name() const { return transport_->name(); }
  void set_timeout(Nanoseconds timeout);
  Nanoseconds timeout() const { return timeout_.load(std::memory_order_relaxed); }
  uint64_t sequence() const;

  // Throws Error(invalid_argument, not_implemented) for a call that submit() would refuse. For
  // whoever submits several: one that is refused must not leave the others under way.
  void check(const CallRequest& request) const { examine(request); }
  // Throws what every call throws that would wait, in a forked child and in a signal handler that
  // has interrupted a call of this group. For whoever waits for one of its operations otherwise.
  void check_caller() const {
    check_owner();
    refuse_in_interrupt();
  }
  // Queues a call. Throws what check() throws before anything happened, or the group's error when
  // it is dead.
  std::shared_ptr<Operation> submit(CallRequest request);
  // Starts a point-to-point message. It needs no turn: messages progress beside the queue.
  std::shared_ptr<Operation> submit(MessageRequest request);
  // Runs a call in this thread, if nothing of the group is queued or under way and its kind of call
  // was run before: then nothing is allocated and no lock taken. False: nothing has happened, run()
  // must be asked. Ends like run(), errors included.
  bool run_at_once(const PlainCall& call, const Interrupt& interrupt);
  // run_at_once(), else the ordinary way.
  void run(const PlainCall& call, const Interrupt& interrupt);
  // submit() and wait().
  void run(CallRequest request, const Interrupt& interrupt);
  std::shared_ptr<Operation> run(MessageRequest request, const Interrupt& interrupt);
  // Returns when the operation is done; rethrows its error. False when `timeout` passed first.
  bool wait(const std::shared_ptr<Operation>& operation, std::optional<Nanoseconds> timeout,
            const Interrupt& interrupt);

  // Collective over this group: ranks that give the same color, 0 or more, make a group of their
  // own, in the order of their ranks here; nullptr for a negative color. As MPI_Comm_split. The new
  // groups know nothing of this one, and number their ranks from 0. Throws what make() throws, and
  // what the interrupt does. A rank that fails does not end this group: the others of its color are
  // told, and throw Error(peer_failed).
  // `over`: of the call whose codes will travel there, for the errors of ranks that make another.
  std::shared_ptr<Communicator> split(int color, const Interrupt& interrupt = nullptr,
                                      const OverCodec& over = {});

  // A call of this group that groups of its ranks carry out. It takes its number in the order of
  // calls, which is returned with the rest, and peers that make another call of that number find
  // out.
  CallHeader announce_elsewhere(const CallRequest& request);
  // Throws Error(mismatch) when a peer has called something of that number that is not carried out
  // elsewhere. Never waits.
  void compare_elsewhere(const CallHeader& call) const;

  // The algorithm that a call of that size would use here.
  const Algorithm& algorithm_for(Collective collective, uint64_t bytes) const;
  // Replaces what the executor runs, for tests of the prover: a call with that collective then runs
  // this Program (validated, not checked). No operation may be in flight.
  void override_program(Program program);

  // The latest collective under way whose vectors are in_conflict() with those; else nullptr.
  std::shared_ptr<Operation> latest_in_conflict(const Touched& touched) const;

  // By name: zero_copy_calls, zero_copy_bytes, staged_calls, staged_bytes (CallCounters).
  std::map<std::string, uint64_t> statistics() const;

  // Gives the group up, here and at the peers. Returns at once.
  void abort(const std::string& reason);
  // Waits a little for queued operations, then leaves. Idempotent.
  void close();
  bool dead() const { return dead_.load(std::memory_order_acquire); }
  // Raises what every call on a dead group raises.
  void throw_if_dead() const;
  // For whoever has calls of this group under way elsewhere: is called once, when the group has
  // died of whatever, among the callbacks of what ended with it; at once if it is dead. One for a
  // group.
  void when_dead(std::function<void()> tell);
  // What is known of peers without a call under way, for whoever waits for something else of the
  // same ranks: why one has given the group up; whether a rank's process has died. Never waits.
  std::optional<std::string> peer_abort() const { return transport_->peer_abort(); }
  bool has_died(int peer) const { return transport_->peer_state(peer) == PeerState::died; }

 private:
  Communicator(const BootstrapRequest& request, std::shared_ptr<Connector> connector,
               Nanoseconds timeout);

  std::unique_ptr<FlightLog> open_flight(const BootstrapRequest& request) const;
  CallHeader take_place(CallHeader call);
  void show_elsewhere(const CallHeader& call);
  void look_at_maker(int member, uint64_t sequence) const;

  using PlanKey = std::tuple<Collective, const Algorithm*, int>;
  using Lock = std::unique_lock<std::mutex>;

  // An operation that the driving thread has brought to its end.
  struct Ended {
    std::shared_ptr<Operation> operation;
    std::exception_ptr error;
  };

  // These move from the request when they take it. One that is refused stays the caller's, to be
  // dropped without the lock: what it keeps alive may need the GIL to go.
  std::shared_ptr<Operation> enqueue(Lock& lock, CallRequest&& request);
  std::shared_ptr<Operation> post(Lock& lock, MessageRequest&& request);
  void tell_driver(Lock& lock);
  void complete_synchronously(const std::shared_ptr<Operation>& operation,
                              const Interrupt& interrupt);
  const Program& plan(const Algorithm& algorithm, const CallRequest& request);
  const Program* fallback_plan(const Algorithm* algorithm, const CallRequest& request);
  SelectionInput selection_input(Collective collective, uint64_t bytes) const;
  const Algorithm& choose(const CallRequest& request, const SelectionInput& input) const;
  // What runs a call that is in order.
  struct Means {
    const ReduceKernels* kernels;
    const Algorithm& algorithm;
    const Algorithm* fallback;  // where `algorithm` needs leases and not all ranks have one
  };
  Means examine(const CallRequest& request) const;
  void check_owner() const;
  CallHeader header_of(const CallRequest& request, const Algorithm& algorithm,
                       Nanoseconds timeout) const;

  // What run_at_once() knows of calls of one kind (at_once.cpp).
  struct Known {
    PlainCall call;  // but for addresses and timeout
    const Program* program = nullptr;
    const Program* fallback = nullptr;  // where `program` needs leases
    const ReduceKernels* kernels = nullptr;
    Shape shape;
    CallHeader header;
  };
  static constexpr size_t kKnown = 64;  // a power of two
  const Known* known_for(const PlainCall& call);
  void learn(const PlainCall& call, Known& known);
  void make_kept(const Known& known);
  void prepare(const PlainCall& call, const Known& known, uint64_t sequence);
  void leave_turn();
  void finish_queued(const std::exception_ptr& thrown, const Interrupt& interrupt);

  // Why a group ends.
  struct Death {
    std::string reason;  // for the peers
    std::exception_ptr error;
    bool tell_peers = true;
    bool in_order = false;  // the caller closes the group
  };
  using Operations = std::vector<std::shared_ptr<Operation>>;
  // A list, because a place in it can be made beforehand.
  using Queue = std::list<std::shared_ptr<CollectiveOperation>>;

  Death interruption_of(const std::string& operation) const;
  Death death_of(const std::exception_ptr& error) const;
  void give_up(const Operation& operation);

  bool unfinished() const { return !queue_.empty() || open_messages_ > 0; }
  bool has_work() const;
  void drive(Lock& lock, const Interrupt& interrupt, const std::exception_ptr& thrown = nullptr);
  bool driven() const { return driving_ || turn_.inside(); }
  void take_up(Lock& lock);
  void begin(CollectiveOperation& operation);
  void scale_input(CollectiveOperation& operation);
  bool advance();
  bool something_ended() const;
  void run_until_news(const Interrupt& interrupt);
  std::exception_ptr die_driving(std::exception_ptr error);
  std::string describe_driven() const;
  std::vector<Ended> gather_ended(Lock& lock);
  void retire(const Ended& one);
  void record_end(const Ended& one);
  void keep_going(Lock& lock);
  void start_clocks();
  void wait_for_peers(Backoff& backoff, const Interrupt& interrupt);
  // This thread is in the Interrupt of a call that it drives.
  bool in_own_interrupt() const {
    return interrupted_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  void refuse_in_interrupt() const;
  Nanoseconds ask_when_stuck();

  void look_for_trouble();
  void look_between_portions();
  void look_for_stalls();
  void warn_of_stall(const StallWatch& stall, const Operation& operation,
                     const std::string& why) const;
  void look_at_collective();
  bool look_at_message(const MessageOperation& operation);
  bool help_from_the_gone();
  Nanoseconds until_first_deadline() const;
  static Nanoseconds until_deadline(const Operation& operation);
  std::string waited_in(const Operation& operation) const;
  std::string whom_it_waits_for(const CollectiveOperation& operation) const;
  [[noreturn]] void report_timeout(const CollectiveOperation& operation) const;
  Operations end_group(const Death& death);
  void dump_flight() const;
  void die(const Death& death);
  void complete_ended(Lock& lock);
  void complete(Lock& lock, std::shared_ptr<Operation> operation);
  void start_progress_thread(Lock& lock);
  bool on_progress_thread() const;
  void progress_loop();
  void stop_progress();

  const int rank_;
  const int world_size_;
  const std::string name_;  // as it was made; for texts
  const Config config_;
  const ForkMark fork_mark_;
  std::atomic<Nanoseconds> timeout_;
  const std::vector<SelectionRule> table_;
  // Before the transport: a bad name is an error before anybody connects.
  const Selector selector_;
  const Isa isa_;
  const std::shared_ptr<Connector> connector_;
  Agreement agreement_;  // set by bootstrap()
  std::unique_ptr<Transport> transport_;
  const std::shared_ptr<FlightRecorder> recorder_;  // nullptr: nothing is recorded
  const std::unique_ptr<FlightLog> flight_;         // nullptr with it
  const WaitPolicy wait_policy_;
  // Used by the driving thread alone; driving_, under mutex_, passes them on.
  SpinBudget spin_budget_;
  Executor executor_;
  MessageEngine messages_;
  bool begun_ = false;  // current_ is in the executor
  StallWatch collective_stall_;
  StallWatch message_stall_;
  bool moved_cpu_ = false;             // in this operation
  bool inquired_ = false;              // in this operation
  Operations orphans_;                 // ended with the group
  std::shared_ptr<Operation> notice_;  // of when_dead(); guarded by mutex_

  mutable std::mutex mutex_;
  std::condition_variable work_;    // progress threads: something to drive
  std::condition_variable change_;  // waiters: an operation ended, or nobody drives any more
  Queue queue_;                     // the oldest is driven
  // Changed by the driving thread under mutex_: the collective at the head of the queue, once it
  // was taken up. Or the operation of the caller that is inside turn_, whose it is until it leaves.
  std::shared_ptr<CollectiveOperation> current_;
  std::deque<std::shared_ptr<MessageOperation>> posted_;  // not yet taken up
  size_t open_messages_ = 0;                              // posted and not ended
  std::deque<std::shared_ptr<Operation>> completing_;     // ended, their callbacks not yet called
  std::atomic<bool> news_{false};  // something was submitted while a thread drives
  std::map<PlanKey, Program> plans_;
  std::map<Collective, Program> overrides_;
  std::mutex elsewhere_;  // of who announces calls that are carried out elsewhere
  Turn turn_;
  // By who is inside turn_: one object for such operations, one after the other; in current_ while
  // it runs.
  std::shared_ptr<CollectiveOperation> kept_;
  Queue kept_place_;  // holds it, for the queue it may have to go to
  std::array<Known, kKnown> known_;
  int waiters_ = 0;
  bool driving_ = false;
  // The driving thread while it is in an Interrupt; relaxed: only that thread finds itself there.
  std::atomic<std::thread::id> interrupted_{};
  bool stopping_ = false;
  std::atomic<bool> dead_{false};
  std::exception_ptr death_;           // why; written once, under mutex_, before dead_ is set
  std::vector<std::thread> progress_;  // the first starts with the first asynchronous call
  std::vector<std::thread::id> progress_ids_;  // of all that were ever started
  int free_progress_ = 0;                      // those that are not in a callback
};

}  // namespace pycoll
