#include "runtime/device/cuda_group.h"

#include "core/error.h"
#include "kernels/cuda/layout.h"

namespace pycoll::cuda {
namespace {

// A peer that has ended may have done its part of all that is under way: work that nobody is
// missing in is over long before this.
constexpr Nanoseconds kGrace = std::chrono::milliseconds(300);
constexpr Nanoseconds kPatience = std::chrono::seconds(5);
constexpr Nanoseconds kReleasePeriod = std::chrono::milliseconds(1);
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

Meeting meeting_of(const std::shared_ptr<Communicator>& control) {
  Meeting meeting;
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

void CudaGroup::make_regions(const Driver& driver, size_t bytes) {
  static_assert(kNewsBytes >= kMaxRanks * sizeof(uint32_t));
  const Meeting meeting = meeting_of(seed_.control);
  regions_ = std::make_unique<Regions>(meeting, peers(), driver, kNewsBytes + bytes);
  meeting.together("listening to its peers",
                   [&] { news_ = std::make_unique<PeerNews>(*regions_, 0, rank()); });
}

void CudaGroup::throw_if_dead() const {
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
void CudaGroup::in_order(cudaStream_t stream, const Launch& launch) {
  const std::lock_guard lock(order_);
  const DeviceGuard guard(device());
  const unsigned long long capture = capture_of(stream);
  try {
    begin_after_last(stream, capture);
    ++sequence_;
    launching_ = capture;
    launch();
    end_call(stream, capture);
  } catch (const Error& error) {
    // Anything else, and peers wait for what this rank has not put on its stream.
    const bool refused =
        error.kind() == ErrorKind::not_implemented || error.kind() == ErrorKind::invalid_argument;
    if (refused) throw;
    die(cause_of(error));
    throw_if_dead();
  }
}

void CudaGroup::enqueue(const CallRequest& request, void* stream) {
  throw_if_dead();
  control().check(request);
  const auto on = static_cast<cudaStream_t>(stream);
  in_order(on, [&] { launch(request, on); });
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
  in_order(on, [&] { launch(batch, on); });
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

std::optional<Error> CudaGroup::find_trouble() {
  try {
    control().throw_if_dead();
  } catch (const Error& error) {
    return error;
  }
  if (const auto reason = control().peer_abort()) return Error(ErrorKind::aborted, *reason);
  std::optional<Error> found = reported();
  if (found && found->kind() != ErrorKind::aborted) return found;
  const cudaError_t state = last_.query();
  if (state != cudaSuccess && state != cudaErrorNotReady) {
    return Error(ErrorKind::system, concat("rank ", rank(), ": GPU ", device(),
                                           " has failed: ", describe(state, "cudaEventQuery")));
  }
  const std::optional<int> gone = news_ != nullptr ? news_->look() : std::nullopt;
  if (auto error = find_ended_peer()) return error;
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
  const DeviceGuard guard(device());
  const RelaxedCapture relaxed;  // asking for events would end captures of other threads
  std::optional<Error> trouble;
  {
    const std::lock_guard lock(state_);
    trouble = find_trouble();
  }
  if (!trouble) return;
  die(*trouble);
  throw_if_dead();
}

void CudaGroup::abort(const std::string& reason) {
  die(Error(ErrorKind::aborted, concat("rank ", rank(), ": the group was aborted: ", reason)));
}

void CudaGroup::die(const Error& error) {
  {
    const std::lock_guard lock(state_);
    if (death_) return;
    death_ = error;
    dead_.store(true, std::memory_order_release);
    const DeviceGuard guard(device());
    const RelaxedCapture relaxed;
    if (news_ != nullptr) news_->tell();
    releaser_ = std::thread([this] { release_until_done(); });
  }
  control().abort(error.what());
  ended();
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

void CudaGroup::finish() noexcept {
  if (stopping_.load(std::memory_order_relaxed)) return;
  const RelaxedCapture relaxed;
  const auto wait = [this] {
    const Deadline deadline = Deadline::after(kPatience);
    while (under_way() && !deadline.passed()) std::this_thread::sleep_for(kReleasePeriod);
    return !under_way();
  };
  try {
    if (!dead_.load(std::memory_order_acquire) && !wait()) {
      die(Error(ErrorKind::aborted, concat("rank ", rank(), " has left")));
    }
  } catch (...) {
    // Nobody to tell.
  }
  if (dead_.load(std::memory_order_acquire)) wait();
  stopping_.store(true, std::memory_order_relaxed);
  if (releaser_.joinable()) releaser_.join();
}

}  // namespace pycoll::cuda
