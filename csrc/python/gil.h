// The GIL around waiting, also when the interpreter ends meanwhile.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace pycoll {

// From then on a thread that asks for the GIL is ended on the spot, by unwinding its stack through
// code that may not throw: the process would abort.
inline bool python_is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Gives the GIL up while it lives, if the thread has it: whoever waits must not keep it from the
// threads that end what is waited for. Not when the interpreter is ending, for then this is the
// thread that ends it. A daemon thread that comes back while it is ending stays here until the
// process is gone, as Python's own threads do from 3.14 on.
class GilRelease {
 public:
  GilRelease() {
    if (!Py_IsInitialized() || python_is_ending()) return;
    if (PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~GilRelease() {
    if (state_ == nullptr) return;
    while (python_is_ending()) ::pause();
    PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

// Threads that are in the core, or on the way back from it to Python. Whoever ends the interpreter
// waits for them a little: a thread that waits for the GIL when the interpreter ends cannot be
// saved.
class Callers {
 public:
  // Counts the calling thread while it lives; made before a GilRelease, so that it is gone after
  // the thread has the GIL again.
  class Inside {
   public:
    explicit Inside(Callers& callers) : callers_(callers) { ++callers_.count_; }
    ~Inside() { --callers_.count_; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    Callers& callers_;
  };

  // Without the GIL, which they need.
  void wait_until_gone(std::chrono::milliseconds at_most) const {
    const auto limit = std::chrono::steady_clock::now() + at_most;
    while (count_ > 0 && std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  std::atomic<int> count_{0};
};

// Runs Python's signal handlers; throws what they raise.
inline void check_signals() {
  if (python_is_ending()) return;
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace pycoll
