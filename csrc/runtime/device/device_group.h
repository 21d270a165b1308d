// A group on GPUs, as the rest of pycoll sees it: no CUDA types, so that neither the core nor
// csrc/torch links to CUDA.
//
// Everything that does is one more library, libpycoll_cuda.so, which is opened by its path. It
// exports one C function, pycoll_device_library(), and calls back into the core that is loaded
// already.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/codec.h"
#include "runtime/codec_request.h"
#include "runtime/communicator.h"
#include "runtime/device/fused_calls.h"

namespace pycoll {

// The ranks of a group, each with one device. Calls of a group are made in one order on every rank,
// by one thread at a time; their work runs in that order even where streams differ. Streams are
// cudaStream_t of the group's device, as void*.
//
// All functions throw Error: invalid_argument and not_implemented before anything was queued;
// anything else means that the group is dead, and every later call throws it again.
class DeviceGroup {
 public:
  virtual ~DeviceGroup() = default;
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  // How the ranks meet: "shared_device" (all on one GPU), "peers" (GPUs that map each other's
  // memory), "hosts" (one of these inside of each host, the CPU transport between them) or "staged"
  // (through pinned host memory and the CPU transport).
  virtual const char* path() const = 0;

  // Queues a collective on `stream` and returns. Vectors are device memory, or pinned host memory;
  // any size and alignment that the type has. The work begins after what is on the stream, and is
  // over before what comes later there; until then the vectors must live. finalize, keep_alive and
  // on_complete of the request are not looked at: they are the caller's, who has events. `timeout`
  // bounds one wait inside of a kernel, or of the CPU transport.
  //
  // During a capture of the stream: as many replays as one likes, mixed with other calls, as long
  // as all ranks replay in the same order.
  virtual void enqueue(const CallRequest& request, void* stream) = 0;

  // The same for a collective whose values travel as codes, residuals in memory of the device; the
  // bits are those of a CodecGroup of such ranks. Encoding and decoding are work of the stream, and
  // codes cross PCIe and the network where anything has to. `in_order` is not looked at. Replays of
  // a graph have the step, and so the random numbers, of the call that was captured.
  // not_implemented for what can_compress() refuses, and for sums over more than 64 ranks.
  virtual void enqueue(const CodecRequest& request, void* stream) = 0;

  // The same for messages that make progress together, as between ncclGroupStart and
  // ncclGroupEnd. Messages of a pair of ranks match in the order of calls; tags must be the same at
  // both ends ("staged", "hosts") or are not looked at. not_implemented for kAnySource.
  virtual void enqueue(const std::vector<MessageRequest>& batch, void* stream) = 0;

  // Throws the group's error: what a kernel reported, or the death of a peer. Never waits; for the
  // watchdog and for whoever waits for the group's work, from any thread.
  virtual void check() = 0;

  // Ends the group here and at the peers, from any thread: queued work ends soon, without results.
  virtual void abort(const std::string& reason) = 0;

 protected:
  DeviceGroup() = default;
};

// A point in the work of a stream.
class DeviceMark {
 public:
  virtual ~DeviceMark() = default;
  DeviceMark(const DeviceMark&) = delete;
  DeviceMark& operator=(const DeviceMark&) = delete;

  // Whether the work before it is over. Throws Error(system) when the GPU has failed.
  virtual bool reached() const = 0;
  // What comes later on `stream`, of whatever device, begins after it.
  virtual void hold(void* stream) const = 0;

 protected:
  DeviceMark() = default;
};

class DeviceLibrary {
 public:
  virtual ~DeviceLibrary() = default;
  DeviceLibrary(const DeviceLibrary&) = delete;
  DeviceLibrary& operator=(const DeviceLibrary&) = delete;

  // "cuda", or "simgpu" for the simulator of the tests.
  virtual const char* name() const = 0;
  virtual int device_count() const = 0;

  // Collective over `control`, the group's CPU communicator, which the group keeps: ranks tell each
  // other where their memory is, and of aborts. Blocks until all ranks have called it.
  virtual std::shared_ptr<DeviceGroup> open(const std::shared_ptr<Communicator>& control,
                                            int device) = 0;

  // The rest is for callers who have addresses and nothing else of CUDA; torch has all this.
  //
  // The device whose memory that is; nothing for pinned host memory, which all devices reach.
  // Throws Error(invalid_argument) for memory that no device reaches.
  virtual std::optional<int> device_of(const void* address) const = 0;
  // That of the calling thread.
  virtual int current_device() const = 0;
  // What is on the stream now. Throws Error(invalid_argument) when it is not a stream of `device`.
  virtual std::shared_ptr<DeviceMark> mark(int device, void* stream) const = 0;

  // The codecs of kernels/codec.h on memory of `device`, queued on a stream of it: until the work
  // is over the memory must live. Throws Error(invalid_argument), with nothing queued, for a codec
  // or a type that cannot be, for more than 64 codes, for codes that are not aligned to 16 bytes,
  // and for values that are not to their elements. A code is the CPU's to the byte, and so is what
  // becomes of it.
  virtual void encode(const EncodeRequest& request, int device, void* stream) const = 0;
  virtual void decode(const DecodeRequest& request, int device, void* stream) const = 0;

  // The kernels of kernels/fused.h, with the CPU's bits, queued as codecs are: target = source *
  // scale; x *= factor, and the sum of squares of all; x *= factor; and x *= min(1, max_norm /
  // (sqrt(sum of squares) + 1e-6)), where 1 leaves memory alone. Tensors are aligned to their
  // elements; the caller has checked dtypes and overlap. Throw Error(not_implemented) during a
  // capture.
  virtual void cast(const CastList& list, float scale, const FusedPlace& place) const = 0;
  virtual void unscale(const TensorList& list, const DeviceFactor& factor, double* sum_of_squares,
                       const FusedPlace& place) const = 0;
  virtual void multiply(const TensorList& list, const DeviceFactor& factor,
                        const FusedPlace& place) const = 0;
  virtual void clip(const TensorList& list, const double* sum_of_squares, double max_norm,
                    const FusedPlace& place) const = 0;

  // Opens the library at `path`, for good: code of a GPU cannot be unloaded safely. Throws
  // Error(system) with the loader's reason when it does not open, Error(mismatch) when it was built
  // for another version of pycoll.
  static std::shared_ptr<DeviceLibrary> load(const std::string& path);

 protected:
  DeviceLibrary() = default;
};

// Changes whenever this header or a type that it uses does.
constexpr int kDeviceInterfaceVersion = 6;

// What the library exports: a new object, or nullptr when its version is another one.
using DeviceLibraryFunction = DeviceLibrary* (*)(int interface_version);
constexpr const char* kDeviceLibraryFunction = "pycoll_device_library";

}  // namespace pycoll
