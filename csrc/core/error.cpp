#include "core/error.h"

#include <cerrno>
#include <system_error>

namespace pycoll {

std::string errno_text(const char* what) {
  const int code = errno;
  return concat(what, ": ", std::system_category().message(code), " (errno ", code, ")");
}

}  // namespace pycoll
