#include "simulator/cost.h"

#include <algorithm>
#include <array>

namespace pycoll::simulator {
namespace {

enum class Peers : uint8_t { none, one, others };  // whose windows or vectors are read

// How often a step goes over the bytes of its slice: what it does in runtime/executor.cpp.
struct Passes {
  uint8_t message_reads;
  uint8_t source_reads;
  uint8_t stores;
  uint8_t message_writes;
  uint8_t reads_again;  // of what the step has just touched
  Peers peers;
  bool stores_at_peers = false;  // at those whose vectors are read
};

// In the order of StepKind: a new kind is a row here.
constexpr std::array<Passes, static_cast<size_t>(StepKind::kCount)> kPasses{{
    {0, 1, 0, 1, 0, Peers::none},          // send
    {1, 0, 1, 0, 0, Peers::none},          // recv
    {1, 0, 1, 1, 1, Peers::none},          // recv_copy_send
    {1, 0, 0, 1, 0, Peers::none},          // recv_send
    {1, 1, 1, 0, 0, Peers::none},          // recv_reduce
    {1, 1, 0, 1, 0, Peers::none},          // recv_reduce_send
    {1, 1, 1, 1, 1, Peers::none},          // recv_reduce_copy_send
    {0, 1, 1, 0, 0, Peers::none},          // copy
    {0, 1, 1, 0, 0, Peers::others},        // reduce_from
    {0, 0, 1, 0, 0, Peers::one},           // copy_from
    {0, 1, 1, 0, 0, Peers::others, true},  // reduce_to
    {0, 0, 0, 0, 0, Peers::none},          // barrier
}};

// A store that misses the caches moves a line twice: it is fetched, and written back later.
constexpr double kStoreMoves = 2;

Wire wire_out(const Step& step, const StepTraits& traits) {
  if (traits.reduces) {
    return traits.stores && step.dst.space != Space::acc ? Wire::value : Wire::partial;
  }
  if (traits.receives) return step.wire;
  return step.src.space == Space::acc ? Wire::partial : Wire::value;
}

class Pricing {
 public:
  Pricing(const Machine& machine, const CallShape& call)
      : host_(machine.host), network_(machine.network), call_(call) {
    // Where the vectors outgrow the caches, less and less of them is found there.
    const double over = (call.vector_bytes - host_.cache_bytes) / std::max(1.0, host_.cache_bytes);
    missing_ = std::clamp(over, 0.0, 1.0);
  }

  Price price(const Step& step, const StepRoute& route) {
    const StepTraits& traits = traits_of(step.kind);
    const Passes& passes = kPasses[static_cast<size_t>(step.kind)];
    const Wire out = wire_out(step, traits);
    price_.fixed = host_.step_overhead;
    // A look at each member's flag: a line that another core has written.
    if (step.kind == StepKind::barrier) price_.fixed += (route.members - 1) * host_.flag_latency;

    message_read(passes.message_reads * bytes_of(step.wire), route.network_in);
    operand(passes.source_reads, step.src.space, 1);
    operand(passes.stores, step.dst.space, kStoreMoves);
    message_write(passes.message_writes * bytes_of(out), route.network_out);
    add(passes.reads_again * bytes_of(out), host_.cache_bandwidth);
    const int32_t peers = passes.peers == Peers::none  ? 0
                          : passes.peers == Peers::one ? 1
                                                       : route.members - 1;
    const int32_t passes_at_peers = passes.stores_at_peers ? 2 : 1;
    add(peers * passes_at_peers * static_cast<double>(call_.element_bytes), host_.peer_bandwidth);
    const int32_t sums = traits.reduces ? 1 : passes.peers == Peers::others ? peers : 0;
    add(sums * static_cast<double>(call_.acc_bytes), host_.reduce_bandwidth);
    if (traits.sends) price_.bytes_out = static_cast<uint32_t>(bytes_of(out));
    return price_;
  }

 private:
  double bytes_of(Wire wire) const {
    return wire == Wire::partial ? call_.acc_bytes : call_.element_bytes;
  }

  void add(double bytes, double bandwidth) { price_.element += bytes / bandwidth; }

  void add_memory(double bytes) {
    add(bytes, host_.core_bandwidth);
    price_.memory += bytes / host_.core_bandwidth;
  }

  // Slots, windows and accumulators are small and used again and again: they stay in caches.
  void operand(int passes, Space space, double moves) {
    if (passes == 0) return;
    const bool caller = space == Space::input || space == Space::output;
    const double bytes = space == Space::acc ? call_.acc_bytes : call_.element_bytes;
    const double missing = caller ? missing_ : 0;
    add(passes * bytes * (1 - missing), host_.cache_bandwidth);
    add_memory(passes * bytes * missing * moves);
  }

  void message_read(double bytes, bool network) {
    if (bytes == 0) return;
    if (network) return through_network(bytes);
    add(bytes, host_.peer_bandwidth);
  }

  void message_write(double bytes, bool network) {
    if (bytes == 0) return;
    if (network) return through_network(bytes);
    add(bytes, host_.cache_bandwidth);
  }

  // Payloads are sent from and received into the place where the step has them.
  void through_network(double bytes) {
    price_.fixed += network_.message_overhead;
    add(bytes, network_.cpu_bandwidth);
  }

  const Host& host_;
  const Network& network_;
  const CallShape& call_;
  double missing_;
  Price price_;
};

}  // namespace

Price price_of(const Step& step, const StepRoute& route, const Machine& machine,
               const CallShape& call) {
  return Pricing(machine, call).price(step, route);
}

}  // namespace pycoll::simulator
