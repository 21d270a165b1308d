#include "core/error.h"

#include <cerrno>
#include <system_error>

namespace pycoll {

std::string errno_text(const char* what) {
  const int code = errno;
  std::string text =
      concat(what, ": ", std::system_category().message(code), " (errno ", code, ")");
  if (code == EMFILE) text += ": raise the limit on open files of this process (ulimit -n)";
  return text;
}

}  // namespace pycoll
