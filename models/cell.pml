/* The cell (csrc/transport/transport.h, csrc/runtime/executor.cpp): a buffer whose flag lies beside
 * its payload, two of them a rank, by the number of the meeting. A rank writes the payload, then the
 * flag of that buffer with the meeting's number; it waits for the same number in everybody's flag of
 * that parity, and reads. A flag shows the last meeting of its own parity only, so it may be two
 * meetings old, never one.
 *
 * Between calls that use the cell there may be others that meet nobody (all messages, say): they must
 * not count.
 *
 * Broken variants, each of which must fail: -DONE_BUFFER, -DFLAG_FIRST, -DANY_NUMBER (a flag of an
 * older meeting counts), -DSHARED_COUNT (other calls
 * count too).
 */
#define RANKS 2
#define CALLS 6

byte payload[RANKS * 2];
byte flag[RANKS * 2];
byte readers[RANKS * 2];

/* Which calls use the cell: the same on all ranks, chosen by the first that comes to it. */
bool in_cell[CALLS];
bool chosen[CALLS];

#ifdef ONE_BUFFER
#define PLACE(rank) ((rank) * 2)
#else
#define PLACE(rank) ((rank) * 2 + parity)
#endif

#ifdef ANY_NUMBER
#define COME(rank) (flag[PLACE(rank)] > 0)
#else
#define COME(rank) (flag[PLACE(rank)] >= meeting)
#endif

active [RANKS] proctype rank() {
  byte me = _pid, call = 0, meeting = 0, others = 0, parity, peer;
  do
  :: call == CALLS -> break
  :: else ->
     atomic {
       if
       :: chosen[call] -> skip
       :: !chosen[call] -> chosen[call] = true; in_cell[call] = true
       :: !chosen[call] -> chosen[call] = true; in_cell[call] = false
       fi
     };
     if
     :: in_cell[call] ->
        meeting++;
#ifdef SHARED_COUNT
        parity = (meeting + others) % 2;
#else
        parity = meeting % 2;
#endif
        assert(readers[PLACE(me)] == 0);
#ifdef FLAG_FIRST
        flag[PLACE(me)] = meeting;
        payload[PLACE(me)] = meeting;
#else
        payload[PLACE(me)] = meeting;
        flag[PLACE(me)] = meeting;
#endif
        peer = 1 - me;
        COME(peer);
        readers[PLACE(peer)]++;
        assert(payload[PLACE(peer)] == meeting);
        readers[PLACE(peer)]--
     :: else ->
        others++
     fi;
     peer = 0;
     parity = 0;
     call++
  od
}
