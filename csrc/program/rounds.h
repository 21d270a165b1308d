// How many rounds chunks and ranks take while Programs are interpreted: the executor's rules
// (runtime/slices.h) in slices instead of elements.
#pragma once

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "program/program.h"

namespace pycoll::prover {

class Rounds {
 public:
  // `lengths`: slices of the chunks of each length class, at most `rounds`; empty: all have
  // `rounds`.
  Rounds(std::span<const Program> programs, int32_t rounds, std::vector<int32_t> lengths)
      : rounds_(rounds), lengths_(std::move(lengths)) {
    for (const Program& program : programs) of_rank_.push_back(longest_known(program));
  }

  // Those in which a chunk of this class takes part: in which it has elements, and the first.
  int32_t of_length(int32_t length) const {
    return lengths_.empty() ? rounds_ : std::max(1, lengths_[static_cast<size_t>(length)]);
  }

  // What a rank can tell from its own vectors.
  int32_t of_rank(int32_t rank) const { return of_rank_[static_cast<size_t>(rank)]; }

  // Blocks are told apart by length only where they differ: a run with equal lengths finds what is
  // wrong with any.
  int32_t length_of(const Program& program, const Step& step) const {
    const bool cut = traits_of(program.collective).lengths == Lengths::cut;
    return cut || !lengths_.empty() ? length_class(program, step) : 0;
  }

 private:
  int32_t longest_known(const Program& program) const {
    if (lengths_.empty()) return rounds_;
    int32_t most = 1;
    const auto look = [&](Space space, int32_t chunks) {
      for (int32_t k = 0; k < chunks; ++k) {
        most = std::max(most, of_length(length_class(program, Ref{space, k})));
      }
    };
    look(Space::input, program.input_chunks);
    look(Space::output, program.output_chunks);
    return most;
  }

  int32_t rounds_;
  std::vector<int32_t> lengths_;
  std::vector<int32_t> of_rank_;
};

}  // namespace pycoll::prover
