// What moves between ranks while Programs are interpreted (interpret.h).
#pragma once

#include <cstdint>
#include <vector>

#include "program/happens_before.h"
#include "program/memory.h"

namespace pycoll::prover {

struct RunOptions {
  int32_t depth = 2;
  int32_t rounds = 1;
  bool in_place = true;  // input and output are the same memory
  // Slices of the chunks of each length class, at most `rounds`; empty: all have `rounds`.
  std::vector<int32_t> lengths;
};

template <typename Value>
struct Message {
  Datum<Value> datum;
  Wire wire = Wire::value;
  int32_t round = 0;
  int32_t length = 0;  // class
  uint32_t time = 0;
  int32_t step = 0;
  ClockRef clock;
};

template <typename Value>
struct Production {
  int32_t rank;
  uint32_t time;
  Value value;
};

template <typename Value>
struct Move {
  uint32_t time;
  int32_t from;
  int32_t to;
  int32_t lane;
  Value value;
  const Step* step;  // of the rank that receives
};

// A FIFO between two ranks.
template <typename Value>
struct Queue {
  struct Slot {
    Message<Value> message;
    ClockRef freed;  // when the receive that emptied the slot happened
  };
  explicit Queue(int32_t depth) : slots(static_cast<size_t>(depth)) {}
  std::vector<Slot> slots;
  uint64_t sent = 0;
  uint64_t received = 0;
  bool empty() const { return sent == received; }
  bool full() const { return sent - received == slots.size(); }
  Slot& head() { return slots[received % slots.size()]; }
  Slot& tail() { return slots[sent % slots.size()]; }
};

}  // namespace pycoll::prover
