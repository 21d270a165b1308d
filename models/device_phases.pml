/* Ranks that share a GPU (csrc/runtime/device/shared_device_group.*): streams wait for words, kernels wait
 * for nobody. A word has two values and two writers that alternate: who arrives makes it 1, who waits for
 * that makes it 0 again. Nothing is counted, so what a stream does may be a graph that is replayed.
 *
 *   meet      a word a pair of ranks, for each of two kinds of meetings, which take turns: `ready`
 *             (staging areas hold this round) and `done` (everybody has read)
 *   mailbox   a sender waits until it is vacant, fills it, says `filled`; the receiver waits for that,
 *             reads, says `vacant`
 *
 * Here every rank shows a number to all and sends one to the next rank, call after call.
 *
 * Broken variants, each of which must fail: -DNO_READY, -DNO_DONE, -DONE_KIND (both kinds of meetings
 * use one word), -DRESET_LATE (a word becomes 0 again only after the next arrival), -DHOST_NUMBERS
 * (words hold the number of a round, as the host knew it when the graph was captured: waits of a
 * replay find what the first run left), -DNO_EMPTY (a sender does not wait), -DEMPTY_EARLY (a receiver
 * says so before it has read), -DFULL_EARLY.
 */
#define RANKS 3
#define CALLS 4
#define CAPTURED 2   /* calls of a graph, which is replayed */

byte staging[RANKS];
byte readers[RANKS];
byte arrived[2 * RANKS * RANKS];   /* [kind][at][from] */
byte mailbox[RANKS];         /* of the sender */
byte reading[RANKS];
byte filled[RANKS];            /* at the receiver */
byte vacant[RANKS] = 1;       /* at the sender */

#ifdef HOST_NUMBERS
#define HERE ((call - 1) % CAPTURED + 1)
#define HAS_COME(word) (word >= HERE)
#define RESET(word)
#else
#define HERE 1
#define HAS_COME(word) (word == 1)
#define RESET(word) word = 0
#endif
#define READY 0
#ifdef ONE_KIND
#define DONE 0
#else
#define DONE 1
#endif
#define WORD(kind, at, from) arrived[((kind) * RANKS + (at)) * RANKS + (from)]

inline arrive(kind) {
  for (other : 0 .. RANKS - 1) {
    if
    :: other != _pid -> WORD(kind, other, _pid) = HERE
    :: else -> skip
    fi
  }
}

inline wait(kind) {
  for (other : 0 .. RANKS - 1) {
    if
    :: other != _pid ->
       (HAS_COME(WORD(kind, _pid, other)));
#ifndef RESET_LATE
       RESET(WORD(kind, _pid, other))
#endif
    :: else -> skip
    fi
  }
}

inline reset(kind) {
#ifdef RESET_LATE
  for (other : 0 .. RANKS - 1) {
    WORD(kind, _pid, other) = 0
  }
#else
  skip
#endif
}

inline put_up(what) {
  assert(readers[_pid] == 0);
  staging[_pid] = what
}

inline look(what) {
  for (other : 0 .. RANKS - 1) {
    readers[other]++;
    assert(staging[other] == what);
    readers[other]--
  }
}

inline send(what) {
#ifndef NO_EMPTY
  (vacant[_pid] == 1);
  vacant[_pid] = 0;
#endif
#ifdef FULL_EARLY
  filled[next] = 1;
#endif
  assert(reading[_pid] == 0);
  mailbox[_pid] = what;
#ifndef FULL_EARLY
  filled[next] = 1
#endif
}

inline receive(what) {
  (filled[_pid] == 1);
  filled[_pid] = 0;
#ifdef EMPTY_EARLY
  vacant[last] = 1;
#endif
  reading[last]++;
  assert(mailbox[last] == what);
  reading[last]--;
#ifndef EMPTY_EARLY
  vacant[last] = 1
#endif
}

active [RANKS] proctype rank() {
  byte call, other;
  byte next = (_pid + 1) % RANKS, last = (_pid + RANKS - 1) % RANKS;
  for (call : 1 .. CALLS) {
    put_up(call);
#ifndef NO_READY
    arrive(READY);
    wait(READY);
#endif
    look(call);
#ifndef NO_DONE
    arrive(DONE);
    reset(READY);
    wait(DONE);
    reset(DONE);
#endif
  }
  /* Messages have no order with what comes before. */
  for (call : 1 .. CALLS) {
    send(call);
    receive(call)
  }
}
