/* Leases (csrc/runtime/leased_call.h, csrc/transport/shm/shm_leases.h): each rank offers, or says
 * that it has nothing to lend, before it waits for anybody; with an offer from everybody all use
 * each other's vectors, and end with a barrier. A rank may fail at any time: it takes its lease
 * back, waits for those who use it, or puts the memory aside, and then its caller reuses it.
 *
 * Stores to the words that a lender and a borrower look at pass through a store buffer of one
 * entry, which is written back at any time or by a fence: the fences matter on any CPU.
 *
 * Proved: all ranks come to the same verdict; nobody uses a vector whose call is over and that was
 * not put aside, or before its rank has come; nobody ends well with nonsense that it has read.
 *
 * Broken variants, each of which must fail: -DNO_ENTER_FENCE, -DNO_REVOKE_FENCE, -DNO_CHECK_AT_ENTRY,
 * -DNO_CHECK_AFTER, -DNO_WAIT, -DNO_BARRIER, -DPAST_IS_GRANTED, -DSTART_BEFORE_ALL.
 */
#define RANKS 2
#define CALLS 2
#define NONE 0
#define REFUSED 1
#define GRANTED 2

byte call_of[RANKS];      /* sequence of the latest offer */
byte terms[RANKS];        /* REFUSED or GRANTED, of that offer */
byte arrived[RANKS];      /* barriers */
bool borrowing[RANKS];
bool revoked[RANKS];
byte verdict[CALLS + 1];  /* of the first rank that has one, for each call */
bool lent[RANKS];         /* the vector belongs to the call: its caller waits */
bool aside[RANKS];        /* what is written there reaches nobody */
bool nonsense[RANKS];     /* this rank has read what a caller had back already */
bool gone[RANKS];         /* the abort that a failed rank sends has come */

#ifdef NO_ENTER_FENCE
#define ENTER_FENCE
#else
#define ENTER_FENCE flush_borrowing()
#endif
#ifdef NO_REVOKE_FENCE
#define REVOKE_FENCE
#else
#define REVOKE_FENCE flush_revoked()
#endif

/* The store buffers: what a rank has stored and others do not see yet. */
bool borrowing_waits[RANKS], borrowing_value[RANKS];
bool revoked_waits[RANKS];

inline flush_borrowing() {
  d_step { if :: borrowing_waits[_pid] -> borrowing[_pid] = borrowing_value[_pid];
                 borrowing_waits[_pid] = false :: else fi }
}
inline flush_revoked() {
  d_step { if :: revoked_waits[_pid] -> revoked[_pid] = true; revoked_waits[_pid] = false
           :: else fi }
}
/* Stores leave in order: the earlier one goes first. */
inline store_borrowing(v) {
  d_step { flush_borrowing(); borrowing_value[_pid] = v; borrowing_waits[_pid] = true }
}
inline store_revoked() { d_step { flush_borrowing(); revoked_waits[_pid] = true } }

inline fail() {
  /* Leaves the peers' memory, takes the lease back. */
  if :: inside -> store_borrowing(false); inside = false :: else fi;
  if
  :: lent[_pid] ->
     store_revoked();
     REVOKE_FENCE;
#ifndef NO_WAIT
     if
     :: !borrowing[other]
     :: aside[_pid] = true   /* it takes too long */
     fi;
#endif
     lent[_pid] = false
  :: else
  fi;
  goto dead
}
inline maybe_fail() { if :: failures > 0 -> failures--; fail() :: skip fi }

byte failures = 1;  /* in all: whoever fails ends the group */

active [RANKS] proctype rank() {
  byte other = 1 - _pid, sequence = 1;
  bool inside = false, granted;
  do
  :: sequence > CALLS -> break
  :: else ->
     lent[_pid] = false;
     if
     :: d_step { granted = true; lent[_pid] = true; terms[_pid] = GRANTED;
                 call_of[_pid] = sequence }
     :: d_step { granted = false; terms[_pid] = REFUSED; call_of[_pid] = sequence }
     fi;
     maybe_fail();
     /* The peer's offer. A rank without a lease of its own does not wait for it. */
     if
     :: !granted
     :: granted ->
#ifndef START_BEFORE_ALL
        do
        :: call_of[other] >= sequence -> break
        :: gone[other] -> fail()
        od;
#endif
#ifdef PAST_IS_GRANTED
        granted = (terms[other] != REFUSED)
#else
        granted = (call_of[other] == sequence && terms[other] == GRANTED)
#endif
     fi;
     d_step {
       if :: verdict[sequence] == NONE -> verdict[sequence] = (granted -> GRANTED : REFUSED)
       :: else -> assert(verdict[sequence] == (granted -> GRANTED : REFUSED)) fi
     }
     if
     :: !granted ->
        /* The staged call: it has its own order, which is not this model's. */
        lent[_pid] = false
     :: granted ->
        maybe_fail();
        store_borrowing(true); inside = true;
        ENTER_FENCE;
#ifndef NO_CHECK_AT_ENTRY
        if :: revoked[other] -> fail() :: else fi;
#endif
        /* Uses the peer's vector: writes it, then reads it. */
        assert(lent[other] || aside[other]);
        if :: lent[other] :: !lent[other] -> nonsense[_pid] = true fi;
        assert(lent[other] || aside[other]);
#ifndef NO_CHECK_AFTER
        if :: revoked[other] -> fail() :: else fi;
#endif
        maybe_fail();
        store_borrowing(false); inside = false;
        flush_borrowing();
        arrived[_pid]++;
#ifndef NO_BARRIER
        do
        :: arrived[other] >= arrived[_pid] -> break
        :: gone[other] -> fail()
        :: failures > 0 -> failures--; fail()
        od;
#endif
        lent[_pid] = false;
        assert(!nonsense[_pid])
     fi;
     sequence++
  od;
dead:
  gone[_pid] = true;
  flush_borrowing();
  flush_revoked()
}

/* Store buffers drain by themselves. */
active proctype drain() {
  do
  :: atomic { borrowing_waits[0] -> borrowing[0] = borrowing_value[0]; borrowing_waits[0] = false }
  :: atomic { borrowing_waits[1] -> borrowing[1] = borrowing_value[1]; borrowing_waits[1] = false }
  :: atomic { revoked_waits[0] && !borrowing_waits[0] -> revoked[0] = true; revoked_waits[0] = false }
  :: atomic { revoked_waits[1] && !borrowing_waits[1] -> revoked[1] = true; revoked_waits[1] = false }
  :: timeout -> break
  od
}
