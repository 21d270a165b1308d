// What a module does around os.fork(): the child closes the sockets of its parent's groups, so that
// peers still see their end when the parent dies.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "gil.h"
#include "transport/network.h"

namespace pycoll {

// Once a module. Without the GIL: a second thread that forks waits for the first one's fork, which
// needs the GIL to go on.
inline void close_in_forked_children(const std::shared_ptr<NetworkRegistry>& networks) {
  namespace py = pybind11;
  py::module_::import("os").attr("register_at_fork")(
      py::arg("before") =
          py::cpp_function([networks] { networks->before_fork(); }, py::call_guard<GilRelease>()),
      py::arg("after_in_parent") = py::cpp_function([networks] { networks->after_fork_parent(); },
                                                    py::call_guard<GilRelease>()),
      py::arg("after_in_child") = py::cpp_function([networks] { networks->after_fork_child(); }));
}

}  // namespace pycoll
