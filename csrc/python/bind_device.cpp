// Arrays on GPUs. What an array is, and that it is contiguous and writable, is known to
// pycoll/_device_arrays.py; here it is made sure that the memory is a GPU's, all of one.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <thread>

#include "bind.h"
#include "core/error.h"
#include "device_calls.h"
#include "gil.h"
#include "parse.h"
#include "requests.h"

namespace py = pybind11;

namespace pycoll {
namespace {

// A wait of the host for a GPU: short sleeps at first.
constexpr auto kShortestSleep = std::chrono::microseconds(20);
constexpr auto kLongestSleep = std::chrono::microseconds(1000);

// Beyond a call's timeout: what waits on the GPU has the same one, and knows for whom it waited.
constexpr auto kGrace = std::chrono::seconds(1);

// What close() gives to a call that is being queued elsewhere.
constexpr auto kClosePatience = std::chrono::seconds(1);

// How many streams are remembered; programs have a few.
constexpr size_t kMostStreams = 256;

using Address = uint64_t;
using Span = std::pair<Address, uint64_t>;  // of elements

struct PyDeviceCall {
  std::string collective;
  std::vector<Span> inputs;
  std::vector<Span> outputs;
  std::string dtype;
  std::string op;
  double factor;
  int root;
  std::string algorithm;
  double timeout;
};

struct PyDeviceMessage {
  bool receives;
  Span array;
  std::string dtype;
  int peer;
  int tag;
  double timeout;
};

Block block_of(const Span& span) {
  return {reinterpret_cast<std::byte*>(span.first), span.second};
}

VectorView view_of(const std::vector<Span>& spans) {
  VectorView view;
  for (const Span& span : spans) view.blocks.push_back(block_of(span));
  return view;
}

CallRequest make_request(const PyDeviceCall& call) {
  CallRequest request = words_of_call(call);
  request.input = view_of(call.inputs);
  request.output = view_of(call.outputs);
  return request;
}

MessageRequest make_request(const PyDeviceMessage& message) {
  MessageRequest request = words_of_message(message);
  request.block = block_of(message.array);
  return request;
}

void* stream_of(Address handle) {
  return reinterpret_cast<void*>(handle);
}

using Residual = std::optional<Span>;

CodecRequest make_request(const PyDeviceCall& call, const CodecChoice& choice,
                          const Residual& residual, const Residual& sum_residual) {
  CodecRequest request{make_request(call), choice};
  if (residual) request.residual = view_of({*residual});
  if (sum_residual) request.sum_residual = view_of({*sum_residual});
  return request;
}

StreamPlace place_of(Address stream, const std::vector<Address>& after) {
  StreamPlace place{stream_of(stream)};
  for (const Address handle : after) place.after.push_back(stream_of(handle));
  return place;
}

template <class Asked>
std::shared_ptr<DeviceOperation> run(DeviceCalls& calls, const Asked& asked, Address stream,
                                     const std::vector<Address>& after, bool awaited) {
  const StreamPlace place = place_of(stream, after);
  auto request = make_request(asked);
  const GilRelease release;
  return calls.run(std::move(request), place, awaited);
}

std::shared_ptr<DeviceOperation> run_codec(DeviceCalls& calls, const PyDeviceCall& call,
                                           const CodecChoice& choice, const Residual& residual,
                                           const Residual& sum_residual, Address stream,
                                           const std::vector<Address>& after, bool awaited) {
  const StreamPlace place = place_of(stream, after);
  CodecRequest request = make_request(call, choice, residual, sum_residual);
  const GilRelease release;
  return calls.run(std::move(request), place, awaited);
}

}  // namespace

void DeviceOperation::check() const {
  if (const auto group = parts_.group.lock()) return group->check();
  if (const auto control = parts_.control.lock()) control->throw_if_dead();
  fail(ErrorKind::aborted, parts_.name, ": the group was closed before its end was waited for");
}

bool DeviceOperation::wait_until(const Deadline& deadline) {
  const GilRelease release;
  auto sleep = kShortestSleep;
  while (!parts_.end->reached()) {
    check();
    if (deadline.passed()) return false;
    check_signals();
    std::this_thread::sleep_for(sleep);
    sleep = std::min(2 * sleep, kLongestSleep);
  }
  check();  // what has failed is over, too
  return true;
}

bool DeviceOperation::wait(std::optional<Nanoseconds> limit) {
  if (succeeded_) return true;
  succeeded_ = wait_until(Deadline::after(limit.value_or(parts_.timeout + kGrace)));
  if (succeeded_ || limit) return succeeded_;
  const std::string text =
      concat(parts_.name, " was not over on the GPU after ", to_seconds(parts_.timeout), " s");
  {
    const GilRelease release;
    if (const auto group = parts_.group.lock()) group->abort(text);
  }
  fail(ErrorKind::timed_out, text);
}

bool DeviceOperation::done() {
  try {
    return wait(Nanoseconds(0));
  } catch (const Error&) {
    return true;
  }
}

DeviceCalls::DeviceCalls(std::shared_ptr<Communicator> control, const std::string& library)
    : control_(std::move(control)), library_(DeviceLibrary::load(library)) {}

std::shared_ptr<DeviceCalls> DeviceCalls::make(std::shared_ptr<Communicator> control,
                                               const std::string& library) {
  return {new DeviceCalls(std::move(control), library), [](DeviceCalls* dying) {
            if (!dying->fork_mark_.in_child()) delete dying;
          }};
}

DeviceCalls::~DeviceCalls() {
  const GilRelease release;
  close();
  control_.reset();  // the last reference joins threads that may want the GIL
}

template <class Body>
auto DeviceCalls::telling_peers(const Body& body) const {
  try {
    return body();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::system)
      control_->abort(concat("a GPU has failed: ", error.what()));
    throw;
  }
}

