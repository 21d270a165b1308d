// A barrier that names the ranks which do not come.
//
// Every other rank tells rank 0 that it is there and waits for its answer. What rank 0 finds, all
// that came hear of: a group whose ranks miss each other ends.
#include <limits>

#include "python/gil.h"
#include "torch/backend.h"
#include "torch/errors.h"

namespace pycoll::torch_adapter {
namespace {

constexpr auto kTitle = "pycoll:monitored_barrier";
// No tag of a user's message: torch's own are not negative.
constexpr int kTag = std::numeric_limits<int>::min() + 0x6d62;

MessageRequest word(bool receives, int peer, std::byte& memory, Nanoseconds timeout) {
  MessageRequest request;
  request.receives = receives;
  request.peer = peer;
  request.tag = kTag;
  request.block = {&memory, 1};
  request.timeout = timeout;
  return request;
}

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() > 1 ? "Ranks " : "Rank ";
  for (size_t i = 0; i < ranks.size(); ++i) text += concat(i > 0 ? ", " : "", ranks[i]);
  return text;
}

// At rank 0: those that did not come in time.
std::vector<int> find_missing(Communicator& group, const Interrupt& interrupt, Nanoseconds timeout,
                              bool all) {
  const auto world = static_cast<size_t>(group.world_size());
  auto memory = std::make_shared<std::vector<std::byte>>(world);
  std::vector<std::shared_ptr<Operation>> coming(world);
  for (size_t peer = 1; peer < world; ++peer) {
    // Who is late is found here, and not by the group, which would end without its list.
    MessageRequest request = word(true, static_cast<int>(peer), (*memory)[peer], kNoLimit);
    request.keep_alive = memory;
    coming[peer] = group.submit(std::move(request));
  }
  const Deadline deadline = Deadline::after(timeout);
  std::vector<int> missing;
  for (size_t peer = 1; peer < world; ++peer) {
    if (group.wait(coming[peer], deadline.remaining(), interrupt)) continue;
    missing.push_back(static_cast<int>(peer));
    if (!all) break;
  }
  return missing;
}

}  // namespace

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const auto given = time_of(options.timeout);
  const Nanoseconds timeout = time_limit(given);
  const Profiled profiled(kTitle, {});
  const GilRelease release;
  std::byte here{1};
  if (getRank() == 0) {
    // That is about itself, and no word of others: they may be there.
    if (timeout <= Nanoseconds(0)) {
      const std::string text =
          concat("[Rank 0]: Rank 0 timed out in monitoredBarrier after ", given.count(), " ms");
      communicator_->abort(text);
      C10_THROW_ERROR(DistBackendError, text);
    }
    std::vector<int> missing;
    with_torch_errors(
        [&] { missing = find_missing(*communicator_, interrupt_, timeout, wait_all_ranks); });
    if (!missing.empty()) {
      const std::string text = concat("[Rank 0]: ", listed(missing),
                                      " failed to pass monitoredBarrier in ", given.count(), " ms");
      communicator_->abort(text);
      C10_THROW_ERROR(DistBackendError, text);
    }
    with_torch_errors([&] {
      for (int peer = 1; peer < getSize(); ++peer) {
        communicator_->run(word(false, peer, here, timeout), interrupt_);
      }
    });
    return;
  }
  try {
    communicator_->run(word(false, 0, here, timeout), interrupt_);
    // Rank 0 may take its whole time, and then says for whom.
    communicator_->run(
        word(true, 0, here,
             2 * std::min<Nanoseconds>(timeout, kNoLimit / 4) + std::chrono::seconds(5)),
        interrupt_);
  } catch (const Error& error) {
    C10_THROW_ERROR(
        DistBackendError,
        concat("[Rank ", getRank(), "]: Rank ", getRank(),
               " successfully reached monitoredBarrier, but received errors while waiting for "
               "send/recv from rank 0. Please check rank 0 logs for faulty rank. Original "
               "exception: ",
               error.what()));
  }
}

}  // namespace pycoll::torch_adapter
