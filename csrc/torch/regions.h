// Regions of Python code, `with pycoll.codec(...)`, as calls of torch.distributed see them.
//
// A region belongs to a context of Python (contextvars). Looking it up takes the GIL, which callers
// of torch do not have, so calls first read how many regions are open in the whole process. Threads
// without a Python context of their own, such as torch's for backward() on GPUs, are in none.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <optional>
#include <string>
#include <tuple>

#include "runtime/codec_request.h"

namespace pycoll::torch_adapter {

// kind, block, stochastic, seed, step: a codec as pycoll/codecs.py takes it apart. This module and
// pycoll._core do not share their types.
using CodecFields = std::tuple<std::string, uint32_t, bool, uint64_t, std::optional<uint32_t>>;

CodecChoice choice_of(const CodecFields& fields);

// What a call or a region says; without a codec: exact.
using CodecWord = std::optional<CodecChoice>;

class Regions {
 public:
  // Relaxed: who is in a region has counted it before, in this thread or before its context came
  // here.
  bool any() const { return open_.load(std::memory_order_relaxed) != 0; }
  void set_open(uint32_t open) { open_.store(open, std::memory_order_relaxed); }
  // A contextvars.ContextVar of pycoll._regions.Region or None, with the GIL. Its reference is
  // never given back: the last group may go in a thread without the GIL.
  void set_variable(const pybind11::object& variable) { variable_ = variable.inc_ref(); }
  // What the region of the calling thread says; nothing: it is in none. Takes the GIL.
  std::optional<CodecWord> here() const;

 private:
  std::atomic<uint32_t> open_{0};
  pybind11::handle variable_;  // guarded by the GIL
};

}  // namespace pycoll::torch_adapter
