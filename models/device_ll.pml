/* one_shot_ll (csrc/kernels/cuda/all_reduce.cuh): data and round number travel in one 64-bit word, by
 * relaxed accesses. A word is read when it shows the round; it says nothing of any other memory, so
 * nothing may be concluded from it about what its sender has read. Two buffers alternate; before a
 * rank writes a buffer again, its peer must have given it back: a credit, released after all threads
 * of the block have read their words of that round (a __syncthreads), and acquired before writing.
 *
 * Threads are processes of their own that nothing else orders, and which thread has which word
 * changes from round to round: sizes and block shapes do.
 *
 * Broken variants, each of which must fail: -DNO_CREDIT, -DCREDIT_EARLY (before words are
 * read), -DONE_BUFFER, -DANY_ROUND (a word counts whatever round it shows), -DCREDIT_OF_LAST (a buffer is
 * written when the round in the other one was read).
 */
#define RANKS 2
#define THREADS 2
#define ROUNDS 4

byte word_round[RANKS * 2 * THREADS];  /* [at][buffer][word] */
byte word_data[RANKS * 2 * THREADS];
byte credit[RANKS];                    /* at the sender: rounds that its peer has read */
#ifndef CREDIT_EARLY
byte done[RANKS];                      /* threads of a rank that have read, over all rounds */
#endif

#ifdef ONE_BUFFER
#define PLACE(at) ((at) * 2 * THREADS + word)
#else
#define PLACE(at) (((at) * 2 + round % 2) * THREADS + word)
#endif
#ifdef ANY_ROUND
#define HERE(place) (word_round[place] > 0)
#else
#define HERE(place) (word_round[place] == round)
#endif
#ifdef CREDIT_OF_LAST
#define MAY_WRITE (credit[me] + 3 >= round)
#else
#define MAY_WRITE (credit[me] + 2 >= round)
#endif

proctype thread(byte me; byte index) {
  byte round, word, peer = 1 - me;
  for (round : 1 .. ROUNDS) {
#ifndef NO_CREDIT
    MAY_WRITE;
#endif
    word = (index + round) % THREADS;
    d_step {
      word_data[PLACE(peer)] = round * 2 + word;
      word_round[PLACE(peer)] = round
    };
    word = (index + round / 2) % THREADS;
#ifdef CREDIT_EARLY
    if
    :: index == 0 -> credit[peer] = round
    :: else
    fi;
#endif
    atomic {
      HERE(PLACE(me));
      assert(word_data[PLACE(me)] == round * 2 + word)
    };
#ifndef CREDIT_EARLY
    done[me]++;
    if
    :: index == 0 -> (done[me] >= round * THREADS); credit[peer] = round
    :: else
    fi
#endif
  }
}

init {
  byte rank, index;
  atomic {
    for (rank : 0 .. RANKS - 1) {
      for (index : 0 .. THREADS - 1) { run thread(rank, index) }
    }
  }
}
