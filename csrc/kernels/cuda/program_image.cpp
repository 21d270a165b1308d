#include "kernels/cuda/program_image.h"

#include <algorithm>

#include "core/error.h"

namespace pycoll::cuda {
namespace {

bool in_vectors(Ref ref) {
  return ref.space == Space::input || ref.space == Space::output;
}

// The chunk of the caller's vectors that has a step's length, as length_class() has it: that of its
// operand there, or of the vector with more chunks (any, where all chunks have one length).
Ref length_ref(const Program& program, const Step& step) {
  const StepTraits& traits = traits_of(step.kind);
  if (traits.reads && in_vectors(step.src)) return step.src;
  if (traits.stores && in_vectors(step.dst)) return step.dst;
  if (length_classes(program) == 1) {
    const bool has_input = program.input_chunks <= program.output_chunks;
    return {has_input ? Space::input : Space::output, 0};
  }
  const Space most = program.input_chunks >= program.output_chunks ? Space::input : Space::output;
  return {most, traits.reads ? step.src.chunk : step.dst.chunk};
}

bool sends_acc(const Step& step, const StepTraits& traits) {
  if (traits.reduces) return !traits.stores || step.dst.space == Space::acc;
  if (traits.receives) return step.wire == Wire::partial;
  return step.src.space == Space::acc;
}

uint8_t bits_of(const StepTraits& traits) {
  unsigned bits = 0;
  if (traits.receives) bits |= ProgramStep::receives;
  if (traits.reduces) bits |= ProgramStep::reduces;
  if (traits.reads) bits |= ProgramStep::reads;
  if (traits.stores) bits |= ProgramStep::stores;
  if (traits.sends) bits |= ProgramStep::sends;
  return static_cast<uint8_t>(bits);
}

uint64_t end_bit(int32_t peer, int32_t channel) {
  return uint64_t{1} << (peer * kMaxChannels + channel);
}

void use_ends(ProgramLane& lane, const Step& step, const StepTraits& traits) {
  if (traits.receives) lane.receives |= end_bit(step.from, step.channel);
  if (traits.sends) lane.sends |= end_bit(step.to, step.channel);
}

bool uses_window(const Step& step) {
  const bool reads_peers = step.kind == StepKind::reduce_from || step.kind == StepKind::copy_from;
  return reads_peers || step.src.space == Space::window || step.dst.space == Space::window;
}

ProgramStep compile_step(const Program& program, const Step& step) {
  const StepTraits& traits = traits_of(step.kind);
  ProgramStep compiled;
  compiled.kind = static_cast<uint8_t>(step.kind);
  compiled.does = bits_of(traits);
  compiled.src = static_cast<uint8_t>(step.src.space);
  compiled.dst = static_cast<uint8_t>(step.dst.space);
  // 0 where the kind has none: kernels index by them before they look at the kind.
  compiled.from = static_cast<uint8_t>(std::max(step.from, 0));
  compiled.to = static_cast<uint8_t>(std::max(step.to, 0));
  compiled.channel = static_cast<uint8_t>(step.channel);
  compiled.received_acc = step.wire == Wire::partial ? 1 : 0;
  compiled.sent_acc = sends_acc(step, traits) ? 1 : 0;
  compiled.received_first = step.received_first ? 1 : 0;
  compiled.src_chunk = step.src.chunk;
  compiled.dst_chunk = step.dst.chunk;
  const Ref length = length_ref(program, step);
  compiled.length_of = static_cast<uint8_t>(length.space);
  compiled.length_chunk = length.chunk;
  compiled.remote_chunk = step.remote_chunk;
  if (step.group >= 0) {
    for (const int32_t member : program.groups[static_cast<size_t>(step.group)]) {
      compiled.members |= 1u << member;
    }
  }
  return compiled;
}

}  // namespace

ProgramImage compile(const Program& program) {
  if (program.world_size > kMaxRanks) {
    fail(ErrorKind::not_implemented, "a kernel reaches ", kMaxRanks, " ranks, not ",
         program.world_size);
  }
  const auto sums_to_acc = [](const Step& step) {
    return step.kind == StepKind::reduce_from && step.dst.space == Space::acc;
  };
  for (const Lane& lane : program.lanes) {
    if (std::none_of(lane.steps.begin(), lane.steps.end(), sums_to_acc)) continue;
    fail(ErrorKind::not_implemented, program.algorithm,
         " sums windows into accumulators: no Program for the executor kernel");
  }
  if (program.needs_lease) {
    fail(ErrorKind::not_implemented, program.algorithm, " works on peers' vectors in place: no ",
         "Program for the executor kernel");
  }
  ProgramImage image;
  ProgramHeader& header = image.header;
  header.lanes = static_cast<int32_t>(program.lanes.size());
  header.channels = program.channels;
  header.input_chunks = program.input_chunks;
  header.output_chunks = program.output_chunks;
  header.acc_chunks = program.acc_chunks;
  header.window_chunks = program.window_chunks;
  header.pairwise = traits_of(program.collective).lengths == Lengths::pairwise ? 1 : 0;
  for (size_t index = 0; index < program.lanes.size(); ++index) {
    ProgramLane& lane = header.lane[index];
    lane.first = static_cast<int32_t>(image.steps.size());
    for (const Step& step : program.lanes[index].steps) {
      image.steps.push_back(compile_step(program, step));
      use_ends(lane, step, traits_of(step.kind));
      if (step.kind == StepKind::barrier) lane.meets = 1;
      if (uses_window(step)) lane.uses_window = 1;
    }
    lane.count = static_cast<int32_t>(image.steps.size()) - lane.first;
  }
  return image;
}

ProgramImage compile_messages(const std::vector<MessageStep>& messages) {
  int32_t counts[2] = {0, 0};
  std::vector<ProgramStep> steps_of[2][kMaxRanks];
  for (const MessageStep& message : messages) {
    if (message.peer < 0 || message.peer >= kMaxRanks) {
      fail(ErrorKind::invalid_argument, "rank ", message.peer, " is no peer of a kernel");
    }
    int32_t& block = counts[message.sends ? 1 : 0];
    if (block == kMaxBlocks) {
      fail(ErrorKind::invalid_argument, "more than ", kMaxBlocks, " messages of one direction");
    }
    const StepKind kind = message.sends ? StepKind::send : StepKind::recv;
    const Space space = message.sends ? Space::input : Space::output;
    ProgramStep step;
    step.kind = static_cast<uint8_t>(kind);
    step.does = bits_of(traits_of(kind));
    step.src = static_cast<uint8_t>(message.sends ? Space::input : Space::none);
    step.dst = static_cast<uint8_t>(message.sends ? Space::none : Space::output);
    step.from = step.to = static_cast<uint8_t>(message.peer);
    step.length_of = static_cast<uint8_t>(space);
    step.src_chunk = step.dst_chunk = step.length_chunk = block++;
    steps_of[message.sends ? 1 : 0][message.peer].push_back(step);
  }
  ProgramImage image;
  ProgramHeader& header = image.header;
  header.step_by_step = header.pairwise = 1;
  header.input_chunks = counts[1];
  header.output_chunks = counts[0];
  for (int32_t direction = 0; direction < 2; ++direction) {
    for (int32_t peer = 0; peer < kMaxRanks; ++peer) {
      const std::vector<ProgramStep>& steps = steps_of[direction][peer];
      if (steps.empty()) continue;
      ProgramLane& lane = header.lane[header.lanes++];
      lane.first = static_cast<int32_t>(image.steps.size());
      lane.count = static_cast<int32_t>(steps.size());
      (direction == 1 ? lane.sends : lane.receives) = end_bit(peer, 0);
      image.steps.insert(image.steps.end(), steps.begin(), steps.end());
    }
  }
  return image;
}

}  // namespace pycoll::cuda
