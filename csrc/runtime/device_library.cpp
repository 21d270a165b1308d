// Finds the GPU's library at run time.
#include <dlfcn.h>

#include "core/error.h"
#include "runtime/device/device_group.h"

namespace pycoll {

std::shared_ptr<DeviceLibrary> DeviceLibrary::load(const std::string& path) {
  void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* reason = ::dlerror();
    fail(ErrorKind::system, "cannot open the GPU library ", path, ": ",
         reason != nullptr ? reason : "no reason given");
  }
  const auto make =
      reinterpret_cast<DeviceLibraryFunction>(::dlsym(handle, kDeviceLibraryFunction));
  // Drops the count only: RTLD_NODELETE keeps the code where it is.
  ::dlclose(handle);
  if (make == nullptr) {
    fail(ErrorKind::system, path, " is no GPU library of pycoll: it has no ",
         kDeviceLibraryFunction, "()");
  }
  std::shared_ptr<DeviceLibrary> library(make(kDeviceInterfaceVersion));
  if (library == nullptr) {
    fail(ErrorKind::mismatch, path, " was built for another version of pycoll (interface ",
         kDeviceInterfaceVersion, " is needed): build pycoll again");
  }
  return library;
}

}  // namespace pycoll
