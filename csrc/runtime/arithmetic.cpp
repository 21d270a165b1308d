// The arithmetic half of the executor: how terms are combined, finished and stored, block by block,
// so that intermediate accumulators stay in the first-level cache.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "core/error.h"
#include "runtime/executor.h"

namespace pycoll {
namespace {

constexpr uint64_t kBlock = 2048;  // elements

}  // namespace

void Scratch::Free::operator()(std::byte* p) const {
  std::free(p);
}

std::byte* Scratch::at_least(size_t bytes) {
  if (bytes > bytes_) {
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(64, rounded)));
    bytes_ = memory_ == nullptr ? 0 : rounded;
    if (memory_ == nullptr) throw std::bad_alloc();
  }
  return memory_.get();
}

void Executor::combine_to_acc(std::byte* dst, const Terms& terms, uint64_t count) const {
  const auto combine =
      in_.kernels->combine[static_cast<int>(terms.a_form)][static_cast<int>(terms.b_form)];
  combine(dst, terms.a, terms.b, count);
}

void Executor::combine_to_value(std::byte* dst, const Terms& terms, uint64_t count) {
  const ReduceKernels& kernels = *in_.kernels;
  const bool same_type = kernels.acc == kernels.value;
  if (same_type && kernels.finish == nullptr) return combine_to_acc(dst, terms, count);
  // The block after those that sum_terms() may be using.
  std::byte* scratch = block_.at_least(2 * kBlock * 16) + kBlock * 16;
  const int world_size = in_.program->world_size;
  for (uint64_t done = 0; done < count; done += kBlock) {
    const uint64_t n = std::min(kBlock, count - done);
    const Terms block{terms.a + done * form_size(terms.a_form),
                      terms.b + done * form_size(terms.b_form), terms.a_form, terms.b_form};
    std::byte* to = dst + done * element_;
    std::byte* sum = same_type ? to : scratch;
    combine_to_acc(sum, block, n);
    kernels.finish(to, sum, n, world_size);
  }
}

void Executor::sum_terms(Operand form, uint64_t begin, uint64_t end) {
  std::byte* partial = block_.at_least(2 * kBlock * 16);
  const size_t stored = form_size(form);
  for (uint64_t at = begin; at < end; at += kBlock) {
    const uint64_t n = std::min(kBlock, end - at);
    const Slice to{targets_[0] + at * stored, form};
    sum_block(to, partial, at, n);
    for (size_t i = 1; i < targets_.size(); ++i) {
      std::memcpy(targets_[i] + at * stored, to.data, n * stored);
    }
  }
}

// Elements [at, at + n) of all terms, into one place.
void Executor::sum_block(Slice to, std::byte* partial, uint64_t at, uint64_t n) {
  const uint64_t offset = at * element_;
  if (terms_.size() == 1) return finish_single(to, partial, terms_[0] + offset, n);
  Terms next{terms_[0] + offset, terms_[1] + offset};
  for (size_t i = 2; i < terms_.size(); ++i) {
    combine_to_acc(partial, next, n);
    next = {partial, terms_[i] + offset, Operand::acc, Operand::value};
  }
  if (to.form == Operand::acc) {
    combine_to_acc(to.data, next, n);
  } else {
    combine_to_value(to.data, next, n);
  }
}

// The sum of one term: that, widened and finished like any.
void Executor::finish_single(Slice dst, std::byte* scratch, const std::byte* term, uint64_t count) {
  if (in_.kernels->widen != nullptr) {
    in_.kernels->widen(scratch, term, count);
  } else {
    std::memcpy(scratch, term, count * element_);
  }
  store(dst, {scratch, Operand::acc}, count);
}

void Executor::store(Slice dst, Slice src, uint64_t count) {
  if (count == 0 || dst.data == src.data) return;
  if (dst.form == src.form || in_.kernels == nullptr) {
    std::memcpy(dst.data, src.data, count * form_size(src.form));
  } else if (dst.form == Operand::acc) {
    if (in_.kernels->widen != nullptr) {
      in_.kernels->widen(dst.data, src.data, count);
    } else {
      std::memcpy(dst.data, src.data, count * element_);
    }
  } else if (in_.kernels->finish != nullptr) {
    in_.kernels->finish(dst.data, src.data, count, in_.program->world_size);
  } else {
    std::memcpy(dst.data, src.data, count * element_);
  }
}

uint64_t slice_elements(const Program& program, const ReduceKernels* kernels, size_t element,
                        const TransportGeometry& geometry) {
  // Accumulators are scratch memory of a slice each: they are kept as small as messages.
  const size_t widest = kernels != nullptr ? std::max(size_of(kernels->acc), element) : element;
  uint64_t limit = program.acc_chunks > 0 ? geometry.slot_bytes / widest : uint64_t{1} << 40;
  for (const Lane& lane : program.lanes) {
    for (const Step& step : lane.steps) {
      if (!traits_of(step.kind).sends && !traits_of(step.kind).receives) continue;
      limit = std::min<uint64_t>(limit, geometry.slot_bytes / widest);
    }
  }
  if (program.window_chunks > 0) {
    const auto chunks = static_cast<uint64_t>(program.window_chunks);
    limit = std::min(limit, geometry.window_bytes / chunks / element);
  }
  const uint64_t line = 64 / std::min<size_t>(element, 64);
  if (limit >= line) limit -= limit % line;
  if (limit == 0) {
    fail(ErrorKind::invalid_argument, "PYCOLL_SLOT_BYTES=", geometry.slot_bytes,
         " or PYCOLL_WINDOW_BYTES=", geometry.window_bytes, " is too small for ", program.algorithm,
         " with ", program.world_size, " ranks");
  }
  return limit;
}

}  // namespace pycoll
