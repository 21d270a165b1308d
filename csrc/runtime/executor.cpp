#include "runtime/executor.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "core/error.h"
#include "runtime/slices.h"

namespace pycoll {
namespace {

constexpr size_t round_up(size_t n, size_t unit) {
  return (n + unit - 1) / unit * unit;
}

}  // namespace

// Which function runs which kind: a row a kind.
struct Executor::StepTable {
  static constexpr StepFunction kFunctions[static_cast<size_t>(StepKind::kCount)] = {
      &Executor::message_step,      // send
      &Executor::message_step,      // recv
      &Executor::message_step,      // recv_copy_send
      &Executor::message_step,      // recv_send
      &Executor::message_step,      // recv_reduce
      &Executor::message_step,      // recv_reduce_send
      &Executor::message_step,      // recv_reduce_copy_send
      &Executor::copy_step,         // copy
      &Executor::reduce_from_step,  // reduce_from
      &Executor::copy_from_step,    // copy_from
      &Executor::borrow_step,       // reduce_to
      &Executor::barrier_step,      // barrier
  };
};

Executor::Executor(Transport& transport, const TransportGeometry& geometry, int rank)
    : transport_(transport), geometry_(geometry), rank_(rank), lease_(transport, rank) {
  // The buffer of the cell goes by the number of the barrier, which counts from 1.
  histories_[kCellLane].window_rounds = 1;
}

void Executor::start(const ExecutorInput& input) {
  in_ = input;
  fingerprint_ = fingerprint(input.call);
  element_ = size_of(input.call.dtype);
  acc_size_ = input.kernels != nullptr ? size_of(input.kernels->acc) : element_;
  past_[input.call.sequence % past_.size()] = input.call;
  asked_.reset();
  exchanging_ = false;
  lanes_.clear();
  lanes_left_ = 0;
  if (input.program->needs_lease) begin_exchange();
  if (!exchanging_) start_program();
}

void Executor::start_program() {
  const Program& program = *in_.program;
  count_call(!program.needs_lease);
  shape_ = in_.shape.slice != 0 ? in_.shape : shape_of(in_);
  lanes_.assign(program.lanes.size() * static_cast<size_t>(shape_.flights), {});
  lanes_left_ = lanes_.size();
  const size_t acc_bytes = static_cast<size_t>(program.acc_chunks) * shape_.slice * acc_size_;
  std::byte* acc = acc_.at_least(acc_bytes * lanes_.size());
  for (size_t i = 0; i < lanes_.size(); ++i) {
    lanes_[i].acc = acc + i * acc_bytes;
    start_lane(i);
  }
}

Shape Executor::shape_of(const ExecutorInput& input) const {
  const Program& program = *input.program;
  const size_t element = size_of(input.call.dtype);
  const uint64_t largest = ChunkCutter(program, input.input, input.output, element).largest_chunk();
  Shape shape;
  TransportGeometry geometry = geometry_;
  // Where only two ranks know a length, all the others' slices must not depend on it.
  const bool agreed = traits_of(program.collective).lengths != Lengths::pairwise;
  if (transport_.window() == nullptr && agreed) {
    geometry.slot_bytes = network_slice(largest * element, geometry_.slot_bytes);
  }
  shape.slice = slice_elements(program, input.kernels, element, geometry);
  shape.rounds = round_count(largest, shape.slice);
  const size_t chunk_bytes = round_up(largest * element, 8);
  shape.in_cell = shape.rounds == 1 && fits_cell(program, chunk_bytes);
  shape.window_stride = shape.in_cell ? chunk_bytes : shape.slice * element;
  shape.flights = flights_of(program, shape.rounds);
  return shape;
}

// Everybody meets once, and what they show is small. All ranks come to the same verdict: they agree
// on the Program and on the lengths of a call that uses windows.
bool Executor::fits_cell(const Program& program, uint64_t chunk_bytes) const {
  if (program.needs_lease || program.lanes.size() != 1 || transport_.window() == nullptr) {
    return false;
  }
  const auto chunks = static_cast<uint64_t>(std::max(program.window_chunks, 1));
  if (chunks * chunk_bytes > kCellBytes) return false;
  size_t barriers = 0;
  for (const Step& step : program.lanes[0].steps) {
    const StepTraits& traits = traits_of(step.kind);
    if (traits.sends || traits.receives) return false;
    if (step.kind != StepKind::barrier) continue;
    if (program.groups[static_cast<size_t>(step.group)].size() !=
        static_cast<size_t>(program.world_size)) {
      return false;
    }
    ++barriers;
  }
  return barriers == 1;
}

void Executor::count_call(bool staged) {
  const uint64_t bytes = std::max(in_.input.count(), in_.output.count()) * element_;
  // One thread drives, so nothing is lost between load and store; relaxed: a statistic.
  const auto add = [](std::atomic<uint64_t>& counter, uint64_t amount) {
    counter.store(counter.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  };
  add(staged ? counters_.staged_calls : counters_.zero_copy_calls, 1);
  add(staged ? counters_.staged_bytes : counters_.zero_copy_bytes, bytes);
}

// A rank that waits for the answer to its slice before it sends the next leaves the network idle
// for a round trip each time: over one, as many rounds are under way as there are FIFOs for. A pure
// function of what all ranks agree on: windows are there for all ranks of a group or for none.
int Executor::flights_of(const Program& program, uint64_t rounds) const {
  if (transport_.window() != nullptr) return 1;
  const auto most = static_cast<uint64_t>(kMaxChannels / program.channels);
  return static_cast<int>(std::min(most, rounds));
}

void Executor::start_lane(size_t place) {
  LaneState& lane = lanes_[place];
  const size_t index = place % in_.program->lanes.size();
  const auto flight = static_cast<int>(place / in_.program->lanes.size());
  lane.round = static_cast<uint64_t>(flight);
  lane.first_channel = flight * in_.program->channels;
  lane.lane = &in_.program->lanes[index];
  lane.window = shape_.in_cell ? kCellLane : static_cast<int>(index);
  lane.history = &histories_[lane.window];
  // In the cell a barrier's number tells the buffer, so the two count together.
  lane.uses_window = shape_.in_cell;
  if (shape_.in_cell) return;
  for (const Step& step : lane.lane->steps) {
    const bool reads_peers = step.kind == StepKind::reduce_from || step.kind == StepKind::copy_from;
    lane.uses_window |= step.src.space == Space::window || step.dst.space == Space::window ||
                        (reads_peers && step.remote == Space::window);
  }
  if (lane.lane->steps.empty()) --lanes_left_;
}

bool Executor::advance() {
  if (exchanging_ && !end_exchange()) return false;
  bool moved = false;
  for (LaneState& lane : lanes_) moved |= advance_lane(lane);
  if (lanes_left_ == 0) lease_.end();
  return moved;
}

bool Executor::advance_lane(LaneState& lane) {
  bool moved = false;
  const auto& steps = lane.lane->steps;
  while (lane.round < shape_.rounds && lane.step < steps.size()) {
    const Step& step = steps[lane.step];
    if (!lane.counted) {
      lane.count = count_of(lane, step);
      lane.counted = true;
    }
    const uint64_t count = lane.count;
    // Both sides skip a slice that is empty, except in the first round: there even an empty message
    // travels, so that operations on nothing still compare their fingerprints and keep in step.
    const bool skip = count == 0 && lane.round > 0 && step.kind != StepKind::barrier;
    if (!skip) {
      const StepFunction run = StepTable::kFunctions[static_cast<size_t>(step.kind)];
      if (!(this->*run)(lane, step, count)) return moved || lane.in_step;
      moved = true;
    }
    lane.counted = lane.offered = false;
    if (++lane.step == steps.size()) finish_round(lane);
  }
  return moved;
}

void Executor::finish_round(LaneState& lane) {
  if (lane.uses_window) ++lane.history->window_rounds;
  lane.round += static_cast<uint64_t>(shape_.flights);
  if (lane.round < shape_.rounds) {
    lane.step = 0;
  } else {
    --lanes_left_;
  }
}

uint64_t Executor::progress() const {
  uint64_t sum = exchanging_ ? 0 : 1;
  for (const LaneState& lane : lanes_) {
    sum += lane.round * (lane.lane->steps.size() + 1) + lane.step + lane.progress + lane.arrived;
  }
  return sum;
}

std::vector<int> Executor::waiting_for() const {
  if (exchanging_) return lease_.missing();
  std::vector<int> ranks;
  for (const LaneState& lane : lanes_) {
    if (lane.round >= shape_.rounds || lane.step >= lane.lane->steps.size()) continue;
    const Step& step = lane.lane->steps[lane.step];
    const StepTraits& traits = traits_of(step.kind);
    if (step.kind == StepKind::barrier) {
      const Arrival mine(lane.history->barriers + 1, fingerprint_);
      for (const int member : in_.program->groups[static_cast<size_t>(step.group)]) {
        if (member == rank_) continue;
        const Arrival theirs = transport_.window()->arrival_of(member, lane.window, mine);
        if (!theirs.reached(mine)) ranks.push_back(member);
      }
    } else if (traits.direct && step.remote == Space::input) {
      // Whoever has failed says why.
      for (const int peer : lease_.revokers()) ranks.push_back(peer);
    } else if (traits.receives && !lane.sending && !fifo_from(lane, step).peek()) {
      ranks.push_back(step.from);
    } else if (traits.sends) {
      ranks.push_back(step.to);
    }
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

uint64_t Executor::count_of(const LaneState& lane, const Step& step) const {
  const ChunkCutter cut(*in_.program, in_.input, in_.output, element_);
  return slice_of(cut.range_of(step), lane.round, shape_.slice).size();
}

Executor::Slice Executor::locate(const LaneState& lane, Ref ref) const {
  switch (ref.space) {
    case Space::input:
    case Space::output: {
      const ChunkCutter cut(*in_.program, in_.input, in_.output, element_);
      const Place place = cut.place_of(ref);
      const uint64_t begin = slice_of(place.range, lane.round, shape_.slice).begin;
      return {place.block == nullptr ? nullptr : place.block + begin * element_, Operand::value};
    }
    case Space::acc:
      return {lane.acc + static_cast<size_t>(ref.chunk) * shape_.slice * acc_size_, Operand::acc};
    case Space::window:
      return {transport_.window()->local(lane.window, parity(lane)) +
                  static_cast<size_t>(ref.chunk) * shape_.window_stride,
              Operand::value};
    case Space::none:
      break;
  }
  return {};
}

const std::byte* Executor::peer_window(const LaneState& lane, int peer, int chunk) const {
  return transport_.window()->peer(peer, lane.window, parity(lane)) +
         static_cast<size_t>(chunk) * shape_.window_stride;
}

void Executor::check_message(const Message& message, const Step& step, uint64_t count) const {
  if (message.tag.bytes != count * wire_size(step.wire) || message.tag.wire != step.wire) {
    fail(ErrorKind::mismatch, "rank ", rank_, ", ", to_string(in_.call), ", algorithm ",
         in_.program->algorithm, ", step ", to_string(step), ": received ", message.tag.bytes,
         " bytes of ", name_of(message.tag.wire), "s, expected ", count * wire_size(step.wire),
         " of ", name_of(step.wire), "s: sender and receiver do not run the same Program");
  }
}

bool Executor::message_step(LaneState& lane, const Step& step, uint64_t count) {
  const StepTraits& traits = traits_of(step.kind);
  if (lane.sending) {
    lane.sending = !fifo_to(lane, step).sent();
    return !lane.sending;
  }
  std::optional<Message> message;
  if (traits.receives) {
    message = fifo_from(lane, step).peek();
    if (!message) {
      offer_places(lane, step);
      return false;
    }
    if (is_of_another(*message, step)) return false;
  }
  std::byte* slot = nullptr;
  if (traits.sends) {
    slot = fifo_to(lane, step).acquire();
    if (slot == nullptr) return false;
  }
  if (message) check_message(*message, step, count);

  const Slice src = traits.reads ? locate(lane, step.src) : Slice{};
  const Slice dst = traits.stores ? locate(lane, step.dst) : Slice{};
  Wire out = src.form == Operand::acc ? Wire::partial : Wire::value;
  const std::byte* payload = slot;  // of what is sent
  if (traits.reduces) {
    const Operand received = step.wire == Wire::partial ? Operand::acc : Operand::value;
    Terms terms{message->data, src.data, received, src.form};
    if (!step.received_first) terms = {src.data, message->data, src.form, received};
    out = traits.stores && dst.form == Operand::value ? Wire::value : Wire::partial;
    if (!traits.stores) {
      combine_to_acc(slot, terms, count);
    } else if (dst.form == Operand::acc) {
      combine_to_acc(dst.data, terms, count);
    } else {
      combine_to_value(dst.data, terms, count);
    }
    if (traits.stores) payload = dst.data;
  } else {
    payload = traits.receives ? message->data : src.data;
    if (traits.receives) out = step.wire;
    if (traits.stores) {
      // A vector of no elements may have no address, which memcpy must not be given.
      if (count > 0 && dst.data != payload) std::memcpy(dst.data, payload, count * wire_size(out));
      payload = dst.data;
    }
  }

  if (message && payload == message->data && !traits.stores && traits.sends && count > 0) {
    std::memcpy(slot, payload, message->tag.bytes);  // it is released before that is sent
    payload = slot;
  }
  if (traits.receives) fifo_from(lane, step).release();
  if (!traits.sends) return true;
  const MessageTag tag{fingerprint_of(step), static_cast<uint32_t>(count * wire_size(out)), out};
  SendEnd& fifo = fifo_to(lane, step);
  if (payload == slot || count == 0) {
    fifo.publish(tag);
    return true;
  }
  fifo.send(tag, payload);
  // The next steps may overwrite what is being sent.
  lane.sending = !fifo.sent();
  if (lane.sending) offer_next(lane, step, 0);
  return !lane.sending;
}

// Where the message of a step that only stores it may be read straight to. The step after it too,
// when that receives from the same FIFO: its message comes after what this step waits for anyway.
void Executor::offer_places(LaneState& lane, const Step& step) {
  if (lane.offered) return;  // once a step: a lane looks often
  lane.offered = true;
  offer_place(lane, step, 0);
  const Step* next = step_after(lane);
  if (next != nullptr && next->from == step.from && next->channel == step.channel) {
    offer_next(lane, step, 1);
  }
}

// The next step's place while this one is not over: then nothing orders what is read there after
// this step but the message itself, so the two must not have a chunk in common.
void Executor::offer_next(const LaneState& lane, const Step& step, uint32_t later) {
  const Step* next = step_after(lane);
  if (next == nullptr) return;
  const auto touches = [&](Ref ref) {
    if (ref.space == Space::output) return ref.chunk == next->dst.chunk;
    return ref.space == Space::input && output_in_place(*in_.program, ref.chunk) == next->dst.chunk;
  };
  if (!touches(step.src) && !touches(step.dst)) offer_place(lane, *next, later);
}

void Executor::offer_place(const LaneState& lane, const Step& step, uint32_t later) {
  const StepTraits& traits = traits_of(step.kind);
  if (!traits.receives || traits.reduces || step.dst.space != Space::output) return;
  const uint64_t count = count_of(lane, step);
  if (count == 0) return;
  const auto bytes = static_cast<uint32_t>(count * wire_size(step.wire));
  fifo_from(lane, step)
      .offer(locate(lane, step.dst).data, {fingerprint_of(step), bytes, step.wire}, later);
}

void Executor::give_up() {
  for (LaneState& lane : lanes_) {
    if (done() || lane.round >= shape_.rounds || lane.step >= lane.lane->steps.size()) continue;
    const Step& step = lane.lane->steps[lane.step];
    if (traits_of(step.kind).receives) fifo_from(lane, step).withdraw();
    if (traits_of(step.kind).sends) fifo_to(lane, step).recall();
    const Step* next = step_after(lane);
    if (next != nullptr && traits_of(next->kind).receives) fifo_from(lane, *next).withdraw();
  }
  exchanging_ = false;
  lease_.give_up();
}

bool Executor::copy_step(LaneState& lane, const Step& step, uint64_t count) {
  if (std::exchange(lane.copied, false)) return true;
  store(locate(lane, step.dst), locate(lane, step.src), count);
  return true;
}

bool Executor::copy_from_step(LaneState& lane, const Step& step, uint64_t count) {
  if (step.remote == Space::input) return borrow_step(lane, step, count);
  const std::byte* src = peer_window(lane, step.from, step.remote_chunk);
  const Slice dst = locate(lane, step.dst);
  if (count > 0) std::memcpy(dst.data, src, count * element_);
  return true;
}

bool Executor::reduce_from_step(LaneState& lane, const Step& step, uint64_t count) {
  if (step.remote == Space::input) return borrow_step(lane, step, count);
  if (count == 0) return true;
  terms_.clear();
  for (const int member : in_.program->groups[static_cast<size_t>(step.group)]) {
    terms_.push_back(member == rank_ ? locate(lane, step.src).data
                                     : peer_window(lane, member, step.remote_chunk));
  }
  const Slice sum = locate(lane, step.dst);
  const Step* next = next_copy_of(lane, step.dst);
  const Slice copy = next != nullptr ? locate(lane, next->dst) : Slice{};
  lane.copied = copy.data != nullptr && copy.form == sum.form;
  targets_.assign({sum.data});
  if (lane.copied) targets_.push_back(copy.data);
  sum_terms(sum.form, 0, count);
  return true;
}

// The next step of the round, where it copies what this one stores.
const Step* Executor::next_copy_of(const LaneState& lane, Ref stored) const {
  const auto& steps = lane.lane->steps;
  if (lane.step + 1 == steps.size()) return nullptr;
  const Step& next = steps[lane.step + 1];
  return next.kind == StepKind::copy && next.src == stored ? &next : nullptr;
}

bool Executor::barrier_step(LaneState& lane, const Step& step, uint64_t /*count*/) {
  Window& window = *transport_.window();
  const Arrival mine(lane.history->barriers + 1, fingerprint_);
  if (!lane.announced) {
    lease_.exit();
    window.arrive(lane.window, mine);
    lane.announced = true;
  }
  const auto& group = in_.program->groups[static_cast<size_t>(step.group)];
  for (; lane.arrived < group.size(); ++lane.arrived) {
    const int member = group[lane.arrived];
    if (member == rank_) continue;
    const Arrival theirs = window.arrival_of(member, lane.window, mine);
    if (!theirs.reached(mine)) return false;
    // A peer that is past this barrier has compared fingerprints with us before it went on.
    if (theirs.same_barrier(mine) && !theirs.same_fingerprint(mine)) report_mismatch(member);
  }
  if (shape_.in_cell) {
    // Whoever has come to this barrier is done with the other buffer.
    window.expect_write(lane.window, 1 - parity(lane), shape_.window_stride);
  }
  ++lane.history->barriers;
  lane.announced = false;
  lane.arrived = 0;
  return true;
}

}  // namespace pycoll
