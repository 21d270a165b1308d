/* Windows on GPUs (csrc/kernels/cuda/all_reduce.cuh, waiting.cuh): blocks with one index at all ranks show
 * parts in their windows and meet in barriers. A barrier is a counter a rank, which its peers wait
 * for; it goes on from one kernel to the next, in device memory. Kernels of two kinds take turns as
 * they like, and share windows and counters:
 *
 *   two_shot   each rank shows a part for every other rank; meets; sums the part that is its own and
 *              shows the sum; meets; reads the others' sums
 *   one_shot   each rank shows one thing; meets; reads the others'
 *
 * Both use two windows alternately, one a round, because a one_shot has no barrier after it has read.
 *
 * Broken variants, each of which must fail: -DONE_WINDOW, -DNO_FIRST_BARRIER, -DNO_SECOND_BARRIER,
 * -DHOST_COUNTERS (each kernel counts barriers from the same number), -DOWN_PARITY (the kinds count
 * their rounds apart).
 */
#define RANKS 2
#define CALLS 5

byte window[RANKS * 2 * RANKS];   /* [rank][parity][part] */
byte readers[RANKS * 2 * RANKS];
byte arrival[RANKS * RANKS];      /* [at][from] */
byte kept_barriers[RANKS];
bool chosen[CALLS + 1], two_shot[CALLS + 1];

#ifdef ONE_WINDOW
#define PLACE(rank, part) (((rank) * 2) * RANKS + (part))
#else
#define PLACE(rank, part) (((rank) * 2 + parity) * RANKS + (part))
#endif

inline put_up(part, what) {
  assert(readers[PLACE(_pid, part)] == 0);
  window[PLACE(_pid, part)] = what
}

inline look(rank, part, what) {
  readers[PLACE(rank, part)]++;
  assert(window[PLACE(rank, part)] == what);
  readers[PLACE(rank, part)]--
}

inline meet() {
  barriers++;
  arrival[peer * RANKS + _pid] = barriers;
  (arrival[_pid * RANKS + peer] >= barriers)
}

active [RANKS] proctype rank() {
  byte call, barriers, rounds, parity, peer = 1 - _pid;
  byte rounds_of[2];
  for (call : 1 .. CALLS) {
    atomic {
      if
      :: chosen[call] -> skip
      :: !chosen[call] -> chosen[call] = true; two_shot[call] = true
      :: !chosen[call] -> chosen[call] = true; two_shot[call] = false
      fi
    };
#ifdef HOST_COUNTERS
    barriers = 0;
#else
    barriers = kept_barriers[_pid];
#endif
#ifdef OWN_PARITY
    parity = rounds_of[two_shot[call]] % 2;
    rounds_of[two_shot[call]]++;
#else
    parity = rounds % 2;
    rounds++;
#endif
    if
    :: two_shot[call] ->
       put_up(peer, call * 4 + 1);
#ifndef NO_FIRST_BARRIER
       meet();
#endif
       look(peer, _pid, call * 4 + 1);
       put_up(_pid, call * 4 + 2);
#ifndef NO_SECOND_BARRIER
       meet();
#endif
       look(peer, peer, call * 4 + 2)
    :: else ->
       put_up(0, call * 4 + 3);
       meet();
       look(peer, 0, call * 4 + 3)
    fi;
    kept_barriers[_pid] = barriers
  }
}
