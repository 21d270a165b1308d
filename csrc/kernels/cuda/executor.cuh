// The executor kernel: runs one rank's Program over FIFOs and windows in peer-mapped memory.
//
// A lane of the Program runs on `channels` blocks. Slice r of every chunk belongs to channel
// r % channels, and each channel has FIFOs and windows of its own: rounds share no memory, so what
// the checker proves of one holds for all (program.h). A block runs its lane's steps in order;
// thread 0 waits for messages and gives slots back, the last thread waits for slots and publishes
// messages.
//
// Why it is safe: what threads of a block do before a __syncthreads happens before what thread 0 or
// the last one releases after it, with system scope; whoever acquires that and comes to a
// __syncthreads hands it on to its block. A slot is written only when `depth` messages back has
// been read.
#pragma once

#include "kernels/cuda/any_op.cuh"
#include "kernels/cuda/executor_arguments.h"
#include "kernels/cuda/waiting.cuh"
#include "program/program.h"

namespace pycoll::cuda {

// Where nothing is reduced: elements are bytes.
class Move {
 public:
  struct Parameters {
    uint32_t unused;
  };
  explicit PYCOLL_DEVICE Move(const Parameters&) {}
  static PYCOLL_DEVICE uint64_t value_size() { return 1; }
  static PYCOLL_DEVICE uint64_t acc_size() { return 1; }
  PYCOLL_DEVICE void combine(const Team&, const Combination&, uint64_t) const {}
  PYCOLL_DEVICE void convert(const Team&, const Operand&, const Target&, uint64_t) const {}
  template <class Terms, class Targets>
  PYCOLL_DEVICE void sum(const Team&, const Terms&, const Targets&, uint64_t, bool) const {}
};

// Counters of a block's ends of FIFOs, by peer * kMaxChannels + channel, in shared memory.
constexpr int kEnds = kMaxRanks * kMaxChannels;
struct FifoCounters {
  uint32_t sent[kEnds];
  uint32_t received[kEnds];
};

// A lane's first steps, in shared memory: each acquire empties the first-level cache, so that every
// step would wait for the second.
constexpr int kCachedSteps = 32;
constexpr int kStepWords = sizeof(ProgramStep) / sizeof(uint32_t);

struct Range {
  uint64_t begin;
  uint64_t end;
  PYCOLL_DEVICE uint64_t size() const { return end - begin; }
};

PYCOLL_DEVICE Range chunk_range_of(const CutVector& vector, int32_t chunk) {
  if (vector.chunk == 0) return {0, vector.count[chunk]};
  const uint64_t count = vector.count[0];
  const uint64_t begin = static_cast<uint64_t>(chunk) * vector.chunk;
  return {begin < count ? begin : count,
          begin + vector.chunk < count ? begin + vector.chunk : count};
}
PYCOLL_DEVICE std::byte* block_of(const CutVector& vector, int32_t chunk) {
  return vector.block[vector.chunk == 0 ? chunk : 0];
}
PYCOLL_DEVICE Range slice_range_of(const Range& chunk, uint64_t round, uint64_t slice) {
  const uint64_t begin = chunk.begin + round * slice;
  return {begin < chunk.end ? begin : chunk.end,
          begin + slice < chunk.end ? begin + slice : chunk.end};
}

template <class Arithmetic>
class Executor {
 public:
  using Arguments = ExecutorArguments<typename Arithmetic::Parameters>;

  PYCOLL_DEVICE Executor(const Arguments& arguments, BlockState* state, FifoCounters* counters,
                         ProgramStep* steps)
      : in_(arguments),
        group_(arguments.group),
        state_(state),
        counters_(counters),
        steps_(steps),
        arithmetic_(arguments.arithmetic),
        lane_(arguments.header.lane[lane_of_block(arguments)]),
        channel_(static_cast<int32_t>(blockIdx.x) % arguments.plan.channels) {}

  PYCOLL_DEVICE void run() {
    load_steps();
    load_counters();
    const bool good = in_.header.step_by_step != 0 ? run_messages() : run_rounds();
    if (good) store_counters();
  }

 private:
  static PYCOLL_DEVICE int32_t lane_of_block(const Arguments& arguments) {
    return static_cast<int32_t>(blockIdx.x) / arguments.plan.channels;
  }

  // ---- What outlives the kernel. Only this block's own ends of FIFOs. ----

