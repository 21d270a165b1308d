#include "torch/device_work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "python/gil.h"
#include "torch/errors.h"

namespace pycoll::torch_adapter {
namespace {

using c10::impl::VirtualGuardImpl;

// A wait of the host for a GPU: short sleeps at first.
constexpr auto kShortestSleep = std::chrono::microseconds(20);
constexpr auto kLongestSleep = std::chrono::microseconds(1000);

// Beyond a call's timeout: what waits on the GPU has the same one, and knows for whom it waited.
constexpr auto kGrace = std::chrono::seconds(1);

c10::intrusive_ptr<c10::ivalue::Future> new_future(std::vector<c10::Device> devices) {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                  std::move(devices));
}

c10::Stream any_stream(c10::Device device) {
  return VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

// Torch errors that the function ends with.
void keep_error(const std::function<void()>& what, std::exception_ptr& error) {
  try {
    with_torch_errors(what);
  } catch (...) {
    error = std::current_exception();
  }
}

}  // namespace

bool Progress::wait(Nanoseconds limit) const {
  const Deadline deadline = Deadline::after(limit);
  auto sleep = kShortestSleep;
  while (!is_over()) {
    group->check();
    if (deadline.passed()) return false;
    if (interrupt) interrupt();
    std::this_thread::sleep_for(sleep);
    sleep = std::min(2 * sleep, kLongestSleep);
  }
  check();  // what has failed is over, too
  return true;
}

bool Progress::is_over() const {
  try {
    return done->query();
  } catch (const c10::Error&) {
    return true;  // the GPU has failed: nothing more will happen there
  }
}

void Progress::check() const {
  group->check();
  done->query();  // throws when the GPU has failed
}

void Progress::wait_to_the_end() const {
  if (wait(timeout + kGrace)) return;
  const std::string text = concat(name, ": Timed out waiting ", to_seconds(timeout), " s");
  group->abort(text);
  fail(ErrorKind::timed_out, text);
}

DeviceWork::DeviceWork(Description description, Progress progress, c10::Device device,
                       uint64_t sequence, bool blocking)
    : c10d::Work(description.rank, description.type, description.title, description.inputs),
      progress_(std::move(progress)),
      device_(device),
      sequence_(sequence),
      blocking_(blocking),
      outputs_(std::move(description.outputs)) {
  finish();  // for profilers: it is queued, and they see the GPU's side for themselves
}

std::exception_ptr DeviceWork::exception() const {
  std::exception_ptr error;
  keep_error([&] { progress_.check(); }, error);
  return error;
}

bool DeviceWork::isCompleted() {
  return progress_.is_over() || exception() != nullptr;
}

bool DeviceWork::isSuccess() const {
  return progress_.is_over() && exception() == nullptr;
}

void DeviceWork::synchronize() {
  with_torch_errors([&] { progress_.group->check(); });
  progress_.done->block(VirtualGuardImpl(device_.type()).getStream(device_));
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  if (!blocking_ && timeout == kNoTimeout) return true;
  const GilRelease release;
  with_torch_errors([&] {
    if (timeout == kNoTimeout) {
      progress_.wait_to_the_end();
    } else if (const Nanoseconds limit = time_limit(timeout); !progress_.wait(limit)) {
      fail(ErrorKind::timed_out, progress_.name, ": Timed out waiting ", to_seconds(limit),
           " s; the operation goes on");
    }
  });
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  const std::lock_guard lock(future_mutex_);
  if (future_) return future_;
  future_ = new_future({device_});
  if (const std::exception_ptr error = exception()) {
    future_->setError(error);
    return future_;
  }
  // The future remembers the stream that is current when it is completed: one on which nothing
  // comes but the end of this call.
  const c10::StreamGuard guard(any_stream(device_));
  progress_.done->block(guard.current_stream());
  future_->markCompleted(c10::IValue(outputs_));
  return future_;
}

StagedReceive::StagedReceive(Description description, c10::intrusive_ptr<c10d::Work> message,
                             Staging staging)
    : c10d::Work(description.rank, description.type, description.title, description.inputs),
      message_(std::move(message)),
      staging_(std::move(staging)),
      future_(new_future({staging_.device.device()})) {}

c10::intrusive_ptr<StagedReceive> StagedReceive::make(Description description,
                                                      c10::intrusive_ptr<c10d::Work> message,
                                                      Staging staging) {
  auto work = c10::make_intrusive<StagedReceive>(std::move(description), std::move(message),
                                                 std::move(staging));
  // The reference ends with the message, which always ends.
  work->message_->getFuture()->addCallback([work](c10::ivalue::Future&) { work->deliver(); });
  return work;
}

// By whoever ended the message.
void StagedReceive::deliver() {
  std::exception_ptr error = message_->exception();
  if (error == nullptr) {
    keep_error(
        [&] {
          const at::AutoDispatchBelowAutograd no_autograd;
          const c10::InferenceMode any_tensor;  // as DenseTensors::copy_back() has it
          at::Tensor to = staging_.device;
          const c10::StreamGuard guard(any_stream(to.device()));
          staging_.ready->block(guard.current_stream());
          VirtualGuardImpl(to.device().type())
              .recordDataPtrOnStream(to.storage().data_ptr(), guard.current_stream());
          if (staging_.deliver) {
            staging_.deliver(to, staging_.host);
          } else {
            to.copy_(staging_.host.view(to.sizes()), /*non_blocking=*/true);
          }
          future_->markCompleted(c10::IValue(Tensors{to}));
        },
        error);
  }
  finish(error);
  if (error) future_->setError(error);
}

std::exception_ptr StagedReceive::exception() const {
  return future_->hasError() ? future_->exception_ptr() : nullptr;
}

bool StagedReceive::wait(std::chrono::milliseconds timeout) {
  message_->wait(timeout);
  // Its thread may still be about to deliver; then the current stream waits for the copy.
  const GilRelease release;
  future_->waitAndThrow();
  return true;
}

std::shared_ptr<c10::Event> recorded(c10::Stream stream) {
  auto event = std::make_shared<c10::Event>(stream.device_type());
  event->record(stream);
  return event;
}

std::vector<c10::Device> gpus_of(const Tensors& tensors) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    const c10::Device device = tensor.device();
    if (device.is_cpu()) continue;
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  return devices;
}

void complete_together(c10::ivalue::Future& future, const CombinedWork::Parts& parts,
                       const Tensors& value) {
  std::vector<c10::Stream> streams;
  for (const c10::Device& device : future.devices()) streams.push_back(any_stream(device));
  const c10::MultiStreamGuard guard(streams);
  try {
    if (!streams.empty()) {
      for (const auto& part : parts) part->synchronize();
    }
  } catch (const std::exception&) {
    future.setError(std::current_exception());
    return;
  }
  future.markCompleted(c10::IValue(value));
}

}  // namespace pycoll::torch_adapter
