// Runs one rank's Program over a transport: a resumable state machine.
//
// advance() does all that can be done and never waits, so one thread can drive several executors
// and a stuck operation of one group does not hold up another. The executor touches nothing but the
// caller's vectors, its own scratch and what the transport hands it; it runs only validated
// Programs.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "core/clock.h"
#include "kernels/reduce.h"
#include "program/program.h"
#include "runtime/executor_input.h"
#include "runtime/leased_call.h"
#include "transport/transport.h"

namespace pycoll {

// What survives from one operation of a group to the next; the same numbers on every rank.
struct LaneHistory {
  uint64_t barriers = 0;       // barriers passed on this lane
  uint64_t window_rounds = 0;  // rounds that used this lane's window: its parity selects the buffer
};

// Memory aligned to cache lines that grows and is kept.
class Scratch {
 public:
  std::byte* at_least(size_t bytes);

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte[], Free> memory_;
  size_t bytes_ = 0;
};

// Elements a slice may have so that every message fits its slot and every window chunk its share. A
// pure function of what all ranks agree on.
uint64_t slice_elements(const Program& program, const ReduceKernels* kernels, size_t element,
                        const TransportGeometry& geometry);

// How many calls of a group began with and without staging, and the bytes of their larger vector on
// this rank. Read by any thread.
struct CallCounters {
  std::atomic<uint64_t> zero_copy_calls{0};
  std::atomic<uint64_t> zero_copy_bytes{0};
  std::atomic<uint64_t> staged_calls{0};
  std::atomic<uint64_t> staged_bytes{0};
};

class Executor {
 public:
  Executor(Transport& transport, const TransportGeometry& geometry, int rank);

  Shape shape_of(const ExecutorInput& input) const;
  // Begins an operation; the previous one must be done or given up (after which the group is dead).
  void start(const ExecutorInput& input);
  // True when something moved. Throws Error(mismatch) when a peer runs another operation.
  bool advance();
  // A number that changes when something moves, for whoever looks now and then.
  uint64_t progress() const;
  bool done() const { return !exchanging_ && lanes_left_ == 0; }
  // Peers' vectors are in use: the call must be looked after between two advances, too.
  bool borrows() const { return lease_.inside(); }
  const CallCounters& counters() const { return counters_; }
  // The ranks whose messages, credits or arrivals the current steps need.
  std::vector<int> waiting_for() const;
  // The operation is given up: when this returns, no transport and no peer writes into its vectors
  // any more, or what they may still write is put aside (leased_call.h).
  void give_up();

 private:
  struct LaneState {
    const Lane* lane = nullptr;
    size_t step = 0;
    uint64_t round = 0;
    uint64_t count = 0;  // elements of the current step, once a step: a waiting lane looks often
    bool counted = false;
    bool offered = false;    // its places in the output, to the transport
    bool sending = false;    // all is done but that the transport still reads what is sent
    size_t arrived = 0;      // members of the current barrier's group that have come
    bool announced = false;  // this rank's arrival at the current barrier
    int window = 0;          // the window's lane that it uses: its own, or the cell
    int first_channel = 0;   // of this flight
    uint64_t progress = 0;   // elements done of a step on peers' vectors
    bool in_step = false;    // which stopped between two portions
    bool copied = false;     // the copy that comes next is done already
    std::byte* acc = nullptr;
    LaneHistory* history = nullptr;
    bool uses_window = false;
  };
  struct Slice {
    std::byte* data = nullptr;
    Operand form = Operand::value;
  };
  struct Terms {  // of one combination
    const std::byte* a = nullptr;
    const std::byte* b = nullptr;
    Operand a_form = Operand::value;
    Operand b_form = Operand::value;
  };
  using StepFunction = bool (Executor::*)(LaneState&, const Step&, uint64_t count);
  struct StepTable;

  bool fits_cell(const Program& program, uint64_t chunk_bytes) const;
  void start_lane(size_t place);
  int flights_of(const Program& program, uint64_t rounds) const;
  void start_program();
  void count_call(bool staged);
  bool advance_lane(LaneState& lane);
  void finish_round(LaneState& lane);

