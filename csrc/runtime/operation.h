// One call of a collective: what was asked, and how it ended.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <limits>
#include <list>
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

// What a call whose vectors are codes stands for, as ranks compare it.
struct OverCodec {
  uint8_t codec = 0;    // wire_tag(); 0: the vectors are what they are
  int32_t call = 0;     // pack_call()
  uint32_t layout = 0;  // hash of all lengths that every rank knows
};

struct CallRequest : RequestBase {
  Collective collective = Collective::barrier;
  DType dtype = DType::uint8;
  ReduceOp reduce_op = ReduceOp::none;
  int root = 0;
  VectorView input;
  VectorView output;
  OverCodec over;              // what `input` and `output` are codes of; for comparing
  std::string algorithm;       // empty: the selector's choice
  double premul_factor = 1.0;  // premul_sum: multiplies this rank's input before the sum
};

// A synchronous call on dense memory, with nobody to tell: all that run_at_once() needs.
struct PlainCall {
  // Blocks of one length, one after the other.
  struct Vector {
    std::byte* data = nullptr;
    uint64_t block_count = 0;  // elements
    uint32_t blocks = 0;
    bool operator==(const Vector&) const = default;
  };
  Collective collective = Collective::barrier;
  DType dtype = DType::uint8;
  ReduceOp reduce_op = ReduceOp::none;
  int root = 0;
  Vector input;
  Vector output;
  std::optional<Nanoseconds> timeout;  // else the group's
};

// No number that a rank could be by mistake, like -1.
constexpr int kAnySource = std::numeric_limits<int>::min();

// What the bytes of a message are codes of, as its two ranks compare it.
struct MessageCode {
  uint8_t codec = 0;  // wire_tag(); 0: they are what they are
  DType dtype = DType::uint8;
  uint64_t count = 0;
  bool operator==(const MessageCode&) const = default;
};

// One side of a point-to-point message. A receive matches the oldest message of that peer (or of
// any) with its tag; dtype, length and code must be those of the message.
struct MessageRequest : RequestBase {
  bool receives = false;
  int peer = 0;  // receives: kAnySource takes from whoever comes first
  int tag = 0;
  DType dtype = DType::uint8;
  Block block;
  MessageCode code{};
};

inline uint64_t milliseconds(Nanoseconds time) {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(time).count());
}

// A request under way, and how it ended.
class Operation {
 public:
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // "all_reduce #12 (sum, 1024 x float32)", "recv from rank 1 (tag 0, 4 x int64)"
  virtual std::string describe() const = 0;
  // Place in the group's order of collectives, from 1; 0: a point-to-point message has none.
  virtual uint64_t sequence() const { return 0; }
  // Receives that are done: the rank that sent the message. Else -1.
  virtual int source() const { return -1; }

  // Acquire: pairs with finish(): whoever sees true sees the result and the error.
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Only when done: nullptr means success.
  std::exception_ptr error() const { return error_; }

 protected:
  Operation(RequestBase base, Nanoseconds timeout) : base_(std::move(base)), timeout_(timeout) {}

 private:
  friend class Communicator;
  bool has_callback() const { return static_cast<bool>(base_.on_complete); }
  void call_on_complete() {
    if (!base_.on_complete) return;
    try {
      std::exchange(base_.on_complete, nullptr)();
    } catch (...) {
      // The operation has ended and was reported: there is nobody left to tell.
    }
  }
  // Lets go of the caller's memory. Never under the communicator's lock: it may need the GIL.
  void release() {
    base_.finalize = nullptr;
    base_.keep_alive.reset();
  }
  void finish(std::exception_ptr error) {
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
  }

  RequestBase base_;
  Nanoseconds timeout_;  // from the moment it is driven: waiting in the queue does not count
  // By the driving thread, when it first has to wait for longer than it spins; else not set.
  Clock::time_point started_{};
  std::exception_ptr error_;
  std::atomic<bool> done_{false};
};

class CollectiveOperation final : public Operation {
 public:
  CollectiveOperation(CallRequest request, const CallHeader& header, const Program& program,
                      const Program* fallback, const ReduceKernels* kernels, Nanoseconds timeout)
      : Operation(std::move(request), timeout),
        input_{&program, kernels, header, std::move(request.input), std::move(request.output),
               fallback},
        premul_factor_(request.premul_factor) {}

  std::string describe() const override { return to_string(input_.call); }
  uint64_t sequence() const override { return input_.call.sequence; }
  const CallHeader& call() const { return input_.call; }

 private:
  friend class Communicator;
  ExecutorInput input_;
  double premul_factor_;
  std::vector<std::byte> scaled_;  // premul_sum: this rank's input times the factor
};

class MessageOperation final : public Operation {
 public:
  // `number`: of its record, see flight.h.
  MessageOperation(MessageRequest request, Nanoseconds timeout, uint64_t number)
      : Operation(std::move(request), timeout),
        receives_(request.receives),
        peer_(request.peer),
        tag_(request.tag),
        dtype_(request.dtype),
        block_(request.block),
        code_(request.code),
        number_(number) {}

  std::string describe() const override;
  int source() const override { return done() ? source_ : -1; }
  uint64_t number() const { return number_; }
  // Of a receive, for whoever drives: the rank whose message it has; -1 before it has one.
  int matched() const { return source_; }
  // For whoever drives: bytes that have travelled, where it does so in slices.
  uint64_t moved() const { return moved_; }
  uint64_t bytes() const { return block_.count * size_of(dtype_); }

 private:
  friend class MessageEngine;
  const bool receives_;
  const int peer_;  // receives: maybe kAnySource
  const int tag_;
  const DType dtype_;
  const Block block_;
  const MessageCode code_;
  const uint64_t number_;
  // By the engine. Of a receive: the rank whose message it has matched; others read it when done.
  int source_ = -1;
  uint64_t moved_ = 0;          // bytes, of a message that travels in slices
  std::exception_ptr outcome_;  // set by the engine before it hands the operation back
  std::list<std::shared_ptr<MessageOperation>>::iterator place_;  // among the engine's pending ones
};

}  // namespace pycoll
