// Many calls of a group, launched together and then run, and the ways that a call may be launched.
#pragma once

#include "device_scenarios.h"

namespace pycoll::sim::tests {

using stress::Rng;

// Under ThreadSanitizer few threads may be resident at a time.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define PYCOLL_FEW_THREADS 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define PYCOLL_FEW_THREADS 1
#endif
#if defined(PYCOLL_FEW_THREADS)
constexpr bool kFewThreads = true;
#else
constexpr bool kFewThreads = false;
#endif

cuda::Geometry draw_geometry(Rng& rng, int32_t world_size);
// Just before they wrap, now and then.
uint32_t draw_counters(Rng& rng);
ReduceOp draw_op(Rng& rng, DType dtype);
// Of the index-th size, aligned to 16 bytes or not, in or out of place.
CallShape draw_shape(Rng& rng, uint64_t index, bool aligned);
// Size of the index-th case where `kinds` kinds take turns: each kind comes to every size.
uint64_t size_index(uint64_t index, uint64_t kinds);

// A kernel by hand, or an algorithm of the registry.
struct Way {
  std::string name;
  Collective collective;
  // By hand: all_reduce of the types that are fast.
  cudaError_t (*by_hand)(const cuda::GroupView&, const cuda::AllReduceCall&, cudaStream_t);

  bool takes(DType dtype) const;
};
const std::vector<Way>& kernels_by_hand();
const std::vector<Way>& programs();

// A few calls of one group: ranks may be calls apart.
class Batch {
 public:
  Batch(const Settings& settings, Rng& rng, int32_t world_size)
      : group_(draw_geometry(rng, world_size), settings.options(), draw_counters(rng)) {}

  int32_t world_size() const { return group_.world_size(); }
  // Launches a call, and what its caller does next. Where the kernel does not take vectors of that
  // length, by one that does.
  void add(const CallShape& shape, const Way& way);
  void run();
  // All calls so far as a captured graph, run again and again, on new data.
  void replay(int times);
  void forget() { calls_.clear(), names_.clear(), keep_.clear(); }

 private:
  void launch_by_hand(const CallData& data, const Way& way, uint32_t sequence);
  void check_all();

  DeviceGroup group_;
  std::vector<std::unique_ptr<CallData>> calls_;
  std::vector<std::string> names_;
  Keep keep_;
};

// Ranks that share a GPU. One all_reduce, by reduce_many or by reduce_places; one all_gather.
void check_shared_all_reduce(DeviceGroup& group, const CallShape& shape, bool places, Rng& rng);
void check_shared_gather(DeviceGroup& group, const CallShape& shape, bool places, Rng& rng);

}  // namespace pycoll::sim::tests