  PYCOLL_DEVICE void load_counters() {
    for (int end = static_cast<int>(threadIdx.x); end < kEnds;
         end += static_cast<int>(blockDim.x)) {
      if (lane_.sends >> end & 1) counters_->sent[end] = *counter(group_.layout.sent, end);
      if (lane_.receives >> end & 1) {
        counters_->received[end] = *counter(group_.layout.received, end);
      }
    }
    if (lane_.meets != 0) {
      barriers_ = *block_word(group_.layout.barriers);
      window_round_ = *block_word(group_.layout.window_rounds);
    }
    __syncthreads();
  }
  PYCOLL_DEVICE void store_counters() {
    __syncthreads();
    for (int end = static_cast<int>(threadIdx.x); end < kEnds;
         end += static_cast<int>(blockDim.x)) {
      if (lane_.sends >> end & 1) *counter(group_.layout.sent, end) = counters_->sent[end];
      if (lane_.receives >> end & 1) {
        *counter(group_.layout.received, end) = counters_->received[end];
      }
    }
    if (lane_.meets != 0 && threadIdx.x == 0) {
      *block_word(group_.layout.barriers) = barriers_;
      *block_word(group_.layout.window_rounds) = window_round_;
    }
  }
  PYCOLL_DEVICE uint32_t* counter(uint64_t array, int end) const {
    return word_at<uint32_t>(group_, group_.rank, array,
                             fifo_index(group_, end / kMaxChannels, fifo_of(end % kMaxChannels)));
  }
  PYCOLL_DEVICE uint32_t* block_word(uint64_t array) const {
    return word_at<uint32_t>(group_, group_.rank, array, blockIdx.x);
  }
  PYCOLL_DEVICE int32_t fifo_of(int32_t program_channel) const {
    return in_.plan.first_fifo + channel_ * in_.header.channels + program_channel;
  }

  // ---- The order of steps. ----

