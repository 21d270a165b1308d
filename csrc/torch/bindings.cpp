// The Python face of the torch module: create_backend() for pycoll/_registration.py.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

#include "python/flight_calls.h"
#include "python/fork_hooks.h"
#include "python/gil.h"
#include "python/group_options.h"
#include "python/parse.h"
#include "torch/allocator.h"
#include "torch/backend.h"
#include "torch/direct.h"
#include "torch/errors.h"
#include "torch/host_tensors.h"

namespace py = pybind11;

namespace pycoll::torch_adapter {
namespace {

// The groups there are, so that they can be closed before the interpreter ends: afterwards it would
// end progress threads in the middle of what they do. One object a module, made with it.
class OpenGroups {
 public:
  void add(const Backend& backend) {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const Group& known) { return known.communicator.expired(); });
    groups_.push_back({backend.communicator(), backend.devices(), backend.codecs()});
  }
  void close_all() {
    std::vector<Group> groups;
    {
      const std::lock_guard lock(mutex_);
      groups.swap(groups_);
    }
    for (const Group& group : groups) {
      if (const auto open = group.devices.lock()) open->close();
      if (const auto open = group.codecs.lock()) open->close();
      if (const auto open = group.communicator.lock()) open->close();
    }
  }

 private:
  struct Group {
    std::weak_ptr<Communicator> communicator;
    std::weak_ptr<DeviceCalls> devices;
    std::weak_ptr<CodecGroup> codecs;
  };
  std::mutex mutex_;
  std::vector<Group> groups_;
};

using CreateBackend = c10::intrusive_ptr<Backend>(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout, const std::string& group_id,
    const std::vector<uint64_t>& global_ranks, const Variables& variables,
    const std::vector<TableRow>& table, const std::optional<CodecFields>& codec,
    uint64_t codec_min_bytes, const Variables& agreed);

CodecWord word_of(const std::optional<CodecFields>& fields) {
  return fields ? CodecWord(choice_of(*fields)) : std::nullopt;
}

std::function<CreateBackend> backend_creator(std::shared_ptr<OpenGroups> groups,
                                             std::shared_ptr<NetworkRegistry> networks,
                                             std::shared_ptr<FlightRecorder> recorder,
                                             std::shared_ptr<DeviceLibraries> devices,
                                             std::shared_ptr<const Regions> regions) {
  return [groups = std::move(groups), networks = std::move(networks),
          recorder = std::move(recorder), devices = std::move(devices),
          regions = std::move(regions)](const auto& store, int rank, int world_size, auto timeout,
                                        const auto& group_id, const auto& global_ranks,
                                        const auto& variables, const auto& table, const auto& codec,
                                        uint64_t codec_min_bytes, const auto& agreed) {
    GroupRequest request{store,           rank,
                         world_size,      timeout,
                         group_id,        global_ranks,
                         check_signals,   networks,
                         recorder,        devices,
                         regions,         variables,
                         rules_of(table), [groups](const Backend& made) { groups->add(made); }};
    request.codec = word_of(codec);
    request.codec_min_bytes = codec_min_bytes;
    request.agreed = agreed;
    return Backend::make(std::move(request));
  };
}

}  // namespace

PYBIND11_MODULE(PYCOLL_MODULE, m) {
  m.doc() = "pycoll as a torch.distributed backend, for the torch it was built with.";
  // torch._C._distributed_c10d registers the base class: it must be there first.
  py::module_::import("torch.distributed");

  // torch.distributed.split_group() copies the options of the group that it splits.
  const auto copy = [](const GroupOptions& options) {
    return c10::make_intrusive<GroupOptions>(options);
  };
  py::class_<GroupOptions, c10d::Backend::Options, c10::intrusive_ptr<GroupOptions>>(m, "Options")
      .def("__copy__", copy)
      .def("__deepcopy__",
           [copy](const GroupOptions& options, const py::dict&) { return copy(options); });

  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(m, "Backend")
      // For ranks that are in no group of a split: there is nothing to do.
      .def("perform_nocolor_split", [](const Backend&, const at::Device&) {})
      .def_property_readonly("options", &Backend::getBackendOptions)
      .def("statistics",
           [](const Backend& backend) {
             const auto open = backend.communicator().lock();
             return open ? open->statistics() : std::map<std::string, uint64_t>();
           })
      .def(
          "all_reduce_over",
          [](Backend& backend, at::Tensor tensor, const c10d::ReduceOp& op, bool async,
             const std::optional<CodecFields>& codec, std::optional<at::Tensor> residual,
             std::optional<at::Tensor> sum_residual) -> c10::intrusive_ptr<c10d::Work> {
            c10d::AllreduceOptions options;
            options.reduceOp = op;
            options.asyncOp = async;
            return with_torch_errors([&] {
              return backend.all_reduce_over(tensor, options, word_of(codec),
                                             {std::move(residual), std::move(sum_residual)});
            });
          },
          py::arg("tensor"), py::arg("op"), py::arg("async_op"), py::arg("codec"),
          py::arg("residual"), py::arg("sum_residual"), py::call_guard<py::gil_scoped_release>())
      .def(
          "set_codec",
          [](Backend& backend, const std::optional<CodecFields>& codec, uint64_t min_bytes) {
            backend.set_codec(word_of(codec), min_bytes);
          },
          py::arg("codec"), py::arg("min_bytes"))
      // torch declares it for all backends, and binds it for those of its own.
      .def("get_error", &Backend::getError, py::call_guard<py::gil_scoped_release>())
      .def("get_sequence_number", &Backend::getSequenceNumberForGroup,
           py::call_guard<py::gil_scoped_release>());

  const auto groups = std::make_shared<OpenGroups>();
  const auto networks = std::make_shared<NetworkRegistry>();
  close_in_forked_children(networks);
  const auto recorder = bind_flight(m, "torch");
  bind_direct_calls(m);
  bind_host_tensors(m);
  const auto devices = std::make_shared<DeviceLibraries>();
  const auto regions = std::make_shared<Regions>();
  m.def("set_open_regions", [regions](uint32_t count) { regions->set_open(count); });
  m.def("set_region_variable", [regions](const py::object& one) { regions->set_variable(one); });
  m.def("create_backend", backend_creator(groups, networks, recorder, devices, regions));
  // pycoll/_native.py has the documentation.
  m.def("load_device_library", [devices](const std::string& path) {
    return with_torch_errors([&] { return devices->load(path); });
  });
  m.def("device_libraries", [devices] { return devices->names(); });
  py::class_<ScopeCount, std::shared_ptr<ScopeCount>>(m, "ShareableScope");
  m.def("enter_shareable", &enter_shareable);
  m.def("leave_shareable", &leave_shareable);
  m.def("serve_everywhere", &serve_everywhere);
  m.def("empty_shareable", &empty_shareable, py::arg("sizes"), py::arg("dtype"),
        py::call_guard<py::gil_scoped_release>());
  m.def("share", &share, py::arg("tensor"), py::call_guard<py::gil_scoped_release>());
  py::module_::import("atexit").attr("register")(py::cpp_function(
      [groups] { groups->close_all(); }, py::call_guard<py::gil_scoped_release>()));
}

}  // namespace pycoll::torch_adapter
