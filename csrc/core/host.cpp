#include "core/host.h"

#include <sys/stat.h>
#include <sys/utsname.h>

#include <fstream>

namespace pycoll {
namespace {

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

std::string host_identity() {
  std::string identity = first_line("/proc/sys/kernel/random/boot_id");
  if (identity.empty()) {
    utsname names{};
    ::uname(&names);
    identity = names.nodename;
  }
  for (const char* name : {"net", "mnt", "pid", "user"}) {
    struct stat status {};
    const std::string path = std::string("/proc/self/ns/") + name;
    const bool known = ::stat(path.c_str(), &status) == 0;
    identity += "/" + (known ? std::to_string(status.st_ino) : "unknown");
  }
  return identity;
}

}  // namespace pycoll
