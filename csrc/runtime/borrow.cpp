// The executor's steps on peers' own vectors (leased_call.h).
#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "runtime/executor.h"
#include "runtime/slices.h"

namespace pycoll {
namespace {

// Bytes between two looks at whether the lenders are well, and at what else there is to do.
constexpr uint64_t kPortion = 1 << 20;

}  // namespace

// Asks for leases, or knows that there will be none.
void Executor::begin_exchange() {
  exchanging_ = lease_.offer(in_, fingerprint_);
  if (!exchanging_) fall_back();
}

void Executor::fall_back() {
  if (in_.fallback == nullptr) {
    fail(ErrorKind::invalid_argument, "rank ", rank_, ", ", to_string(in_.call), ": algorithm ",
         in_.program->algorithm,
         " works on the ranks' own vectors, and some are not in shareable memory");
  }
  in_.program = in_.fallback;
  in_.shape = {};
}

// False while offers are missing.
bool Executor::end_exchange() {
  const LeasedCall::Verdict verdict = lease_.look();
  if (const auto stranger = lease_.stranger()) report_mismatch(*stranger);
  if (verdict == LeasedCall::Verdict::pending) return false;
  exchanging_ = false;
  if (verdict == LeasedCall::Verdict::refused) fall_back();
  start_program();
  return true;
}

// Where the slice of a peer's chunk begins.
std::byte* Executor::lent_slice(const LaneState& lane, int peer, Ref ref) const {
  const ChunkCutter cut(*in_.program, in_.input, in_.output, element_);
  std::byte* vector =
      lease_.vector_of(peer, ref.space, cut.elements_at(peer, ref.space) * element_);
  return vector + slice_of(cut.range_at(peer, ref), lane.round, shape_.slice).begin * element_;
}

void Executor::find_operands(const LaneState& lane, const Step& step) {
  terms_.clear();
  targets_.clear();
  const Ref remote{step.remote, step.remote_chunk};
  if (step.kind == StepKind::copy_from) {
    terms_.push_back(lent_slice(lane, step.from, remote));
    targets_.push_back(locate(lane, step.dst).data);
    return;
  }
  const auto& group = in_.program->groups[static_cast<size_t>(step.group)];
  for (const int member : group) {
    terms_.push_back(member == rank_ ? locate(lane, step.src).data
                                     : lent_slice(lane, member, remote));
  }
  if (step.kind == StepKind::reduce_from || step.to < 0 || step.to == rank_) {
    targets_.push_back(locate(lane, step.dst).data);
  }
  if (step.kind == StepKind::reduce_from || step.to == rank_) return;
  for (const int member : group) {
    const bool wanted = step.to < 0 ? member != rank_ : member == step.to;
    if (wanted) targets_.push_back(lent_slice(lane, member, step.dst));
  }
}

void Executor::combine_portion(const Step& step, uint64_t begin, uint64_t end) {
  if (step.kind == StepKind::copy_from) {
    std::memcpy(targets_[0] + begin * element_, terms_[0] + begin * element_,
                (end - begin) * element_);
    return;
  }
  const Operand form = step.dst.space == Space::acc ? Operand::acc : Operand::value;
  if (form == Operand::value && in_.kernels->sum_rows != nullptr) {
    // Only here: where everything is in this CPU's own caches, blocks are a quarter faster.
    in_.kernels->sum_rows({terms_.data(), terms_.size(), targets_.data(), targets_.size()}, begin,
                          end, in_.program->world_size);
  } else {
    sum_terms(form, begin, end);
  }
}

// One portion at a time: the driver looks for aborts and deadlines in between.
bool Executor::borrow_step(LaneState& lane, const Step& step, uint64_t count) {
  lane.in_step = false;
  if (!lease_.enter()) return false;
  if (count > 0) {
    find_operands(lane, step);
    const uint64_t portion = std::max<uint64_t>(1, kPortion / element_);
    const uint64_t end = std::min(count, lane.progress + portion);
    combine_portion(step, lane.progress, end);
    // Before anybody counts on it.
    if (!lease_.is_valid()) return false;
    lane.progress = end;
    lane.in_step = end < count;
    if (lane.in_step) return false;
    lane.progress = 0;
  }
  return true;
}

}  // namespace pycoll
