/* Credits of point-to-point messages (csrc/runtime/messages.h): a sender may be LIMIT announced and
 * unmatched messages ahead of its receiver, every message takes back the count that its sender has
 * matched, and a receiver with nothing to send says it by itself when its peer may be short of
 * credit.
 *
 * Two ranks send to each other through FIFOs of one slot, and each receives in an order of its own.
 * A rank looks at what came and sends what it can, in any order, until its work is done; then it
 * does nothing more. Proved: no deadlock, and never more than LIMIT messages without a receive.
 *
 * Broken variants, each of which must fail: -DNO_TELL (counts travel only with messages),
 * -DTELL_AT_HALF (told when half of LIMIT was matched since the last time, though the peer may be
 * blocked before), -DNO_LIMIT, -DSEND_FIRST (reads only when it has nothing to send).
 */
#define LIMIT 4
#define SENT_BY(r) (r == 0 -> 6 : 2)

mtype = { eager, credit };

/* Into each rank: kind, number of the message, messages matched at its sender. */
chan fifo[2] = [1] of { mtype, byte, byte };

/* The number of the message that the n-th receive of a rank wants. */
inline wanted(me, n, number) {
  if
  :: me == 0 -> number = 1 - n                                 /* 1 0 */
  :: me == 1 && n == 0 -> number = 0                           /* 0 4 1 2 3 5 */
  :: me == 1 && n == 1 -> number = 4
  :: me == 1 && n >= 2 && n <= 4 -> number = n - 1
  :: me == 1 && n == 5 -> number = 5
  fi
}

#ifdef NO_TELL
#define must_tell false
#elif defined(TELL_AT_HALF)
#define must_tell (matched - told >= LIMIT / 2)
#else
#define must_tell (matched != told && arrived - told > LIMIT / 2)
#endif

#ifdef NO_LIMIT
#define has_credit true
#else
#define has_credit (sent - returned < LIMIT)
#endif

#define may_announce (sent < SENT_BY(me) && has_credit)

#ifdef SEND_FIRST
#define may_read (sent == SENT_BY(me))
#else
#define may_read true
#endif

#define RECEIVES SENT_BY(1 - me)

/* Posted receives take what they want, as far as it has come. */
inline match(me) {
  do
  :: matched < posted ->
    wanted(me, matched, number);
    if
    :: unexpected & (1 << number) -> unexpected = unexpected & ~(1 << number); matched++
    :: else -> break
    fi
  :: else -> break
  od;
  number = 0; count = 0
}

proctype rank(byte me) {
  byte sent, returned;          /* as a sender: announced; matched by the peer as far as known */
  byte arrived, matched, told;  /* as a receiver: and the count that the peer was told last */
  byte posted;                  /* receives, one after the other */
  byte unexpected;              /* bits: came before its receive */
  byte number, count;
  mtype kind;
  do
  :: sent == SENT_BY(me) && matched == RECEIVES -> break
  :: may_read && nempty(fifo[me]) -> d_step {
      fifo[me] ? kind, number, count;
      returned = count;
      if
      :: kind == eager -> arrived++; unexpected = unexpected | (1 << number)
      :: else
      fi;
      assert(arrived - matched <= LIMIT);
      match(me)
    }
  :: posted < RECEIVES -> d_step { posted++; match(me) }
  :: must_tell && nfull(fifo[1 - me]) -> d_step {
      fifo[1 - me] ! credit, 0, matched; told = matched
    }
  :: !must_tell && may_announce && nfull(fifo[1 - me]) -> d_step {
      fifo[1 - me] ! eager, sent, matched; told = matched; sent++
    }
  od
}

init { atomic { run rank(0); run rank(1) } }
