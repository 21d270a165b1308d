#include "torch/backend.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/python_headers.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "python/gil.h"
#include "torch/allocator.h"
#include "torch/errors.h"
#include "transport/shm/arena.h"

namespace pycoll::torch_adapter {
namespace {

// Long enough for the answer of a distant store, short enough to be waited for now and then.
constexpr auto kPeekWithoutCheck = std::chrono::milliseconds(200);

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
  // A store that cannot answer, as when the process that serves it has ended, has nothing to tell:
  // the connections to that process say so, or the deadline.
  std::optional<std::string> peek(const std::string& key) override {
    try {
      const auto there = check(key);
      if (!there) return get(key, kPeekWithoutCheck);
      if (!*there) return std::nullopt;
      const std::vector<uint8_t> value = store_->get(key);
      return std::string(value.begin(), value.end());
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }
  void remove(const std::string& key) override {
    try {
      store_->deleteKey(key);
    } catch (const std::exception&) {
      // Some stores cannot; the key then stays, which does no harm under a
      // group's own prefix.
    }
  }

 private:
  // A store of somebody's own may not have it.
  std::optional<bool> check(const std::string& key) {
    try {
      return store_->check({key});
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }

  // The stores have no common class or code for "not in time": only their texts
  // do.
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
                             request.interrupt,
                             request.table,
                             request.agreed,
                             request.recorder};
  apply_variables(request.variables, bootstrap.config);
  bootstrap.config.store_host = host_of(request.store);
  return Communicator::make(bootstrap,
                            request.networks->network_for(bootstrap.prefix, bootstrap.config),
                            time_limit(request.timeout));
}

}  // namespace

Backend::Backend(GroupRequest request)
    : c10d::Backend(request.rank, request.world_size),
      request_(std::move(request)),
      communicator_(with_torch_errors([&] { return connect(request_); })),
      devices_(DeviceCalls::make(communicator_, request_.devices, request_.interrupt)),
      options_(c10::make_intrusive<GroupOptions>("pycoll", request_.timeout)),
      interrupt_(request_.interrupt),
      codecs_(CodecGroup::make(communicator_)),
      sparse_(std::make_unique<SparseCalls>(communicator_, request_.interrupt)) {
  options_->global_ranks_in_group = request_.global_ranks;
}

c10::intrusive_ptr<Backend> Backend::make(GroupRequest request) {
  auto backend = c10::make_intrusive<Backend>(std::move(request));
  if (backend->request_.made) backend->request_.made(*backend);
  return backend;
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& /*store*/,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<Options>& options) {
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  if (mine == ranks.end()) return nullptr;
  GroupRequest request = request_of_part("split", ranks);
  if (options != nullptr) request.timeout = options->timeout;
  return make(std::move(request));
}

c10::intrusive_ptr<c10d::Backend> Backend::shrink(const std::vector<int64_t>& ranks_to_exclude,
                                                  int flags,
                                                  const c10::intrusive_ptr<Options>& options) {
  constexpr int kAbort = 1;  // torch's SHRINK_ABORT
  std::vector<int> ranks;
  for (int rank = 0; rank < getSize(); ++rank) {
    const auto found = std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), rank);
    if (found == ranks_to_exclude.end()) ranks.push_back(rank);
  }
  if (std::find(ranks.begin(), ranks.end(), getRank()) == ranks.end()) {
    refuse("pycoll:shrink", "rank ", getRank(), " is one of those that are excluded");
  }
  if (flags & kAbort) abort();
  GroupRequest request = request_of_part("shrink", ranks);
  if (options != nullptr) request.timeout = options->timeout;
  return make(std::move(request));
}

GroupRequest Backend::request_of_part(const char* kind, const std::vector<int>& ranks) {
  GroupRequest request = request_;
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  request.rank = static_cast<int>(mine - ranks.begin());
  request.world_size = static_cast<int>(ranks.size());
  // The same on all of these ranks, which make the same parts among themselves.
  request.group_id += concat("/", kind);
  for (const int rank : ranks) request.group_id += concat("-", rank);
  {
    const std::lock_guard lock(splits_mutex_);
    request.group_id += concat("/", ++splits_[ranks]);
  }
  request.global_ranks.clear();
  for (const int rank : ranks) {
    const auto place = static_cast<size_t>(rank);
    const bool known = place < request_.global_ranks.size();
    request.global_ranks.push_back(known ? request_.global_ranks[place] : place);
  }
  return request;
}

void Backend::eagerConnectSingleDevice(at::Device device) {
  const GilRelease release;
  with_torch_errors([&] { devices_->connect(device); });
}

Backend::~Backend() {
  const GilRelease release;
  devices_->close();
  sparse_->close();
  codecs_->close();
  communicator_->close();
  devices_.reset();
  codecs_.reset();
  communicator_.reset();
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  communicator_->set_timeout(time_limit(timeout));
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  if (!options.device().is_cpu()) return at::empty({size}, options);
  return empty_shareable({size}, c10::typeMetaToScalarType(options.dtype()));
}

