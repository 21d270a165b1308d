// Which machine, or which part of one, this process runs on.
#pragma once

#include <string>

namespace pycoll {

// Boot id and network namespace: processes with the same reach each other over loopback. One word
// of text. Both throw Error(system) when the process has no descriptor left to find out.
std::string network_identity();

// Boot id and network, mount, pid and user namespaces: processes with the same can share memory,
// see each other's pids and reach each other's sockets. One word of text.
std::string host_identity();

}  // namespace pycoll
