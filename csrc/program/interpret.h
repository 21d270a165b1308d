// One engine that runs the Programs of all ranks, over a Domain: the checker runs it on symbols,
// the trace on numbers. Programs are deterministic processes over bounded FIFOs (Kahn networks with
// barriers), so one schedule shows the outcome of all: the same values, and a deadlock always or
// never. Only accesses to shared memory depend on the schedule; happens_before.h judges those.
//
// A Domain has
//   Value                      a small handle
//   input(rank, chunk)         the contribution of a rank
//   combine(left, right)       left (+) right
//   finish(value)              what a complete sum becomes when it is stored
//   produced(Production)       a step received or computed a value
//   moved(Move)                a value went from rank to rank
#pragma once

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

#include "core/error.h"
#include "program/borrowed.h"
#include "program/happens_before.h"
#include "program/interpret_types.h"
#include "program/memory.h"
#include "program/rounds.h"
#include "program/wiring.h"

namespace pycoll::prover {

template <typename Domain>
class Interpreter {
 public:
  using Value = typename Domain::Value;

  Interpreter(std::span<const Program> programs, RunOptions options, Domain& domain)
      : wiring_(wire(programs)),
        options_(std::move(options)),
        rounds_(programs, options_.rounds, options_.lengths),
        domain_(domain),
        memory_(programs, options_.rounds, options_.in_place),
        states_(wiring_.processes.size()),
        fifos_(wiring_.fifos.size(), Fifo(options_.depth)),
        announcements_(wiring_.processes.size()),
        watchers_(wiring_.processes.size()),
        meetings_(wiring_.barriers.size()),
        is_barrier_(programs.front().collective == Collective::barrier) {
    if (is_barrier_ || memory_.needs_order()) order_.emplace(states_.size());
    if (is_barrier_) arrivals_.emplace(wiring_.lanes_of_rank, options_.rounds);
  }

  // Throws Fault.
  void run() {
    for (size_t i = 0; i < states_.size(); ++i) ready_.push_back(static_cast<int32_t>(i));
    while (!ready_.empty()) {
      const int32_t process = ready_.front();
      ready_.pop_front();
      advance(process);
    }
    for (const ProcessState& state : states_) {
      if (state.done) continue;
      throw Fault{CheckKind::deadlock, concat("deadlock with FIFOs of ", options_.depth,
                                              " slots: ", describe_deadlock(wiring_, states_))};
    }
    find_leftover();
    if (order_) borrowed_.find_late(wiring_, *order_);
  }

  const Wiring& wiring() const { return wiring_; }

  const Cell<Value>& output(int32_t rank, int32_t round, int32_t chunk) {
    return memory_.at({rank, 0, round, {Space::output, chunk}});
  }

  const Rounds& rounds() const { return rounds_; }

 private:
  using Fifo = Queue<Value>;
  struct Announcement {
    uint32_t time = 0;
    ClockRef clock;
  };
  // A step that is being executed.
  struct Turn {
    int32_t process;
    ProcessState& state;
    const WiredStep& wired;
    const Step& step;
    const StepTraits& traits;
    int32_t rank;
    int32_t lane;
  };

  int32_t length_of(const Turn& turn) const {
    return rounds_.length_of(wiring_.program_of(turn.process), turn.step);
  }

  // Runs a process until it has to wait.
  void advance(int32_t process) {
    ProcessState& state = states_[static_cast<size_t>(process)];
    const Process& wired = wiring_.processes[static_cast<size_t>(process)];
    while (!state.done) {
      enter_round(process, wired.rank, state);
      while (static_cast<size_t>(state.next_step) < wired.steps.size()) {
        if (!execute(process, state, wired)) return;
        ++state.next_step;
      }
      leave_round(process, wired.rank, state.round);
      state.next_step = 0;
      state.done = ++state.round == rounds_.of_rank(wired.rank);
    }
  }

  void enter_round(int32_t process, int32_t rank, ProcessState& state) {
    if (!arrivals_ || state.entered == state.round) return;
    state.entered = state.round;
    order_->tick(process);
    arrivals_->enter(*order_, rank, process, state.round);
  }

