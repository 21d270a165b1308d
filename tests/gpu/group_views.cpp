#include "group_views.h"

#include <stdexcept>

namespace pycoll::tests {

cuda::Geometry small_geometry(int ranks) {
  cuda::Geometry geometry;
  geometry.world_size = ranks;
  geometry.fifos = 4;
  geometry.message_fifos = 2;
  geometry.depth = 2;
  geometry.slot_bytes = 256;
  geometry.blocks = 8;
  geometry.window_bytes = 1024;
  geometry.packets = 32;
  geometry.scratch_bytes = 128 << 10;  // of the Program with the most partial sums, a line each
  geometry.threads = 32;
  return geometry;
}

std::vector<cuda::GroupView> views_of(const cuda::Geometry& geometry,
                                      const std::vector<std::byte*>& regions,
                                      cuda::HostWords* hosts) {
  if (const char* why = cuda::why_unusable(geometry)) throw std::invalid_argument(why);
  std::vector<cuda::GroupView> views(regions.size());
  for (size_t rank = 0; rank < views.size(); ++rank) {
    cuda::GroupView& view = views[rank];
    for (size_t peer = 0; peer < regions.size(); ++peer) view.region[peer] = regions[peer];
    view.host = hosts + rank;
    view.rank = static_cast<int32_t>(rank);
    view.geometry = geometry;
    view.layout = cuda::RegionLayout(geometry);
  }
  return views;
}

}  // namespace pycoll::tests
