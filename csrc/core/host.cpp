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

std::string namespace_id(const std::string& name) {
  struct stat status {};
  const bool known = ::stat(("/proc/self/ns/" + name).c_str(), &status) == 0;
  return known ? std::to_string(status.st_ino) : "unknown";
}

}  // namespace

std::string network_identity() {
  std::string boot = first_line("/proc/sys/kernel/random/boot_id");
  if (boot.empty()) {
    utsname names{};
    ::uname(&names);
    boot = names.nodename;
  }
  return boot + "/" + namespace_id("net");
}

std::string host_identity() {
  std::string identity = network_identity();
  for (const char* name : {"mnt", "pid", "user"}) identity += "/" + namespace_id(name);
  return identity;
}

}  // namespace pycoll
