// The Programs of all ranks joined to one system of processes (a lane of a rank each), FIFOs and
// barriers. What check and trace run; see interpret.h.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "program/check.h"
#include "program/program.h"

namespace pycoll::prover {

// Thrown inside the interpreter, never across its callers' interfaces.
struct Fault {
  CheckKind kind;
  std::string message;
};

// A step with its peers looked up.
struct WiredStep {
  const Step* step;
  int32_t fifo_in = -1;
  int32_t fifo_out = -1;
  int32_t barrier = -1;
};

struct Process {
  int32_t rank;
  int32_t lane;
  std::vector<WiredStep> steps;
};

struct FifoEnds {
  int32_t from;
  int32_t to;
  int32_t channel;
  int32_t sender = -1;    // process; -1 when no step uses this end
  int32_t receiver = -1;  // process
};

// A group as one lane of its members sees it.
struct BarrierMembers {
  std::vector<int32_t> ranks;
  std::vector<int32_t> processes;  // -1 where a member has no such lane
};

struct Wiring {
  std::span<const Program> programs;
  std::vector<int32_t> first_process;  // of each rank; its lanes follow
  std::vector<int32_t> lanes_of_rank;
  std::vector<Process> processes;
  std::vector<FifoEnds> fifos;
  std::vector<BarrierMembers> barriers;

  const Program& program_of(int32_t process) const;
  // "rank 2, lane 0, step 3 (...)"
  std::string describe(int32_t process, int32_t step) const;
};

// All Programs are valid and of one collective (check_headers in check.cpp).
Wiring wire(std::span<const Program> programs);

// Can two lanes of one rank touch the same element, one of them writing?
bool lanes_share_chunks(const Program& program, bool in_place);

// What a process that cannot go on waits for.
enum class Wait : uint8_t { nothing, message, slot, barrier };

struct ProcessState {
  int32_t next_step = 0;
  int32_t round = 0;
  int32_t entered = -1;  // the last round it began
  uint32_t time = 0;     // logical: the longest chain of messages, barriers and direct reads so far
  bool done = false;
  Wait wait = Wait::nothing;
  int32_t waits_for = -1;  // index of the FIFO or the barrier
  bool announced = false;  // its arrival at the barrier that is its next step
  int32_t barriers = 0;    // that it has passed
  size_t arrived = 0;      // members of that barrier's group that it knows to have come
};

// Follows who waits for whom from the first process that is stuck: a cycle, or a chain to a process
// that has finished.
std::string describe_deadlock(const Wiring& wiring, std::span<const ProcessState> states);

}  // namespace pycoll::prover
