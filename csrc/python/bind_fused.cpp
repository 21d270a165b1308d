// Fused kernels on lists of memory: tables of spans (spans.h). What an array or tensor is, is known
// to pycoll/mixed_precision.py, which also holds on to it during a call.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "bind.h"
#include "buffer.h"
#include "core/error.h"
#include "gil.h"
#include "kernels/codec.h"
#include "kernels/fused.h"
#include "parse.h"
#include "runtime/device/device_group.h"
#include "runtime/float_mode.h"
#include "spans.h"

namespace py = pybind11;

namespace pycoll {
namespace {

// Of pycoll/mixed_precision.py, whose errors these are.
constexpr const char* kCast = "cast_";
constexpr const char* kUnscale = "unscale_";
constexpr const char* kClip = "clip_by_norm_";

// Rows of a table that Python made.
class Spans {
 public:
  explicit Spans(const py::object& table) : buffer_(table, false) {
    if (buffer_.bytes() % sizeof(Span) != 0) {
      fail(ErrorKind::invalid_argument, "a table of ", buffer_.bytes(),
           " bytes is not one of spans");
    }
  }
  size_t size() const { return buffer_.bytes() / sizeof(Span); }
  Span operator[](size_t i) const {
    Span span;
    std::memcpy(&span, buffer_.data() + i * sizeof(Span), sizeof(Span));  // at any alignment
    return span;
  }

 private:
  const Buffer buffer_;
};

Tensor tensor_of(const Span& span, bool (*takes)(DType), const char* function) {
  const bool known = span.dtype < static_cast<uint64_t>(DType::kCount);
  const auto dtype = static_cast<DType>(span.dtype);
  if (!known || !takes(dtype)) {
    fail(ErrorKind::invalid_argument, function, " does not take ",
         known ? name_of(dtype) : std::string_view("such a dtype"));
  }
  return {dtype, reinterpret_cast<void*>(static_cast<uintptr_t>(span.address)), span.count};
}

// Where the tensors of a list are.
class Extents {
 public:
  struct Extent {
    uintptr_t begin;
    uintptr_t end;
    size_t index;
  };

  void add(const Tensor& tensor, size_t index) {
    if (tensor.count == 0) return;
    const auto begin = reinterpret_cast<uintptr_t>(tensor.values);
    extents_.push_back({begin, begin + tensor.count * size_of(tensor.dtype), index});
  }
  // Once, after all were added.
  void check_apart(const char* function, const char* what) {
    std::sort(extents_.begin(), extents_.end(),
              [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
    for (size_t i = 1; i < extents_.size(); ++i) {
      if (extents_[i].begin >= extents_[i - 1].end) continue;
      const auto [first, second] = std::minmax(extents_[i - 1].index, extents_[i].index);
      fail(ErrorKind::invalid_argument, function, ": ", what, '[', first, "] and ", what, '[',
           second, "] have memory in common");
    }
  }
  // Those that have memory in common with `other`, in order; after check_apart().
  std::vector<Extent> that_meet(const Extent& other) const {
    std::vector<Extent> met;
    auto at = std::upper_bound(extents_.begin(), extents_.end(), other.begin,
                               [](uintptr_t begin, const Extent& e) { return begin < e.end; });
    for (; at != extents_.end() && at->begin < other.end; ++at) met.push_back(*at);
    return met;
  }

 private:
  std::vector<Extent> extents_;
};

std::vector<Tensor> tensors_of(const char* function, const py::object& table) {
  const Spans spans(table);
  std::vector<Tensor> tensors;
  Extents extents;
  for (size_t i = 0; i < spans.size(); ++i) {
    tensors.push_back(tensor_of(spans[i], can_unscale, function));
    extents.add(tensors.back(), i);
  }
  extents.check_apart(function, "tensors");
  return tensors;
}

CastTensor cast_tensor_of(const Span& target_span, const Span& source_span) {
  const Tensor target = tensor_of(target_span, can_encode, kCast);
  const Tensor source = tensor_of(source_span, can_encode, kCast);
  if (target.count != source.count) {
    fail(ErrorKind::invalid_argument, kCast, ": a dst has ", target.count,
         " elements, its src has ", source.count);
  }
  return {source.dtype, source.values, target.dtype, target.values, target.count};
}

// A source may be its own target where both have one size; else no target is written that a source
// is read from.
void check_sources(const std::vector<CastTensor>& tensors, const Extents& targets) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const CastTensor& one = tensors[i];
    if (one.count == 0) continue;
    const auto begin = reinterpret_cast<uintptr_t>(one.source);
    const bool in_place = one.source == one.target && size_of(one.from) == size_of(one.to);
    for (const auto& met : targets.that_meet({begin, begin + one.count * size_of(one.from), i})) {
      if (in_place && met.index == i) continue;
      fail(ErrorKind::invalid_argument, kCast, ": src[", i, "] and dst[", met.index,
           "] have memory in common");
    }
  }
}

std::vector<CastTensor> cast_tensors_of(const Spans& targets, const Spans& sources) {
  if (targets.size() != sources.size()) {
    fail(ErrorKind::invalid_argument, kCast, ": dst has ", targets.size(), " tensors, src has ",
         sources.size());
  }
  std::vector<CastTensor> tensors;
  Extents written;
  for (size_t i = 0; i < targets.size(); ++i) {
    const CastTensor& one = tensors.emplace_back(cast_tensor_of(targets[i], sources[i]));
    written.add({one.to, one.target, one.count}, i);
  }
  written.check_apart(kCast, "dst");
  check_sources(tensors, written);
  return tensors;
}

bool cast(const py::object& targets, const py::object& sources, double scale,
          const std::string& isa) {
  const std::vector<CastTensor> tensors = cast_tensors_of(Spans(targets), Spans(sources));
  const FusedKernels& kernels = fused_kernels(parse_isa(isa));
  const GilRelease release;
  const IeeeFloatMode ieee;
  return kernels.cast({tensors.data(), tensors.size()}, static_cast<float>(scale));
}

std::tuple<bool, double> unscale(const py::object& table, double factor, const std::string& isa) {
  const std::vector<Tensor> tensors = tensors_of(kUnscale, table);
  const FusedKernels& kernels = fused_kernels(parse_isa(isa));
  const GilRelease release;
  const IeeeFloatMode ieee;
  const Unscaled done = kernels.unscale({tensors.data(), tensors.size()}, factor);
  return {done.found_inf, done.sum_of_squares};
}

void multiply(const py::object& table, double factor, const std::string& isa) {
  const std::vector<Tensor> tensors = tensors_of(kClip, table);
  const FusedKernels& kernels = fused_kernels(parse_isa(isa));
  const GilRelease release;
  const IeeeFloatMode ieee;
  kernels.multiply({tensors.data(), tensors.size()}, factor);
}

// ---- Tensors on GPUs. What a tensor is, is known to pycoll/_device_fused.py. ----

using Address = uint64_t;

template <class T = void>
T* pointer_to(Address address) {
  return reinterpret_cast<T*>(address);
}

uint64_t room_of(const py::object& table) {
  const Spans spans(table);
  uint64_t chunks = 0;
  for (size_t i = 0; i < spans.size(); ++i) chunks += chunks_of(spans[i].count);
  return fused_room(spans.size(), chunks);
}

class DeviceFused {
 public:
  explicit DeviceFused(const std::string& library) : library_(DeviceLibrary::load(library)) {}

