#include "runtime/device/cuda_group.h"

#include "core/error.h"
#include "kernels/cuda/layout.h"
#include "runtime/device/code_carrier.h"

namespace pycoll::cuda {
namespace {

// A peer that has ended may have done its part of all that is under way: work that nobody is
// missing in is over long before this.
constexpr Nanoseconds kGrace = std::chrono::milliseconds(300);
// With whoever has the group go, for what is under way; and for what was given up, to end.
constexpr Nanoseconds kPatience = std::chrono::seconds(5);
constexpr Nanoseconds kPatienceWithDead = std::chrono::seconds(1);
constexpr Nanoseconds kReleasePeriod = std::chrono::milliseconds(1);
// Codes of all ranks that go in one call from GPU to GPU, as a multiple of what the CPU path
// stages: 32 MiB unless somebody chose otherwise.
constexpr uint64_t kPortionWindows = 64;
// As in kernels/cuda/layout.h: for callers who give none.
constexpr Nanoseconds kUsualTimeout = Nanoseconds(Call{}.timeout_ns);
// Longer than any kernel of ours runs that waits for nobody.
constexpr Nanoseconds kQuarantine = std::chrono::milliseconds(100);

// Which capture the stream is in; 0: none.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  require(cudaStreamGetCaptureInfo(stream, &status, &id), "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

Block whole_block(std::vector<std::byte>& bytes, size_t part, size_t parts) {
  const size_t length = bytes.size() / parts;
  return {bytes.data() + part * length, length};
}

}  // namespace

Meeting meeting_of(const std::shared_ptr<Communicator>& control, int device) {
  Meeting meeting;
  meeting.device = device;
  meeting.rank = control->rank();
  meeting.world_size = control->world_size();
  meeting.all_gather = [control](const std::vector<std::byte>& mine) {
    const auto world = static_cast<size_t>(control->world_size());
    std::vector<std::byte> input = mine, output(mine.size() * world);
    CallRequest request;
    request.collective = Collective::all_gather;
    request.input.blocks.push_back(whole_block(input, 0, 1));
    for (size_t r = 0; r < world; ++r) {
      request.output.blocks.push_back(whole_block(output, r, world));
    }
    control->run(std::move(request), nullptr);
    return output;
  };
  return meeting;
}

CudaGroup::CudaGroup(GroupSeed seed) : seed_(std::move(seed)), liveness_(seed_.peers) {}

CudaGroup::~CudaGroup() {
  finish();
}

std::shared_ptr<DeviceGroup> CudaGroup::shared(std::unique_ptr<CudaGroup> group) {
  return {group.release(), [](CudaGroup* dying) {
            if (!dying->fork_mark_.in_child()) dying->end();
          }};
}

// By whatever thread, which may never have used the device.
void CudaGroup::end() noexcept {
  const RelaxedCapture relaxed;  // what is freed would end captures of other threads
  std::optional<DeviceGuard> guard;
  try {
    guard.emplace(device());
  } catch (const Error&) {
    // It has failed: what belongs to it can only be forgotten.
  }
  if (wait_for_end()) {
    delete this;
  } else {
    end_later();
  }
}

void CudaGroup::make_regions(const Driver& driver, size_t bytes) {
  static_assert(kNewsBytes >= kMaxRanks * sizeof(uint32_t));
  const Meeting meeting = meeting_of(seed_.control, device());
  regions_ = std::make_unique<Regions>(meeting, peers(), driver, kNewsBytes + bytes);
  meeting.together("listening to its peers",
                   [&] { news_ = std::make_unique<PeerNews>(*regions_, 0, rank()); });
}

void CudaGroup::throw_if_dead() const {
  if (fork_mark_.in_child()) {
    fail(ErrorKind::invalid_argument, "rank ", rank(), ": this process was forked after the group ",
         "had used GPU ", device(), ", which a forked process cannot");
  }
  if (!dead_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(state_);
  throw *death_;
}

void CudaGroup::begin_after_last(cudaStream_t stream, unsigned long long capture) {
  const bool first = capture != capture_;
  if (capture == 0) {
    require(cudaStreamWaitEvent(stream, last_.get()), "cudaStreamWaitEvent");
  } else if (first) {
    // When the graph is launched, not now.
    require(cudaStreamWaitEvent(stream, last_.get(), cudaEventWaitExternal), "cudaStreamWaitEvent");
  } else {
    require(cudaStreamWaitEvent(stream, captured_.get()), "cudaStreamWaitEvent");
  }
}

void CudaGroup::end_call(cudaStream_t stream, unsigned long long capture) {
  if (capture != 0) require(cudaEventRecord(captured_.get(), stream), "cudaEventRecord");
  const unsigned how = capture != 0 ? cudaEventRecordExternal : cudaEventRecordDefault;
  require(cudaEventRecordWithFlags(last_.get(), stream, how), "cudaEventRecordWithFlags");
  capture_ = capture;
}

template <class Launch>
void CudaGroup::in_order(cudaStream_t stream, const std::optional<Nanoseconds>& timeout,
                         const Launch& launch) {
  const std::lock_guard lock(order_);
  std::optional<DeviceGuard> guard;
  // What is asked and mapped here would end captures of other streams.
  const RelaxedCapture relaxed;
  unsigned long long capture = 0;
  try {
    guard.emplace(device());
    capture = capture_of(stream);
  } catch (const Error& error) {
    if (!gpu_has_failed()) throw;  // the stream is none that can be used now
    die(failure_of_gpu(error.what()));
    throw_if_dead();
  }
  try {
    begin_after_last(stream, capture);
    launching_ = capture;
    launch();
    end_call(stream, capture);
  } catch (const Error& error) {
    const bool refused =
        error.kind() == ErrorKind::not_implemented || error.kind() == ErrorKind::invalid_argument;
    if (refused) throw;
    // Peers wait for what this rank has not put on its stream.
    die(error.kind() == ErrorKind::system ? failure_of_gpu(error.what()) : cause_of(error));
    throw_if_dead();
  } catch (const std::exception& error) {
    die(failure_of_gpu(error.what()));  // no memory, say
    throw_if_dead();
  }
  clock_.queued(timeout.value_or(kUsualTimeout));
}

void CudaGroup::enqueue(const CallRequest& request, void* stream) {
  throw_if_dead();
  control().check(request);
  const auto on = static_cast<cudaStream_t>(stream);
  in_order(on, request.timeout, [&] {
    sequence_.fetch_add(1, std::memory_order_relaxed);
    launch(request, on);
  });
}

void CudaGroup::enqueue(const CodecRequest& request, void* stream) {
  throw_if_dead();
  check_codec_request(control(), request);
  const auto on = static_cast<cudaStream_t>(stream);
  in_order(on, request.timeout, [&] {
    CodecRequest numbered = request;
    // As a CodecGroup counts.
    if (!numbered.step) numbered.step = codec_calls_;
    launch_over_codec(numbered, on);
    ++codec_calls_;
  });
}

// By the group's own collectives, which are work of the stream throughout.
class CudaGroup::Carrier final : public CodeCarrier {
 public:
  explicit Carrier(CudaGroup& group) : group_(group) {}

  int world_size() const override { return group_.world_size(); }
  int rank() const override { return group_.rank(); }
  size_t slots() const override { return 2; }
  uint64_t portion() const override {
    return group_.control().config().window_bytes * kPortionWindows;
  }
  void begin(size_t /*slot*/, const CallRequest& call, cudaStream_t stream) override {
    group_.sequence_.fetch_add(1, std::memory_order_relaxed);
    group_.launch(call, stream);
  }
  void end(size_t /*slot*/, cudaStream_t /*stream*/) override {}

 private:
  CudaGroup& group_;
};

void CudaGroup::launch_over_codec(const CodecRequest& request, cudaStream_t stream) {
  Carrier carrier(*this);
  codecs_.run({request}, carrier, stream);
}

void CudaGroup::check_messages(const std::vector<MessageRequest>& batch) const {
  for (const MessageRequest& message : batch) {
    const char* name = message.receives ? "recv" : "send";
    if (message.receives && message.peer == kAnySource) {
      fail(ErrorKind::not_implemented, name, " on a GPU needs the rank that it receives from");
    }
    if (message.peer < 0 || message.peer >= world_size()) {
      fail(ErrorKind::invalid_argument, name, ": rank ", message.peer,
           " is not a rank of this group of ", world_size());
    }
    if (message.peer == rank()) {
      fail(ErrorKind::invalid_argument, name,
           ": the peer is the same as the rank of this process, ", rank(),
           "; a rank cannot exchange messages with itself");
    }
  }
}

void CudaGroup::enqueue(const std::vector<MessageRequest>& batch, void* stream) {
  throw_if_dead();
  check_messages(batch);
  const auto on = static_cast<cudaStream_t>(stream);
  if (batch.empty()) return;
  in_order(on, batch.front().timeout, [&] { launch(batch, on); });
}

// Processes of other hosts, and where the kernel has no pidfds, are known to the CPU transport.
std::optional<int> CudaGroup::ended_peer() const {
  if (const auto ended = liveness_.find_ended()) return ended;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank() && control().has_died(peer)) return peer;
  }
  return std::nullopt;
}

