#include "transport/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "core/error.h"

namespace pycoll::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

void check_sealed(int fd, size_t bytes, const struct stat& status) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0) fail(ErrorKind::system, errno_text("F_GET_SEALS on a peer's segment"));
  if ((seals & kSeals) != kSeals || static_cast<size_t>(status.st_size) != bytes) {
    fail(ErrorKind::system, "a peer's shared segment has ", status.st_size, " bytes and seals ",
         seals, ", expected ", bytes, " bytes and seals ", kSeals,
         ": all ranks must run the same version of pycoll");
  }
}

}  // namespace

UniqueFd create_segment(size_t bytes) {
  UniqueFd fd(::memfd_create("pycoll", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail(ErrorKind::system, errno_text("memfd_create for shared memory"));
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    fail(ErrorKind::system, errno_text("ftruncate of a shared segment"));
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    fail(ErrorKind::system, errno_text("sealing a shared segment"));
  }
  return fd;
}

SharedMapping SegmentMapper::map(const UniqueFd& fd, size_t bytes) {
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) fail(ErrorKind::system, errno_text("fstat of a segment"));
  check_sealed(fd.get(), bytes, status);

  const std::lock_guard lock(mutex_);
  const FileId id(status.st_dev, status.st_ino);
  if (share_) {
    if (auto existing = mappings_[id].lock()) return existing;
  }
  void* base =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (base == MAP_FAILED) {
    fail(ErrorKind::system, errno_text("mmap of a shared segment"), ", ", bytes, " bytes");
  }
  auto mapping = std::make_shared<Mapping>(base, bytes);
  if (share_) mappings_[id] = mapping;
  return mapping;
}

}  // namespace pycoll::shm