void Backend::registerOnCompletionHook(CompletionHook::Function&& hook) {
  with_torch_errors([&] { hook_->set(hook); });
  onCompletionHook_ = std::move(hook);  // for hasHooks()
}

void Backend::waitForPendingWorks() {
  const GilRelease release;
  hook_->wait_for_pending(interrupt_);
}

c10d::ErrorType Backend::getError() {
  try {
    communicator_->throw_if_dead();
    return c10d::ErrorType::SUCCESS;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::timed_out) return c10d::ErrorType::TIMEOUT;
    const bool by_peer =
        error.kind() == ErrorKind::peer_failed || error.kind() == ErrorKind::aborted;
    return by_peer ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::COMM_ERROR;
  }
}

std::unordered_map<std::string, uint64_t> Backend::getMemoryStats() {
  std::unordered_map<std::string, uint64_t> found;
  for (const auto& [name, value] : communicator_->statistics()) found[name] = value;
  const shm::Arena* const arena = shm::existing_process_arena();
  const auto shareable = arena != nullptr ? arena->statistics() : shm::Arena::Statistics();
  found["shareable_live_bytes"] = shareable.live;
  found["shareable_peak_bytes"] = shareable.peak;
  found["shareable_cached_bytes"] = shareable.cached;
  found["shareable_backed_bytes"] = shareable.backed;
  return found;
}

void Backend::abort() {
  const GilRelease release;
  constexpr auto kReason = "torch.distributed asked for it";
  devices_->abort(kReason);
  sparse_->abort(kReason);
  communicator_->abort(kReason);
}

void Backend::shutdown() {
  const GilRelease release;
  devices_->close();
  sparse_->close();
  codecs_->close();
  communicator_->close();
}

CallRequest Backend::prepare(Call& call, Tensors* copies) const {
  CallRequest request = std::move(call.request);
  if (call.timeout != c10d::kUnsetTimeout) request.timeout = time_limit(call.timeout);
  // Strided tensors travel as dense copies; what comes out is copied back
  // element by element. A tensor that is both input and output stays one.
  const DenseTensors inputs(call.inputs, DenseTensors::Role::input);
  const DenseTensors outputs(call.outputs, DenseTensors::Role::output, &inputs);
  // Outputs first: taking the address for writing may move a copy-on-write
  // tensor that is also an input.
  request.output = outputs.view(call.output_lengths);
  request.input = inputs.view(call.input_lengths);
  if (outputs.any_copied()) {
    request.finalize = [outputs] { outputs.copy_back(); };
  }
  // Dense copies of inputs must live as long as the operation.
  if (inputs.any_copied()) request.keep_alive = std::make_shared<DenseTensors>(inputs);
  if (copies != nullptr) {
    inputs.append_copies(*copies);
    outputs.append_copies(*copies);
  }
  return request;
}

c10::intrusive_ptr<Work> Backend::start(Call call, CallRequest request, const CodecWord& codec) {
  Description description{getRank(), call.type, call.shown ? call.title : nullptr,
                          std::move(call.inputs), std::move(call.outputs)};
  auto work = c10::make_intrusive<Work>(communicator_, std::move(description), interrupt_);
  const GilRelease release;
  with_torch_errors([&] {
    if (codec) {
      CodecRequest compressed{std::move(request), *codec};
      // Both live as long as the operation.
      compressed.keep_alive = std::make_shared<std::pair<std::shared_ptr<void>, Tensors>>(
          std::move(compressed.keep_alive), std::move(call.residuals));
      work->submit(codecs_, std::move(compressed));
    } else {
      codecs_->let_end(request, interrupt_);
      work->submit(std::move(request));
    }
  });
  return work;
}

// Every rank ends with what codes decode to, the root of a broadcast too, which is else read.
void Backend::check_outputs(const Call& call) const {
  for (const at::Tensor& output : call.outputs) {
    check_tensor(call.title, "tensor", output, Access::write);
  }
}

CodecWord Backend::codec_for(const Call& call, const CallRequest& request,
                             c10::Device device) const {
  // A group's codec is for gradients: DDP broadcasts parameters and buffers, which must be exact.
  const bool reduces = request.collective == Collective::all_reduce ||
                       request.collective == Collective::reduce_scatter;
  // One that was chosen by measuring is for what was measured.
  const bool by_group = reduces && (device.is_cpu() || !request_.codec_is_chosen);
  const CodecWord of_group = by_group ? request_.codec : std::nullopt;
  const auto said = call.codec ? call.codec : request_.regions->here();
  const CodecWord codec = said.value_or(of_group);
  if (!codec || !can_compress(getSize(), request.collective, request.dtype, request.reduce_op)) {
    return std::nullopt;
  }
  // Ranks know no more than their own lengths of an all_to_all: they could not agree.
  if (request.collective == Collective::all_to_all) return codec;
  const uint64_t count = std::max(request.input.count(), request.output.count());
  if (count * size_of(request.dtype) < request_.codec_min_bytes) return std::nullopt;
  return codec;
}

