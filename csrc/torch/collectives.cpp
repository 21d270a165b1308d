// Collectives as torch calls them: checks first, then a Call. Everything is
// checked before anything is sent or written.
#include <c10/core/impl/VirtualGuardImpl.h>

#include "torch/backend.h"
#include "torch/errors.h"

namespace pycoll::torch_adapter {
namespace {

struct ReduceOpRow {
  c10d::ReduceOp::RedOpType torch;
  ReduceOp pycoll;
};

constexpr ReduceOpRow kReduceOps[] = {
    {c10d::ReduceOp::SUM, ReduceOp::sum},
    {c10d::ReduceOp::AVG, ReduceOp::avg},
    {c10d::ReduceOp::PRODUCT, ReduceOp::product},
    {c10d::ReduceOp::MIN, ReduceOp::min},
    {c10d::ReduceOp::MAX, ReduceOp::max},
    {c10d::ReduceOp::BAND, ReduceOp::band},
    {c10d::ReduceOp::BOR, ReduceOp::bor},
    {c10d::ReduceOp::BXOR, ReduceOp::bxor},
    {c10d::ReduceOp::PREMUL_SUM, ReduceOp::premul_sum},
};

ReduceOp reduce_op_of(const c10d::ReduceOp& op) {
  for (const ReduceOpRow& row : kReduceOps) {
    if (row.torch == op.op_) return row.pycoll;
  }
  C10_THROW_ERROR(NotImplementedError, "pycoll does not know this reduce operation");
}

// PREMUL_SUM's factor: a number, or a tensor of one element.
double factor_of(const char* operation, const c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) {
    refuse(operation,
           "PREMUL_SUM without a factor; make it with "
           "torch.distributed._make_nccl_premul_sum(factor)");
  }
  const at::Tensor& tensor = supplement->tensor_factor;
  return tensor.defined() ? tensor.item().toDouble() : supplement->double_factor;
}

CallRequest request_for(Collective collective, const char* operation, const at::Tensor& tensor) {
  CallRequest request;
  request.collective = collective;
  request.dtype = dtype_of(operation, tensor);
  return request;
}

CallRequest request_for(Collective collective, const char* operation, const at::Tensor& tensor,
                        const c10d::ReduceOp& op) {
  CallRequest request = request_for(collective, operation, tensor);
  request.reduce_op = reduce_op_of(op);
  if (request.reduce_op == ReduceOp::premul_sum) request.premul_factor = factor_of(operation, op);
  return request;
}

void check_root(const char* operation, int64_t root, int world_size) {
  if (root < 0 || root >= world_size) {
    refuse(operation, "root ", root, " is not a rank of this group of ", world_size);
  }
}

// gather and scatter: only the root has a list.
void check_no_list(const char* operation, const char* name, const std::vector<Tensors>& lists,
                   int64_t root, int rank) {
  for (const Tensors& list : lists) {
    if (list.empty()) continue;
    refuse(operation, "rank ", rank, " gave a list of ", list.size(), " ", name,
           " tensors, but only the root, rank ", root, ", may: requires empty ", name,
           " on non-root");
  }
}

// Coalesced forms: as many outputs as inputs.
void check_pairs(const char* operation, size_t outputs, size_t inputs) {
  if (outputs != inputs) refuse(operation, outputs, " outputs for ", inputs, " inputs");
}

}  // namespace

void Backend::check_slot(const Slot& what, const at::Tensor& mine, const at::Tensor& slot) const {
  if (mine.numel() == slot.numel()) return;
  const std::string text =
      concat(what.operation, ": rank ", getRank(), "'s ", what.tensor_name, " has shape ",
             mine.sizes(), ", its place in the ", what.list_name, " list has shape ", slot.sizes(),
             "; they must have the same number of elements");
  communicator_->abort(text);
  C10_THROW_ERROR(Error, text);
}

Call Backend::all_reduce_of(const at::Tensor& tensor, const c10d::AllreduceOptions& options) const {
  constexpr auto kTitle = "pycoll:all_reduce";
  check_tensor(kTitle, "tensor", tensor, Access::write);
  return {c10d::OpType::ALLREDUCE,
          kTitle,
          request_for(Collective::all_reduce, kTitle, tensor, options.reduceOp),
          {tensor},
          {tensor},
          options.timeout,
          options.asyncOp};
}

Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors,
                                           const c10d::AllreduceOptions& options) {
  constexpr auto kTitle = "pycoll:all_reduce";
  const at::Tensor& tensor = only_tensor(kTitle, tensors);
  if (tensor.layout() != at::kSparse || !tensor.device().is_cpu()) {
    refuse(kTitle, "a sparse all_reduce takes a COO tensor on the CPU, not ", tensor.layout(),
           " on ", tensor.device());
  }
  auto work =
      sparse_->all_reduce({getRank(), c10d::OpType::ALLREDUCE, kTitle, tensors, tensors},
                          reduce_op_of(options.reduceOp), time_limit(time_of(options.timeout)));
  if (options.asyncOp) return remember(std::move(work));
  if (hook_->is_set()) hook_->watch(*work);
  work->wait();
  return nullptr;
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
  if (tensors.size() == 1 &&
      run_at_once({Collective::all_reduce, &tensors[0], &tensors[0], options.timeout,
                   options.asyncOp, reduce_op_of(options.reduceOp)})) {
    return nullptr;
  }
  return run(all_reduce_of(only_tensor("pycoll:all_reduce", tensors), options));
}

