#include "core/host.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/utsname.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "core/error.h"
#include "core/fd.h"

namespace pycoll {
namespace {

// Empty where there is no such file. Throws Error(system) when there is no descriptor left to look:
// a rank that took that for an answer would seem to be on another host.
std::string first_line(const char* path) {
  const UniqueFd file(::open(path, O_RDONLY | O_CLOEXEC));
  if (!file && (errno == EMFILE || errno == ENFILE)) fail(ErrorKind::system, errno_text(path));
  std::array<char, 256> text;
  const ssize_t length = file ? ::read(file.get(), text.data(), text.size()) : 0;
  const std::string all(text.data(), static_cast<size_t>(std::max<ssize_t>(length, 0)));
  return all.substr(0, all.find('\n'));
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
