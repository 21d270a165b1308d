// A group's calls on GPU tensors, whatever the GPU: written on c10's device-generic streams and
// events, so that the same code serves CUDA and the simulator of the tests. What moves the data is
// a DeviceLibrary, opened at run time.
//
// Semantics are those that users of NCCL know. A call takes its place on the stream that is current
// when it is made: it begins after what is there, and what comes there later sees its result. An
// asynchronous one runs on a stream of the group, and joins the current stream in wait(), which
// does not block the caller.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/fork_mark.h"
#include "runtime/coded_message.h"
#include "runtime/device/device_group.h"
#include "runtime/device_watchdog.h"
#include "torch/device_work.h"
#include "torch/tensors.h"

namespace pycoll::torch_adapter {

// The GPU libraries that this process has opened: at most one for each type of device.
class DeviceLibraries {
 public:
  // Returns the library's name. Throws what DeviceLibrary::load() throws, and
  // Error(invalid_argument) when torch has no device of that name, or it is served already.
  std::string load(const std::string& path);
  // Null: none was opened for these devices.
  std::shared_ptr<DeviceLibrary> find(c10::DeviceType type) const;
  bool any() const;
  std::vector<std::string> names() const;

 private:
  mutable std::mutex mutex_;
  std::map<c10::DeviceType, std::shared_ptr<DeviceLibrary>> libraries_;  // guarded by mutex_
};

// The GPU that the call's tensors are on; nothing: they are on the CPU. Refuses tensors that are
// not all on one device.
std::optional<c10::Device> gpu_of(const char* operation, const Tensors& inputs,
                                  const Tensors& outputs);

// A message that waits for the batch that it belongs to.
struct DeviceMessage {
  MessageRequest request;
  at::Tensor tensor;
  DenseTensors dense;
};

// A collective, and how its values travel; none: as they are.
struct DeviceRequest {
  CallRequest request;
  std::optional<CodecChoice> codec{};
};

// Collectives to be queued one after the other, or messages that make progress together; seen by
// torch as one.
struct DeviceCall {
  const char* title;        // "pycoll:all_reduce": for profilers and errors
  Description description;  // of the Work
  c10::Device device;
  std::chrono::milliseconds timeout;
  bool async;
  bool blocking = false;  // the caller waits for the GPU: barriers
  std::vector<DeviceRequest> calls{};
  std::vector<MessageRequest> messages{};
  // That the requests point to beside the caller's: dense ones of strided tensors, residuals.
  Tensors copies{};
};

// The GPU side of one group. Its libraries' groups are made at the first call on a device, which
// all ranks must make: they meet over the group's CPU communicator.
class DeviceCalls {
 public:
  // In a forked child the object is never destroyed: nothing of a GPU can be ended there.
  static std::shared_ptr<DeviceCalls> make(std::shared_ptr<Communicator> control,
                                           std::shared_ptr<DeviceLibraries> libraries,
                                           Interrupt interrupt);
  ~DeviceCalls() { close(); }
  DeviceCalls(const DeviceCalls&) = delete;
  DeviceCalls& operator=(const DeviceCalls&) = delete;

  // Queues it. The Work is that of an asynchronous call; another one is on the current stream, in
  // order with whatever comes there, and needs none (nullptr). One that blocks, by its nature or by
  // PYCOLL_BLOCKING_WAIT, is done when this returns or its Work was waited for.
  c10::intrusive_ptr<c10d::Work> run(DeviceCall call);
  // torch has thrown that while it prepared a call. If it is the GPU that has failed, the peers are
  // told, who would wait for this rank: before the first call there no group sees it.
  void note_error(c10::Device device, const c10::Error& error);

  // Collective: makes what the first call there would make.
  void connect(c10::Device device);

  // Messages on their own: through host memory and the CPU communicator. No rank but the two has to
  // take part, none waits for its peer to receive, and any source may be taken from. (Those that
  // come in one batch go from GPU to GPU.)
  // With a coding the GPU encodes and decodes, and what passes through host memory is the code.
  c10::intrusive_ptr<c10d::Work> send(Description description, MessageRequest request,
                                      const std::optional<MessageCoding>& coding);
  c10::intrusive_ptr<c10d::Work> receive(Description description, MessageRequest request,
                                         const std::optional<MessageCoding>& coding);

  // Whether there may be calls on GPUs at all.
  bool possible() const { return libraries_->any(); }
  uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

  void abort(const std::string& reason);
  // No more calls after that; what was queued is still done. A call that is being queued elsewhere
  // gets a moment, then it is aborted.
  void close();

 private:
  DeviceCalls(std::shared_ptr<Communicator> control, std::shared_ptr<DeviceLibraries> libraries,
              Interrupt interrupt);

  // What is kept for one device.
  struct Lane {
    std::shared_ptr<DeviceGroup> group;
    c10::Stream side;
  };

  struct Queued {
    uint64_t sequence = 0;
    Progress progress{};
  };

  std::shared_ptr<DeviceLibrary> library_for(c10::Device device) const;
  Lane& lane(c10::Device device);
  Queued queue(DeviceCall& call, bool awaited);
  void check(const DeviceCall& call) const;
  static void enqueue(DeviceCall& call, DeviceGroup& group, c10::Stream stream);
  std::string name_of(const DeviceCall& call, uint64_t sequence) const;

  const std::shared_ptr<Communicator> control_;
  const std::shared_ptr<DeviceLibraries> libraries_;
  const Interrupt interrupt_;
  const ForkMark fork_mark_;
  std::atomic<uint64_t> sequence_{0};  // relaxed: a number to show

  // Held while something is queued, which may take long: calls of a group are made one at a time.
  std::timed_mutex mutex_;
  std::map<c10::Device, Lane, bool (*)(const c10::Device&, const c10::Device&)> lanes_;
  bool closed_ = false;  // guarded by mutex_
  DeviceWatchdog watchdog_;
};

}  // namespace pycoll::torch_adapter
