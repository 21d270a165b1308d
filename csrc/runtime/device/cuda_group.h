// What every way through a group's GPUs has in common: order, checks, death.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "core/error.h"
#include "core/fork_mark.h"
#include "runtime/device/codec_runner.h"
#include "runtime/device/device_group.h"
#include "runtime/device/news.h"
#include "runtime/device/work_clock.h"
#include "transport/cuda_ipc/liveness.h"
#include "transport/cuda_ipc/runtime_api.h"

namespace pycoll::cuda {

// Ranks tell each other where things are over the CPU communicator.
Meeting meeting_of(const std::shared_ptr<Communicator>& control, int device);

struct GroupSeed {
  std::shared_ptr<Communicator> control;
  int device = 0;
  Peers peers;
};

// Work of a group runs in the order of calls, whatever streams it is put on: each call begins after
// an event that the one before it ended with. Graphs wait for that event and record it when they
// are launched ("external" in CUDA's words), so they are calls like any other.
//
// A rank whose GPU fails can tell nobody by that GPU: it is the control communicator that says so.
class CudaGroup : public DeviceGroup {
 public:
  ~CudaGroup() override;
  // Ends it when the last reference goes: waits a little for what is under way, then gives it up.
  // Where work stays on the device all the same (behind somebody else's), the group stays until
  // that is over, and nobody waits for it. In a forked child nothing of a GPU can be ended.
  static std::shared_ptr<DeviceGroup> shared(std::unique_ptr<CudaGroup> group);

  // Collective, on the current device: what ranks need of each other. All ranks come back, or all
  // throw. (Constructors take what is this rank's own.)
  virtual void connect() {}
  void enqueue(const CallRequest& request, void* stream) final;
  void enqueue(const CodecRequest& request, void* stream) final;
  void enqueue(const std::vector<MessageRequest>& batch, void* stream) final;
  void check() final;
  void abort(const std::string& reason) final;

 protected:
  explicit CudaGroup(GroupSeed seed);

  // Put the work on the stream; the device is current, and the request in order.
  virtual void launch(const CallRequest& request, cudaStream_t stream) = 0;
  virtual void launch(const std::vector<MessageRequest>& batch, cudaStream_t stream) = 0;
  // The collectives of bytes that such a call is made of are calls of the group, one after the
  // other.
  virtual void launch_over_codec(const CodecRequest& request, cudaStream_t stream);
  // What a kernel has reported, if anything.
  virtual std::optional<Error> reported() { return std::nullopt; }
  // Whether what runs a call looks at its timeout, and knows for whom it waited.
  virtual bool times_out_itself() const { return false; }
  // Else: what is known of work that is late, as "waiting for rank 1"; empty: nothing.
  virtual std::string why_late() const { return ""; }
  // The group is dead: nothing that begins from now on may write to peers' vectors. Once, before
  // release_waits(), which comes after what runs by then is over.
  virtual void disarm() {}
  // End what waits on the device. Called again until the group goes.
  virtual void release_waits() {}
  // The group is dead, and the peers have been told: whatever it uses beside may be given up.
  virtual void ended() {}

  // Collective: memory that all ranks map, `bytes` from payload_of(). Beside it they hear when a
  // peer gives up.
  void make_regions(const Driver& driver, size_t bytes);
  std::byte* payload_of(int peer) const { return regions_->of(peer) + kNewsBytes; }
  // Before members that threads of the group use go.
  void finish() noexcept;

  int rank() const { return seed_.peers.rank; }
  int world_size() const { return seed_.peers.world_size(); }
  const Peers& peers() const { return seed_.peers; }
  Communicator& control() const { return *seed_.control; }
  const std::shared_ptr<Communicator>& control_pointer() const { return seed_.control; }
  int device() const { return seed_.device; }
  // Whether work of the group is on the device.
  bool under_way() const { return last_.query() == cudaErrorNotReady; }
  // Of the call that is being launched: whether that is into a graph; its number, from 1, the same
  // on every rank. Messages, which not all ranks make, have that of the call before.
  bool is_captured() const { return launching_ != 0; }
  uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }
  CodecRunner& codecs() { return codecs_; }

 private:
  class Carrier;
  static constexpr size_t kNewsBytes = 256;

  void begin_after_last(cudaStream_t stream, unsigned long long capture);
  void end_call(cudaStream_t stream, unsigned long long capture);
  template <class Launch>
  void in_order(cudaStream_t stream, const std::optional<Nanoseconds>& timeout,
                const Launch& launch);
  void check_messages(const std::vector<MessageRequest>& batch) const;
  void throw_if_dead() const;
  std::optional<Error> find_trouble();
  Error cause_of(const Error& error);
  std::optional<Error> find_ended_peer();
  std::optional<int> ended_peer() const;
  std::optional<Error> find_late_work();
  bool gpu_has_failed() const;
  Error failure_of_gpu(const std::string& what) const;
  void die(const Error& error) noexcept;
  void tell_peers() noexcept;
  void release_until_done();
  void end() noexcept;
  bool wait_for_end() noexcept;
  void end_later() noexcept;

  const ForkMark fork_mark_;
  const GroupSeed seed_;
  const Liveness liveness_;
  std::unique_ptr<Regions> regions_;
  std::atomic<uint64_t> sequence_{0};  // relaxed: a number, for errors by other threads
  std::mutex order_;                   // one call at a time; guards these:
  const Event last_;                   // the end of the call before
  const Event captured_;               // the same inside of a capture,
  unsigned long long capture_ = 0;     // which is this one
  unsigned long long launching_ = 0;   // the capture of the call that is being launched
  CodecRunner codecs_;
  uint32_t codec_calls_ = 0;

  // Guards what check() and abort() change. Never held while order_ is waited for.
  mutable std::mutex state_;
  std::unique_ptr<PeerNews> news_;
  WorkClock clock_;
  std::optional<Clock::time_point> ended_since_;  // when a peer's process was first seen to be gone
  std::optional<Clock::time_point> aborted_since_;  // when a peer was first seen to have given up
  std::optional<Error> death_;
  std::atomic<bool> dead_{false};
  std::atomic<bool> stopping_{false};
  std::thread releaser_;  // of a dead group
};

}  // namespace pycoll::cuda
