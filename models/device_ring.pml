/* A ring of ranks on GPUs (csrc/kernels/cuda/executor.cuh): each rank sends to the next through a FIFO of
 * DEPTH slots in the receiver's memory. A slot has a flag of its own, which holds the number of the
 * message in it; the receiver tells the sender how many it has read (credits). A step that receives
 * and sends waits for both. Numbers wrap (here at WRAP). They lie in device memory and go on from
 * one call to the next, so that replaying a captured kernel is a call like any other.
 *
 * A slot is written and read in two halves, by different threads of a block: that both are done before the
 * flag or the credit is what __syncthreads and release give; the variants stand for breaking it.
 *
 * Broken variants, each of which must fail: -DNO_CREDIT, -DDEPTH_OFF_BY_ONE, -DFLAG_EARLY,
 * -DCREDIT_EARLY, -DHOST_COUNTERS (each call begins with the numbers that the first one began with).
 */
#define RANKS 3
#define DEPTH 2
#define WRAP 8
#define CALLS 2
#define STEPS (2 * RANKS - 1)  /* the first only sends, the last only receives */

byte low[RANKS * DEPTH], high[RANKS * DEPTH];  /* of the receiver */
byte flag[RANKS * DEPTH];
byte credit[RANKS];                            /* of the sender */
byte kept_sent[RANKS], kept_received[RANKS];

#define SLOT(rank, number) ((rank) * DEPTH + (number) % DEPTH)
#define NEXT(number) (((number) + 1) % WRAP)
#define DISTANCE(a, b) (((a) + WRAP - (b)) % WRAP)
#define REACHED(seen, wanted) (DISTANCE(seen, wanted) < WRAP / 2)
#ifdef DEPTH_OFF_BY_ONE
#define ROOM REACHED(credit[_pid], (sent + WRAP - DEPTH) % WRAP)
#else
#define ROOM REACHED(credit[_pid], (sent + 1 + WRAP - DEPTH) % WRAP)
#endif

active [RANKS] proctype rank() {
  byte call, step, sent, received, first, second;
  byte next = (_pid + 1) % RANKS, previous = (_pid + RANKS - 1) % RANKS;
  for (call : 1 .. CALLS) {
#ifndef HOST_COUNTERS
    sent = kept_sent[_pid];
    received = kept_received[_pid];
#else
    sent = 0;
    received = 0;
#endif
    for (step : 1 .. STEPS) {
      if
      :: step > 1 -> REACHED(flag[SLOT(_pid, received)], NEXT(received))
      :: else
      fi;
#ifndef NO_CREDIT
      if
      :: step < STEPS -> ROOM
      :: else
      fi;
#endif
      if
      :: step > 1 ->
#ifdef CREDIT_EARLY
         credit[previous] = NEXT(received);
#endif
         first = low[SLOT(_pid, received)];
         second = high[SLOT(_pid, received)];
         assert(first == NEXT(received) && second == NEXT(received))
      :: else
      fi;
      if
      :: step < STEPS ->
#ifdef FLAG_EARLY
         flag[SLOT(next, sent)] = NEXT(sent);
#endif
         low[SLOT(next, sent)] = NEXT(sent);
         high[SLOT(next, sent)] = NEXT(sent)
      :: else
      fi;
      if
      :: step > 1 -> received = NEXT(received); credit[previous] = received
      :: else
      fi;
      if
      :: step < STEPS -> flag[SLOT(next, sent)] = NEXT(sent); sent = NEXT(sent)
      :: else
      fi
    }
    kept_sent[_pid] = sent;
    kept_received[_pid] = received
  }
}