// Asked while work is under way that a peer may be missing in.
std::optional<Error> CudaGroup::find_ended_peer() {
  const std::optional<int> ended = ended_peer();
  if (!ended || !under_way()) return std::nullopt;
  if (!ended_since_) ended_since_ = Clock::now();
  if (Clock::now() - *ended_since_ < kGrace) return std::nullopt;
  return Error(ErrorKind::peer_failed,
               concat("rank ", rank(), ": rank ", *ended, " (process ", peers().of(*ended).process,
                      ") has died or left, and work of the group on the GPU waits for it"));
}

std::optional<Error> CudaGroup::find_late_work() {
  if (times_out_itself() || !clock_.is_late(last_)) return std::nullopt;
  const std::string why = why_late();
  return Error(ErrorKind::timed_out,
               concat("rank ", rank(), ": Timed out: work of the group on GPU ", device(),
                      " has taken longer than its timeout", why.empty() ? "" : ", ", why));
}

// A process that ends has no GPU any more: that is no failure.
bool CudaGroup::gpu_has_failed() const {
  const cudaError_t state = last_.query();
  return state != cudaSuccess && state != cudaErrorNotReady && state != cudaErrorCudartUnloading;
}

Error CudaGroup::failure_of_gpu(const std::string& what) const {
  return Error(ErrorKind::system,
               concat("rank ", rank(), ": GPU ", device(), " has failed: ", what));
}