Backend::WorkPtr Backend::all_reduce_over(at::Tensor& tensor, const c10d::AllreduceOptions& options,
                                          CodecWord codec, const Residuals& residuals) {
  constexpr auto kTitle = "pycoll:all_reduce";
  Call call = all_reduce_of(tensor, options);
  const auto add = [&](const char* name, const std::optional<at::Tensor>& residual,
                       VectorView& view) {
    if (!residual) return;
    check_tensor(kTitle, name, *residual, Access::write);
    if (residual->scalar_type() != at::kFloat || residual->device() != tensor.device() ||
        !residual->is_contiguous() || residual->numel() != tensor.numel()) {
      refuse(kTitle, name, " is a dense float32 tensor of as many elements as the tensor, ",
             tensor.numel(), ", on ", tensor.device(), "; this one has ", residual->numel(), " of ",
             residual->scalar_type(), " on ", residual->device(), " and strides ",
             residual->strides());
    }
    view.blocks.push_back({static_cast<std::byte*>(residual->mutable_data_ptr()),
                           static_cast<uint64_t>(residual->numel())});
    call.residuals.push_back(*residual);
  };
  // Without a codec there is nothing that they could lack.
  if (codec) {
    add("residual", residuals.input, codec->residual);
    add("sum_residual", residuals.sum, codec->sum_residual);
  }
  call.codec = std::move(codec);
  return run(std::move(call));
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Call> calls;
  for (const at::Tensor& tensor : tensors) calls.push_back(all_reduce_of(tensor, options));
  return run_together(c10d::OpType::ALLREDUCE_COALESCED, "pycoll:all_reduce", std::move(calls));
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  constexpr auto kTitle = "pycoll:broadcast";
  const at::Tensor& tensor = only_tensor(kTitle, tensors);
  check_root(kTitle, options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  if (run_at_once({Collective::broadcast, &tensor, &tensor, options.timeout, options.asyncOp,
                   ReduceOp::none, root})) {
    return nullptr;
  }
  // The root's is only read, so it may be an expanded view.
  check_tensor(kTitle, "tensor", tensor,
               options.rootRank == getRank() ? Access::read : Access::write);
  CallRequest request = request_for(Collective::broadcast, kTitle, tensor);
  request.root = root;
  return run({c10d::OpType::BROADCAST, kTitle, std::move(request), tensors, tensors,
              options.timeout, options.asyncOp});
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  constexpr auto kTitle = "pycoll:reduce";
  const at::Tensor& tensor = only_tensor(kTitle, tensors);
  check_root(kTitle, options.rootRank, getSize());
  const bool is_root = options.rootRank == getRank();
  if (run_at_once({Collective::reduce, &tensor, is_root ? &tensor : nullptr, options.timeout,
                   options.asyncOp, reduce_op_of(options.reduceOp),
                   static_cast<int>(options.rootRank)})) {
    return nullptr;
  }
  check_tensor(kTitle, "tensor", tensor, is_root ? Access::write : Access::read);
  CallRequest request = request_for(Collective::reduce, kTitle, tensor, options.reduceOp);
  request.root = static_cast<int>(options.rootRank);
  // Only the root has an output: the others' tensors stay as they are.
  return run({c10d::OpType::REDUCE, kTitle, std::move(request), tensors,
              is_root ? tensors : Tensors{}, options.timeout, options.asyncOp});
}

Call Backend::all_gather_list(const Tensors& outputs, const at::Tensor& input,
                              const c10d::AllgatherOptions& options) const {
  constexpr auto kTitle = "pycoll:all_gather";
  check_tensor(kTitle, "input", input, Access::read);
  check_list({kTitle, "output", Access::write}, outputs, input, getSize());
  check_disjoint(kTitle, outputs);
  check_slot({kTitle, "input", "output"}, input, outputs[static_cast<size_t>(getRank())]);
  return {c10d::OpType::ALLGATHER,
          kTitle,
          request_for(Collective::all_gather, kTitle, input),
          {input},
          outputs,
          options.timeout,
          options.asyncOp};
}

Backend::WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  constexpr auto kTitle = "pycoll:all_gather";
  return run(all_gather_list(only_list(kTitle, outputs), only_tensor(kTitle, inputs), options));
}