  void leave_round(int32_t process, int32_t rank, int32_t round) {
    if (!arrivals_) return;
    const auto absent = arrivals_->leave(*order_, rank, process, round);
    if (!absent) return;
    const size_t steps = wiring_.processes[static_cast<size_t>(process)].steps.size();
    const std::string place = steps == 0
                                  ? concat("rank ", rank)
                                  : wiring_.describe(process, static_cast<int32_t>(steps) - 1);
    throw Fault{CheckKind::wrong_result, concat(place, ": the barrier ends here before rank ",
                                                *absent, " is known to have come")};
  }

  // False: it has to wait.
  bool execute(int32_t process, ProcessState& state, const Process& wired) {
    const WiredStep& op = wired.steps[static_cast<size_t>(state.next_step)];
    const Turn turn{process, state, op, *op.step, traits_of(op.step->kind), wired.rank, wired.lane};
    if (turn.step.kind == StepKind::barrier) return meet(turn);
    // A barrier's vectors are empty in every round; its rounds stand for calls.
    const int32_t rounds = is_barrier_ ? options_.rounds : rounds_.of_length(length_of(turn));
    if (state.round > 0 && state.round >= rounds) return true;
    if (op.fifo_in >= 0 && fifo(op.fifo_in).empty()) return wait(state, Wait::message, op.fifo_in);
    if (op.fifo_out >= 0 && fifo(op.fifo_out).full()) return wait(state, Wait::slot, op.fifo_out);
    perform(turn);
    return true;
  }

  static bool wait(ProcessState& state, Wait what, int32_t index) {
    state.wait = what;
    state.waits_for = index;
    return false;
  }

  void wake(int32_t process, Wait what, int32_t index) {
    if (process < 0) return;
    ProcessState& state = states_[static_cast<size_t>(process)];
    if (state.wait != what || state.waits_for != index) return;
    state.wait = Wait::nothing;
    ready_.push_back(process);
  }

  // A barrier announces its number, then waits until every member has announced that number or a
  // later one. What a member does after its announcement is not ordered by it.
  bool meet(const Turn& turn) {
    ProcessState& state = turn.state;
    const size_t number = static_cast<size_t>(state.barriers);
    if (!state.announced) announce(turn.process, state);
    const BarrierMembers& members = wiring_.barriers[static_cast<size_t>(turn.wired.barrier)];
    for (; state.arrived < members.processes.size(); ++state.arrived) {
      const int32_t member = members.processes[state.arrived];
      if (member >= 0 && announcements_[static_cast<size_t>(member)].size() > number) continue;
      if (member >= 0) watchers_[static_cast<size_t>(member)].push_back(turn.process);
      return wait(state, Wait::barrier, turn.wired.barrier);
    }
    const Announcement& meeting = meeting_of(turn.wired.barrier, number);
    if (order_) order_->join(turn.process, meeting.clock);
    state.time = meeting.time + 1;
    state.announced = false;
    ++state.barriers;
    return true;
  }

  void announce(int32_t process, ProcessState& state) {
    const size_t index = static_cast<size_t>(process);
    if (order_) order_->tick(process);
    announcements_[index].push_back({state.time, order_ ? order_->snapshot(process) : nullptr});
    state.announced = true;
    state.arrived = 0;
    for (int32_t watcher : std::exchange(watchers_[index], {})) {
      wake(watcher, Wait::barrier, states_[static_cast<size_t>(watcher)].waits_for);
    }
  }

  // The latest of the announcements that a barrier waits for; all its members use the same.
  const Announcement& meeting_of(int32_t barrier, size_t number) {
    auto& meetings = meetings_[static_cast<size_t>(barrier)];
    if (meetings.size() <= number) meetings.resize(number + 1);
    std::optional<Announcement>& meeting = meetings[number];
    if (meeting) return *meeting;
    meeting.emplace();
    std::vector<ClockRef> clocks;
    for (int32_t member : wiring_.barriers[static_cast<size_t>(barrier)].processes) {
      const Announcement& one = announcements_[static_cast<size_t>(member)][number];
      meeting->time = std::max(meeting->time, one.time);
      clocks.push_back(one.clock);
    }
    if (order_) meeting->clock = latest(clocks);
    return *meeting;
  }

