// Events that several processes record and wait for.
#pragma once

#include <cstdint>
#include <memory>

#include "sim/cuda/shared_file.h"

namespace pycoll::sim::cuda {

// What processes share of an event: a page of a memfd that each maps.
//
// Records are numbered as they are posted, by whichever process; a wait is for the last number at
// the time it was posted. Records on different streams may finish in another order, so each number
// has a word of its own, used again after kWords records, when the older one has long been done. A
// record whose process dies is never done, and a wait for it never ends.
class SharedEvent {
 public:
  // Null: no memory, or the event is gone.
  static std::shared_ptr<SharedEvent> create();
  static std::shared_ptr<SharedEvent> open(const FileName& name);

  uint64_t issue();       // the number of a new record
  uint64_t last() const;  // the number of the last one; 0: none ever
  void finish(uint64_t ticket);
  bool finished(uint64_t ticket) const;

  const FileName& name() const { return file_.name; }

 private:
  struct Page;
  bool map(int fd);
  Page* page() const;

  SharedFile file_;  // of the process that made the event
  Mapping mapping_;
};

}  // namespace pycoll::sim::cuda
