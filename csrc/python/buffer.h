// Memory that Python objects lend.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace pycoll {

// A contiguous buffer of a Python object, held for as long as this lives.
class Buffer {
 public:
  Buffer(const pybind11::handle& object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
      throw pybind11::error_already_set();
    }
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  char* data() const { return static_cast<char*>(view_.buf); }
  size_t bytes() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

}  // namespace pycoll