  // Everything but a barrier; message and slot are there.
  void perform(const Turn& turn) {
    Message<Value> received;
    if (turn.traits.receives) received = fifo(turn.wired.fifo_in).head().message;
    if (order_) {
      order_->join(turn.process, received.clock);
      if (turn.traits.sends) order_->join(turn.process, fifo(turn.wired.fifo_out).tail().freed);
      order_->tick(turn.process);
    }
    if (turn.traits.receives) accept(turn, received);
    Datum<Value> result = compute(turn, received.datum);
    if (turn.traits.stores) {
      if (turn.step.dst.space == Space::acc) refuse_finished(turn, result);
      const bool finishes = turn.step.dst.space != Space::acc && result.form == Form::partial;
      if (finishes) result = {domain_.finish(result.value), Form::finished};
      if (turn.step.dst.space == Space::acc && result.form == Form::raw)
        result.form = Form::partial;
      if (turn.step.kind == StepKind::reduce_to) return store_at_peers(turn, result);
      store(turn, turn.rank, result);
    }
    if (turn.traits.stores || turn.traits.receives) {
      domain_.produced(Production<Value>{turn.rank, turn.state.time, result.value});
    }
    const ClockRef now = order_ && (turn.traits.receives || turn.traits.sends)
                             ? order_->snapshot(turn.process)
                             : nullptr;
    if (turn.traits.receives) release(turn, now);
    if (turn.traits.sends) post(turn, result, received.wire, now);
  }

  void accept(const Turn& turn, const Message<Value>& message) {
    const int32_t wanted = length_of(turn);
    const auto disagree = [&](const auto&... parts) {
      const int32_t sender = wiring_.fifos[static_cast<size_t>(turn.wired.fifo_in)].sender;
      fault(CheckKind::mismatch, turn, parts..., ", sent by ",
            wiring_.describe(sender, message.step));
    };
    if (message.wire != turn.step.wire) {
      disagree("expects a ", name_of(turn.step.wire), " and gets a ", name_of(message.wire));
    }
    if (message.length != wanted) {
      disagree("expects chunk ", wanted, " and gets chunk ", message.length,
               ", which has another size");
    }
    if (message.round != turn.state.round) {
      disagree("gets slice ", message.round, " in round ", turn.state.round);
    }
    turn.state.time = std::max(turn.state.time, message.time + 1);
    const FifoEnds& ends = wiring_.fifos[static_cast<size_t>(turn.wired.fifo_in)];
    domain_.moved(Move<Value>{turn.state.time, ends.from, turn.rank, turn.lane, message.datum.value,
                              &turn.step});
  }

  // What the step stores or sends, before it is finished.
  Datum<Value> compute(const Turn& turn, const Datum<Value>& received) {
    if (turn.step.kind == StepKind::copy_from) {
      return read_remote(turn, turn.step.from);
    }
    if (turn.traits.direct) return reduce_group(turn);
    if (!turn.traits.reads) return received;
    const Datum<Value> own = read(turn, turn.step.src);
    if (!turn.traits.reduces) return own;
    return turn.step.received_first ? combine(turn, received, own) : combine(turn, own, received);
  }

  Datum<Value> reduce_group(const Turn& turn) {
    const Program& program = wiring_.program_of(turn.process);
    Datum<Value> sum;
    for (int32_t member : program.groups[static_cast<size_t>(turn.step.group)]) {
      const Datum<Value> term =
          member == turn.rank ? read(turn, turn.step.src) : read_remote(turn, member);
      if (sum.form == Form::none) {
        sum = term;
        refuse_finished(turn, sum);
      } else {
        sum = combine(turn, sum, term);
      }
    }
    sum.form = Form::partial;
    return sum;
  }

  Datum<Value> combine(const Turn& turn, const Datum<Value>& left, const Datum<Value>& right) {
    refuse_finished(turn, left);
    refuse_finished(turn, right);
    return {domain_.combine(left.value, right.value), Form::partial};
  }

  void refuse_finished(const Turn& turn, const Datum<Value>& datum) {
    if (datum.form != Form::finished) return;
    fault(CheckKind::wrong_result, turn,
          "accumulates a result that is finished already, so divided and rounded");
  }

  Place place_of(const Turn& turn, Ref ref) const {
    return {turn.rank, turn.lane, turn.state.round, ref};
  }

