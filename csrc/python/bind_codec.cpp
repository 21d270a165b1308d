// Codecs on buffers. What an array or tensor is, is known to pycoll/codecs.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "bind.h"
#include "buffer.h"
#include "core/error.h"
#include "gil.h"
#include "kernels/codec.h"
#include "parse.h"
#include "runtime/codec_request.h"
#include "runtime/device/device_group.h"
#include "runtime/float_mode.h"

namespace py = pybind11;

namespace pycoll {
namespace {

Codec make_codec(const std::string& kind, uint32_t block, bool stochastic) {
  const Codec codec{parse_enum<CodecKind>(kind, "codec"), block, stochastic};
  check_codec(codec);
  return codec;
}

DType dtype_of(const std::string& name) {
  const auto dtype = parse_enum<DType>(name, "dtype");
  if (!can_encode(dtype)) {
    fail(ErrorKind::invalid_argument, "codecs take float32, float16 and bfloat16, not ", name);
  }
  return dtype;
}

void check_bytes(const Buffer& buffer, uint64_t bytes, const char* what) {
  if (buffer.bytes() != bytes) {
    fail(ErrorKind::invalid_argument, what, " has ", buffer.bytes(), " bytes, ", bytes,
         " are needed");
  }
}

uint64_t count_of(const Buffer& values, DType dtype) {
  if (values.bytes() % size_of(dtype) != 0) {
    fail(ErrorKind::invalid_argument, "values have ", values.bytes(),
         " bytes, not a whole number of ", name_of(dtype));
  }
  return values.bytes() / size_of(dtype);
}

void encode(const Codec& codec, const py::object& values, const std::string& dtype,
            const py::object& code, const RandomKey& key, const py::object& residual,
            const std::string& isa) {
  const Buffer source(values, false), target(code, true);
  EncodeRequest request{codec, key, dtype_of(dtype), source.data(), 0, nullptr};
  request.count = count_of(source, request.dtype);
  request.code = reinterpret_cast<std::byte*>(target.data());
  check_bytes(target, code_bytes(codec, request.count), "the code");
  std::optional<Buffer> error;
  if (!residual.is_none()) {
    error.emplace(residual, true);
    check_bytes(*error, request.count * sizeof(float), "the residual");
    request.residual = reinterpret_cast<float*>(error->data());
  }
  const CodecKernels& kernels = codec_kernels(parse_isa(isa));
  const GilRelease release;
  const IeeeFloatMode ieee;
  kernels.encode(request);
}

void decode(const Codec& codec, const std::vector<py::object>& codes, const py::object& values,
            const std::string& dtype, float divisor, const std::string& isa) {
  const Buffer target(values, true);
  const DType type = dtype_of(dtype);
  const uint64_t count = count_of(target, type);
  std::deque<Buffer> buffers;
  std::vector<const std::byte*> sources;
  for (const py::object& code : codes) {
    const Buffer& buffer = buffers.emplace_back(code, false);
    check_bytes(buffer, code_bytes(codec, count), "a code");
    sources.push_back(reinterpret_cast<const std::byte*>(buffer.data()));
  }
  if (sources.empty()) fail(ErrorKind::invalid_argument, "there is no code");
  const CodecKernels& kernels = codec_kernels(parse_isa(isa));
  const GilRelease release;
  const IeeeFloatMode ieee;
  kernels.decode({codec, sources.data(), sources.size(), type, target.data(), count, divisor});
}

// ---- Arrays on GPUs. What an array is, is known to pycoll/_device_codecs.py. ----

using Address = uint64_t;

template <class T = void>
T* pointer_to(Address address) {
  return reinterpret_cast<T*>(address);
}

class DeviceCodecs {
 public:
  explicit DeviceCodecs(const std::string& library) : library_(DeviceLibrary::load(library)) {}

  const char* device() const { return library_->name(); }

  // `after`: streams whose work the call comes after.
  void encode(const Codec& codec, Address values, uint64_t count, const std::string& dtype,
              Address code, const RandomKey& key, Address stream,
              const std::vector<Address>& after) const {
    if (count == 0) return;
    const EncodeRequest request{
        codec, key, dtype_of(dtype), pointer_to(values), count, pointer_to<std::byte>(code)};
    const GilRelease release;
    const int device = device_of({values, code});
    join(device, stream, after);
    library_->encode(request, device, pointer_to(stream));
  }