// The lists are by rank: outputs[r][i] takes rank r's inputs[i].
Backend::WorkPtr Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  constexpr auto kTitle = "pycoll:all_gather";
  check_pairs(kTitle, outputs.size(), static_cast<size_t>(getSize()));
  for (const Tensors& of_rank : outputs) check_pairs(kTitle, of_rank.size(), inputs.size());
  std::vector<Call> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors list;
    for (const Tensors& of_rank : outputs) list.push_back(of_rank[i]);
    calls.push_back(all_gather_list(list, inputs[i], options));
  }
  return run_together(c10d::OpType::ALLGATHER_COALESCED, kTitle, std::move(calls));
}

Call Backend::all_gather_into(const at::Tensor& output, const at::Tensor& input,
                              const c10d::AllgatherOptions& options) const {
  constexpr auto kTitle = "pycoll:all_gather_into_tensor";
  check_tensor(kTitle, "input", input, Access::read);
  check_tensor(kTitle, "output", output, Access::write);
  check_stacked({kTitle, "output", "input"}, output, input, getSize());
  return {c10d::OpType::_ALLGATHER_BASE,
          kTitle,
          request_for(Collective::all_gather, kTitle, input),
          {input},
          {output},
          options.timeout,
          options.asyncOp,
          {},
          equal_lengths(output, getSize())};
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  if (run_at_once({Collective::all_gather, &input, &output, options.timeout, options.asyncOp})) {
    return nullptr;
  }
  return run(all_gather_into(output, input, options));
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  constexpr auto kTitle = "pycoll:all_gather_into_tensor";
  check_pairs(kTitle, outputs.size(), inputs.size());
  std::vector<Call> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    calls.push_back(all_gather_into(outputs[i], inputs[i], options));
  }
  return run_together(c10d::OpType::ALLGATHER_COALESCED, kTitle, std::move(calls));
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  constexpr auto kTitle = "pycoll:reduce_scatter";
  const at::Tensor& output = only_tensor(kTitle, outputs);
  const Tensors& input = only_list(kTitle, inputs);
  check_tensor(kTitle, "output", output, Access::write);
  check_list({kTitle, "input", Access::read}, input, output, getSize());
  check_slot({kTitle, "output", "input"}, output, input[static_cast<size_t>(getRank())]);
  return run({c10d::OpType::REDUCE_SCATTER, kTitle,
              request_for(Collective::reduce_scatter, kTitle, output, options.reduceOp), input,
              outputs, options.timeout, options.asyncOp});
}

Call Backend::reduce_scatter_from(const at::Tensor& output, const at::Tensor& input,
                                  const c10d::ReduceScatterOptions& options) const {
  constexpr auto kTitle = "pycoll:reduce_scatter_tensor";
  check_tensor(kTitle, "output", output, Access::write);
  check_tensor(kTitle, "input", input, Access::read);
  if (input.dim() == 0 || output.dim() == 0) {
    refuse(kTitle, "input of shape ", input.sizes(), " and output of shape ", output.sizes(),
           ": a tensor without dimensions has no dim 0 to scatter");
  }
  check_stacked({kTitle, "input", "output"}, input, output, getSize());
  return {c10d::OpType::_REDUCE_SCATTER_BASE,
          kTitle,
          request_for(Collective::reduce_scatter, kTitle, output, options.reduceOp),
          {input},
          {output},
          options.timeout,
          options.asyncOp,
          equal_lengths(input, getSize()),
          {}};
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  if (input.dim() > 0 && output.dim() > 0 &&
      run_at_once({Collective::reduce_scatter, &input, &output, options.timeout, options.asyncOp,
                   reduce_op_of(options.reduceOp)})) {
    return nullptr;
  }
  return run(reduce_scatter_from(output, input, options));
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  constexpr auto kTitle = "pycoll:reduce_scatter_tensor";
  check_pairs(kTitle, outputs.size(), inputs.size());
  std::vector<Call> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    calls.push_back(reduce_scatter_from(outputs[i], inputs[i], options));
  }
  // Later versions have a type for it.
  return run_together(c10d::OpType::COALESCED, kTitle, std::move(calls));
}