int DeviceCalls::device_of(const std::vector<Block>& blocks) const {
  std::optional<int> found;
  for (const Block& block : blocks) {
    if (block.count == 0) continue;  // may have no address
    const std::optional<int> device = library_->device_of(block.data);
    if (!found) found = device;
    if (device && *device != *found) {
      fail(ErrorKind::invalid_argument, "rank ", control_->rank(), ": one array is on GPU ", *found,
           ", another on GPU ", *device, ": all arrays of a call must be on one device");
    }
  }
  return found.value_or(library_->current_device());
}

// Before anything is queued: a stream of another device would end the group.
void DeviceCalls::join_streams(int device, const StreamPlace& place) {
  if (!seen_streams_.contains({device, place.stream})) {
    library_->mark(device, place.stream);
    if (seen_streams_.size() >= kMostStreams) seen_streams_.clear();
    seen_streams_.emplace(device, place.stream);
  }
  for (void* const other : place.after) library_->mark(device, other)->hold(place.stream);
}

// What happened on a GPU says more than what the CPU's side was then told.
void DeviceCalls::throw_if_dead() const {
  if (!control_->dead()) return;
  for (const auto& [device, group] : groups_) group->check();
  control_->throw_if_dead();
}

const std::shared_ptr<DeviceGroup>& DeviceCalls::group_on(int device) {
  const auto known = groups_.find(device);
  if (known != groups_.end()) return known->second;
  // Whoever comes first waits here, where a signal can end it and the late rank is named.
  control_->run(CallRequest{}, check_signals);
  auto group = library_->open(control_, device);
  watchdog_.watch(group);
  return groups_.emplace(device, std::move(group)).first->second;
}

template <class Enqueue>
std::shared_ptr<DeviceOperation> DeviceCalls::queue(int device, const StreamPlace& place,
                                                    std::optional<DeviceOperation::Parts> awaited,
                                                    const Enqueue& enqueue) {
  const std::lock_guard lock(mutex_);
  throw_if_dead();
  if (closed_) fail(ErrorKind::aborted, "rank ", control_->rank(), ": the group was closed");
  telling_peers([&] { join_streams(device, place); });
  const std::shared_ptr<DeviceGroup>& group = group_on(device);
  enqueue(*group);
  if (!awaited) return nullptr;
  awaited->control = control_;
  awaited->group = group;
  awaited->end = library_->mark(device, place.stream);
  return std::make_shared<DeviceOperation>(std::move(*awaited));
}

template <class Request>
std::shared_ptr<DeviceOperation> DeviceCalls::run_call(Request request, std::vector<Block> blocks,
                                                       const StreamPlace& place, bool awaited) {
  blocks.insert(blocks.end(), request.input.blocks.begin(), request.input.blocks.end());
  blocks.insert(blocks.end(), request.output.blocks.begin(), request.output.blocks.end());
  const int device = telling_peers([&] { return device_of(blocks); });
  std::optional<DeviceOperation::Parts> parts;
  if (awaited) {
    parts.emplace();
    parts->timeout = *request.timeout;
    parts->name = concat("rank ", control_->rank(), ": ", name_of(request.collective));
  }
  return queue(device, place, std::move(parts),
               [&](DeviceGroup& group) { group.enqueue(request, place.stream); });
}

