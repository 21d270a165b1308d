// Uses of peers' vectors, which a lender's caller has back when that rank ends: each must be known
// to the lender by then.
#pragma once

#include <cstdint>
#include <vector>

#include "core/error.h"
#include "program/happens_before.h"
#include "program/wiring.h"

namespace pycoll::prover {

class BorrowedVectors {
 public:
  struct Use {
    int32_t lender;   // rank
    int32_t process;  // who used it, in which step, at which of its times
    int32_t step;
    uint32_t time;
  };

  void add(const Use& use) { uses_.push_back(use); }

  // After the run, when the clocks are those that the ranks end with. Throws Fault.
  void find_late(const Wiring& wiring, const HappensBefore& order) const {
    for (const Use& use : uses_) {
      const int32_t first = wiring.first_process[static_cast<size_t>(use.lender)];
      const int32_t lanes = wiring.lanes_of_rank[static_cast<size_t>(use.lender)];
      bool known = false;
      for (int32_t lane = first; lane < first + lanes; ++lane) {
        known = known || order.time_of(use.process, lane) >= use.time;
      }
      if (known) continue;
      throw Fault{CheckKind::race,
                  concat(wiring.describe(use.process, use.step), ": rank ", use.lender,
                         " may have ended, and its caller have its vectors back")};
    }
  }

 private:
  std::vector<Use> uses_;
};

}  // namespace pycoll::prover
