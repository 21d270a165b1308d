// What torch holds of calls on GPUs.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "runtime/device/device_group.h"
#include "torch/work.h"

namespace pycoll::torch_adapter {

// How a call on a GPU may end, for who waits for it.
struct Progress {
  std::shared_ptr<DeviceGroup> group;
  std::shared_ptr<c10::Event> done;  // recorded behind the call
  Nanoseconds timeout;               // of the call
  Interrupt interrupt;
  std::string name;  // "rank 0: pycoll:all_reduce #3 on cuda:0"

  bool is_over() const;  // well or not
  // Throws the group's error, or that of a GPU that has failed.
  void check() const;
  // Blocks the caller until it is over; false when `limit` passed first. Throws
  // what check() throws.
  bool wait(Nanoseconds limit) const;
  // Until it is done, or the call's timeout: then the group is given up.
  void wait_to_the_end() const;
};

// A call that is on a stream. wait() makes the current stream wait for it, and blocks the caller
// only when that was asked for (PYCOLL_BLOCKING_WAIT), when a time limit is given, and in barriers.
class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(Description description, Progress progress, c10::Device device, uint64_t sequence,
             bool blocking);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  Tensors result() override { return outputs_; }
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  // Complete from the start, as users of NCCL know it: its value is there for the streams of who
  // takes it from the future, in the order of streams.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  const Progress progress_;
  const c10::Device device_;
  const uint64_t sequence_;
  const bool blocking_;
  const Tensors outputs_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by future_mutex_
};

// A message that arrives in host memory and goes on to the GPU from there.
class StagedReceive final : public c10d::Work {
 public:
  struct Staging {
    at::Tensor host;
    at::Tensor device;                  // where it belongs
    std::shared_ptr<c10::Event> ready;  // then the tensor may be written
    // Fills `device` from `host`, by the current stream; none: they hold the same.
    std::function<void(at::Tensor& device, const at::Tensor& host)> deliver;
  };
  static c10::intrusive_ptr<StagedReceive> make(Description description,
                                                c10::intrusive_ptr<c10d::Work> message,
                                                Staging staging);
  StagedReceive(Description description, c10::intrusive_ptr<c10d::Work> message, Staging staging);

  bool isCompleted() override { return future_->completed(); }
  bool isSuccess() const override { return future_->hasValue(); }
  std::exception_ptr exception() const override;
  int sourceRank() const override { return message_->sourceRank(); }
  Tensors result() override { return {staging_.device}; }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  void deliver();

  const c10::intrusive_ptr<c10d::Work> message_;
  const Staging staging_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// What is on the stream now.
std::shared_ptr<c10::Event> recorded(c10::Stream stream);

// The GPUs that tensors are on.
std::vector<c10::Device> gpus_of(const Tensors& tensors);

// Completes the future of several works with what they have made, on whatever GPUs that is: for
// their streams it is there when all parts are done.
void complete_together(c10::ivalue::Future& future, const CombinedWork::Parts& parts,
                       const Tensors& value);

}  // namespace pycoll::torch_adapter
