#include "torch/device.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "python/gil.h"
#include "torch/errors.h"

namespace pycoll::torch_adapter {
namespace {

using c10::impl::VirtualGuardImpl;

// What close() gives to others.
constexpr auto kClosePatience = std::chrono::seconds(1);

std::string name_of(c10::DeviceType type) {
  return c10::DeviceTypeName(type, /*lower_case=*/true);
}

bool by_type_and_index(const c10::Device& a, const c10::Device& b) {
  return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
}

void for_each_tensor(const DeviceCall& call, const std::function<void(const at::Tensor&)>& visit) {
  for (const Tensors* tensors :
       {&call.description.inputs, &call.description.outputs, &call.copies}) {
    for (const at::Tensor& tensor : *tensors) visit(tensor);
  }
}

// The caching allocator must not give the memory to somebody else before the stream has come so
// far, even if all tensors are gone by then.
void keep_until_done(const DeviceCall& call, const VirtualGuardImpl& impl, c10::Stream stream) {
  for_each_tensor(call, [&](const at::Tensor& tensor) {
    if (tensor.device().is_cpu() || !tensor.has_storage()) return;
    impl.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  });
}

}  // namespace

std::string DeviceLibraries::load(const std::string& path) {
  auto library = DeviceLibrary::load(path);
  std::string name = library->name();
  c10::DeviceType type{};
  try {
    type = c10::Device(name).type();
  } catch (const c10::Error&) {
    fail(ErrorKind::invalid_argument, path, " serves '", name,
         "' devices, and this torch has none of that name");
  }
  const std::lock_guard lock(mutex_);
  const auto [place, is_new] = libraries_.emplace(type, std::move(library));
  if (!is_new) {
    fail(ErrorKind::invalid_argument, "a library for '", name, "' devices is open already");
  }
  return name;
}

std::shared_ptr<DeviceLibrary> DeviceLibraries::find(c10::DeviceType type) const {
  const std::lock_guard lock(mutex_);
  const auto found = libraries_.find(type);
  return found == libraries_.end() ? nullptr : found->second;
}

bool DeviceLibraries::any() const {
  const std::lock_guard lock(mutex_);
  return !libraries_.empty();
}

std::vector<std::string> DeviceLibraries::names() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [type, library] : libraries_) names.emplace_back(library->name());
  return names;
}

std::optional<c10::Device> gpu_of(const char* operation, const Tensors& inputs,
                                  const Tensors& outputs) {
  std::optional<c10::Device> found;
  for (const Tensors* tensors : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *tensors) {
      const c10::Device device = tensor.device();
      if (!found) found = device;
      if (*found != device) {
        refuse(operation, "one tensor is on ", found->str(), ", another on ", device.str(),
               ": all tensors of a call must be on one device");
      }
    }
  }
  return found && !found->is_cpu() ? found : std::nullopt;
}

DeviceCalls::DeviceCalls(std::shared_ptr<Communicator> control,
                         std::shared_ptr<DeviceLibraries> libraries, Interrupt interrupt)
    : control_(std::move(control)),
      libraries_(std::move(libraries)),
      interrupt_(std::move(interrupt)),
      lanes_(&by_type_and_index) {}

std::shared_ptr<DeviceCalls> DeviceCalls::make(std::shared_ptr<Communicator> control,
                                               std::shared_ptr<DeviceLibraries> libraries,
                                               Interrupt interrupt) {
  auto* calls = new DeviceCalls(std::move(control), std::move(libraries), std::move(interrupt));
  return {calls, [](DeviceCalls* dying) {
            if (!dying->fork_mark_.in_child()) delete dying;
          }};
}

std::shared_ptr<DeviceLibrary> DeviceCalls::library_for(c10::Device device) const {
  auto library = libraries_->find(device.type());
  if (library != nullptr) return library;
  fail(ErrorKind::not_implemented, "a tensor is on ", device.str(),
       ", and pycoll has no library for '", torch_adapter::name_of(device.type()),
       "' devices here (`pycoll doctor` says which it has): build pycoll where torch and nvcc have "
       "CUDA, or move the tensor to the CPU");
}

DeviceCalls::Lane& DeviceCalls::lane(c10::Device device) {
  const auto known = lanes_.find(device);
  if (known != lanes_.end()) return known->second;
  const auto library = library_for(device);
  // Whoever comes first waits here, where a signal can end it and the late rank is named.
  control_->run(CallRequest{}, interrupt_);
  auto group = library->open(control_, device.index());
  const VirtualGuardImpl impl(device.type());
  const c10::Stream side = impl.getStreamFromGlobalPool(device, control_->config().high_priority);
  watchdog_.watch(group);
  return lanes_.emplace(device, Lane{std::move(group), side}).first->second;
}

