// The communicator on NumPy arrays. Checks that need Python's view of an array (dtype names,
// layout, overlap) are in pycoll/communicator.py; here it is made sure that memory is not overrun
// whatever comes.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bind.h"
#include "core/cpus.h"
#include "core/error.h"
#include "core/host.h"
#include "device_calls.h"
#include "flight_calls.h"
#include "fork_hooks.h"
#include "gil.h"
#include "group_options.h"
#include "op_names.h"
#include "parse.h"
#include "requests.h"
#include "runtime/codec_group.h"
#include "runtime/communicator.h"
#include "transport/network.h"

namespace py = pybind11;

namespace pycoll {
namespace {

// A Python object that may be dropped by a thread that does not hold the GIL.
using Shared = std::shared_ptr<py::object>;
Shared share(py::object object) {
  return {new py::object(std::move(object)), [](py::object* dying) {
            if (python_is_ending()) return;
            const py::gil_scoped_acquire gil;
            delete dying;
          }};
}

// pycoll/_store_adapter.py: set(key, bytes), get(key, seconds) and peek(key) -> bytes or None,
// remove(key).
class PythonStore final : public Store {
 public:
  explicit PythonStore(py::object store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    const py::gil_scoped_acquire gil;
    store_.attr("set")(key, py::bytes(value));
  }
  std::optional<std::string> get(const std::string& key, Nanoseconds timeout) override {
    const py::gil_scoped_acquire gil;
    return text_of(store_.attr("get")(key, to_seconds(timeout)));
  }
  std::optional<std::string> peek(const std::string& key) override {
    const py::gil_scoped_acquire gil;
    return text_of(store_.attr("peek")(key));
  }
  void remove(const std::string& key) override {
    const py::gil_scoped_acquire gil;
    store_.attr("remove")(key);
  }

 private:
  static std::optional<std::string> text_of(const py::object& value) {
    if (value.is_none()) return std::nullopt;
    return value.cast<py::bytes>();
  }

  py::object store_;
};

Block block_of(const py::array& array, size_t element, bool writable) {
  const auto bytes = static_cast<uint64_t>(array.nbytes());
  if ((array.flags() & py::array::c_style) == 0 || (writable && !array.writeable()) ||
      bytes % element != 0) {
    fail(ErrorKind::invalid_argument, "an array of ", bytes, " bytes was given where contiguous",
         writable ? ", writable" : "", " elements of ", element, " bytes are needed");
  }
  // Inputs are never written: the block serves both.
  return {static_cast<std::byte*>(const_cast<void*>(array.data())), bytes / element};
}

VectorView view_of(const std::vector<py::array>& arrays, size_t element, bool writable) {
  VectorView view;
  for (const py::array& array : arrays) view.blocks.push_back(block_of(array, element, writable));
  return view;
}

// The type of NumPy's own dtypes in this machine's byte order. Others are known by name
// (pycoll/_arrays.py).
std::optional<DType> plain_dtype(const py::array& array) {
  static constexpr struct {
    char kind;
    int size;
    DType dtype;
  } kRows[] = {
      {'f', 4, DType::float32}, {'f', 8, DType::float64}, {'f', 2, DType::float16},
      {'i', 8, DType::int64},   {'i', 4, DType::int32},   {'i', 2, DType::int16},
      {'i', 1, DType::int8},    {'u', 1, DType::uint8},   {'u', 2, DType::uint16},
      {'u', 4, DType::uint32},  {'u', 8, DType::uint64},  {'b', 1, DType::bool8},
  };
  const py::dtype dtype = array.dtype();
  const char order = dtype.byteorder();
  if (order != '=' && order != '|') return std::nullopt;
  for (const auto& row : kRows) {
    if (row.kind == dtype.kind() && row.size == dtype.itemsize()) return row.dtype;
  }
  return std::nullopt;
}

struct PyCall {
  std::string collective;
  std::vector<py::array> inputs;
  std::vector<py::array> outputs;
  std::string dtype;
  std::string op;
  double factor;  // of premul_sum
  int root;
  std::string algorithm;
  std::optional<double> timeout;
  py::object on_result;  // None, or called with no arguments when the outputs hold the result
};

struct PyMessage {
  bool receives;
  py::array array;
  std::string dtype;
  std::optional<int> peer;  // none: a receive from any rank
  int tag;
  std::optional<double> timeout;
  py::object on_result;
  std::optional<CodecChoice> codec;
};

std::function<void()> finalizer(const py::object& on_result) {
  if (on_result.is_none()) return nullptr;
  return [function = share(on_result)] {
    const py::gil_scoped_acquire gil;
    (*function)();
  };
}

CallRequest make_request(const PyCall& call) {
  CallRequest request = words_of_call(call);
  request.input = view_of(call.inputs, size_of(request.dtype), false);
  request.output = view_of(call.outputs, size_of(request.dtype), true);
  request.finalize = finalizer(call.on_result);
  return request;
}

MessageRequest make_request(const PyMessage& message) {
  MessageRequest request = words_of_message(message);
  request.block = block_of(message.array, size_of(request.dtype), message.receives);
  request.finalize = finalizer(message.on_result);
  return request;
}

py::object arrays_of(const PyCall& call) {
  return py::make_tuple(call.inputs, call.outputs);
}
py::object arrays_of(const PyMessage& message) {
  return message.array;
}

// What is in flight. The arrays are kept by the operation until it has ended, not by this object: a
// caller may drop it without waiting.
class PyWork {
 public:
  // `home` outlives what is pending.
  PyWork(std::shared_ptr<void> home, std::shared_ptr<Pending> pending,
         std::shared_ptr<Callers> callers)
      : home_(std::move(home)), pending_(std::move(pending)), callers_(std::move(callers)) {}
  ~PyWork() {
    // The last reference to the communicator joins threads that may want the GIL.
    const GilRelease release;
    pending_.reset();
    home_.reset();
  }

