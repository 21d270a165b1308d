/* The host's part of a stream's work (csrc/runtime/device/host_work.h), as an all_reduce between hosts uses
 * it (hosts_group.cpp): a stream copies pieces out to slots of pinned memory, a thread of the host works
 * on them one after the other, and the stream copies what came of it back. The stream hands a piece over
 * by a host function, and waits for a word a slot, which the thread makes 1 and the stream makes 0
 * again. Nothing is counted, so the stream may be a graph that is replayed.
 *
 * Here pieces of CALLS calls go through SLOTS slots.
 *
 * Broken variants, each of which must fail: -DNO_END (a slot is used again without waiting for it),
 * -DRESET_LATE (a word becomes 0 only after the slot's next piece was handed over), -DOPEN_EARLY (the
 * thread makes the word 1 before it has worked), -DONE_WORD (slots share a word), -DHAND_OVER_EARLY
 * (the host function comes before the copy).
 */
#define SLOTS 2
#define PIECES 3   /* a call */
#define CALLS 2

byte pinned[SLOTS];       /* what is there: 2 p + 1 of piece p as it came, 2 p + 2 when it was worked on */
bit opened[SLOTS];
chan ready = [PIECES * CALLS] of { byte };

#ifdef ONE_WORD
#define WORD(slot) opened[0]
#else
#define WORD(slot) opened[slot]
#endif

inline copy_out(k) {
  pinned[k % SLOTS] = 2 * k + 1
}

inline begin(k) {
#ifdef HAND_OVER_EARLY
  ready ! k;
  copy_out(k)
#else
  copy_out(k);
  ready ! k
#endif
}

inline end(slot) {
  (WORD(slot) == 1);
#ifndef RESET_LATE
  WORD(slot) = 0
#endif
}

inline copy_back(k) {
#ifndef NO_END
  end((k) % SLOTS);
#endif
  assert(pinned[(k) % SLOTS] == 2 * (k) + 2)
}

/* The order in which the calls were enqueued, which a replay repeats. */
active proctype stream() {
  byte call, k;
  for (call : 0 .. CALLS - 1) {
    for (k : 0 .. PIECES + SLOTS - 1) {
      if
      :: k >= SLOTS -> copy_back(k - SLOTS)
      :: else -> skip
      fi;
      if
      :: k < PIECES ->
         begin(k);
#ifdef RESET_LATE
         WORD(k % SLOTS) = 0
#endif
      :: else -> skip
      fi
    }
  }
}

active proctype host() {
  byte done, k;
  for (done : 0 .. PIECES * CALLS - 1) {
    ready ? k;
#ifdef OPEN_EARLY
    WORD(k % SLOTS) = 1;
#endif
    assert(pinned[k % SLOTS] == 2 * k + 1);
    pinned[k % SLOTS] = 2 * k + 2;
#ifndef OPEN_EARLY
    WORD(k % SLOTS) = 1
#endif
  }
}