  const char* device() const { return library_->name(); }

  void cast(const py::object& targets, const py::object& sources, double scale, Address stream,
            Address room, Address found_inf) const {
    const std::vector<CastTensor> tensors = cast_tensors_of(Spans(targets), Spans(sources));
    const GilRelease release;
    library_->cast({tensors.data(), tensors.size()}, static_cast<float>(scale),
                   place(stream, room, found_inf));
  }
  void unscale(const py::object& table, double factor, Address factor_at, Address sum_of_squares,
               Address stream, Address room, Address found_inf) const {
    const std::vector<Tensor> tensors = tensors_of(kUnscale, table);
    const GilRelease release;
    library_->unscale({tensors.data(), tensors.size()}, {factor, pointer_to<float>(factor_at)},
                      pointer_to<double>(sum_of_squares), place(stream, room, found_inf));
  }
  void multiply(const py::object& table, double factor, Address stream, Address room) const {
    const std::vector<Tensor> tensors = tensors_of(kClip, table);
    const GilRelease release;
    library_->multiply({tensors.data(), tensors.size()}, {factor}, place(stream, room, 0));
  }
  void clip(const py::object& table, Address sum_of_squares, double max_norm, Address stream,
            Address room) const {
    const std::vector<Tensor> tensors = tensors_of(kClip, table);
    const GilRelease release;
    library_->clip({tensors.data(), tensors.size()}, pointer_to<double>(sum_of_squares), max_norm,
                   place(stream, room, 0));
  }

 private:
  FusedPlace place(Address stream, Address room, Address found_inf) const {
    const int device = library_->device_of(pointer_to(room)).value_or(library_->current_device());
    return {device, pointer_to(stream), pointer_to(room), pointer_to<float>(found_inf)};
  }

  std::shared_ptr<DeviceLibrary> library_;
};

void bind_device_fused(py::module_& m) {
  using py::arg;
  m.def("fused_room", &room_of, arg("tensors"), "Bytes of device memory for calls on such a list.");
  py::class_<DeviceFused>(m, "DeviceFused")
      .def(py::init<const std::string&>(), arg("library"))
      .def_property_readonly("device", &DeviceFused::device)
      .def("cast", &DeviceFused::cast, py::kw_only(), arg("targets"), arg("sources"), arg("scale"),
           arg("stream"), arg("room"), arg("found_inf"))
      .def("unscale", &DeviceFused::unscale, py::kw_only(), arg("tensors"), arg("factor"),
           arg("factor_at"), arg("sum_of_squares"), arg("stream"), arg("room"), arg("found_inf"))
      .def("multiply", &DeviceFused::multiply, py::kw_only(), arg("tensors"), arg("factor"),
           arg("stream"), arg("room"))
      .def("clip", &DeviceFused::clip, py::kw_only(), arg("tensors"), arg("sum_of_squares"),
           arg("max_norm"), arg("stream"), arg("room"));
}

}  // namespace

void bind_fused(py::module_& m) {
  using py::arg;
  m.def("cast", &cast, py::kw_only(), arg("targets"), arg("sources"), arg("scale"), arg("isa") = "",
        "Writes sources times `scale` to targets; whether a result is infinite or NaN.");
  m.def("unscale", &unscale, py::kw_only(), arg("tensors"), arg("factor"), arg("isa") = "",
        "Multiplies in place: (whether a value is infinite or NaN, the sum of squares).");
  m.def("multiply", &multiply, py::kw_only(), arg("tensors"), arg("factor"), arg("isa") = "",
        "Multiplies in place.");
  bind_device_fused(m);
}

}  // namespace pycoll