std::optional<Error> CudaGroup::find_trouble() {
  try {
    control().throw_if_dead();
  } catch (const Error& error) {
    return error;
  }
  if (const auto reason = control().peer_abort()) return Error(ErrorKind::aborted, *reason);
  std::optional<Error> found = reported();
  if (found && found->kind() != ErrorKind::aborted) return found;
  if (gpu_has_failed()) return failure_of_gpu(describe(last_.query(), "cudaEventQuery"));
  const std::optional<int> gone = news_ != nullptr ? news_->look() : std::nullopt;
  if (auto error = find_ended_peer()) return error;
  if (auto error = find_late_work()) return error;
  if (gone && !found) {
    found = Error(ErrorKind::aborted,
                  concat("rank ", rank(), ": rank ", *gone, " has given the group up"));
  }
  // That somebody has given up is the consequence of something, of which all ranks have been told:
  // that may come a little later than words on a GPU.
  if (!found) return std::nullopt;
  if (!aborted_since_) aborted_since_ = Clock::now();
  return Clock::now() - *aborted_since_ < kGrace ? std::nullopt : found;
}

// What is behind an error in a call that was being launched.
Error CudaGroup::cause_of(const Error& error) {
  const Deadline deadline = Deadline::after(2 * kGrace);
  while (error.kind() == ErrorKind::aborted && !deadline.passed()) {
    {
      const std::lock_guard lock(state_);
      if (death_) return *death_;
      if (const auto trouble = find_trouble()) return *trouble;
    }
    std::this_thread::sleep_for(kReleasePeriod);
  }
  return error;
}

