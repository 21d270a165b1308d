// Programs as Python sees them: builders, validation, checker and trace. Attributes are copied in
// and out, enumerations are their names.
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bind.h"
#include "core/dtype.h"
#include "core/error.h"
#include "group_options.h"
#include "program/algorithm.h"
#include "program/check.h"
#include "program/trace.h"
#include "runtime/selector.h"

namespace py = pybind11;

namespace pycoll {
namespace {

using Steps = std::vector<Step>;

// The first `count` values of an enumeration, looked up by name.
template <typename Enum, typename NameOf>
Enum from_name(const std::string& name, int count, NameOf name_of_value, const char* what) {
  std::string known;
  for (int i = 0; i < count; ++i) {
    const Enum value = static_cast<Enum>(i);
    if (name_of_value(value) == name) return value;
    known += concat(i == 0 ? "" : ", ", name_of_value(value));
  }
  fail(ErrorKind::invalid_argument, "no ", what, " \"", name, "\"; there are: ", known);
}

StepKind kind_from(const std::string& name) {
  return from_name<StepKind>(
      name, static_cast<int>(StepKind::kCount), [](StepKind k) { return traits_of(k).name; },
      "kind of step");
}
Space space_from(const std::string& name) {
  return from_name<Space>(
      name, static_cast<int>(Space::window) + 1, [](Space s) { return name_of(s); }, "space");
}
Wire wire_from(const std::string& name) {
  return from_name<Wire>(
      name, static_cast<int>(Wire::partial) + 1, [](Wire w) { return name_of(w); }, "wire");
}
Order order_from(const std::string& name) {
  return from_name<Order>(
      name, static_cast<int>(Order::lower_first) + 1, [](Order o) { return name_of(o); }, "order");
}
Collective collective_from(const std::string& name) {
  return from_name<Collective>(
      name, static_cast<int>(Collective::kCount), [](Collective c) { return name_of(c); },
      "collective");
}

Lane& lane_of(Program& program, int32_t lane) {
  if (lane < 0 || static_cast<size_t>(lane) >= program.lanes.size()) {
    fail(ErrorKind::invalid_argument, "no lane ", lane, ": rank ", program.rank, " has ",
         program.lanes.size());
  }
  return program.lanes[static_cast<size_t>(lane)];
}

std::vector<std::string> collective_names() {
  std::vector<std::string> names;
  for (int i = 0; i < static_cast<int>(Collective::kCount); ++i) {
    names.emplace_back(name_of(static_cast<Collective>(i)));
  }
  return names;
}

std::vector<Algorithm> algorithms_of(const std::string& collective) {
  const Collective wanted = collective_from(collective);
  std::vector<Algorithm> rows;
  for (const Algorithm& row : algorithms()) {
    if (row.collective == wanted) rows.push_back(row);
  }
  return rows;
}

std::vector<Program> build_programs(const std::string& collective, const std::string& algorithm,
                                    int32_t world_size, int32_t root, std::vector<int32_t> hosts) {
  ProgramRequest request{collective_from(collective), 0, world_size, root, std::move(hosts)};
  std::vector<Program> programs;
  do {
    programs.push_back(build_program(algorithm, request));
  } while (++request.rank < world_size);
  return programs;
}

// A communicator's choice without a communicator: for tests and `pycoll tune --check`.
struct Situation {
  std::string transport;
  bool has_window;
  bool several_hosts;
  int32_t ranks;
  std::string rules;
  std::vector<TableRow> table;
  std::string determinism;
  bool leases;
};

std::string select_algorithm(const std::string& collective, uint64_t bytes,
                             const Situation& where) {
  Config config;
  if (!where.determinism.empty()) {
    apply_variables({{"PYCOLL_DETERMINISM", where.determinism}}, config);
  }
  const Selector selector({where.rules, rules_of(where.table), config.determinism, where.ranks});
  return std::string(selector
                         .select({.collective = collective_from(collective),
                                  .bytes = bytes,
                                  .ranks = where.ranks,
                                  .transport = where.transport,
                                  .has_window = where.has_window,
                                  .several_hosts = where.several_hosts,
                                  .leases = where.leases})
                         .name);
}

Trace trace_named(const std::vector<Program>& programs,
                  const std::vector<std::vector<double>>& inputs, const std::string& op) {
  const std::optional<ReduceOp> known = reduce_op_from_name(op);
  if (!known) fail(ErrorKind::invalid_argument, "no reduce op \"", op, "\"");
  return trace(programs, inputs, *known);
}

void bind_steps(py::module_& m) {
  using py::arg;
  py::class_<Ref>(m, "Ref", "A chunk of one of a rank's memories.")
      .def(py::init([](const std::string& space, int32_t chunk) {
             return Ref{space_from(space), chunk};
           }),
           arg("space") = "none", arg("chunk") = 0)
      .def_property(
          "space", [](const Ref& r) { return std::string(name_of(r.space)); },
          [](Ref& r, const std::string& name) { r.space = space_from(name); })
      .def_readwrite("chunk", &Ref::chunk)
      .def("__eq__", [](const Ref& a, const Ref& b) { return a == b; })
      .def("__str__", [](const Ref& r) { return to_string(r); })
      .def("__repr__", [](const Ref& r) { return "<Ref " + to_string(r) + ">"; });

  py::class_<Step>(m, "Step", "One step of a lane.")
      .def(py::init([](const std::string& kind) { return Step{.kind = kind_from(kind)}; }),
           arg("kind") = "barrier")
      .def(py::init<const Step&>(), arg("other"))
      .def_property(
          "kind", [](const Step& s) { return std::string(traits_of(s.kind).name); },
          [](Step& s, const std::string& name) { s.kind = kind_from(name); })
      .def_property(
          "src", [](const Step& s) { return s.src; }, [](Step& s, Ref ref) { s.src = ref; })
      .def_property(
          "dst", [](const Step& s) { return s.dst; }, [](Step& s, Ref ref) { s.dst = ref; })
      .def_readwrite("from_rank", &Step::from)
      .def_readwrite("to_rank", &Step::to)
      .def_readwrite("channel", &Step::channel)
      .def_readwrite("group", &Step::group)
      .def_readwrite("remote_chunk", &Step::remote_chunk)
      .def_property(
          "remote", [](const Step& s) { return std::string(name_of(s.remote)); },
          [](Step& s, const std::string& name) { s.remote = space_from(name); })
      .def_property(
          "wire", [](const Step& s) { return std::string(name_of(s.wire)); },
          [](Step& s, const std::string& name) { s.wire = wire_from(name); })
      .def_readwrite("received_first", &Step::received_first)
      .def("__eq__", [](const Step& a, const Step& b) { return a == b; })
      .def("__str__", [](const Step& s) { return to_string(s); })
      .def("__repr__", [](const Step& s) { return "<Step " + to_string(s) + ">"; });

  py::class_<Lane>(m, "Lane", "Steps that a rank executes one after the other.")
      .def(py::init([](Steps steps) { return Lane{std::move(steps)}; }), arg("steps") = Steps{})
      .def_readwrite("steps", &Lane::steps)
      .def("__eq__", [](const Lane& a, const Lane& b) { return a == b; });
}

void bind_programs(py::module_& m) {
  using py::arg;
  py::class_<Algorithm>(m, "AlgorithmInfo", "A row of the table of algorithms.")
      .def_property_readonly("collective",
                             [](const Algorithm& a) { return std::string(name_of(a.collective)); })
      .def_property_readonly("name", [](const Algorithm& a) { return std::string(a.name); })
      .def_property_readonly("summary", [](const Algorithm& a) { return std::string(a.summary); })
      .def_readonly("needs_window", &Algorithm::needs_window)
      .def_readonly("needs_lease", &Algorithm::needs_lease)
      .def_readonly("min_depth", &Algorithm::min_depth)
      .def("__repr__", [](const Algorithm& a) {
        return concat("<AlgorithmInfo ", name_of(a.collective), " ", a.name, ">");
      });

  py::class_<Program>(m, "Program", "What one rank does in a collective. Lists are copies.")
      .def(py::init<>())
      .def(py::init<const Program&>(), arg("other"))
      .def_property(
          "collective", [](const Program& p) { return std::string(name_of(p.collective)); },
          [](Program& p, const std::string& name) { p.collective = collective_from(name); })
      .def_readwrite("algorithm", &Program::algorithm)
      .def_readwrite("rank", &Program::rank)
      .def_readwrite("world_size", &Program::world_size)
      .def_readwrite("root", &Program::root)
      .def_readwrite("input_chunks", &Program::input_chunks)
      .def_readwrite("output_chunks", &Program::output_chunks)
      .def_readwrite("acc_chunks", &Program::acc_chunks)
      .def_readwrite("window_chunks", &Program::window_chunks)
      .def_readwrite("channels", &Program::channels)
      .def_property(
          "order", [](const Program& p) { return std::string(name_of(p.order)); },
          [](Program& p, const std::string& name) { p.order = order_from(name); })
      .def_readwrite("ring", &Program::ring)
      .def_readwrite("groups", &Program::groups)
      .def_readwrite("lanes", &Program::lanes)
      .def_readwrite("needs_lease", &Program::needs_lease)
      .def_readwrite("lends_input", &Program::lends_input)
      .def_readwrite("lends_output", &Program::lends_output)
      .def(
          "steps", [](Program& p, int32_t lane) { return lane_of(p, lane).steps; }, arg("lane") = 0)
      .def(
          "set_steps",
          [](Program& p, int32_t lane, Steps steps) { lane_of(p, lane).steps = std::move(steps); },
          arg("lane"), arg("steps"))
      .def("__repr__", [](const Program& p) {
        return concat("<Program ", name_of(p.collective), " ", p.algorithm, ", rank ", p.rank,
                      " of ", p.world_size, ">");
      });

  m.def("collectives", &collective_names, "Names of the collectives.");
  m.def("algorithms", &algorithms_of, arg("collective"), "The algorithms of a collective.");
  m.def("build_programs", &build_programs, arg("collective"), arg("algorithm"), arg("world_size"),
        arg("root") = 0, arg("hosts") = std::vector<int32_t>{}, "One Program a rank.");
  m.def(
      "select_algorithm",
      [](const std::string& collective, uint64_t bytes, bool has_window, bool several_hosts,
         const std::string& rules, const std::vector<TableRow>& table, int32_t ranks,
         const std::string& transport, const std::string& determinism, bool leases) {
        return select_algorithm(
            collective, bytes,
            {transport, has_window, several_hosts, ranks, rules, table, determinism, leases});
      },
      arg("collective"), arg("bytes"), py::kw_only(), arg("has_window"), arg("several_hosts"),
      arg("rules") = "", arg("table") = std::vector<TableRow>(), arg("ranks") = 2,
      arg("transport") = "shm", arg("determinism") = "", arg("leases") = false,
      "The name of the algorithm that a call of that size would use.");
  m.def("validate", &validate, arg("program"), "Raises InvalidArgumentError for unsafe Programs.");
  m.def(
      "chunk_range",
      [](uint64_t count, int32_t chunks, int32_t chunk, uint64_t align) {
        if (chunks < 1 || chunk < 0 || chunk >= chunks || align < 1) {
          fail(ErrorKind::invalid_argument, "no chunk ", chunk, " of ", chunks, ", aligned to ",
               align);
        }
        const ChunkRange range = chunk_range(count, chunks, chunk, align);
        return std::pair(range.begin, range.end);
      },
      arg("count"), arg("chunks"), arg("chunk"), arg("align") = 1,
      "Elements [begin, end) of a chunk of a vector of `count` elements.");
}

void bind_check_and_trace(py::module_& m) {
  using py::arg;
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<CheckResult>(m, "CheckResult", "What the checker found; true when nothing is wrong.")
      .def_property_readonly("ok", &CheckResult::ok)
      .def_property_readonly("kind",
                             [](const CheckResult& r) { return std::string(name_of(r.kind)); })
      .def_readonly("message", &CheckResult::message)
      .def("__bool__", &CheckResult::ok)
      .def("__repr__", [](const CheckResult& r) {
        return concat("<CheckResult ", name_of(r.kind), r.ok() ? "" : ": ", r.message, ">");
      });
  py::class_<TraceRow>(m, "TraceRow", "What every rank holds after a logical time.")
      .def_readonly("time", &TraceRow::time)
      .def_readonly("values", &TraceRow::values);
  py::class_<Transfer>(m, "Transfer", "One message, or one read of a peer's window.")
      .def_readonly("time", &Transfer::time)
      .def_readonly("source", &Transfer::from)
      .def_readonly("destination", &Transfer::to)
      .def_readonly("chunk", &Transfer::chunk)
      .def_readonly("lane", &Transfer::lane)
      .def_readonly("text", &Transfer::text);
  py::class_<Trace>(m, "Trace", "A run on numbers, step by step.")
      .def_readonly("rows", &Trace::rows)
      .def_readonly("transfers", &Trace::transfers);

  m.def(
      "check",
      [](const std::vector<Program>& programs, int32_t depth, int32_t rounds, bool in_place,
         int32_t draws, uint64_t seed) {
        return check(programs, {depth, rounds, in_place, draws, seed});
      },
      arg("programs"), arg("depth") = 2, arg("rounds") = 3, arg("in_place") = true,
      arg("draws") = 2, arg("seed") = 0, unlocked(),
      "Proves that the Programs of all ranks do what their collective promises.");
  m.def("trace", &trace_named, arg("programs"), arg("inputs"), arg("op") = "sum", unlocked(),
        "Runs the Programs on numbers.");
}

}  // namespace

void bind_program(py::module_& m) {
  bind_steps(m);
  bind_programs(m);
  bind_check_and_trace(m);
}

}  // namespace pycoll
