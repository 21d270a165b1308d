#include "torch/backend.h"

#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/python_headers.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/error.h"
#include "python/gil.h"
#include "torch/tensors.h"

namespace pycoll::torch_adapter {
namespace {

// Negative is no limit: torch wraps timedelta.max round to that.
Nanoseconds time_limit(std::chrono::milliseconds timeout) {
  return timeout < std::chrono::milliseconds(0) ? kNoLimit : Nanoseconds(saturated(timeout));
}

// The exception classes that torch users catch.
[[noreturn]] void throw_torch_error(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::invalid_argument:
      C10_THROW_ERROR(Error, error.what());
    case ErrorKind::not_implemented:
      C10_THROW_ERROR(NotImplementedError, error.what());
    default:
      C10_THROW_ERROR(DistBackendError, error.what());
  }
}

template <typename Function>
auto with_torch_errors(Function&& function) -> decltype(function()) {
  try {
    return function();
  } catch (const Error& error) {
    throw_torch_error(error);
  }
}

std::exception_ptr as_torch_error(std::exception_ptr error) {
  if (!error) return nullptr;
  try {
    with_torch_errors([&] { std::rethrow_exception(error); });
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

class C10dStore final : public Store {
 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::optional<std::string> get(const std::string& key, Nanoseconds timeout) override {
    try {
      const auto ms = std::chrono::ceil<std::chrono::milliseconds>(timeout);
      store_->wait({key}, std::max(ms, std::chrono::milliseconds(1)));
    } catch (const std::exception& error) {
      if (is_timeout(error.what())) return std::nullopt;
      throw;
    }
    const std::vector<uint8_t> value = store_->get(key);
    return std::string(value.begin(), value.end());
  }
  void remove(const std::string& key) override {
    try {
      store_->deleteKey(key);
    } catch (const std::exception&) {
      // Some stores cannot; the key then stays, which does no harm under a group's own prefix.
    }
  }

 private:
  // The stores have no common class or code for "not in time": only their texts do.
  static bool is_timeout(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    return text.find("timeout") != std::string::npos || text.find("timed out") != std::string::npos;
  }

  c10::intrusive_ptr<c10d::Store> store_;
};

// The host of a store that is reached over the network: peers should be told the address from which
// this rank reaches it.
std::string host_of(c10::intrusive_ptr<c10d::Store> store) {
  while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    store = prefixed->getUnderlyingStore();
  }
  const auto* networked = dynamic_cast<const c10d::TCPStore*>(store.get());
  return networked == nullptr ? "" : networked->getHost();
}

std::shared_ptr<Communicator> connect(const GroupRequest& request) {
  const GilRelease release;
  C10dStore store(request.store);
  BootstrapRequest bootstrap{&store,
                             "pycoll/" + request.group_id,
                             request.rank,
                             request.world_size,
                             Config::from_env(),
                             request.interrupt};
  bootstrap.config.store_host = host_of(request.store);
  return Communicator::make(bootstrap,
                            request.networks->network_for(bootstrap.prefix, bootstrap.config),
                            time_limit(request.timeout));
}

}  // namespace

Work::Work(std::shared_ptr<Communicator> communicator, Description description, Interrupt interrupt)
    : c10d::Work(description.rank, description.type, description.title, description.inputs),
      communicator_(std::move(communicator)),
      inputs_(std::move(description.inputs)),
      outputs_(std::move(description.outputs)),
      interrupt_(std::move(interrupt)) {}

void Work::submit(CallRequest request) {
  // The operation may end before submit() returns: complete() waits for this lock.
  const std::lock_guard lock(state_);
  const auto self = c10::intrusive_ptr<Work>::reclaim_copy(this);
  request.on_complete = [self] { self->complete(); };
  operation_ = communicator_->submit(std::move(request));
}

std::exception_ptr Work::exception() const {
  return operation_->done() ? as_torch_error(operation_->error()) : nullptr;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  std::optional<Nanoseconds> limit;
  if (timeout != kNoTimeout) limit = time_limit(timeout);
  const GilRelease release;
  with_torch_errors([&] {
    if (!communicator_->wait(operation_, limit, interrupt_)) {
      fail(ErrorKind::timed_out, "rank ", communicator_->rank(), ": Timed out waiting ",
           to_seconds(*limit), " s for ", operation_->describe(), "; the operation goes on");
    }
  });
  complete();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  {
    const std::lock_guard lock(state_);
    if (!future_) {
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    }
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
  finish(as_torch_error(operation_->error()));
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
  if (operation_->error()) {
    future->setError(as_torch_error(operation_->error()));
  } else {
    future->markCompleted(c10::IValue(outputs_));
  }
}

// One collective as torch called it.
struct Backend::Call {
  c10d::OpType type;
  const char* title;
  CallRequest request;
  std::vector<at::Tensor> inputs;   // as the caller gave them
  std::vector<at::Tensor> outputs;  // likewise
  std::chrono::milliseconds timeout;
  bool async;
};

Backend::Backend(const GroupRequest& request)
    : c10d::Backend(request.rank, request.world_size),
      communicator_(with_torch_errors([&] { return connect(request); })),
      options_(c10::make_intrusive<Options>("pycoll", request.timeout)),
      interrupt_(request.interrupt) {
  options_->global_ranks_in_group = request.global_ranks;
}

Backend::~Backend() {
  const GilRelease release;
  communicator_->close();
  communicator_.reset();
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  communicator_->set_timeout(time_limit(timeout));
}

void Backend::abort() {
  const GilRelease release;
  communicator_->abort("torch.distributed asked for it");
}

void Backend::shutdown() {
  const GilRelease release;
  communicator_->close();
}

Backend::WorkPtr Backend::run(Call call) {
  CallRequest& request = call.request;
  if (call.timeout != c10d::kUnsetTimeout) request.timeout = time_limit(call.timeout);

  check_disjoint(call.title, call.outputs);
  // Strided tensors travel as dense copies; what comes out is copied back element by element. A
  // tensor that is both input and output stays one.
  const DenseTensors inputs(call.inputs, DenseTensors::Role::input);
  const DenseTensors outputs(call.outputs, DenseTensors::Role::output, &inputs);
  // Outputs first: taking the address for writing may move a copy-on-write tensor that is also an
  // input.
  const int ranks = getSize();
  request.output = outputs.view(request.collective == Collective::all_gather ? ranks : 1);
  request.input = inputs.view(request.collective == Collective::reduce_scatter ? ranks : 1);
  if (outputs.any_copied()) request.finalize = [outputs] { outputs.copy_back(); };

  if (call.async) {
    const Work::Description description{getRank(), call.type, call.title, call.inputs,
                                        call.outputs};
    auto work = c10::make_intrusive<Work>(communicator_, description, interrupt_);
    // Dense copies of inputs must live as long as the operation.
    if (inputs.any_copied() && !request.finalize) request.finalize = [inputs] {};
    with_torch_errors([&] { work->submit(std::move(request)); });
    return work;
  }
  RECORD_FUNCTION(call.title, std::vector<c10::IValue>(call.inputs.begin(), call.inputs.end()));
  const GilRelease release;
  with_torch_errors([&] { communicator_->run(std::move(request), interrupt_); });
  return nullptr;
}

Backend::WorkPtr Backend::allreduce(std::vector<at::Tensor>& tensors,
                                    const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only_tensor("all_reduce", tensors);
  check_tensor("all_reduce", "tensor", tensor, Access::write);
  CallRequest request = request_for(Collective::all_reduce, tensor);
  request.reduce_op = reduce_op_of(options.reduceOp);
  return run({c10d::OpType::ALLREDUCE, "pycoll:all_reduce", std::move(request), tensors, tensors,
              options.timeout, options.asyncOp});
}

Backend::WorkPtr Backend::broadcast(std::vector<at::Tensor>& tensors,
                                    const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only_tensor("broadcast", tensors);
  check_tensor("broadcast", "tensor", tensor, Access::write);
  CallRequest request = request_for(Collective::broadcast, tensor);
  request.root = static_cast<int>(options.rootRank);
  return run({c10d::OpType::BROADCAST, "pycoll:broadcast", std::move(request), tensors, tensors,
              options.timeout, options.asyncOp});
}

Backend::WorkPtr Backend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                    std::vector<at::Tensor>& inputs,
                                    const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only_tensor("all_gather", inputs);
  const std::vector<at::Tensor>& output = only_list("all_gather", outputs);
  check_tensor("all_gather", "input", input, Access::read);
  check_list("all_gather", "output", output, input, getSize(), Access::write);
  return run({c10d::OpType::ALLGATHER, "pycoll:all_gather",
              request_for(Collective::all_gather, input), inputs, output, options.timeout,
              options.asyncOp});
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  check_tensor("all_gather_into_tensor", "input", input, Access::read);
  check_stacked("all_gather_into_tensor", "output", output, "input", input, getSize());
  check_tensor("all_gather_into_tensor", "output", output, Access::write);
  return run({c10d::OpType::_ALLGATHER_BASE,
              "pycoll:_all_gather_base",
              request_for(Collective::all_gather, input),
              {input},
              {output},
              options.timeout,
              options.asyncOp});
}

Backend::WorkPtr Backend::reduce_scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only_tensor("reduce_scatter", outputs);
  const std::vector<at::Tensor>& input = only_list("reduce_scatter", inputs);
  check_tensor("reduce_scatter", "output", output, Access::write);
  check_list("reduce_scatter", "input", input, output, getSize(), Access::read);
  CallRequest request = request_for(Collective::reduce_scatter, output);
  request.reduce_op = reduce_op_of(options.reduceOp);
  return run({c10d::OpType::REDUCE_SCATTER, "pycoll:reduce_scatter", std::move(request), input,
              outputs, options.timeout, options.asyncOp});
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  check_tensor("reduce_scatter_tensor", "output", output, Access::write);
  check_stacked("reduce_scatter_tensor", "input", input, "output", output, getSize());
  check_tensor("reduce_scatter_tensor", "input", input, Access::read);
  CallRequest request = request_for(Collective::reduce_scatter, output);
  request.reduce_op = reduce_op_of(options.reduceOp);
  return run({c10d::OpType::_REDUCE_SCATTER_BASE,
              "pycoll:_reduce_scatter_base",
              std::move(request),
              {input},
              {output},
              options.timeout,
              options.asyncOp});
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
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

}  // namespace pycoll::torch_adapter
