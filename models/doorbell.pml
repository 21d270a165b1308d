/* How a rank sleeps until a peer has done something (csrc/transport/shm/doorbell.h), on a machine
 * with store buffers (x86-TSO: Sewell et al., CACM 53(7), 2010): a store goes into its CPU's own
 * buffer, from where it reaches memory later, in order; a load looks into that buffer first; a
 * fence waits until it is empty. A model without the buffers finds nothing wrong with missing
 * fences.
 *
 * Two wakers raise a flag each, ROUNDS times, without waiting for anyone. The sleeper waits for
 * each value of both flags in turn. A lost wake-up is a sleeper that sleeps for ever: an invalid
 * end state. The real sleep has a time limit, which would only turn the hang into a delay.
 *
 * Broken variants, each of which must fail: -DNO_SLEEPER_FENCE, -DNO_WAKER_FENCE, -DNO_RECHECK,
 * -DNO_WAKE.
 */
#define ROUNDS 2
#define WAKERS 2
#define CPUS 3     /* the wakers, then the sleeper */
#define SLEEPER 2
#define WORDS 3    /* the wakers' flags, then `sleeping` */
#define SLEEPING 2

byte memory[WORDS];
chan buffer[CPUS] = [3] of { byte, byte };  /* (word, value) */
byte pending[CPUS * WORDS];                 /* how many stores of a word are in a buffer */
byte newest[CPUS * WORDS];                  /* and the value of the last of them */
bool in_futex;

#define AT(cpu, word) ((cpu) * WORDS + (word))

inline store(cpu, word, value) {
  atomic {
    buffer[cpu]!word, value;
    pending[AT(cpu, word)]++;
    newest[AT(cpu, word)] = value
  }
}

inline load(cpu, word, result) {
  atomic {
    if
    :: pending[AT(cpu, word)] > 0 -> result = newest[AT(cpu, word)]
    :: else -> result = memory[word]
    fi
  }
}

inline fence(cpu) { empty(buffer[cpu]) }

/* The kernel takes a lock before it compares or wakes: a fence in itself. */
inline futex_wait(cpu, word, expected) {
  fence(cpu);
  atomic { in_futex = (memory[word] == expected) };
  !in_futex
}

inline futex_wake(cpu) {
  fence(cpu);
  in_futex = false
}

proctype drain(byte cpu) {
  byte word, value;
end:
  do
  :: atomic {
       buffer[cpu]?word, value;
       memory[word] = value;
       pending[AT(cpu, word)]--;
       word = 0;
       value = 0
     }
  od
}

proctype waker(byte me) {
  byte round = 1, seen;
  do
  :: round > ROUNDS -> break
  :: else ->
     store(me, me, round);
#ifndef NO_WAKER_FENCE
     fence(me);
#endif
     load(me, SLEEPING, seen);
     if
     :: seen != 0 ->
        store(me, SLEEPING, 0);
#ifndef NO_WAKE
        futex_wake(me)
#endif
     :: else
     fi;
     round++
  od
}

inline look() {
  load(SLEEPER, 0, a);
  load(SLEEPER, 1, b);
  ready = (a >= round && b >= round)
}

active proctype sleeper() {
  byte round = 1, a, b;
  bool ready;
  run drain(0);
  run drain(1);
  run drain(SLEEPER);
  run waker(0);
  run waker(1);
  do
  :: round > ROUNDS -> break
  :: else ->
     look();
     if
     :: ready -> round++
     :: else ->
        store(SLEEPER, SLEEPING, 1);
#ifndef NO_SLEEPER_FENCE
        fence(SLEEPER);
#endif
#ifndef NO_RECHECK
        look();
#endif
        if
        :: ready -> skip
        :: else -> futex_wait(SLEEPER, SLEEPING, 1)
        fi;
        store(SLEEPER, SLEEPING, 0)
     fi
  od
}