  bool wait(std::optional<double> timeout) {
    std::optional<Nanoseconds> limit;
    if (timeout) limit = from_seconds(*timeout);
    const Callers::Inside inside(*callers_);
    if (pending_->done()) return pending_->wait(limit, nullptr);
    const GilRelease release;
    return pending_->wait(limit, check_signals);
  }
  bool done() const { return pending_->done(); }
  uint64_t sequence() const { return pending_->sequence(); }
  int source() const { return pending_->source(); }

 private:
  std::shared_ptr<void> home_;
  std::shared_ptr<Pending> pending_;
  std::shared_ptr<Callers> callers_;
};

class PyCommunicator {
 public:
  PyCommunicator(py::object store, int rank, int world_size, const std::string& prefix,
                 double timeout, const Variables& variables, const std::vector<TableRow>& table,
                 const Variables& agreed, NetworkRegistry& networks,
                 std::shared_ptr<FlightRecorder> recorder) {
    PythonStore adapter(std::move(store));
    BootstrapRequest request{
        &adapter,      prefix,          rank,   world_size,         Config::from_env(),
        check_signals, rules_of(table), agreed, std::move(recorder)};
    apply_variables(variables, request.config);
    const GilRelease release;
    communicator_ = Communicator::make(request, networks.network_for(prefix, request.config),
                                       from_seconds(timeout));
    codecs_ = CodecGroup::make(communicator_);
  }
  ~PyCommunicator() {
    const GilRelease release;
    if (devices_) devices_->close();
    codecs_->close();  // calls of lanes' threads may hold the group a little longer
    communicator_->close();
    codecs_.reset();
    communicator_.reset();
  }

