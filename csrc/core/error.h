// Every failure of the core is one of these; the bindings turn `kind` into a Python exception
// class.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace pycoll {

enum class ErrorKind {
  invalid_argument,  // the caller's fault, found before memory was touched
  mismatch,          // ranks called different things
  peer_failed,       // another process died or left
  timed_out,         // a deadline passed
  aborted,           // this group was aborted, here or by a peer
  not_implemented,   // known, but not there yet
  system,            // the operating system refused something
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// Text from pieces: concat("rank ", 3, " of ", 4).
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts) {
  throw Error(kind, concat(parts...));
}

// "memfd_create: Operation not permitted (errno 1)", from the calling thread's errno.
std::string errno_text(const char* what);

}  // namespace pycoll
