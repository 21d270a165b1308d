/* Who runs a group's next operation (csrc/runtime/turn.h, at_once.cpp, driving.cpp): a caller that
 * finds the group idle enters without a lock, takes the next number and runs; a caller that queues
 * holds the lock, marks the group busy, takes its number, and a driver runs the queue in order.
 *
 * Claims: one at a time runs, in the order of the numbers, and nobody waits for ever (an invalid end
 * state otherwise). One word holds flags and number; each of its changes is one atomic step.
 *
 * Broken variants, each of which must fail: -DNUMBER_UNCHECKED (who is inside takes a number though
 * someone has queued), -DDRIVE_ANYWAY (the driver does not look whether someone is inside),
 * -DLEAVE_SILENTLY (who leaves does not wake the driver), -DIDLE_EARLY (the group counts as idle as
 * soon as the queue is empty, while its last operation runs).
 */
#define CALLS 3

bool busy = false, inside = false, lock = false, driving = false, wake = false;
byte number = 0;      /* of the last operation that has one */
byte ran = 0;         /* of the last operation that was run */
byte running = 0;     /* threads that run one */
byte queue[CALLS * 2];
byte queued = 0, taken = 0;
byte finished = 0;

inline acquire() { atomic { !lock -> lock = true } }
inline release() { lock = false }

inline run_one(which) {
  running++;
  assert(running == 1);
  assert(which == ran + 1);
  ran = which;
  running--
}

/* Synchronous callers: at once if they can, else through the queue. */
active proctype at_once() {
  byte call = 0, mine;
  bool entered;
  do
  :: call == CALLS -> break
  :: else ->
     mine = 0;
     atomic { entered = !busy && !inside; inside = inside || entered };
     if
     :: entered ->
#ifdef NUMBER_UNCHECKED
        atomic { number++; mine = number };
#else
        atomic { if :: !busy -> number++; mine = number :: else -> skip fi };
#endif
        if
        :: mine > 0 -> run_one(mine)
        :: else -> skip
        fi;
        inside = false;
        if
        :: busy ->
#ifndef LEAVE_SILENTLY
           acquire(); wake = true; release()
#else
           skip
#endif
        :: else -> skip
        fi
     :: else -> skip
     fi;
     if
     :: mine > 0 -> skip
     :: else ->
        acquire();
        busy = true;
        atomic { number++; queue[queued] = number; queued++ };
        wake = true;
        release()
     fi;
     call++
  od;
  finished++
}

/* Asynchronous callers: always through the queue. */
active proctype submitter() {
  byte call = 0;
  do
  :: call == CALLS -> break
  :: else ->
     acquire();
     busy = true;
     atomic { number++; queue[queued] = number; queued++ };
     wake = true;
     release();
     call++
  od;
  finished++
}

active proctype driver() {
  byte mine;
  do
  :: finished == 2 && taken == queued -> break
  :: wake ->
     acquire();
     wake = false;
     do
#ifdef DRIVE_ANYWAY
     :: taken < queued ->
#else
     :: taken < queued && !inside ->
#endif
        mine = queue[taken];
        taken++;
#ifdef IDLE_EARLY
        if :: taken == queued -> busy = false :: else -> skip fi;
#endif
        driving = true;
        release();
        run_one(mine);
        acquire();
        driving = false
     :: taken < queued && inside -> break
     :: taken == queued -> busy = false; break
     od;
     release()
  od
}