Backend::WorkPtr Backend::gather(TensorLists& outputs, Tensors& inputs,
                                 const c10d::GatherOptions& options) {
  constexpr auto kTitle = "pycoll:gather";
  const at::Tensor& input = only_tensor(kTitle, inputs);
  check_root(kTitle, options.rootRank, getSize());
  check_tensor(kTitle, "input", input, Access::read);
  CallRequest request = request_for(Collective::gather, kTitle, input);
  request.root = static_cast<int>(options.rootRank);
  Tensors output;
  if (options.rootRank == getRank()) {
    output = only_list(kTitle, outputs);
    check_list({kTitle, "output", Access::write}, output, input, getSize());
    check_disjoint(kTitle, output);
    for (const at::Tensor& slot : output) check_slot({kTitle, "input", "output"}, input, slot);
  } else {
    check_no_list(kTitle, "output", outputs, options.rootRank, getRank());
  }
  return run({c10d::OpType::GATHER, kTitle, std::move(request), inputs, std::move(output),
              options.timeout, options.asyncOp});
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, TensorLists& inputs,
                                  const c10d::ScatterOptions& options) {
  constexpr auto kTitle = "pycoll:scatter";
  const at::Tensor& output = only_tensor(kTitle, outputs);
  check_root(kTitle, options.rootRank, getSize());
  check_tensor(kTitle, "output", output, Access::write);
  CallRequest request = request_for(Collective::scatter, kTitle, output);
  request.root = static_cast<int>(options.rootRank);
  Tensors input;
  if (options.rootRank == getRank()) {
    input = only_list(kTitle, inputs);
    check_list({kTitle, "input", Access::read}, input, output, getSize());
    for (const at::Tensor& slot : input) check_slot({kTitle, "output", "input"}, output, slot);
  } else {
    check_no_list(kTitle, "input", inputs, options.rootRank, getRank());
  }
  return run({c10d::OpType::SCATTER, kTitle, std::move(request), std::move(input), outputs,
              options.timeout, options.asyncOp});
}

// Lengths are each pair's own affair: every message is compared with what its
// receiver expects.
Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                   const c10d::AllToAllOptions& options) {
  constexpr auto kTitle = "pycoll:all_to_all";
  if (inputs.empty()) refuse(kTitle, "the input list is empty; the group has ", getSize());
  check_list({kTitle, "input", Access::read}, inputs, inputs.front(), getSize());
  check_list({kTitle, "output", Access::write}, outputs, inputs.front(), getSize());
  check_disjoint(kTitle, outputs);
  const auto own = static_cast<size_t>(getRank());
  check_slot({kTitle, "input for itself", "output"}, inputs[own], outputs[own]);
  return run({c10d::OpType::ALLTOALL, kTitle,
              request_for(Collective::all_to_all, kTitle, inputs.front()), inputs, outputs,
              options.timeout, options.asyncOp});
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits,
                                        const c10d::AllToAllOptions& options) {
  constexpr auto kTitle = "pycoll:all_to_all";
  check_tensor(kTitle, "input", input, Access::read);
  check_tensor(kTitle, "output", output, Access::write);
  if (input.scalar_type() != output.scalar_type()) {
    refuse(kTitle, "input has type ", input.scalar_type(), ", output has type ",
           output.scalar_type(), "; they must be the same");
  }
  BlockLengths from = split_lengths("input", input, input_splits, getSize());
  BlockLengths to = split_lengths("output", output, output_splits, getSize());
  const auto own = static_cast<size_t>(getRank());
  if (from[own] != to[own]) {
    refuse(kTitle, "Split sizes: rank ", own, " sends itself ", from[own], " elements and expects ",
           to[own]);
  }
  return run({c10d::OpType::ALLTOALL_BASE,
              kTitle,
              request_for(Collective::all_to_all, kTitle, input),
              {input},
              {output},
              options.timeout,
              options.asyncOp,
              std::move(from),
              std::move(to)});
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  if (options.device && !options.device->is_cpu()) return barrier_on(*options.device, options);
  if (run_at_once({Collective::barrier, nullptr, nullptr, options.timeout, options.asyncOp})) {
    return nullptr;
  }
  CallRequest request;
  request.collective = Collective::barrier;
  return run({c10d::OpType::BARRIER,
              "pycoll:barrier",
              std::move(request),
              {},
              {},
              options.timeout,
              options.asyncOp});
}

// When it is done, all ranks have come to it, and their GPUs to that point of their streams.
Backend::WorkPtr Backend::barrier_on(c10::Device device, const c10d::BarrierOptions& options) {
  constexpr auto kTitle = "pycoll:barrier";
  if (!options.asyncOp && hook_->is_set()) {
    c10d::BarrierOptions async = options;
    async.asyncOp = true;
    barrier_on(device, async)->wait();
    return nullptr;
  }
  if (!device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  DeviceCall call{kTitle,          {getRank(), c10d::OpType::BARRIER, kTitle, {}, {}},
                  device,          time_of(options.timeout),
                  options.asyncOp, true};
  call.calls.resize(1);
  call.calls[0].request.collective = Collective::barrier;
  WorkPtr work = devices_->run(std::move(call));
  return work ? remember(std::move(work)) : nullptr;
}

}  // namespace pycoll::torch_adapter