  Datum<Value> read(const Turn& turn, Ref ref) {
    if (ref.space == Space::input) return read_input(turn, turn.rank, ref.chunk);
    const Place place = place_of(turn, ref);
    const Cell<Value>& cell = memory_.at(place);
    if (cell.round != turn.state.round) {
      fault(CheckKind::race, turn, "reads ", to_string(ref), ", which this round has not written");
    }
    same_length(turn, ref, cell);
    note(turn, place, false);
    return cell.datum;
  }

  Datum<Value> read_input(const Turn& turn, int32_t rank, int32_t chunk) {
    const Datum<Value> mine{domain_.input(rank, chunk), Form::raw};
    const int32_t alias = options_.in_place ? output_in_place(program_of(rank), chunk) : -1;
    if (alias < 0) return mine;
    const Place place{rank, turn.lane, turn.state.round, {Space::output, alias}};
    const Cell<Value>& cell = memory_.at(place);
    // A root that copied its own input there overwrote it with itself.
    if (cell.round >= 0 && !(cell.datum.value == mine.value)) {
      fault(CheckKind::race, turn, "reads input[", chunk, "]",
            rank == turn.rank ? "" : concat(" of rank ", rank), ", which in place is output[",
            alias, "] and was overwritten by ", wiring_.describe(cell.process, cell.step));
    }
    note(turn, place, false);
    return mine;
  }

  Datum<Value> read_remote(const Turn& turn, int32_t peer) {
    return turn.step.remote == Space::input ? borrow_input(turn, peer) : read_window(turn, peer);
  }

  Datum<Value> borrow_input(const Turn& turn, int32_t peer) {
    if (!program_of(peer).lends_input) {
      fault(CheckKind::race, turn, "reads the input of rank ", peer, ", which that rank keeps");
    }
    borrow(turn, peer);
    const Datum<Value> datum = read_input(turn, peer, turn.step.remote_chunk);
    turn.state.time = std::max(turn.state.time, 1u);
    domain_.moved(
        Move<Value>{turn.state.time, peer, turn.rank, turn.lane, datum.value, &turn.step});
    return datum;
  }

  Datum<Value> read_window(const Turn& turn, int32_t peer) {
    const Place place{peer, turn.lane, turn.state.round, {Space::window, turn.step.remote_chunk}};
    const Cell<Value>& cell = memory_.at(place);
    if (cell.round != turn.state.round) {
      fault(CheckKind::race, turn, "reads ", to_string(place.ref), " of rank ", peer,
            cell.round < turn.state.round ? ", which that rank may not have written in this round"
                                          : ", which that rank may have overwritten already");
    }
    same_length(turn, place.ref, cell);
    note(turn, place, false);
    turn.state.time = std::max(turn.state.time, cell.time + 1);
    domain_.moved(
        Move<Value>{turn.state.time, peer, turn.rank, turn.lane, cell.datum.value, &turn.step});
    return cell.datum;
  }

  // An accumulator or a window chunk holds as many elements as the step that wrote it had.
  void same_length(const Turn& turn, Ref ref, const Cell<Value>& cell) const {
    const int32_t wanted = length_of(turn);
    if (cell.length == wanted) return;
    fault(CheckKind::mismatch, turn, "reads ", to_string(ref), " as chunk ", wanted,
          ", but it holds chunk ", cell.length, ", which has another size");
  }

  // The sum of a reduce_to.
  void store_at_peers(const Turn& turn, const Datum<Value>& datum) {
    const auto one = [&](int32_t rank) {
      if (rank != turn.rank) {
        if (!program_of(rank).lends_output) {
          fault(CheckKind::race, turn, "writes the output of rank ", rank,
                ", which that rank keeps");
        }
        borrow(turn, rank);
        domain_.moved(
            Move<Value>{turn.state.time, turn.rank, rank, turn.lane, datum.value, &turn.step});
      }
      store(turn, rank, datum);
      domain_.produced(Production<Value>{rank, turn.state.time, datum.value});
    };
    if (turn.step.to >= 0) return one(turn.step.to);
    const Program& program = wiring_.program_of(turn.process);
    for (int32_t rank : program.groups[static_cast<size_t>(turn.step.group)]) one(rank);
  }

  // A copy of a vector's own memory onto itself does not happen.
  bool moves_nothing(const Turn& turn) const {
    const Step& step = turn.step;
    return options_.in_place && step.kind == StepKind::copy && step.src.space == Space::input &&
           step.dst.space == Space::output &&
           output_in_place(wiring_.program_of(turn.process), step.src.chunk) == step.dst.chunk;
  }