void CudaGroup::check() {
  throw_if_dead();
  std::optional<Error> trouble;
  try {
    const DeviceGuard guard(device());
    const RelaxedCapture relaxed;  // asking for events would end captures of other threads
    const std::lock_guard lock(state_);
    trouble = find_trouble();
  } catch (const Error& error) {
    trouble = failure_of_gpu(error.what());
  }
  if (!trouble) return;
  die(*trouble);
  throw_if_dead();
}

void CudaGroup::abort(const std::string& reason) {
  die(Error(ErrorKind::aborted, concat("rank ", rank(), ": the group was aborted: ", reason)));
}

void CudaGroup::die(const Error& error) noexcept {
  {
    const std::lock_guard lock(state_);
    if (death_) return;
    death_ = error;
    dead_.store(true, std::memory_order_release);
    tell_peers();
    try {
      releaser_ = std::thread([this] { release_until_done(); });
    } catch (const std::exception&) {
      // No thread to be had: streams of this rank wait until the process ends.
    }
  }
  control().abort(error.what());
  ended();
}

// By the GPU, which may have failed: then there is the control communicator.
void CudaGroup::tell_peers() noexcept {
  if (news_ == nullptr) return;
  try {
    const DeviceGuard guard(device());
    const RelaxedCapture relaxed;
    news_->tell();
  } catch (const Error&) {
  }
}

void CudaGroup::release_until_done() {
  cudaSetDevice(device());
  const RelaxedCapture relaxed;
  disarm();
  std::this_thread::sleep_for(kQuarantine);
  // Relaxed: it orders nothing.
  while (!stopping_.load(std::memory_order_relaxed)) {
    release_waits();
    std::this_thread::sleep_for(kReleasePeriod);
  }
}

// False: work of the group stays on the device.
bool CudaGroup::wait_for_end() noexcept {
  const auto is_dead = [this] { return dead_.load(std::memory_order_acquire); };
  const auto wait = [&](Nanoseconds patience, const auto& ended) {
    const Deadline deadline = Deadline::after(patience);
    while (under_way() && !ended() && !deadline.passed()) {
      std::this_thread::sleep_for(kReleasePeriod);
    }
  };
  const auto ask = [&] {
    try {
      check();
    } catch (const Error&) {
    }
    return is_dead();
  };
  if (gpu_has_failed()) ask();  // the peers are told, if nobody has yet
  wait(kPatience, ask);
  if (!under_way()) return true;
  if (!is_dead()) die(Error(ErrorKind::aborted, concat("rank ", rank(), " has left")));
  wait(kPatienceWithDead, [] { return false; });
  return !under_way();
}

// The releaser goes on. What is left of the group is a leak if there is no thread to be had.
void CudaGroup::end_later() noexcept {
  try {
    std::thread([this] {
      cudaSetDevice(device());
      const RelaxedCapture relaxed;
      while (under_way()) std::this_thread::sleep_for(kQuarantine);
      delete this;
    }).detach();
  } catch (const std::exception&) {
  }
}

void CudaGroup::finish() noexcept {
  stopping_.store(true, std::memory_order_relaxed);
  if (releaser_.joinable()) releaser_.join();
}

}  // namespace pycoll::cuda
