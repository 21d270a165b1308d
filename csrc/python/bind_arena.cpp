// Shareable memory: the process's arena for pycoll/shared_memory.py, and arenas of their own for
// tests.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

#include "bind.h"
#include "gil.h"
#include "transport/shm/peer_arena.h"

namespace py = pybind11;

namespace pycoll {
namespace {

using shm::Arena;

void* pointer(uintptr_t address) {
  return reinterpret_cast<void*>(address);
}

py::dict statistics_dict(const Arena::Statistics& s) {
  using namespace py::literals;
  return py::dict("size"_a = s.size, "live"_a = s.live, "peak"_a = s.peak, "cached"_a = s.cached,
                  "quarantined"_a = s.quarantined, "backed"_a = s.backed, "large"_a = s.large,
                  "blocks"_a = s.blocks, "allocations"_a = s.allocations, "reused"_a = s.reused,
                  "refused"_a = s.refused);
}

std::shared_ptr<Arena> make_arena(uint64_t bytes, uint64_t cache_bytes, bool large_pages) {
  return Arena::make(bytes, {cache_bytes, large_pages});
}

std::optional<uintptr_t> allocate(Arena& arena, size_t bytes) {
  void* const block = arena.allocate(bytes);
  if (block == nullptr) return std::nullopt;
  return reinterpret_cast<uintptr_t>(block);
}

// Bytes of the process's arena as an array, whose last view frees them; None when there is no room
// or no arena.
py::object allocate_array(size_t bytes) {
  const auto arena = shm::process_arena();
  void* const block = arena ? arena->allocate(bytes) : nullptr;
  if (block == nullptr) return py::none();
  // The process's arena is there for ever, so the capsule holds nothing but the block.
  const py::capsule owner(block, [](void* p) { shm::existing_process_arena()->free(p); });
  return py::array_t<uint8_t>(static_cast<py::ssize_t>(bytes), static_cast<uint8_t*>(block), owner);
}

bool is_shareable(uintptr_t address, size_t bytes) {
  const Arena* const arena = shm::existing_process_arena();
  return arena != nullptr && arena->offset_of(pointer(address), bytes).has_value();
}

}  // namespace

void bind_arena(py::module_& m) {
  const auto without_gil = py::call_guard<GilRelease>();
  py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena", "Memory that peers can map; for tests.")
      .def(py::init(&make_arena), py::arg("bytes"), py::kw_only(),
           py::arg("cache_bytes") = Arena::Options().cache_bytes, py::arg("large_pages") = true)
      .def_property_readonly("fd", &Arena::fd)
      .def_property_readonly("bytes", &Arena::bytes)
      .def_property_readonly("base",
                             [](const Arena& a) { return reinterpret_cast<uintptr_t>(a.base()); })
      .def("allocate", &allocate, without_gil)
      .def(
          "free", [](Arena& a, uintptr_t block) { a.free(pointer(block)); }, without_gil)
      .def("offset_of",
           [](const Arena& a, uintptr_t p, size_t bytes) { return a.offset_of(pointer(p), bytes); })
      .def("quarantine", &Arena::quarantine)
      .def("release", &Arena::release)
      .def("large_pages_problem", &Arena::large_pages_problem)
      .def("statistics", [](const Arena& a) { return statistics_dict(a.statistics()); });

  m.def("process_arena", &shm::process_arena, "The arena of this process; None without one.");
  m.def("process_arena_problem", &shm::process_arena_problem,
        "Why there is none; empty while there is one, or nobody has asked for it.");
  m.def("allocate_shareable", &allocate_array, py::arg("bytes"));
  m.def("is_shareable", &is_shareable, py::arg("address"), py::arg("bytes"));
  m.def(
      "shareable_statistics",
      [] {
        const Arena* const arena = shm::existing_process_arena();
        shm::process_quarantine().sweep();
        return statistics_dict(arena != nullptr ? arena->statistics() : Arena::Statistics());
      },
      "Without making an arena: zeros until there is one.");
}

}  // namespace pycoll
