// pycoll as a c10d Backend: what torch.distributed calls, turned into
// CallRequests.
//
// The legacy names are overridden (_allgather_base, ...): torch 2.14 renamed
// them, and its base class forwards the new names to these, so one source
// serves all supported versions.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_map>
#include <vector>

#include "python/group_options.h"
#include "runtime/codec_group.h"
#include "runtime/communicator.h"
#include "torch/completion_hook.h"
#include "torch/device.h"
#include "torch/regions.h"
#include "torch/sparse.h"
#include "torch/tensors.h"
#include "torch/work.h"
#include "transport/network.h"

namespace pycoll::torch_adapter {

class Backend;

// What torch calls the options of a group, and copies for groups that are split off.
struct GroupOptions final : c10d::Backend::Options {
  using c10d::Backend::Options::Options;
#ifdef C10D_BACKEND_HAS_HOOKS
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<GroupOptions>(*this);
  }
#endif
};

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
  std::shared_ptr<FlightRecorder> recorder;
  std::shared_ptr<DeviceLibraries> devices;
  std::shared_ptr<const Regions> regions;
  // pycoll.Options, taken apart.
  Variables variables{};
  std::vector<SelectionRule> table{};
  // Hears of every group that is made, those that are split off too.
  std::function<void(const Backend&)> made{};
  std::optional<CodecChoice> codec{};
  bool codec_is_chosen = false;  // by measuring calls of CPU tensors, which it serves alone
  uint64_t codec_min_bytes = 0;
  // What else must be equal on all ranks, by name.
  std::map<std::string, std::string> agreed{};
};

// One collective as torch called it.
struct Call {
  c10d::OpType type;
  const char* title;  // "pycoll:all_reduce": for profilers and errors
  CallRequest request;
  Tensors inputs;   // as the caller gave them
  Tensors outputs;  // likewise; the value of the future
  std::chrono::milliseconds timeout;
  bool async;
  // How a single tensor is cut; empty: one block a tensor.
  BlockLengths input_lengths{};
  BlockLengths output_lengths{};
  bool shown = true;                 // to profilers; not when it is a part of what is shown as one
  std::optional<CodecWord> codec{};  // else the region's, or the group's
  Tensors residuals{};               // of that codec
};

// A call as far as the short way looks at it: at most one tensor each side.
struct PlainTensors {
  Collective collective;
  const at::Tensor* input;
  const at::Tensor* output;
  std::chrono::milliseconds timeout;
  bool async;
  ReduceOp reduce_op = ReduceOp::none;
  int root = 0;
};

class Backend final : public c10d::Backend {
 public:
  static c10::intrusive_ptr<Backend> make(GroupRequest request);
  explicit Backend(GroupRequest request);
  ~Backend() override;

