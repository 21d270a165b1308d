// pycoll as a c10d Backend: what torch.distributed calls, turned into CallRequests.
//
// The legacy names are overridden (_allgather_base, ...): torch 2.14 renamed them, and its base
// class forwards the new names to these, so one source serves all supported versions.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "runtime/communicator.h"
#include "transport/network.h"

namespace pycoll::torch_adapter {

// What the Python side passes when a group is made.
struct GroupRequest {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout{0};
  std::string group_id;
  std::vector<uint64_t> global_ranks;
  Interrupt interrupt;
  std::shared_ptr<NetworkRegistry> networks;
};

// An asynchronous operation. Keeps the tensors alive; its future is made only when somebody asks.
class Work final : public c10d::Work {
 public:
  struct Description {
    int rank;
    c10d::OpType type;
    const char* title;  // "pycoll:all_reduce": what profilers show
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;  // the value of the future
  };

  Work(std::shared_ptr<Communicator> communicator, Description description, Interrupt interrupt);
  // Hands the request to the communicator; throws when it refuses.
  void submit(CallRequest request);

  bool isCompleted() override { return operation_->done(); }
  bool isSuccess() const override { return operation_->done() && !operation_->error(); }
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return operation_->sequence(); }

 private:
  void complete();
  void mark_future();

  std::shared_ptr<Communicator> communicator_;
  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> outputs_;
  Interrupt interrupt_;
  std::mutex state_;
  std::shared_ptr<Operation> operation_;            // set once, under state_
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by state_
  bool completed_here_ = false;                     // guarded by state_
  bool future_marked_ = false;                      // guarded by state_
};

class Backend final : public c10d::Backend {
 public:
  explicit Backend(const GroupRequest& request);
  ~Backend() override;

  const std::string getBackendName() const override { return "pycoll"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return communicator_->sequence(); }

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options) override;
  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs,
                         std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  // For closing groups at the end of the process.
  std::weak_ptr<Communicator> communicator() const { return communicator_; }

  void abort() override;
  void shutdown() override;

 private:
  struct Call;
  WorkPtr run(Call call);

  std::shared_ptr<Communicator> communicator_;
  c10::intrusive_ptr<Options> options_;
  Interrupt interrupt_;
};

}  // namespace pycoll::torch_adapter
