// Which kernel ranks on different devices choose, against the sizes at which docs/architecture.md
// says that it changes.
#include <cmath>

#include "device_scenarios.h"
#include "runtime/device/peer_choice.h"

namespace pycoll::sim::tests {
namespace {

constexpr double kKiB = 1024;

std::string name_of(const cuda::PeerChoice& choice) {
  return choice.fast != nullptr ? std::string(choice.algorithm) + " kernel" : choice.algorithm;
}

struct Sweep {
  Collective collective;
  bool fast;
  Determinism determinism = Determinism::run;
};

// Up to `most` bytes it is `name`.
struct Stretch {
  const char* name;
  double most;
};

void check_stretches(const cuda::Geometry& geometry, const Sweep& sweep,
                     const std::vector<Stretch>& stretches) {
  for (double bytes = 4; bytes < 4e9; bytes *= 1.0625) {
    const cuda::PeerCall call{sweep.collective, static_cast<uint64_t>(bytes), sweep.fast,
                              sweep.determinism};
    const std::string got = name_of(cuda::choose_for_peers(call, geometry));
    size_t i = 0;
    while (i + 1 < stretches.size() && bytes > stretches[i].most * 1.001) ++i;
    const bool at_the_edge = std::fabs(bytes / stretches[i].most - 1) < 0.001;
    check(got == stretches[i].name || at_the_edge,
          std::string(pycoll::name_of(sweep.collective)) + " of " + std::to_string(bytes) +
              " bytes on " + std::to_string(geometry.world_size) + " ranks: " + got + ", not " +
              stretches[i].name);
  }
}

}  // namespace

uint64_t choice_suite(const Settings& /*settings*/, uint64_t /*cases*/) {
  const double forever = INFINITY;
  cuda::Geometry g;
  g.blocks = 64;
  g.window_bytes = 128 << 10;
  const double round = 64 * 128 * kKiB;  // of kernels by hand; Programs have a fourth of the blocks
  const auto all_reduce = [&](bool fast, std::vector<Stretch> stretches) {
    check_stretches(g, {Collective::all_reduce, fast}, stretches);
    // In the order of ranks: all but the ring.
    stretches.pop_back();
    stretches.back().most = forever;
    check_stretches(g, {Collective::all_reduce, fast, Determinism::algorithm}, stretches);
  };
  g.world_size = 2;
  all_reduce(
      true, {{"one_shot_ll kernel", 64 * kKiB}, {"one_shot kernel", 2 * round}, {"ring", forever}});
  all_reduce(false, {{"one_shot", round / 2}, {"ring", forever}});
  check_stretches(g, {Collective::broadcast, false}, {{"one_shot", round / 4}, {"ring", forever}});
  g.world_size = 8;
  all_reduce(true, {{"one_shot_ll kernel", 64 * kKiB},
                    {"one_shot kernel", 3 * 256 * kKiB / 5.25},
                    {"two_shot kernel", 7 * round},
                    {"ring", forever}});
  all_reduce(false,
             {{"one_shot", 3 * 256 * kKiB / 5.25}, {"two_shot", 7 * round / 4}, {"ring", forever}});
  check_stretches(g, {Collective::all_gather, false},
                  {{"one_shot", 7 * 8 * round / 4}, {"ring", forever}});
  check_stretches(g, {Collective::reduce_scatter, false},
                  {{"one_shot", 7 * round / 4}, {"ring", forever}});
  check_stretches(g, {Collective::broadcast, false},
                  {{"one_shot", 18 * 256 * kKiB / 6}, {"ring", forever}});
  check_stretches(g, {Collective::reduce_scatter, false, Determinism::algorithm},
                  {{"one_shot", forever}});
  return 1;
}

}  // namespace pycoll::sim::tests
