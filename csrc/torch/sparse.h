// all_reduce of sparse (COO) CPU tensors: every rank gathers what all have, and sums it in the
// order of ranks, so all get the same bits.
//
// That takes several collectives, the later ones sized by the earlier. They run on a group of their
// own, by a thread, so that a call takes its place among others of the group when it is made and
// does not keep its caller.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "runtime/communicator.h"
#include "torch/work.h"

namespace pycoll::torch_adapter {

class SparseWork;

class SparseCalls {
 public:
  SparseCalls(std::shared_ptr<Communicator> control, Interrupt interrupt)
      : control_(std::move(control)), interrupt_(std::move(interrupt)) {}
  ~SparseCalls() { close(); }
  SparseCalls(const SparseCalls&) = delete;
  SparseCalls& operator=(const SparseCalls&) = delete;

  // Of the description's tensor, in place: the same shape, numbers of sparse dimensions and dtype
  // on every rank, any indices. SUM and AVG; throws what other operations are refused with. The
  // first call waits for the other ranks, which make the group together.
  c10::intrusive_ptr<c10d::Work> all_reduce(Description description, ReduceOp op,
                                            Nanoseconds timeout);
  void abort(const std::string& reason);
  // No more calls; those under way get a moment.
  void close();

 private:
  void start();
  void carry_out(SparseWork& work);
  void loop();

  const std::shared_ptr<Communicator> control_;
  const Interrupt interrupt_;
  std::mutex mutex_;
  std::condition_variable news_;
  std::shared_ptr<Communicator> group_;      // of the same ranks; set once, under mutex_
  std::deque<std::function<void()>> queue_;  // calls to be carried out; guarded by mutex_
  bool closed_ = false;                      // guarded by mutex_
  std::thread thread_;
};

}  // namespace pycoll::torch_adapter