  // Before the __syncthreads of load_counters().
  PYCOLL_DEVICE void load_steps() {
    const int words = (lane_.count < kCachedSteps ? lane_.count : kCachedSteps) * kStepWords;
    const auto* from = reinterpret_cast<const uint32_t*>(in_.steps + lane_.first);
    for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x)) {
      reinterpret_cast<uint32_t*>(steps_)[i] = from[i];
    }
  }
  PYCOLL_DEVICE ProgramStep step_at(int32_t i) const {
    return i < kCachedSteps ? steps_[i] : in_.steps[lane_.first + i];
  }

  PYCOLL_DEVICE bool run_rounds() {
    const auto channels = static_cast<uint64_t>(in_.plan.channels);
    for (uint64_t round = static_cast<uint64_t>(channel_); round < in_.plan.rounds;
         round += channels) {
      for (int32_t i = 0; i < lane_.count; ++i) {
        const ProgramStep step = step_at(i);
        const uint64_t count = slice_range_of(length_of(step), round, in_.plan.slice).size();
        // Both sides skip a slice that is empty, except in the first round (program.h).
        const bool is_barrier = step.kind == static_cast<uint8_t>(StepKind::barrier);
        if (count == 0 && round > 0 && !is_barrier) continue;
        if (!perform(step, static_cast<uint32_t>(i), round, count)) return false;
      }
      if (lane_.uses_window != 0) ++window_round_;
    }
    return true;
  }

  PYCOLL_DEVICE bool run_messages() {
    const auto channels = static_cast<uint64_t>(in_.plan.channels);
    for (int32_t i = 0; i < lane_.count; ++i) {
      const ProgramStep step = step_at(i);
      const Range whole = length_of(step);
      for (uint64_t round = static_cast<uint64_t>(channel_);
           round == 0 || round * in_.plan.slice < whole.size(); round += channels) {
        const uint64_t count = slice_range_of(whole, round, in_.plan.slice).size();
        if (!message(step, static_cast<uint32_t>(i), round, count)) return false;
      }
    }
    return true;
  }

  PYCOLL_DEVICE bool perform(const ProgramStep& step, uint32_t index, uint64_t round,
                             uint64_t count) {
    switch (static_cast<StepKind>(step.kind)) {
      case StepKind::barrier:
        return meet(group_, state_, in_.call, step.members, &barriers_, index);
      case StepKind::copy:
        copy(step, round, count);
        break;
      case StepKind::copy_from:
        copy_from(step, round, count);
        break;
      case StepKind::reduce_from:
        reduce_from(step, round, count);
        break;
      default:
        return message(step, index, round, count);
    }
    __syncthreads();  // the next step may give other threads the same elements
    return true;
  }

  // ---- Steps. ----

  PYCOLL_DEVICE bool message(const ProgramStep& step, uint32_t index, uint64_t round,
                             uint64_t count) {
    const bool receives = (step.does & ProgramStep::receives) != 0;
    const bool sends = (step.does & ProgramStep::sends) != 0;
    const int32_t fifo = fifo_of(step.channel);
    uint32_t* const received = &counters_->received[step.from * kMaxChannels + step.channel];
    uint32_t* const sent = &counters_->sent[step.to * kMaxChannels + step.channel];

    if (receives && threadIdx.x == 0) await_message(step, index, fifo, *received);
    if (sends && threadIdx.x == blockDim.x - 1) await_slot(step, index, fifo, *sent);
    __syncthreads();
    if (block_failed(state_)) return false;

    SlotAddress in{}, out{};
    if (receives) in = slot_of(group_, group_.rank, step.from, fifo, *received);
    if (sends) out = slot_of(group_, step.to, group_.rank, fifo, *sent);
    if ((step.does & ProgramStep::reduces) != 0) {
      combine(step, in.data, out.data, round, count);
    } else {
      pass_on(step, in.data, out.data, round, count);
    }
    __syncthreads();

    if (receives && threadIdx.x == 0) {
      ++*received;
      device::store_release<Scope::system>(credit_of(group_, step.from, group_.rank, fifo),
                                           *received);
    }
    if (sends && threadIdx.x == blockDim.x - 1) {
      ++*sent;
      device::store_release<Scope::system>(out.flag, flag_of(*sent, fingerprint_of(step)));
    }
    return true;
  }

  PYCOLL_DEVICE void await_message(const ProgramStep& step, uint32_t index, int32_t fifo,
                                   uint32_t number) {
    const SlotAddress slot = slot_of(group_, group_.rank, step.from, fifo, number);
    const Awaited awaited{step.from, number + 1, index};
    const uint64_t seen = wait_for(group_, state_, in_.call, awaited, slot.flag);
    check_fingerprint(group_, state_, in_.call, awaited, seen, fingerprint_of(step));
  }

  PYCOLL_DEVICE void await_slot(const ProgramStep& step, uint32_t index, int32_t fifo,
                                uint32_t number) {
    const auto depth = static_cast<uint32_t>(group_.geometry.depth);
    const Awaited awaited{step.to, number + 1 - depth, index};
    wait_for(group_, state_, in_.call, awaited, credit_of(group_, group_.rank, step.to, fifo));
  }

  // Where only two ranks know the length of a block nothing else compares it.
  PYCOLL_DEVICE uint32_t fingerprint_of(const ProgramStep& step) const {
    if (in_.header.pairwise == 0) return in_.call.fingerprint;
    const uint64_t mixed = length_of(step).size() * 0x9E3779B97F4A7C15u;
    return in_.call.fingerprint ^ static_cast<uint32_t>(mixed >> 32);
  }

  PYCOLL_DEVICE void combine(const ProgramStep& step, const std::byte* in, std::byte* out,
                             uint64_t round, uint64_t count) {
    const bool stores = (step.does & ProgramStep::stores) != 0;
    Combination c;
    c.received = {in, step.received_acc != 0};
    c.own = {locate(step.src, step.src_chunk, round), is_acc(step.src)};
    c.stored = {stores ? locate(step.dst, step.dst_chunk, round) : nullptr, is_acc(step.dst)};
    c.sent = {out, step.sent_acc != 0};
    c.received_first = step.received_first != 0;
    arithmetic_.combine(block_team(), c, count);
  }

  // A message, unchanged, to where it is stored and to whom it is sent.
  PYCOLL_DEVICE void pass_on(const ProgramStep& step, const std::byte* in, std::byte* out,
                             uint64_t round, uint64_t count) {
    const std::byte* src = in != nullptr ? in : locate(step.src, step.src_chunk, round);
    std::byte* dst =
        (step.does & ProgramStep::stores) != 0 ? locate(step.dst, step.dst_chunk, round) : nullptr;
    const bool acc = in != nullptr ? step.received_acc != 0 : is_acc(step.src);
    const Copy copy = dst != nullptr ? Copy{src, dst, out} : Copy{src, out, nullptr};
    copy_bytes(block_team(), copy, count * form_size(acc));
  }

  PYCOLL_DEVICE void copy(const ProgramStep& step, uint64_t round, uint64_t count) {
    std::byte* src = locate(step.src, step.src_chunk, round);
    std::byte* dst = locate(step.dst, step.dst_chunk, round);
    if (src == dst) return;  // in place
    if (is_acc(step.src) == is_acc(step.dst)) {
      copy_bytes(block_team(), {src, dst, nullptr}, count * form_size(is_acc(step.src)));
    } else {
      arithmetic_.convert(block_team(), {src, is_acc(step.src)}, {dst, is_acc(step.dst)}, count);
    }
  }

  PYCOLL_DEVICE void copy_from(const ProgramStep& step, uint64_t round, uint64_t count) {
    const std::byte* src = peer_window(step.from, step.remote_chunk);
    copy_bytes(block_team(), {src, locate(step.dst, step.dst_chunk, round), nullptr},
               count * arithmetic_.value_size());
  }

  struct WindowTerms {
    const Executor& executor;
    const ProgramStep& step;
    const std::byte* own;
    template <class Body>
    PYCOLL_DEVICE void for_each(const Body& body) const {
      bool begins = true;
      for (int32_t rank = 0; rank < executor.group_.geometry.world_size; ++rank) {
        if ((step.members >> rank & 1) == 0) continue;
        body(begins,
             rank == executor.group_.rank ? own : executor.peer_window(rank, step.remote_chunk));
        begins = false;
      }
    }
  };
  struct OneTarget {
    std::byte* data;
    template <class Body>
    PYCOLL_DEVICE void for_each(const Body& body) const {
      body(data);
    }
  };
  PYCOLL_DEVICE void reduce_from(const ProgramStep& step, uint64_t round, uint64_t count) {
    const std::byte* own = locate(step.src, step.src_chunk, round);
    std::byte* dst = locate(step.dst, step.dst_chunk, round);
    arithmetic_.sum(block_team(), WindowTerms{*this, step, own}, OneTarget{dst}, count,
                    (low_bits(own) | low_bits(dst)) == 0);
  }

  // ---- Where things lie. ----

  PYCOLL_DEVICE const CutVector& vector_of(uint8_t space) const {
    return space == static_cast<uint8_t>(Space::input) ? in_.input : in_.output;
  }
  PYCOLL_DEVICE Range length_of(const ProgramStep& step) const {
    return chunk_range_of(vector_of(step.length_of), step.length_chunk);
  }
  static PYCOLL_DEVICE bool is_acc(uint8_t space) {
    return space == static_cast<uint8_t>(Space::acc);
  }
  PYCOLL_DEVICE uint64_t form_size(bool acc) const {
    return acc ? arithmetic_.acc_size() : arithmetic_.value_size();
  }
  PYCOLL_DEVICE std::byte* locate(uint8_t space, int32_t chunk, uint64_t round) const {
    switch (static_cast<Space>(space)) {
      case Space::acc: {
        const uint64_t slice = static_cast<uint64_t>(chunk) * in_.plan.slice;
        return group_.region[group_.rank] + group_.layout.scratch +
               blockIdx.x * in_.scratch_stride + slice * arithmetic_.acc_size();
      }
      case Space::window:
        return window_of(group_, group_.rank, blockIdx.x, window_round_) +
               static_cast<uint64_t>(chunk) * in_.plan.slice * arithmetic_.value_size();
      default:
        break;
    }
    const CutVector& vector = vector_of(space);
    const Range slice = slice_range_of(chunk_range_of(vector, chunk), round, in_.plan.slice);
    return block_of(vector, chunk) + slice.begin * arithmetic_.value_size();
  }
  PYCOLL_DEVICE const std::byte* peer_window(int32_t rank, int32_t chunk) const {
    return window_of(group_, rank, blockIdx.x, window_round_) +
           static_cast<uint64_t>(chunk) * in_.plan.slice * arithmetic_.value_size();
  }

  const Arguments& in_;
  const GroupView& group_;
  BlockState* state_;
  FifoCounters* counters_;
  ProgramStep* steps_;
  const Arithmetic arithmetic_;
  const ProgramLane& lane_;
  const int32_t channel_;
  uint32_t barriers_ = 0;
  uint32_t window_round_ = 0;
};

// One block a multiprocessor is enough: given the choice ptxas spills registers to fit two.
template <class Arithmetic>
__global__ void __launch_bounds__(kMaxThreads, 1) run_program_kernel(
    PYCOLL_GRID_CONSTANT ExecutorArguments<typename Arithmetic::Parameters> arguments) {
  PYCOLL_SHARED(BlockState, state, 1);
  PYCOLL_SHARED(FifoCounters, counters, 1);
  PYCOLL_SHARED(ProgramStep, steps, kCachedSteps);
  begin_block(state);
  Executor<Arithmetic>(arguments, state, counters, steps).run();
}

}  // namespace pycoll::cuda