std::shared_ptr<DeviceOperation> DeviceCalls::run(CallRequest request, const StreamPlace& place,
                                                  bool awaited) {
  return run_call(std::move(request), {}, place, awaited);
}

std::shared_ptr<DeviceOperation> DeviceCalls::run(CodecRequest request, const StreamPlace& place,
                                                  bool awaited) {
  std::vector<Block> blocks = request.residual.blocks;
  blocks.insert(blocks.end(), request.sum_residual.blocks.begin(),
                request.sum_residual.blocks.end());
  return run_call(std::move(request), std::move(blocks), place, awaited);
}

std::shared_ptr<DeviceOperation> DeviceCalls::run(MessageRequest request, const StreamPlace& place,
                                                  bool awaited) {
  const int device = telling_peers([&] { return device_of({request.block}); });
  std::optional<DeviceOperation::Parts> parts;
  if (awaited) {
    parts.emplace();
    parts->timeout = *request.timeout;
    parts->name = concat("rank ", control_->rank(), request.receives ? ": recv from" : ": send to",
                         " rank ", request.peer);
    if (request.receives) parts->source = request.peer;
  }
  const std::vector<MessageRequest> batch{std::move(request)};
  return queue(device, place, std::move(parts),
               [&](DeviceGroup& group) { group.enqueue(batch, place.stream); });
}

// Of a dead communicator: else each would wait a while for what never comes.
void DeviceCalls::end_groups() const {
  for (const auto& [device, group] : groups_) {
    try {
      group->check();
    } catch (const Error&) {
      // The group has ended now.
    }
  }
}

void DeviceCalls::close() {
  if (fork_mark_.in_child()) return;
  std::unique_lock lock(mutex_, kClosePatience);
  if (!lock) {
    control_->abort("the group is closed while a call is being queued");
    lock.lock();
  }
  closed_ = true;
  if (control_->dead()) end_groups();
  watchdog_.stop();
  groups_.clear();
}

void bind_device(py::module_& m) {
  py::class_<PyDeviceCall>(m, "DeviceCall")
      .def(py::init([](std::string collective, std::vector<Span> inputs, std::vector<Span> outputs,
                       std::string dtype, std::string op, double factor, int root,
                       std::string algorithm, double timeout) {
             return PyDeviceCall{std::move(collective),
                                 std::move(inputs),
                                 std::move(outputs),
                                 std::move(dtype),
                                 std::move(op),
                                 factor,
                                 root,
                                 std::move(algorithm),
                                 timeout};
           }),
           py::kw_only(), py::arg("collective"), py::arg("inputs"), py::arg("outputs"),
           py::arg("dtype"), py::arg("op"), py::arg("factor"), py::arg("root"),
           py::arg("algorithm"), py::arg("timeout"));

  py::class_<PyDeviceMessage>(m, "DeviceMessage")
      .def(py::init(
               [](bool receives, Span array, std::string dtype, int peer, int tag, double timeout) {
                 return PyDeviceMessage{receives, array, std::move(dtype), peer, tag, timeout};
               }),
           py::kw_only(), py::arg("receives"), py::arg("array"), py::arg("dtype"), py::arg("peer"),
           py::arg("tag"), py::arg("timeout"));

  py::class_<DeviceOperation, std::shared_ptr<DeviceOperation>>(m, "DeviceWork")
      .def(
          "wait",
          [](DeviceOperation& operation, std::optional<double> timeout) {
            std::optional<Nanoseconds> limit;
            if (timeout) limit = from_seconds(*timeout);
            return operation.wait(limit);
          },
          py::arg("timeout") = py::none())
      .def("done", &DeviceOperation::done)
      .def_property_readonly("source", &DeviceOperation::source);

  py::class_<DeviceCalls, std::shared_ptr<DeviceCalls>>(m, "DeviceCalls")
      .def("run", &run<PyDeviceCall>)
      .def("run", &run<PyDeviceMessage>)
      .def("run_codec", &run_codec);
}

}  // namespace pycoll
