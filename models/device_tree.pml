/* A tree of ranks on GPUs (csrc/program/tree.cpp over csrc/kernels/cuda/executor.cuh): sums go up and
 * results come down, slice after slice, in lanes that are blocks of their own: a leaf sends slice s + 1 up
 * while slice s is on its way down. Rank 0 is the root, the others are its children. FIFOs have
 * DEPTH slots, flags and credits as in device_ring.pml; here numbers do not wrap. Each message holds
 * its slice and which ranks' contributions are in it.
 *
 * Broken variants, each of which must fail: -DNO_CREDIT, -DFLAG_EARLY, -DONE_COUNTER (the two lanes of a
 * leaf count messages together), -DFORGET_CHILD (the root sends before the last child has come).
 */
#define CHILDREN 2
#define DEPTH 2
#define SLICES 4
#define ALL 7

byte up_slice[3 * DEPTH], up_parts[3 * DEPTH], up_flag[3 * DEPTH], up_credit[3];
byte down_slice[3 * DEPTH], down_parts[3 * DEPTH], down_flag[3 * DEPTH], down_credit[3];
byte count[3];  /* ONE_COUNTER */

#define SLOT(rank, number) ((rank) * DEPTH + (number) % DEPTH)

inline send_up(child, number, parts) {
#ifndef NO_CREDIT
  (up_credit[child] + DEPTH >= number + 1);
#endif
#ifdef FLAG_EARLY
  up_flag[SLOT(child, number)] = number + 1;
#endif
  up_slice[SLOT(child, number)] = number;
  up_parts[SLOT(child, number)] = parts;
  up_flag[SLOT(child, number)] = number + 1
}

inline send_down(child, number, parts) {
#ifndef NO_CREDIT
  (down_credit[child] + DEPTH >= number + 1);
#endif
  down_slice[SLOT(child, number)] = number;
  down_parts[SLOT(child, number)] = parts;
  down_flag[SLOT(child, number)] = number + 1
}

inline recv_up(child, number) {
  (up_flag[SLOT(child, number)] >= number + 1);
  assert(up_slice[SLOT(child, number)] == number);
  sum = sum | up_parts[SLOT(child, number)];
  assert(up_slice[SLOT(child, number)] == number);
  up_credit[child] = number + 1
}

active proctype root() {
  byte slice, sum;
  for (slice : 0 .. SLICES - 1) {
    sum = 1;
    recv_up(1, slice);
#ifndef FORGET_CHILD
    recv_up(2, slice);
#endif
    send_down(2, slice, sum);
    send_down(1, slice, sum);
#ifdef FORGET_CHILD
    recv_up(2, slice);
#endif
  }
}

proctype leaf_up(byte me) {
  byte slice, number;
  for (slice : 0 .. SLICES - 1) {
#ifdef ONE_COUNTER
    atomic { number = count[me]; count[me]++ };
#else
    number = slice;
#endif
    send_up(me, number, 1 << me)
  }
}

proctype leaf_down(byte me) {
  byte slice, number;
  for (slice : 0 .. SLICES - 1) {
#ifdef ONE_COUNTER
    atomic { number = count[me]; count[me]++ };
#else
    number = slice;
#endif
    (down_flag[SLOT(me, number)] >= number + 1);
    assert(down_slice[SLOT(me, number)] == slice);
    assert(down_parts[SLOT(me, number)] == ALL);
    assert(down_slice[SLOT(me, number)] == slice);
    down_credit[me] = number + 1
  }
}

init {
  byte child;
  atomic {
    for (child : 1 .. CHILDREN) {
      run leaf_up(child);
      run leaf_down(child)
    }
  }
}
