/* Windows with two buffers that alternate (csrc/program/program.h, csrc/runtime/executor.cpp): in
 * each round a rank writes its buffer, comes to a barrier of all, and reads everybody's buffer of
 * that round. There is no second barrier after the reads: the next round uses the other buffer, and
 * its barrier is what says that all reads of this round are over.
 *
 * Broken variants, each of which must fail: -DONE_BUFFER, -DNO_BARRIER, -DLAST_MEMBER_MISSED,
 * -DSTALE_ARRIVAL (arrivals that do not tell one round from the last).
 */
#define RANKS 3
#define ROUNDS 4

byte window[RANKS * 2];
byte readers[RANKS * 2];
byte arrival[RANKS];

#ifdef ONE_BUFFER
#define BUFFER(rank) ((rank) * 2)
#else
#define BUFFER(rank) ((rank) * 2 + round % 2)
#endif

#ifdef LAST_MEMBER_MISSED
#define MEMBERS (RANKS - 1)
#else
#define MEMBERS RANKS
#endif

#ifdef STALE_ARRIVAL
#define REACHED(rank) (arrival[rank] > 0)
#else
#define REACHED(rank) (arrival[rank] >= round)
#endif

active [RANKS] proctype rank() {
  byte round = 1, peer;
  do
  :: round > ROUNDS -> break
  :: else ->
     assert(readers[BUFFER(_pid)] == 0);
     window[BUFFER(_pid)] = round;
     arrival[_pid] = round;
#ifndef NO_BARRIER
     peer = 0;
     do
     :: peer == MEMBERS -> break
     :: peer < MEMBERS && REACHED(peer) -> peer++
     od;
#endif
     peer = 0;
     do
     :: peer == RANKS -> break
     :: else ->
        readers[BUFFER(peer)]++;
        assert(window[BUFFER(peer)] == round);
        readers[BUFFER(peer)]--;
        peer++
     od;
     peer = 0;
     round++
  od
}