  void run(const PyCall& call) {
    CallRequest request = make_request(call);
    const Callers::Inside inside(*callers_);
    communicator_->throw_if_dead();  // close() does not wait for callers that come later
    const GilRelease release;
    get_ready(request, call);
    communicator_->run(std::move(request), check_signals);
  }
  // all_reduce of an array that needs no closer look. False: nothing has happened, run() must be
  // asked.
  bool all_reduce_at_once(const py::handle& given, const py::handle& op) {
    if (!py::isinstance<py::array>(given) || !codecs_->idle()) return false;
    const auto array = py::reinterpret_borrow<py::array>(given);
    const auto dtype = plain_dtype(array);
    const auto reduce_op = op_names_.find(op.ptr());
    if (!dtype || !reduce_op || !array.writeable()) return false;
    if ((array.flags() & py::array::c_style) == 0) return false;
    const PlainCall::Vector vector{static_cast<std::byte*>(const_cast<void*>(array.data())),
                                   static_cast<uint64_t>(array.size()), 1};
    const PlainCall call{Collective::all_reduce, *dtype, *reduce_op, 0, vector, vector, {}};
    const Callers::Inside inside(*callers_);
    communicator_->throw_if_dead();
    const GilRelease release;
    return communicator_->run_at_once(call, check_signals);
  }
  // The rank that sent the message, of a receive.
  int run_message(const PyMessage& message) {
    MessageRequest request = make_request(message);
    const Callers::Inside inside(*callers_);
    communicator_->throw_if_dead();
    const GilRelease release;
    get_ready(request, message);
    return communicator_->run(std::move(request), check_signals)->source();
  }
  template <typename Asked>
  std::unique_ptr<PyWork> submit(const Asked& asked) {
    auto request = make_request(asked);
    // The arrays live until the operation has ended.
    request.keep_alive = share(arrays_of(asked));
    const Callers::Inside inside(*callers_);
    communicator_->throw_if_dead();
    std::shared_ptr<Pending> pending;
    {
      const GilRelease release;
      get_ready(request, asked);
      auto operation = communicator_->submit(std::move(request));
      pending = std::make_shared<QueuedOperation>(communicator_, std::move(operation));
    }
    return std::make_unique<PyWork>(nullptr, std::move(pending), callers_);
  }
  bool compresses(const std::string& collective, const std::string& dtype,
                  const std::string& op) const {
    return can_compress(
        communicator_->world_size(), parse_enum<Collective>(collective, "collective"),
        parse_enum<DType>(dtype, "dtype"), parse_enum<ReduceOp>(op, "reduce operation"));
  }
  using Residual = std::optional<py::array>;
  std::unique_ptr<PyWork> submit_codec(const PyCall& call, const CodecChoice& choice,
                                       const Residual& residual, const Residual& sum_residual) {
    CodecRequest request{make_request(call), choice};
    if (residual) request.residual = view_of({*residual}, sizeof(float), true);
    if (sum_residual) request.sum_residual = view_of({*sum_residual}, sizeof(float), true);
    request.keep_alive = share(py::make_tuple(arrays_of(call), residual, sum_residual));
    const Callers::Inside inside(*callers_);
    communicator_->throw_if_dead();
    std::shared_ptr<Pending> pending;
    {
      const GilRelease release;
      pending = codecs_->submit(std::move(request), check_signals);
    }
    return std::make_unique<PyWork>(codecs_, std::move(pending), callers_);
  }
  // For arrays on GPUs; made at the first call.
  std::shared_ptr<DeviceCalls> devices(const std::string& library) {
    if (!devices_) devices_ = DeviceCalls::make(communicator_, library);
    return devices_;
  }
  void close() {
    const GilRelease release;
    if (devices_) devices_->close();
    codecs_->close();
    communicator_->close();
    callers_->wait_until_gone(std::chrono::seconds(1));
  }
  void abort(const std::string& reason) { communicator_->abort(reason); }
  Communicator& core() const { return *communicator_; }

