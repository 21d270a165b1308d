/* One connection a pair of processes, shared by all of their groups (csrc/transport/shm/endpoints.h):
 * the dialling process opens a group on the connection that is there, or dials; the other one
 * answers when it has joined that group too. Either drops a connection that none of its groups
 * uses, also just when the other one opens the next group on it.
 *
 * Each group is a thread on either side, so groups open and close in any order; each side's watching
 * thread reads what came. A group may close once both sides have seen it connect (the ranks meet in
 * stages before they return). Every group must connect, on one connection that both sides keep.
 *
 * Broken variants, each of which must fail: -DNO_REDIAL (a connection that ended is not dialled
 * anew), -DNO_WAITING (an open of a group that is not joined yet is thrown away), -DDROP_WAITING (a
 * connection is dropped, and an open that waits on it is answered all the same), -DNO_COUNT (the
 * first group that closes takes the connection with it).
 */
#define GROUPS 3
#define CONNECTIONS 6
#define NONE 6
/* Blocks when no connection has anything to say, so that a group that waits in vain is an error. */
#define FOR_EACH(what) :: what(0) :: what(1) :: what(2) :: what(3) :: what(4) :: what(5)

/* What is on its way; an end is seen when the queue is empty. */
chan opens[CONNECTIONS] = [GROUPS] of { byte };
chan answers[CONNECTIONS] = [GROUPS] of { byte };
bit dialler_closed[CONNECTIONS], acceptor_closed[CONNECTIONS];
bit end_seen[CONNECTIONS];  /* by the dialling side */

/* The dialling side. */
byte current = NONE, dialled;
byte dialler_uses[CONNECTIONS];
byte opened_on[GROUPS] = NONE;
bit answered[GROUPS];
/* The accepting side. */
byte acceptor_uses[CONNECTIONS];  /* groups that use it, and opens that wait */
byte received_on[GROUPS] = NONE;
bit joined[GROUPS], connected[GROUPS];

proctype dialler(byte group) {
  do
  :: answered[group] -> break
  :: !answered[group] && opened_on[group] == NONE ->
     atomic {
       if
       :: current == NONE ->
          assert(dialled < CONNECTIONS);
          current = dialled;
          dialled++
       :: else
       fi;
       opened_on[group] = current;
       dialler_uses[current]++;
       if
       :: !acceptor_closed[current] -> opens[current]!group
       :: else  /* written to a connection that has ended */
       fi
     }
  od;
  connected[group] && answered[group];
  atomic {
    byte mine = opened_on[group];
    assert(mine == received_on[group]);
    assert(!dialler_closed[mine]);
    dialler_uses[mine]--;
#ifdef NO_COUNT
    dialler_uses[mine] = 0;
#endif
    if
    :: dialler_uses[mine] == 0 ->
       dialler_closed[mine] = 1;
       if
       :: current == mine -> current = NONE
       :: else
       fi
    :: else
    fi
  }
}

/* Loses a connection: groups that wait for an answer on it go back. */
inline lose(connection) {
  each = 0;
  do
  :: each == GROUPS -> break
  :: else ->
     if
     :: opened_on[each] == connection && !answered[each] ->
#ifndef NO_REDIAL
        opened_on[each] = NONE;
#endif
        dialler_uses[connection]--
     :: else
     fi;
     each++
  od;
  if
  :: current == connection -> current = NONE
  :: else
  fi
}

inline take_answer(connection) {
  answers[connection]?group;
  if
  :: opened_on[group] == connection -> answered[group] = 1
  :: else
  fi
}

inline take_end(connection) {
  end_seen[connection] = 1;
  if
  :: !dialler_closed[connection] -> lose(connection)
  :: else
  fi
}

#define HAS_ENDED(k) (acceptor_closed[k] && !end_seen[k] && empty(answers[k]))
#define ANSWER(k) atomic { nempty(answers[k]) && !end_seen[k] -> take_answer(k) }
#define END(k) atomic { HAS_ENDED(k) -> take_end(k) }

active proctype dialler_watch() {
  byte group, each;
end:
  do
  FOR_EACH(ANSWER)
  FOR_EACH(END)
  od
}

inline drop_if_idle(connection) {
  if
  :: acceptor_uses[connection] == 0 -> acceptor_closed[connection] = 1
  :: else
  fi
}

proctype acceptor(byte group) {
  joined[group] = 1;
  atomic {
    received_on[group] != NONE;
    answers[received_on[group]]!group;
    connected[group] = 1
  }
  answered[group];
  atomic {
    assert(!acceptor_closed[received_on[group]]);
    acceptor_uses[received_on[group]]--;
#ifdef NO_COUNT
    acceptor_uses[received_on[group]] = 0;
#endif
    drop_if_idle(received_on[group])
  }
}

inline take_open(connection) {
  opens[connection]?group;
  if
#ifdef NO_WAITING
  :: !joined[group]
#endif
  :: else ->
     received_on[group] = connection;
     if
#ifdef DROP_WAITING
     :: !joined[group]
#endif
     :: else -> acceptor_uses[connection]++
     fi
  fi
}
#define OPEN(k) atomic { nempty(opens[k]) && !acceptor_closed[k] -> take_open(k) }

active proctype acceptor_watch() {
  byte group;
end:
  do
  FOR_EACH(OPEN)
  od
}

init {
  atomic {
    byte group = 0;
    do
    :: group == GROUPS -> break
    :: else ->
       run dialler(group);
       run acceptor(group);
       group++
    od
  }
}
