// What was started and has not been waited for, whatever carries it out.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "runtime/communicator.h"

namespace pycoll {

// How often a thread that waits for one looks for signals.
constexpr auto kLook = std::chrono::milliseconds(50);

class Pending {
 public:
  virtual ~Pending() = default;
  // Returns when it is done; rethrows its error. False when `timeout` passed first.
  virtual bool wait(std::optional<Nanoseconds> timeout, const Interrupt& interrupt) = 0;
  virtual bool done() const = 0;
  virtual std::exception_ptr error() const = 0;  // only when done: nullptr means success
  virtual std::string describe() const = 0;
  virtual uint64_t sequence() const { return 0; }  // see Operation
  virtual int source() const { return -1; }
};

// An operation of a communicator's queue.
class QueuedOperation final : public Pending {
 public:
  QueuedOperation(std::shared_ptr<Communicator> communicator, std::shared_ptr<Operation> operation)
      : communicator_(std::move(communicator)), operation_(std::move(operation)) {}

  bool wait(std::optional<Nanoseconds> timeout, const Interrupt& interrupt) override {
    return communicator_->wait(operation_, timeout, interrupt);
  }
  bool done() const override { return operation_->done(); }
  std::exception_ptr error() const override { return operation_->error(); }
  std::string describe() const override { return operation_->describe(); }
  uint64_t sequence() const override { return operation_->sequence(); }
  int source() const override { return operation_->source(); }

 private:
  const std::shared_ptr<Communicator> communicator_;
  const std::shared_ptr<Operation> operation_;
};

}  // namespace pycoll
