#include "sim/cuda/shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>

namespace pycoll::sim::cuda {
namespace {

std::string label(uint64_t nonce) {
  return "pycoll-sim-" + std::to_string(nonce);
}

uint64_t inode_of(int fd) {
  struct stat status;
  return ::fstat(fd, &status) == 0 ? status.st_ino : 0;
}

// A descriptor of a memfd links to its label in /proc.
bool has_label(int fd, uint64_t nonce) {
  char target[256];
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t length = ::readlink(link.c_str(), target, sizeof(target));
  const std::string expected = "/memfd:" + label(nonce) + " (deleted)";
  return length >= 0 && std::string(target, length) == expected;
}

uint64_t new_nonce() {
  // Differs between processes by pid and start, within one by the count.
  static std::atomic<uint64_t> made{0};
  const uint64_t now = std::chrono::steady_clock::now().time_since_epoch().count();
  return (static_cast<uint64_t>(::getpid()) << 40) ^ (now << 8) ^
         made.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

SharedFile create_shared_file(size_t bytes) {
  SharedFile file;
  file.name.nonce = new_nonce();
  file.fd = UniqueFd(::memfd_create(label(file.name.nonce).c_str(), MFD_CLOEXEC));
  if (!file.fd) return {};
  if (::ftruncate(file.fd.get(), static_cast<off_t>(bytes)) != 0) return {};
  file.name.process = ::getpid();
  file.name.descriptor = file.fd.get();
  file.name.inode = inode_of(file.fd.get());
  return file;
}

UniqueFd open_shared_file(const FileName& name) {
  const std::string path =
      "/proc/" + std::to_string(name.process) + "/fd/" + std::to_string(name.descriptor);
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd || inode_of(fd.get()) != name.inode || !has_label(fd.get(), name.nonce)) return {};
  return fd;
}

}  // namespace pycoll::sim::cuda
