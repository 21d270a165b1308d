// One call of a collective: what was asked, and how it ended.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/clock.h"
#include "runtime/executor.h"

namespace pycoll {

// What every request carries beside its data.
struct RequestBase {
  std::optional<Nanoseconds> timeout;  // else the group's
  // Run by the thread that drove the operation, when its result is in `output`, before anyone is
  // told. What it throws is the operation's error; the group goes on.
  std::function<void()> finalize;
  std::shared_ptr<void> keep_alive;  // whoever owns the vectors; dropped after the operation ended
  // Run once by that thread after waiters were told, also on failure; may call the communicator.
  std::function<void()> on_complete;
};

struct CallRequest : RequestBase {
  Collective collective = Collective::barrier;
  DType dtype = DType::uint8;
  ReduceOp reduce_op = ReduceOp::none;
  int root = 0;
  VectorView input;
  VectorView output;
  std::string algorithm;       // empty: the selector's choice
  double premul_factor = 1.0;  // premul_sum: multiplies this rank's input before the sum
};

constexpr int kAnySource = -1;

// One side of a point-to-point message. A receive matches the oldest message of that peer (or of
// any) with its tag; dtype and length must be those of the message.
struct MessageRequest : RequestBase {
  bool receives = false;
  int peer = 0;  // receives: kAnySource takes from whoever comes first
  int tag = 0;
  DType dtype = DType::uint8;
  Block block;
};

class Operation {
 public:
  Operation(CallRequest request, const CallHeader& header, const Program& program,
            const ReduceKernels* kernels, Nanoseconds timeout)
      : request_(std::move(request)),
        input_{&program, kernels, header, request_.input, request_.output},
        timeout_(timeout) {}

  const CallHeader& call() const { return input_.call; }
  // Acquire: pairs with finish(): whoever sees true sees the result and the error.
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Only when done: nullptr means success.
  std::exception_ptr error() const { return error_; }

 private:
  friend class Communicator;
  bool has_callback() const { return static_cast<bool>(request_.on_complete); }
  void call_on_complete() {
    if (!request_.on_complete) return;
    try {
      std::exchange(request_.on_complete, nullptr)();
    } catch (...) {
      // The operation has ended and was reported: there is nobody left to tell.
    }
  }
  // Lets go of the caller's memory. Never under the communicator's lock: it may need the GIL.
  void release() {
    request_.finalize = nullptr;
    request_.keep_alive.reset();
  }
  void finish(std::exception_ptr error) {
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
  }

  CallRequest request_;
  ExecutorInput input_;
  Nanoseconds timeout_;  // from the moment it is driven: waiting in the queue does not count
  std::exception_ptr error_;
  std::atomic<bool> done_{false};
};

}  // namespace pycoll
