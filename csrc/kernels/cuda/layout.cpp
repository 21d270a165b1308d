#include "kernels/cuda/layout.h"

namespace pycoll::cuda {
namespace {

constexpr uint64_t kAlign = 256;

// Hands out one array after the other.
class Cursor {
 public:
  uint64_t take(uint64_t bytes) {
    const uint64_t at = next_;
    next_ = (next_ + bytes + kAlign - 1) / kAlign * kAlign;
    return at;
  }
  uint64_t end() const { return next_; }

 private:
  uint64_t next_ = 0;
};

bool is_power_of_two(int64_t x) {
  return x > 0 && (x & (x - 1)) == 0;
}

struct Condition {
  bool holds;
  const char* text;
};

}  // namespace

const char* why_unusable(const Geometry& g) {
  const Condition conditions[] = {
      {g.world_size >= 1 && g.world_size <= kMaxRanks, "world_size must be 1 to 16"},
      {g.fifos >= 4 && g.fifos <= 64, "fifos must be 4 to 64"},
      {g.message_fifos >= 1 && g.message_fifos <= 64, "message_fifos must be 1 to 64"},
      {g.depth >= 2 && is_power_of_two(g.depth), "depth must be a power of two, 2 at least"},
      {g.slot_bytes >= 64 && g.slot_bytes % 64 == 0, "slot_bytes must be a multiple of 64"},
      {g.blocks >= 4 && g.blocks <= 1024, "blocks must be 4 to 1024"},
      {g.window_bytes >= 64 * kMaxRanks && g.window_bytes % 64 == 0,
       "window_bytes must be a multiple of 64, 1024 at least"},
      {g.packets >= 1, "packets must be 1 at least"},
      {g.scratch_bytes >= uint64_t{64} << 10, "scratch_bytes must be 64 KiB at least"},
      {g.threads >= g.world_size && g.threads >= 8 && g.threads <= 512 && g.threads % 8 == 0,
       "threads must be a multiple of 8, 512 at most, and one a rank at least"},
  };
  for (const Condition& condition : conditions) {
    if (!condition.holds) return condition.text;
  }
  return nullptr;
}

RegionLayout::RegionLayout(const Geometry& g) {
  const auto world = static_cast<uint64_t>(g.world_size);
  const uint64_t ends = world * static_cast<uint64_t>(g.all_fifos());
  const uint64_t all_slots = ends * static_cast<uint64_t>(g.depth);
  const auto lanes = static_cast<uint64_t>(g.blocks);
  Cursor cursor;
  message_flags = cursor.take(all_slots * sizeof(uint64_t));
  credits = cursor.take(ends * sizeof(uint32_t));
  arrivals = cursor.take(lanes * world * sizeof(uint64_t));
  packet_credits = cursor.take(lanes * world * sizeof(uint32_t));
  failed = cursor.take(sizeof(uint32_t));
  sent = cursor.take(ends * sizeof(uint32_t));
  received = cursor.take(ends * sizeof(uint32_t));
  barriers = cursor.take(lanes * sizeof(uint32_t));
  window_rounds = cursor.take(lanes * sizeof(uint32_t));
  packet_rounds = cursor.take(lanes * sizeof(uint32_t));
  slots = cursor.take(all_slots * g.slot_bytes);
  packets = cursor.take(lanes * 2 * world * (1 + uint64_t{g.packets}) * sizeof(uint64_t));
  windows = cursor.take(lanes * 2 * g.window_bytes);
  scratch = cursor.take(g.scratch_bytes);
  bytes = cursor.end();
}

}  // namespace pycoll::cuda