 private:
  // Messages are not ordered with collectives.
  void get_ready(MessageRequest& request, const PyMessage& message) const {
    if (message.codec) request = codecs_->coded(std::move(request), *message.codec);
  }
  void get_ready(CallRequest& request, const PyCall& /*call*/) const {
    codecs_->let_end(request, check_signals);
  }

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<DeviceCalls> devices_;  // guarded by the GIL
  std::shared_ptr<CodecGroup> codecs_;
  std::shared_ptr<Callers> callers_ = std::make_shared<Callers>();
  const OpNames op_names_;
};

// (name, value in force, default, help, must be equal on all ranks)
std::vector<std::tuple<std::string, std::string, std::string, std::string, bool>> show_config() {
  const Config in_force = Config::from_env();
  const Config defaults;
  std::vector<std::tuple<std::string, std::string, std::string, std::string, bool>> rows;
  for (const ConfigVariable& variable : config_variables()) {
    rows.emplace_back(variable.name, variable.show(in_force), variable.show(defaults),
                      variable.help, variable.agreed);
  }
  return rows;
}

void bind_calls(py::module_& m) {
  py::class_<PyCall>(m, "Call").def(
      py::init([](std::string collective, std::vector<py::array> inputs,
                  std::vector<py::array> outputs, std::string dtype, std::string op, double factor,
                  int root, std::string algorithm, std::optional<double> timeout,
                  py::object on_result) {
        return PyCall{std::move(collective),
                      std::move(inputs),
                      std::move(outputs),
                      std::move(dtype),
                      std::move(op),
                      factor,
                      root,
                      std::move(algorithm),
                      timeout,
                      std::move(on_result)};
      }),
      py::kw_only(), py::arg("collective"), py::arg("inputs"), py::arg("outputs"), py::arg("dtype"),
      py::arg("op"), py::arg("factor"), py::arg("root"), py::arg("algorithm"), py::arg("timeout"),
      py::arg("on_result"));

  py::class_<PyMessage>(m, "Message")
      .def(py::init([](bool receives, py::array array, std::string dtype, std::optional<int> peer,
                       int tag, std::optional<double> timeout, py::object on_result,
                       std::optional<CodecChoice> codec) {
             return PyMessage{receives, std::move(array), std::move(dtype),     peer,
                              tag,      timeout,          std::move(on_result), std::move(codec)};
           }),
           py::kw_only(), py::arg("receives"), py::arg("array"), py::arg("dtype"), py::arg("peer"),
           py::arg("tag"), py::arg("timeout"), py::arg("on_result"), py::arg("codec"));

  py::class_<PyWork>(m, "WorkCore")
      .def("wait", &PyWork::wait, py::arg("timeout") = py::none())
      .def("done", &PyWork::done)
      .def_property_readonly("sequence", &PyWork::sequence)
      .def_property_readonly("source", &PyWork::source);
}

// (name, what it is, why this process cannot use it; empty when it can), best first.
std::vector<std::tuple<std::string, std::string, std::string>> try_transports() {
  std::vector<std::tuple<std::string, std::string, std::string>> rows;
  const Config config = Config::from_env();
  const GilRelease release;
  for (const TransportRow& row : transports()) {
    std::string reason;
    try {
      row.make()->describe(config);
    } catch (const Error& error) {
      reason = error.what();
    }
    rows.emplace_back(row.name, row.summary, reason);
  }
  return rows;
}

void bind_groups(py::module_& m) {
  const auto networks = std::make_shared<NetworkRegistry>();
  close_in_forked_children(networks);
  const auto recorder = bind_flight(m, "core");
  // The core's lock may be held by a thread that wants the GIL.
  const py::call_guard<GilRelease> without_gil;

  py::class_<PyCommunicator>(m, "CommunicatorCore")
      .def(py::init([networks, recorder](
                        py::object store, int rank, int world_size, const std::string& prefix,
                        double timeout, const Variables& variables,
                        const std::vector<TableRow>& table, const Variables& agreed) {
             return std::make_unique<PyCommunicator>(std::move(store), rank, world_size, prefix,
                                                     timeout, variables, table, agreed, *networks,
                                                     recorder);
           }),
           py::kw_only(), py::arg("store"), py::arg("rank"), py::arg("world_size"),
           py::arg("prefix"), py::arg("timeout"), py::arg("variables"), py::arg("table"),
           py::arg("agreed") = Variables())
      .def("all_reduce_at_once", &PyCommunicator::all_reduce_at_once)
      .def("run", &PyCommunicator::run)
      .def("submit", &PyCommunicator::submit<PyCall>)
      .def("run_message", &PyCommunicator::run_message)
      .def("submit_message", &PyCommunicator::submit<PyMessage>)
      .def("compresses", &PyCommunicator::compresses, py::arg("collective"), py::arg("dtype"),
           py::arg("op"))
      .def("submit_codec", &PyCommunicator::submit_codec, py::arg("call"), py::arg("choice"),
           py::arg("residual"), py::arg("sum_residual"))
      .def("devices", &PyCommunicator::devices, py::arg("library"))
      .def("close", &PyCommunicator::close)
      .def("abort", &PyCommunicator::abort, without_gil)
      .def("dead", [](PyCommunicator& c) { return c.core().dead(); })
      .def(
          "sequence", [](PyCommunicator& c) { return c.core().sequence(); }, without_gil)
      .def("transport", [](PyCommunicator& c) { return c.core().transport_name(); })
      .def("statistics", [](PyCommunicator& c) { return c.core().statistics(); })
      .def("algorithm_for",
           [](PyCommunicator& c, const std::string& collective, uint64_t bytes) {
             const auto which = parse_enum<Collective>(collective, "collective");
             return std::string(c.core().algorithm_for(which, bytes).name);
           })
      .def(
          "override_program",
          [](PyCommunicator& c, const Program& program) { c.core().override_program(program); },
          without_gil);
}

}  // namespace

void bind_communicator(py::module_& m) {
  bind_calls(m);
  bind_groups(m);
  m.def(
      "check_variable",
      [](const std::string& name, const std::string& value) {
        Config config;
        apply_variables({{name, value}}, config);
        parse_selection(config.algo);
      },
      py::arg("name"), py::arg("value"),
      "Raises InvalidArgumentError when a PYCOLL_* variable cannot have this value.");
  m.def("config_variables", &show_config,
        "Rows (name, value in force, default, help, must be equal on all ranks).");
  m.def("try_transports", &try_transports,
        "Rows (name, what it is, why this process cannot use it; empty when it can), best first.");
  m.def(
      "available_cpus", [](const std::string& root) { return available_cpus(root); },
      py::arg("root") = "/", "CPUs that this thread may use, by affinity mask and cgroup quota.");
  m.def(
      "cgroup_cpus", [](const std::string& root) { return cgroup_cpus(root); },
      py::arg("root") = "/", "The tightest quota in CPUs; None without one.");
  m.def("host_identity", &host_identity,
        "Ranks with the same identity are on one host and share memory.");
}

}  // namespace pycoll