  void decode(const Codec& codec, Address code, Address values, uint64_t count,
              const std::string& dtype, Address stream, const std::vector<Address>& after) const {
    if (count == 0) return;
    const std::byte* const codes[] = {pointer_to<const std::byte>(code)};
    const DecodeRequest request{codec, codes, 1, dtype_of(dtype), pointer_to(values), count};
    const GilRelease release;
    const int device = device_of({values, code});
    join(device, stream, after);
    library_->decode(request, device, pointer_to(stream));
  }

 private:
  int device_of(const std::vector<Address>& addresses) const {
    std::optional<int> found;
    for (const Address address : addresses) {
      const std::optional<int> device = library_->device_of(pointer_to(address));
      if (found && device && *device != *found) {
        fail(ErrorKind::invalid_argument, "values are on GPU ", *found, ", their code on GPU ",
             *device, ": they must be on one");
      }
      if (device) found = device;
    }
    return found.value_or(library_->current_device());
  }
  void join(int device, Address stream, const std::vector<Address>& after) const {
    library_->mark(device, pointer_to(stream));  // throws for a stream of another device
    for (const Address other : after) {
      library_->mark(device, pointer_to(other))->hold(pointer_to(stream));
    }
  }

  std::shared_ptr<DeviceLibrary> library_;
};

// (name, bits a value, floats a block, may round stochastically, always does).
std::vector<std::tuple<std::string, int, int, bool, bool>> codecs() {
  std::vector<std::tuple<std::string, int, int, bool, bool>> rows;
  for (int i = 0; i < static_cast<int>(CodecKind::kCount); ++i) {
    const CodecTraits& traits = traits_of(static_cast<CodecKind>(i));
    rows.emplace_back(traits.name, traits.bits, traits.scales, traits.may_be_stochastic,
                      traits.always_stochastic);
  }
  return rows;
}

}  // namespace

void bind_codec(py::module_& m) {
  using py::arg;
  py::class_<Codec>(m, "Codec")
      .def(py::init(&make_codec), py::kw_only(), arg("kind"), arg("block") = 256,
           arg("stochastic") = false)
      .def_property_readonly("kind", [](const Codec& c) { return std::string(name_of(c.kind)); })
      .def_readonly("block", &Codec::block)
      .def_readonly("stochastic", &Codec::stochastic)
      .def("code_bytes", &code_bytes, arg("count"), "Bytes of the code of `count` values.");
  py::class_<RandomKey>(m, "RandomKey")
      .def(py::init([](uint64_t seed, uint32_t step, uint32_t rank, uint64_t first) {
             return RandomKey{seed, step, rank, first};
           }),
           py::kw_only(), arg("seed") = 0, arg("step") = 0, arg("rank") = 0, arg("first") = 0);
  py::class_<CodecChoice>(m, "CodecChoice")
      .def(py::init([](const Codec& codec, uint64_t seed, std::optional<uint32_t> step) {
             return CodecChoice{codec, seed, step};
           }),
           arg("codec"), arg("seed"), arg("step") = py::none());
  m.def("codecs", &codecs,
        "Rows (name, bits a value, floats a block, may be stochastic, always is).");
  m.def("encode", &encode, py::kw_only(), arg("codec"), arg("values"), arg("dtype"), arg("code"),
        arg("key"), arg("residual") = py::none(), arg("isa") = "",
        "Writes the code of `values` + `residual`; the residual becomes what the code lacks.");
  m.def("decode", &decode, py::kw_only(), arg("codec"), arg("codes"), arg("values"), arg("dtype"),
        arg("divisor") = 1.0f, arg("isa") = "",
        "Writes the sum of what the codes hold, in their order, divided.");
  py::class_<DeviceCodecs>(m, "DeviceCodecs")
      .def(py::init<const std::string&>(), arg("library"))
      .def_property_readonly("device", &DeviceCodecs::device)
      .def("encode", &DeviceCodecs::encode, py::kw_only(), arg("codec"), arg("values"),
           arg("count"), arg("dtype"), arg("code"), arg("key"), arg("stream"), arg("after"))
      .def("decode", &DeviceCodecs::decode, py::kw_only(), arg("codec"), arg("code"), arg("values"),
           arg("count"), arg("dtype"), arg("stream"), arg("after"));
}

}  // namespace pycoll