  // By all ranks of the group, as ProcessGroup::splitGroup() does it: `ranks` make a group with the
  // options of this one, where it has no others; nullptr for a rank that is not of them. The new
  // group has connections of its own, over this group's store: that of torch (2.13) is another one
  // on ranks that were in other splits before.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  bool supportsSplitting() const override { return true; }
  // By the ranks that stay, as torch.distributed.shrink_group() does it, all with the same list:
  // they make a group without the others, who need not live. This group may have ended; with a flag
  // (SHRINK_ABORT) it does.
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                                           const c10::intrusive_ptr<Options>& options) override;
  bool supportsShrinking() const override { return true; }
  // By all ranks: the first call on that GPU is then like any other.
  void eagerConnectSingleDevice(at::Device device) override;

  const std::string getBackendName() const override { return "pycoll"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  // Memory for who asks the group for it, as fully_shard can: on the CPU it is shareable.
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  uint64_t getSequenceNumberForGroup() override {
    return communicator_->sequence() + devices_->sequence();
  }

  // Of all calls from then on; with a hook, synchronous ones have a Work, too.
  void registerOnCompletionHook(CompletionHook::Function&& hook) override;
  void waitForPendingWorks() override;
  // Why the group has ended, if it has.
  c10d::ErrorType getError() override;
  // Bytes of shareable memory of the process, and calls and bytes of the group that did and did not
  // need staging. (No `override`: torch 2.11 does not ask.)
  virtual std::unordered_map<std::string, uint64_t> getMemoryStats();

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using TensorLists = std::vector<Tensors>;

  // Collectives (collectives.cpp). A synchronous one returns no Work.
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  // Raises on every rank that came where one did not: rank 0 with their numbers (the first, or
  // `wait_all_ranks`), the others with that text. The group then ends.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  // Also what allreduce() of a sparse tensor is.
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;

  // all_reduce with a codec of its own.
  struct Residuals {
    std::optional<at::Tensor> input;
    std::optional<at::Tensor> sum;
  };
  WorkPtr all_reduce_over(at::Tensor& tensor, const c10d::AllreduceOptions& options,
                          CodecWord codec, const Residuals& residuals);

  // Messages (point_to_point.cpp): always a Work.
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // Between the two, asynchronous calls start as ever and are remembered; the
  // Work of endCoalescing() (none when there was nothing) waits for them all.
  // Synchronous calls are done when they return, here too. Only messages of GPU
  // tensors have to wait for the end: they make progress together, from GPU to GPU.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  // torch asks in batch_isend_irecv() only: without, its callers get one Work a
  // message, and messages of CPU tensors need no grouping, since a send does not
  // wait for its peer to receive.
  bool supportsCoalescing() const override { return devices_->possible(); }

  // Of calls of CPU tensors from then on that name none: what measuring has chosen. By all ranks,
  // before the first call.
  void set_codec(CodecWord codec, uint64_t min_bytes) {
    request_.codec = std::move(codec);
    request_.codec_is_chosen = true;
    request_.codec_min_bytes = min_bytes;
  }

  // For closing groups at the end of the process.
  std::weak_ptr<Communicator> communicator() const { return communicator_; }
  std::weak_ptr<DeviceCalls> devices() const { return devices_; }
  std::weak_ptr<CodecGroup> codecs() const { return codecs_; }

  // The short way (at_once.cpp). False: nothing has happened, the ordinary way must be taken.
  bool run_at_once(const PlainTensors& tensors);

  void abort() override;
  void shutdown() override;

 private:
  // What makes a group of some of its ranks, this one among them. `kind` is a part of its name.
  GroupRequest request_of_part(const char* kind, const std::vector<int>& ranks);
  // Calls of the coalesced forms too: checked, not started.
  Call all_reduce_of(const at::Tensor& tensor, const c10d::AllreduceOptions& options) const;
  Call all_gather_list(const Tensors& outputs, const at::Tensor& input,
                       const c10d::AllgatherOptions& options) const;
  Call all_gather_into(const at::Tensor& output, const at::Tensor& input,
                       const c10d::AllgatherOptions& options) const;
  Call reduce_scatter_from(const at::Tensor& output, const at::Tensor& input,
                           const c10d::ReduceScatterOptions& options) const;
  // This rank's tensor must be as long as its place in the list that every rank
  // has. If not, the others would wait for data that never comes: so the group
  // is told why, and ends.
  struct Slot {
    const char* operation;
    const char* tensor_name;
    const char* list_name;
  };
  void check_slot(const Slot& what, const at::Tensor& mine, const at::Tensor& slot) const;

  WorkPtr run(Call call);
  // One event and one Work for several calls; none starts unless all are in order.
  WorkPtr run_together(c10d::OpType type, const char* title, std::vector<Call> calls);
  WorkPtr barrier_on(c10::Device device, const c10d::BarrierOptions& options);
  // On a GPU: one call, or several.
  WorkPtr run_on(c10::Device device, const char* title, Description description,
                 std::vector<Call> calls);
  // Makes everything dense and points the request at it. `copies` gets what had to be copied.
  CallRequest prepare(Call& call, Tensors* copies = nullptr) const;
  c10::intrusive_ptr<Work> start(Call call, CallRequest request, const CodecWord& codec);
  // How a call of tensors on that device travels, by what the call, the region or the group says.
  CodecWord codec_for(const Call& call, const CallRequest& request, c10::Device device) const;
  void check_outputs(const Call& call) const;
  // The message itself where its region says nothing.
  CodecWord codec_of_message(const MessageRequest& request, uint64_t count) const;
  MessageRequest as_region_says(MessageRequest request) const;
  WorkPtr start_message(const char* title, c10d::OpType type, Tensors& tensors,
                        MessageRequest request);
  WorkPtr start_message_on(c10::Device device, Description description, MessageRequest request);
  // The messages that a coalescing block has collected, if there are any.
  WorkPtr run_batch(std::vector<DeviceMessage> batch);
  std::chrono::milliseconds time_of(std::chrono::milliseconds given) const {
    return given == c10d::kUnsetTimeout ? options_->timeout : given;
  }
  // What every call that has a Work goes through.
  WorkPtr remember(c10::intrusive_ptr<c10d::Work> work);

  struct Coalescing {
    bool open = false;
    CombinedWork::Parts works{};
    std::vector<DeviceMessage> batch{};  // on GPUs
  };

  GroupRequest request_;
  std::mutex splits_mutex_;
  std::map<std::vector<int>, uint64_t> splits_;  // how often those ranks; guarded by splits_mutex_
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<DeviceCalls> devices_;
  c10::intrusive_ptr<Options> options_;
  Interrupt interrupt_;
  std::shared_ptr<CodecGroup> codecs_;
  std::unique_ptr<SparseCalls> sparse_;
  const std::shared_ptr<CompletionHook> hook_ = std::make_shared<CompletionHook>();
  std::mutex coalescing_mutex_;
  Coalescing coalescing_;  // guarded by coalescing_mutex_
};

}  // namespace pycoll::torch_adapter
