/* A FIFO with credits (csrc/transport/shm/fifo.h): the sender publishes a count, the receiver
 * releases one, message i lies in slot i % DEPTH. Counts wrap (here at WRAP, a multiple of DEPTH,
 * and soon); each side looks at the other's count only when its copy says it must.
 *
 * A slot is written and read in two halves, so that a message overwritten while it is read is seen.
 * That stores become visible in order is the promise of release and acquire, which
 * ThreadSanitizer checks in the code; the variants -DPUBLISH_EARLY and -DRELEASE_EARLY stand for
 * breaking it.
 *
 * Broken variants, each of which must fail: -DPUBLISH_EARLY, -DRELEASE_EARLY, -DDEPTH_OFF_BY_ONE,
 * -DNO_CREDIT.
 */
#define DEPTH 2
#define WRAP 4
#define MESSAGES 7

byte low[DEPTH], high[DEPTH];  /* the two halves of a slot */
byte published, released;

/* As the code has it: a wrapped difference of counts. */
#define DISTANCE(a, b) (((a) + WRAP - (b)) % WRAP)

#ifdef DEPTH_OFF_BY_ONE
#define FULL(seen) (DISTANCE(sent, seen) > DEPTH)
#else
#define FULL(seen) (DISTANCE(sent, seen) >= DEPTH)
#endif

active proctype sender() {
  byte sent, seen, message = 1;
  do
  :: message > MESSAGES -> break
  :: else ->
     do
     :: !FULL(seen) -> break
     :: FULL(seen) ->
        !FULL(released);
        seen = released
     od;
#ifdef PUBLISH_EARLY
     published = (sent + 1) % WRAP;
#endif
     low[sent % DEPTH] = message;
     high[sent % DEPTH] = message;
     sent = (sent + 1) % WRAP;
     published = sent;
     message++
  od
}

active proctype receiver() {
  byte taken, seen, message = 1, first, second;
  do
  :: message > MESSAGES -> break
  :: else ->
     if
     :: seen != taken
     :: seen == taken ->
        published != taken;
        seen = published
     fi;
#ifdef RELEASE_EARLY
     released = (taken + 1) % WRAP;
#endif
     first = low[taken % DEPTH];
     second = high[taken % DEPTH];
     assert(first == message && second == message);
     taken = (taken + 1) % WRAP;
#ifndef NO_CREDIT
     released = taken;
#endif
     message++
  od
}
