#include "torch/work.h"

#include <torch/csrc/python_headers.h>

#include <algorithm>
#include <optional>

#include "python/gil.h"
#include "torch/device_work.h"
#include "torch/errors.h"

namespace pycoll::torch_adapter {
namespace {

c10::intrusive_ptr<c10::ivalue::Future> new_future(std::vector<c10::Device> gpus = {}) {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                  std::move(gpus));
}

}  // namespace

Work::Work(std::shared_ptr<Communicator> communicator, Description description, Interrupt interrupt)
    : c10d::Work(description.rank, description.type, description.title, description.inputs),
      communicator_(std::move(communicator)),
      inputs_(std::move(description.inputs)),
      outputs_(std::move(description.outputs)),
      interrupt_(std::move(interrupt)) {}

std::exception_ptr Work::exception() const {
  return pending_->done() ? as_torch_error(pending_->error()) : nullptr;
}

int Work::sourceRank() const {
  const int source = pending_->done() ? pending_->source() : -1;
  if (source < 0) {
    refuse("pycoll:source_rank", "there is one for a receive that is done; this is ",
           pending_->describe(), pending_->done() ? "" : ", which is not done");
  }
  return source;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  std::optional<Nanoseconds> limit;
  if (timeout != kNoTimeout) limit = time_limit(timeout);
  const GilRelease release;
  with_torch_errors([&] {
    if (!pending_->wait(limit, interrupt_)) {
      fail(ErrorKind::timed_out, "rank ", communicator_->rank(), ": Timed out waiting ",
           to_seconds(*limit), " s for ", pending_->describe(), "; the operation goes on");
    }
  });
  complete();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  {
    const std::lock_guard lock(state_);
    if (!future_) future_ = new_future();
    if (!completed_here_) return future_;
  }
  mark_future();
  return future_;
}

void Work::complete() {
  {
    const std::lock_guard lock(state_);
    if (completed_here_) return;
    completed_here_ = true;
  }
  finish(as_torch_error(pending_->error()));
  mark_future();
}

// Without the lock: callbacks of the future may come back to this object.
void Work::mark_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(state_);
    if (!future_ || future_marked_) return;
    future_marked_ = true;
    future = future_;
  }
  if (pending_->error()) {
    future->setError(as_torch_error(pending_->error()));
  } else {
    future->markCompleted(c10::IValue(outputs_));
  }
}

CombinedWork::CombinedWork(Description description, Parts parts)
    : c10d::Work(description.rank, description.type, description.title, description.inputs),
      outputs_(std::move(description.outputs)),
      parts_(std::move(parts)),
      left_(parts_.size() + 1),
      future_(new_future(gpus_of(outputs_))) {}

c10::intrusive_ptr<CombinedWork> CombinedWork::make(Description description, Parts parts) {
  auto work = c10::make_intrusive<CombinedWork>(std::move(description), std::move(parts));
  for (const auto& part : work->parts_) {
    // The reference ends with the part, which always ends.
    part->getFuture()->addCallback([work](c10::ivalue::Future&) { work->part_ended(); });
  }
  work->part_ended();  // one more than there are parts: there may be none
  return work;
}

void CombinedWork::part_ended() {
  // acq_rel: the last one sees what all parts have left.
  if (left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const std::exception_ptr error = exception();
  finish(error);
  if (error) {
    future_->setError(error);
  } else {
    complete_together(*future_, parts_, outputs_);
  }
}

bool CombinedWork::isCompleted() {
  return std::all_of(parts_.begin(), parts_.end(), [](auto& part) { return part->isCompleted(); });
}

bool CombinedWork::isSuccess() const {
  return std::all_of(parts_.begin(), parts_.end(),
                     [](const auto& part) { return part->isSuccess(); });
}

std::exception_ptr CombinedWork::exception() const {
  for (const auto& part : parts_) {
    if (const std::exception_ptr error = part->exception()) return error;
  }
  return nullptr;
}

bool CombinedWork::wait(std::chrono::milliseconds timeout) {
  const Deadline end = Deadline::after(time_limit(timeout));
  for (const auto& part : parts_) {
    if (timeout <= kNoTimeout) {
      part->wait(timeout);
      continue;
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end.remaining());
    part->wait(std::max(left, std::chrono::milliseconds(1)));  // 0 would be no limit
  }
  // The thread that ended the last part may still be about to mark it.
  const GilRelease release;
  future_->wait();
  return true;
}

Profiled::Profiled(const char* title, const Tensors& inputs) {
  if (!record_.isActive()) return;
  // As works are shown: one kind of event, whether a call was synchronous or
  // not.
  record_._setAsync();
  const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
  record_.before(title, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
}

}  // namespace pycoll::torch_adapter
