// What torch holds of operations under way.
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "runtime/codec_group.h"
#include "runtime/pending.h"
#include "torch/tensors.h"

namespace pycoll::torch_adapter {

// How an operation looks from torch.
struct Description {
  int rank;
  c10d::OpType type;
  const char* title;  // "pycoll:all_reduce": what profilers show; nullptr:
                      // nothing is shown
  Tensors inputs;
  Tensors outputs;  // the value of the future
};

// An asynchronous operation. Keeps the tensors alive; its future is made only
// when somebody asks.
class Work final : public c10d::Work {
 public:
  Work(std::shared_ptr<Communicator> communicator, Description description, Interrupt interrupt);

  // Hands a CallRequest or MessageRequest to the communicator; throws when it
  // refuses.
  template <typename Request>
  void submit(Request request) {
    // The operation may end before submit() returns: complete() waits for this
    // lock.
    const std::lock_guard lock(state_);
    const auto self = c10::intrusive_ptr<Work>::reclaim_copy(this);
    request.on_complete = [self] { self->complete(); };
    pending_ =
        std::make_shared<QueuedOperation>(communicator_, communicator_->submit(std::move(request)));
  }
  // The same over a codec. That may complete in this thread: not under the lock.
  void submit(const std::shared_ptr<CodecGroup>& codecs, CodecRequest request) {
    const auto self = c10::intrusive_ptr<Work>::reclaim_copy(this);
    request.on_complete = [self] { self->complete(); };
    const auto call = codecs->prepare(std::move(request), interrupt_);
    {
      const std::lock_guard lock(state_);
      pending_ = call;
      codecs_ = codecs;
    }
    codecs->start(call);
  }

  bool isCompleted() override { return pending_->done(); }
  bool isSuccess() const override { return pending_->done() && !pending_->error(); }
  std::exception_ptr exception() const override;
  // Of a receive that is done; throws for everything else.
  int sourceRank() const override;
  Tensors result() override { return outputs_; }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return pending_->sequence(); }

 private:
  void complete();
  void mark_future();

  std::shared_ptr<Communicator> communicator_;
  Tensors inputs_;
  Tensors outputs_;
  Interrupt interrupt_;
  std::mutex state_;
  std::shared_ptr<CodecGroup> codecs_;              // outlives what is pending; may be none
  std::shared_ptr<Pending> pending_;                // set once, under state_
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by state_
  bool completed_here_ = false;                     // guarded by state_
  bool future_marked_ = false;                      // guarded by state_
};

// Several operations as one: done when all are, failed when one has.
class CombinedWork final : public c10d::Work {
 public:
  using Parts = std::vector<c10::intrusive_ptr<c10d::Work>>;

  // The description's outputs are those of all parts, in their order.
  static c10::intrusive_ptr<CombinedWork> make(Description description, Parts parts);
  CombinedWork(Description description, Parts parts);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  Tensors result() override { return outputs_; }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  void part_ended();

  Tensors outputs_;
  Parts parts_;
  std::atomic<size_t> left_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Shows a synchronous operation to a profiler while it lives.
class Profiled {
 public:
  Profiled(const char* title, const Tensors& inputs);

 private:
  at::RecordFunction record_{at::RecordScope::USER_SCOPE};
};

}  // namespace pycoll::torch_adapter