  bool message_step(LaneState& lane, const Step& step, uint64_t count);
  void offer_places(LaneState& lane, const Step& step);
  void offer_next(const LaneState& lane, const Step& step, uint32_t later);
  void offer_place(const LaneState& lane, const Step& step, uint32_t later);
  const Step* step_after(const LaneState& lane) const {
    const auto& steps = lane.lane->steps;
    return lane.step + 1 < steps.size() ? &steps[lane.step + 1] : nullptr;
  }
  bool copy_step(LaneState& lane, const Step& step, uint64_t count);
  bool reduce_from_step(LaneState& lane, const Step& step, uint64_t count);
  bool copy_from_step(LaneState& lane, const Step& step, uint64_t count);
  bool barrier_step(LaneState& lane, const Step& step, uint64_t count);

  void begin_exchange();
  void fall_back();
  bool end_exchange();
  bool borrow_step(LaneState& lane, const Step& step, uint64_t count);
  std::byte* lent_slice(const LaneState& lane, int peer, Ref ref) const;
  void find_operands(const LaneState& lane, const Step& step);
  void combine_portion(const Step& step, uint64_t begin, uint64_t end);

  const Step* next_copy_of(const LaneState& lane, Ref stored) const;
  // Elements of the slice that a step works on in this round.
  uint64_t count_of(const LaneState& lane, const Step& step) const;
  Slice locate(const LaneState& lane, Ref ref) const;
  const std::byte* peer_window(const LaneState& lane, int peer, int chunk) const;
  int parity(const LaneState& lane) const {
    return static_cast<int>(lane.history->window_rounds & 1);
  }
  RecvEnd& fifo_from(const LaneState& lane, const Step& step) const {
    return transport_.receiver(step.from, lane.first_channel + step.channel);
  }
  SendEnd& fifo_to(const LaneState& lane, const Step& step) const {
    return transport_.sender(step.to, lane.first_channel + step.channel);
  }
  size_t wire_size(Wire wire) const { return wire == Wire::partial ? acc_size_ : element_; }
  size_t form_size(Operand form) const { return form == Operand::acc ? acc_size_ : element_; }

  // What the messages of a step vouch for: the call, and where only two ranks know the length of a
  // block, that too, since nothing else compares it.
  uint32_t fingerprint_of(const Step& step) const;
  void check_message(const Message& message, const Step& step, uint64_t count) const;
  // mismatch.cpp
  bool is_of_another(const Message& message, const Step& step);
  void compare_calls(int peer) const;
  [[noreturn]] void report_mismatch(int peer) const;

  void combine_to_acc(std::byte* dst, const Terms& terms, uint64_t count) const;
  // Combines, finishes and stores values; dst may be one of the terms.
  void combine_to_value(std::byte* dst, const Terms& terms, uint64_t count);
  // Elements [begin, end) of terms_, in their order, into each of targets_, which hold that form.
  void sum_terms(Operand form, uint64_t begin, uint64_t end);
  void sum_block(Slice to, std::byte* partial, uint64_t at, uint64_t n);
  void finish_single(Slice dst, std::byte* scratch, const std::byte* term, uint64_t count);
  void store(Slice dst, Slice src, uint64_t count);

  Transport& transport_;
  TransportGeometry geometry_;
  int rank_;
  LaneHistory histories_[kWindowLanes];

  ExecutorInput in_;
  uint32_t fingerprint_ = 0;
  std::array<CallHeader, 16> past_{};  // this rank's latest, by sequence % 16
  std::optional<Deadline> asked_;      // until when peers' answers are waited for
  size_t element_ = 0;
  size_t acc_size_ = 0;
  Shape shape_;
  std::vector<LaneState> lanes_;  // of all flights
  size_t lanes_left_ = 0;
  // Of the direct step that runs.
  std::vector<const std::byte*> terms_;
  std::vector<std::byte*> targets_;
  LeasedCall lease_;
  bool exchanging_ = false;  // waits for the peers' offers
  CallCounters counters_;
  Scratch acc_;
  Scratch block_;
};

}  // namespace pycoll