std::string DeviceCalls::name_of(const DeviceCall& call, uint64_t sequence) const {
  return concat("rank ", control_->rank(), ": ", call.title, " #", sequence, " on ",
                call.device.str());
}

// None starts unless all are in order.
void DeviceCalls::check(const DeviceCall& call) const {
  for (const DeviceRequest& one : call.calls) {
    if (one.codec) {
      check_codec_request(*control_, {one.request, *one.codec});
    } else {
      control_->check(one.request);
    }
  }
}

// What the requests ask for, and then what is to be done with their results, on the stream.
void DeviceCalls::enqueue(DeviceCall& call, DeviceGroup& group, c10::Stream stream) {
  const Nanoseconds timeout = time_limit(call.timeout);
  for (DeviceRequest& one : call.calls) {
    one.request.timeout = timeout;
    if (one.codec) {
      group.enqueue(CodecRequest{one.request, *one.codec}, stream.native_handle());
    } else {
      group.enqueue(one.request, stream.native_handle());
    }
  }
  for (MessageRequest& message : call.messages) message.timeout = timeout;
  if (!call.messages.empty()) group.enqueue(call.messages, stream.native_handle());
  const c10::StreamGuard guard(stream);
  for (const DeviceRequest& one : call.calls) {
    if (one.request.finalize) one.request.finalize();
  }
  for (const MessageRequest& message : call.messages) {
    if (message.finalize) message.finalize();
  }
}

void DeviceCalls::note_error(c10::Device device, const c10::Error& error) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return;  // whoever is in a call now finds out by itself
  if (const auto known = lanes_.find(device); known != lanes_.end()) {
    const auto group = known->second.group;
    lock.unlock();
    try {
      group->check();
    } catch (const Error&) {
      // It has told the peers.
    }
    return;
  }
  try {
    recorded(VirtualGuardImpl(device.type()).getStream(device))->query();
  } catch (const c10::Error&) {
    control_->abort(concat(device.str(), " has failed: ", error.what_without_backtrace()));
  }
}

DeviceCalls::Queued DeviceCalls::queue(DeviceCall& call, bool awaited) {
  const std::lock_guard lock(mutex_);
  if (closed_) fail(ErrorKind::aborted, "rank ", control_->rank(), ": the group was destroyed");
  check(call);
  const c10::DeviceGuard device_guard(call.device);
  const Lane& lane = this->lane(call.device);
  const VirtualGuardImpl impl(call.device.type());
  const c10::Stream current = impl.getStream(call.device);
  const c10::Stream stream = call.async ? lane.side : current;
  if (stream != current) {
    c10::Event before(call.device.type());
    before.record(current);
    before.block(stream);
  }
  const uint64_t sequence = 1 + sequence_.fetch_add(1, std::memory_order_relaxed);
  enqueue(call, *lane.group, stream);
  if (stream != current) keep_until_done(call, impl, stream);
  if (!awaited) return {};
  return {sequence,
          {lane.group, recorded(stream), time_limit(call.timeout), interrupt_,
           name_of(call, sequence)}};
}

c10::intrusive_ptr<c10d::Work> DeviceCalls::run(DeviceCall call) {
  const bool blocking = call.blocking || control_->config().blocking_wait;
  std::optional<Profiled> profiled;
  if (!call.async) profiled.emplace(call.title, call.description.inputs);
  Queued queued;
  {
    const GilRelease release;
    with_torch_errors([&] {
      queued = queue(call, call.async || blocking);
      if (!call.async && blocking) queued.progress.wait_to_the_end();
    });
  }
  if (!call.async) return nullptr;
  return c10::make_intrusive<DeviceWork>(std::move(call.description), std::move(queued.progress),
                                         call.device, queued.sequence, blocking);
}

void DeviceCalls::connect(c10::Device device) {
  const std::lock_guard lock(mutex_);
  if (closed_) fail(ErrorKind::aborted, "rank ", control_->rank(), ": the group was destroyed");
  const c10::DeviceGuard guard(device);
  lane(device);
}

void DeviceCalls::abort(const std::string& reason) {
  // Not under mutex_, which whoever is stuck may hold: in the first meeting, say.
  watchdog_.abort(reason);
  control_->abort(reason);
}

void DeviceCalls::close() {
  if (fork_mark_.in_child()) return;  // what there is belongs to the parent
  std::unique_lock lock(mutex_, kClosePatience);
  if (!lock) {
    abort("the group is destroyed while a call is under way");
    lock.lock();
  }
  closed_ = true;
  watchdog_.stop();
  lanes_.clear();
}

}  // namespace pycoll::torch_adapter