Backend::WorkPtr Backend::run_on(c10::Device device, const char* title, Description description,
                                 std::vector<Call> calls) {
  try {
    const c10::DeviceGuard guard(device);
    DeviceCall together{title, std::move(description), device, time_of(calls.front().timeout),
                        calls.front().async};
    for (Call& call : calls) {
      CallRequest request = prepare(call, &together.copies);
      const CodecWord codec = codec_for(call, request, device);
      if (codec) check_outputs(call);
      together.copies.insert(together.copies.end(), call.residuals.begin(), call.residuals.end());
      together.calls.push_back({std::move(request), codec});
    }
    WorkPtr work = devices_->run(std::move(together));
    return work ? remember(std::move(work)) : nullptr;
  } catch (const c10::Error& error) {
    const GilRelease release;
    devices_->note_error(device, error);
    throw;
  }
}

Backend::WorkPtr Backend::run(Call call) {
  if (!call.async && hook_->is_set()) {
    call.async = true;
    run(std::move(call))->wait();
    return nullptr;
  }
  if (const auto gpu = gpu_of(call.title, call.inputs, call.outputs)) {
    const char* title = call.title;
    Description description{getRank(), call.type, title, call.inputs, call.outputs};
    std::vector<Call> calls;
    calls.push_back(std::move(call));
    return run_on(*gpu, title, std::move(description), std::move(calls));
  }
  CallRequest request = prepare(call);
  const CodecWord codec = codec_for(call, request, at::kCPU);
  if (codec) check_outputs(call);
  if (codec && !call.async) {
    const Profiled profiled(call.title, call.inputs);
    const GilRelease release;
    with_torch_errors([&] {
      codecs_->submit({std::move(request), *codec}, interrupt_)->wait(std::nullopt, interrupt_);
    });
    return nullptr;
  }
  if (call.async) return remember(start(std::move(call), std::move(request), codec));
  const Profiled profiled(call.title, call.inputs);
  const GilRelease release;
  with_torch_errors([&] {
    codecs_->let_end(request, interrupt_);
    communicator_->run(std::move(request), interrupt_);
  });
  return nullptr;
}

Backend::WorkPtr Backend::run_together(c10d::OpType type, const char* title,
                                       std::vector<Call> calls) {
  if (!calls.empty() && !calls.front().async && hook_->is_set()) {
    for (Call& call : calls) call.async = true;
    run_together(type, title, std::move(calls))->wait();
    return nullptr;
  }
  Description description{getRank(), type, title, {}, {}};
  if (calls.empty()) return CombinedWork::make(std::move(description), {});
  for (const Call& call : calls) {
    description.inputs.insert(description.inputs.end(), call.inputs.begin(), call.inputs.end());
    description.outputs.insert(description.outputs.end(), call.outputs.begin(), call.outputs.end());
  }
  if (const auto gpu = gpu_of(title, description.inputs, description.outputs)) {
    return run_on(*gpu, title, std::move(description), std::move(calls));
  }
  std::optional<Profiled> profiled;
  const bool async = calls.front().async;
  if (!async) profiled.emplace(title, description.inputs);
  std::vector<CallRequest> requests;
  for (Call& call : calls) requests.push_back(prepare(call));
  with_torch_errors([&] {
    for (const CallRequest& request : requests) communicator_->check(request);
  });
  // Synchronous calls too are all under way before the first is waited for.
  CombinedWork::Parts parts;
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i].shown = false;
    const CodecWord codec = codec_for(calls[i], requests[i], at::kCPU);
    parts.push_back(start(std::move(calls[i]), std::move(requests[i]), codec));
  }
  if (async) return remember(CombinedWork::make(std::move(description), std::move(parts)));
  for (const auto& part : parts) part->wait();
  return nullptr;
}

Backend::WorkPtr Backend::remember(c10::intrusive_ptr<c10d::Work> work) {
  if (hook_->is_set()) hook_->watch(*work);
  const std::lock_guard lock(coalescing_mutex_);
  if (coalescing_.open) coalescing_.works.push_back(work);
  return work;
}

void Backend::startCoalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  // One that was left open by an exception counts for nothing.
  coalescing_ = Coalescing{true};
}

Backend::WorkPtr Backend::endCoalescing() {
  Coalescing coalescing;
  {
    const std::lock_guard lock(coalescing_mutex_);
    std::swap(coalescing, coalescing_);
  }
  if (!coalescing.open) refuse("pycoll:end_coalescing", "start_coalescing was not called");
  if (WorkPtr batch = run_batch(std::move(coalescing.batch))) {
    if (coalescing.works.empty()) return batch;
    coalescing.works.push_back(std::move(batch));
  }
  if (coalescing.works.empty()) return nullptr;
  Description description{getRank(), c10d::OpType::COALESCED, "pycoll:coalesced", {}, {}};
  for (const auto& work : coalescing.works) {
    const Tensors outputs = work->result();
    description.outputs.insert(description.outputs.end(), outputs.begin(), outputs.end());
  }
  return CombinedWork::make(std::move(description), std::move(coalescing.works));
}

}  // namespace pycoll::torch_adapter
