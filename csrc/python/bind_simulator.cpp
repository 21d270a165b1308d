// The simulator as Python sees it: machines are made of numbers, results are read only.
#include <pybind11/stl.h>

#include <string>

#include "bind.h"
#include "core/error.h"
#include "simulator/simulate.h"

namespace py = pybind11;

namespace pycoll {
namespace {

using namespace simulator;

// Ctrl-C ends a simulation that runs without the GIL.
void raise_if_interrupted() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

struct Request : SimulationRequest {
  Request(const std::string& collective_name, const std::string& algorithm_name, int32_t rank_count,
          uint64_t byte_count, const Machine& on) {
    const auto known = collective_from_name(collective_name);
    if (!known) fail(ErrorKind::invalid_argument, "no collective \"", collective_name, "\"");
    collective = *known;
    algorithm = algorithm_name;
    ranks = rank_count;
    bytes = byte_count;
    machine = on;
  }
};

SimulationResult simulate_named(const std::string& collective, const std::string& algorithm,
                                int32_t ranks, uint64_t bytes, const Machine& machine,
                                const std::string& dtype, int32_t root, bool in_place,
                                uint64_t slot_bytes, uint32_t fifo_depth, uint64_t window_bytes,
                                bool use_symmetry, uint64_t symmetry_from, uint64_t most_steps) {
  Request request(collective, algorithm, ranks, bytes, machine);
  const auto type = dtype_from_name(dtype);
  if (!type) fail(ErrorKind::invalid_argument, "no dtype \"", dtype, "\"");
  request.dtype = *type;
  request.root = root;
  request.in_place = in_place;
  request.geometry = {slot_bytes, fifo_depth, window_bytes};
  request.use_symmetry = use_symmetry;
  request.symmetry_from = symmetry_from;
  request.most_steps = most_steps;
  const py::gil_scoped_release unlocked;
  return simulate(request, raise_if_interrupted);
}

void bind_machine(py::module_& m) {
  py::class_<Host>(m, "HostModel", "What a host costs: seconds and bytes a second.")
      .def(py::init<>())
      .def_readwrite("cores", &Host::cores)
      .def_readwrite("cache_bandwidth", &Host::cache_bandwidth)
      .def_readwrite("peer_bandwidth", &Host::peer_bandwidth)
      .def_readwrite("core_bandwidth", &Host::core_bandwidth)
      .def_readwrite("memory_bandwidth", &Host::memory_bandwidth)
      .def_readwrite("cache_bytes", &Host::cache_bytes)
      .def_readwrite("reduce_bandwidth", &Host::reduce_bandwidth)
      .def_readwrite("call_overhead", &Host::call_overhead)
      .def_readwrite("step_overhead", &Host::step_overhead)
      .def_readwrite("flag_latency", &Host::flag_latency)
      .def_readwrite("switch_overhead", &Host::switch_overhead);
  py::class_<simulator::Network>(m, "NetworkModel", "What joins the hosts.")
      .def(py::init<>())
      .def_readwrite("bandwidth", &simulator::Network::bandwidth)
      .def_readwrite("latency", &simulator::Network::latency)
      .def_readwrite("message_overhead", &simulator::Network::message_overhead)
      .def_readwrite("cpu_bandwidth", &simulator::Network::cpu_bandwidth);
  py::class_<Machine>(m, "MachineModel", "Hosts that are alike, and their network.")
      .def(py::init<>())
      .def_readwrite("host", &Machine::host)
      .def_readwrite("network", &Machine::network)
      .def_readwrite("ranks_per_host", &Machine::ranks_per_host);
}

}  // namespace

void bind_simulator(py::module_& m) {
  using py::arg;
  bind_machine(m);
  py::class_<SimulationResult>(m, "SimulationResult", "One simulated call.")
      .def_readonly("seconds", &SimulationResult::seconds)
      .def_readonly("finished", &SimulationResult::finished)
      .def_readonly("rounds", &SimulationResult::rounds)
      .def_readonly("steps", &SimulationResult::steps)
      .def_readonly("events", &SimulationResult::events)
      .def_readonly("simulated_ranks", &SimulationResult::simulated_ranks)
      .def_readonly("compared_hosts", &SimulationResult::compared_hosts)
      .def_readonly("network_bytes", &SimulationResult::network_bytes)
      .def_readonly("network_messages", &SimulationResult::network_messages);
  const TransportGeometry usual{Config{}.slot_bytes, static_cast<uint32_t>(Config{}.fifo_depth),
                                Config{}.window_bytes};
  m.def("simulate", &simulate_named, arg("collective"), arg("algorithm"), arg("ranks"),
        arg("bytes"), arg("machine"), py::kw_only(), arg("dtype") = "float32", arg("root") = 0,
        arg("in_place") = true, arg("slot_bytes") = usual.slot_bytes,
        arg("fifo_depth") = usual.fifo_depth, arg("window_bytes") = usual.window_bytes,
        arg("use_symmetry") = true, arg("symmetry_from") = SimulationRequest{}.symmetry_from,
        arg("most_steps") = SimulationRequest{}.most_steps,
        "Runs the Programs of a collective on a described machine.");
}

}  // namespace pycoll