  void store(const Turn& turn, int32_t rank, const Datum<Value>& datum) {
    const Place place{rank, turn.lane, turn.state.round, turn.step.dst};
    if (!moves_nothing(turn)) note(turn, place, true);
    memory_.at(place) = {datum,        turn.state.round,     turn.state.time,
                         turn.process, turn.state.next_step, length_of(turn)};
  }

  // Tells the race detector of an access; the schedule at hand got away with an unordered one,
  // another would not.
  void note(const Turn& turn, const Place& place, bool writes) {
    CellHistory* history = order_ && !is_barrier_ ? memory_.history(place) : nullptr;
    if (history == nullptr) return;
    const int32_t step = turn.state.next_step;
    const auto conflict = writes ? order_->write(*history, turn.process, step)
                                 : order_->read(*history, turn.process, step);
    if (!conflict) return;
    fault(CheckKind::race, turn, writes ? "writes " : "reads ", to_string(place.ref), " of rank ",
          place.rank, " with nothing to order it after ",
          wiring_.describe(conflict->process, conflict->step));
  }

  // Frees the slot that a receive has read.
  void release(const Turn& turn, const ClockRef& now) {
    Fifo& queue = fifo(turn.wired.fifo_in);
    queue.head().freed = now;
    queue.head().message.clock = nullptr;
    ++queue.received;
    wake(wiring_.fifos[static_cast<size_t>(turn.wired.fifo_in)].sender, Wait::slot,
         turn.wired.fifo_in);
  }

  void post(const Turn& turn, const Datum<Value>& datum, Wire received, const ClockRef& now) {
    Fifo& queue = fifo(turn.wired.fifo_out);
    queue.tail().message = {datum,
                            wire_sent(turn.step, received),
                            turn.state.round,
                            length_of(turn),
                            turn.state.time,
                            turn.state.next_step,
                            now};
    ++queue.sent;
    wake(wiring_.fifos[static_cast<size_t>(turn.wired.fifo_out)].receiver, Wait::message,
         turn.wired.fifo_out);
  }

  static Wire wire_sent(const Step& step, Wire received) {
    const StepTraits& traits = traits_of(step.kind);
    if (traits.reduces) return traits.stores ? Wire::value : Wire::partial;
    if (traits.receives) return received;
    return step.src.space == Space::acc ? Wire::partial : Wire::value;
  }

  void find_leftover() {
    for (size_t i = 0; i < fifos_.size(); ++i) {
      if (fifos_[i].empty()) continue;
      const FifoEnds& ends = wiring_.fifos[i];
      throw Fault{CheckKind::leftover,
                  concat(wiring_.describe(ends.sender, fifos_[i].head().message.step), ": rank ",
                         ends.to, " never receives this message")};
    }
  }

  void borrow(const Turn& turn, int32_t lender) {
    borrowed_.add(
        {lender, turn.process, turn.state.next_step, order_->time_of(turn.process, turn.process)});
  }

  const Program& program_of(int32_t rank) const {
    return wiring_.programs[static_cast<size_t>(rank)];
  }

  template <typename... Parts>
  [[noreturn]] void fault(CheckKind kind, const Turn& turn, const Parts&... parts) const {
    throw Fault{kind, concat(wiring_.describe(turn.process, turn.state.next_step), ": ", parts...)};
  }

  Fifo& fifo(int32_t index) { return fifos_[static_cast<size_t>(index)]; }

  Wiring wiring_;
  RunOptions options_;
  Rounds rounds_;
  Domain& domain_;
  Memory<Value> memory_;
  std::vector<ProcessState> states_;
  std::vector<Fifo> fifos_;
  std::vector<std::vector<Announcement>> announcements_;  // of each process, at its barriers
  std::vector<std::vector<int32_t>> watchers_;            // processes that wait for its next one
  std::vector<std::vector<std::optional<Announcement>>> meetings_;  // of each barrier
  BorrowedVectors borrowed_;
  std::deque<int32_t> ready_;
  bool is_barrier_;
  std::optional<HappensBefore> order_;
  std::optional<Arrivals> arrivals_;
};

}  // namespace pycoll::prover
