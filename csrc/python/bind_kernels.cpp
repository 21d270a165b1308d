// Kernels on plain buffers, one call a kernel: what the tests of the element maths go through.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <deque>
#include <string>
#include <vector>

#include "bind.h"
#include "buffer.h"
#include "core/error.h"
#include "kernels/reduce.h"

namespace py = pybind11;

namespace pycoll {
namespace {

DType parse_dtype(const std::string& name) {
  const auto dtype = dtype_from_name(name);
  if (!dtype) {
    fail(ErrorKind::invalid_argument, "unknown dtype '", name, "'");
  }
  return *dtype;
}

Isa parse_isa(const std::string& name) {
  std::string known;
  for (int i = 0; i < static_cast<int>(Isa::kCount); ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (isa_available(isa)) {
      if (name_of(isa) == name) {
        return isa;
      }
      known += concat(known.empty() ? "" : ", ", name_of(isa));
    }
  }
  fail(ErrorKind::invalid_argument, "instruction set '", name, "' is not one of: ", known);
}

ReduceOp parse_op(const std::string& name) {
  const auto op = reduce_op_from_name(name);
  if (!op) {
    fail(ErrorKind::invalid_argument, "unknown reduce operation '", name, "'");
  }
  return *op;
}

const ReduceKernels& find_kernels(const std::string& dtype_name, const std::string& op_name,
                                  const std::string& isa) {
  const DType dtype = parse_dtype(dtype_name);
  const ReduceOp op = parse_op(op_name);
  const ReduceKernels* kernels = find_reduce_kernels(dtype, op, parse_isa(isa));
  if (!kernels) {
    fail(ErrorKind::not_implemented, "no kernel for ", op_name, " of ", dtype_name, ": ",
         why_not_reducible(dtype, op));
  }
  return *kernels;
}

size_t count_of(const Buffer& buffer, DType dtype, const char* what) {
  if (buffer.bytes() % size_of(dtype) != 0) {
    fail(ErrorKind::invalid_argument, what, " has ", buffer.bytes(),
         " bytes, not a whole number of ", name_of(dtype));
  }
  return buffer.bytes() / size_of(dtype);
}

void check_output(const Buffer& out, size_t n, DType dtype) {
  if (out.bytes() != n * size_of(dtype)) {
    fail(ErrorKind::invalid_argument, "out has ", out.bytes(), " bytes, not ", n, " ",
         name_of(dtype));
  }
}

void check_overlap(const Buffer& out, const Buffer& in, bool same_start_allowed) {
  const bool apart = out.data() + out.bytes() <= in.data() || in.data() + in.bytes() <= out.data();
  if (!apart && !(same_start_allowed && out.data() == in.data())) {
    fail(ErrorKind::invalid_argument, "out overlaps an operand in a way the kernel does not allow");
  }
}

// Runs body(dst) on `out`, or on fresh bytes when it is None; returns what it wrote to.
template <typename Body>
py::object with_output(const py::object& out, size_t n, DType dtype, Body body) {
  if (!out.is_none()) {
    const Buffer buffer(out, true);
    check_output(buffer, n, dtype);
    body(buffer);
    return out;
  }
  py::bytearray fresh(static_cast<const char*>(nullptr), n * size_of(dtype));
  {
    const Buffer buffer(fresh, true);
    body(buffer);
  }
  return fresh;
}

py::object reduce_local(const py::object& a, const py::object& b, const std::string& dtype,
                        const std::string& op, const std::string& isa, bool a_acc, bool b_acc,
                        const py::object& out) {
  const ReduceKernels& kernels = find_kernels(dtype, op, isa);
  const DType a_dtype = a_acc ? kernels.acc : kernels.value;
  const DType b_dtype = b_acc ? kernels.acc : kernels.value;
  const Buffer a_buffer(a, false), b_buffer(b, false);
  const size_t n = count_of(a_buffer, a_dtype, "a");
  if (count_of(b_buffer, b_dtype, "b") != n) {
    fail(ErrorKind::invalid_argument, "a has ", n, " elements, b has ",
         b_buffer.bytes() / size_of(b_dtype));
  }
  return with_output(out, n, kernels.acc, [&](const Buffer& dst) {
    check_overlap(dst, a_buffer, a_dtype == kernels.acc);
    check_overlap(dst, b_buffer, b_dtype == kernels.acc);
    kernels.combine[a_acc][b_acc](dst.data(), a_buffer.data(), b_buffer.data(), n);
  });
}

py::object widen(const py::object& src, const std::string& dtype, const std::string& op,
                 const std::string& isa, const py::object& out) {
  const ReduceKernels& kernels = find_kernels(dtype, op, isa);
  if (!kernels.widen) {
    fail(ErrorKind::invalid_argument, op, " of ", dtype, " accumulates in ", dtype, " itself");
  }
  const Buffer source(src, false);
  const size_t n = count_of(source, kernels.value, "src");
  return with_output(out, n, kernels.acc, [&](const Buffer& dst) {
    check_overlap(dst, source, false);
    kernels.widen(dst.data(), source.data(), n);
  });
}

// `out` may be the start of `acc`: in place, which narrows.
py::object finish(const py::object& acc, const std::string& dtype, const std::string& op,
                  int world_size, const std::string& isa, const py::object& out) {
  const ReduceKernels& kernels = find_kernels(dtype, op, isa);
  if (!kernels.finish) {
    fail(ErrorKind::invalid_argument, op, " of ", dtype, " needs no finish");
  }
  if (world_size < 1) {
    fail(ErrorKind::invalid_argument, "world_size is ", world_size, ", not 1 or more");
  }
  const Buffer source(acc, false);
  const size_t n = count_of(source, kernels.acc, "acc");
  return with_output(out, n, kernels.value, [&](const Buffer& dst) {
    check_overlap(dst, source, true);
    kernels.finish(dst.data(), source.data(), n, world_size);
  });
}

// False where the pair has no such kernel. All buffers have one length; a target may be a term.
bool sum_rows(const std::vector<py::object>& terms, const std::vector<py::object>& targets,
              const std::string& dtype, const std::string& op, int world_size,
              const std::string& isa) {
  const ReduceKernels& kernels = find_kernels(dtype, op, isa);
  if (kernels.sum_rows == nullptr) return false;
  if (terms.empty()) fail(ErrorKind::invalid_argument, "there are no terms");
  std::deque<Buffer> buffers;
  std::vector<const std::byte*> from;
  std::vector<std::byte*> to;
  const auto add = [&](const py::object& object, bool writable) {
    const Buffer& buffer = buffers.emplace_back(object, writable);
    if (buffer.bytes() != buffers.front().bytes()) {
      fail(ErrorKind::invalid_argument, "buffers have ", buffers.front().bytes(), " and ",
           buffer.bytes(), " bytes");
    }
    return reinterpret_cast<std::byte*>(buffer.data());
  };
  for (const py::object& term : terms) from.push_back(add(term, false));
  for (const py::object& target : targets) to.push_back(add(target, true));
  const size_t n = count_of(buffers.front(), kernels.value, "a term");
  kernels.sum_rows({from.data(), from.size(), to.data(), to.size()}, 0, n, world_size);
  return true;
}

py::object scale(const py::object& src, const std::string& dtype, double factor,
                 const std::string& isa, const py::object& out) {
  const ReduceKernels& kernels = find_kernels(dtype, "premul_sum", isa);
  const Buffer source(src, false);
  const size_t n = count_of(source, kernels.value, "src");
  return with_output(out, n, kernels.value, [&](const Buffer& dst) {
    check_overlap(dst, source, true);
    kernels.scale(dst.data(), source.data(), n, factor);
  });
}

std::vector<std::string> dtypes() {
  std::vector<std::string> names;
  for (int i = 0; i < static_cast<int>(DType::kCount); ++i) {
    names.emplace_back(name_of(static_cast<DType>(i)));
  }
  return names;
}

std::string why_not(const std::string& dtype, const std::string& op) {
  return why_not_reducible(parse_dtype(dtype), parse_op(op));
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (int i = 0; i < static_cast<int>(Isa::kCount); ++i) {
    if (isa_available(static_cast<Isa>(i))) {
      names.emplace_back(name_of(static_cast<Isa>(i)));
    }
  }
  return names;
}

std::string acc_dtype(const std::string& dtype, const std::string& op) {
  return std::string(name_of(find_kernels(dtype, op, "baseline").acc));
}

}  // namespace

void bind_kernels(py::module_& m) {
  using py::arg;
  m.def("isas", &isas, "Instruction sets that this CPU and build can run, best last.");
  m.def(
      "best_isa", [] { return std::string(name_of(best_isa())); },
      "The instruction set that collectives use.");
  m.def("dtypes", &dtypes, "Names of the element types that collectives can move.");
  m.def("why_not_reducible", &why_not, arg("dtype"), arg("op"),
        "Why `op` is not defined for `dtype`; empty when it is.");
  m.def("acc_dtype", &acc_dtype, arg("dtype"), arg("op"),
        "Name of the type that partial results of `op` over `dtype` are held in.");
  m.def("reduce_local", &reduce_local, arg("a"), arg("b"), arg("dtype"), arg("op"), arg("isa"),
        arg("a_acc") = false, arg("b_acc") = false, arg("out") = py::none(),
        "a (+) b as accumulators, from contiguous buffers of values, or of accumulators where "
        "`a_acc` / `b_acc`. Writes to `out` (which may be an operand of accumulators) and returns "
        "it, or a new bytearray.");
  m.def("widen", &widen, arg("src"), arg("dtype"), arg("op"), arg("isa"), arg("out") = py::none(),
        "Values as accumulators, where the two types differ.");
  m.def("finish", &finish, arg("acc"), arg("dtype"), arg("op"), arg("world_size"), arg("isa"),
        arg("out") = py::none(),
        "Accumulators as values: AVG divides by `world_size`, then 8 and 16-bit floats round.");
  m.def("sum_rows", &sum_rows, arg("terms"), arg("targets"), arg("dtype"), arg("op"),
        arg("world_size"), arg("isa"),
        "Stores the finished sum of all terms into every target, in one pass. False, and nothing "
        "is done, where there is no such kernel for `op` of `dtype`.");
  m.def("scale", &scale, arg("src"), arg("dtype"), arg("factor"), arg("isa"),
        arg("out") = py::none(),
        "Values times a factor, rounded once: what PREMUL_SUM does to the input of each rank.");
}

}  // namespace pycoll
