/* The physical limit of an all_reduce of two ranks over memory that both have mapped: each rank
 * reads its half of both vectors and writes the sum into both. Nothing is checked, copied or
 * queued. Compiled by limit.py for the CPU at hand. */
#define _POSIX_C_SOURCE 200809L
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define SPINS 20000
#define LIMIT_SECONDS 60

/* One a rank, each on its own cache line; only its rank writes it. */
struct flag {
    _Alignas(64) _Atomic uint64_t arrivals;
};

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static time_t seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

/* Release and acquire order the vectors: what a rank wrote before it came is there after both did. */
static int barrier(struct flag *flags, int rank) {
    struct flag *other = &flags[!rank];
    uint64_t mine = atomic_load_explicit(&flags[rank].arrivals, memory_order_relaxed) + 1;
    atomic_store_explicit(&flags[rank].arrivals, mine, memory_order_release);
    time_t deadline = 0;
    for (unsigned spins = 0;
         atomic_load_explicit(&other->arrivals, memory_order_acquire) < mine; spins++) {
        if (spins < SPINS) {
            relax();
            continue;
        }
        sched_yield();
        if (deadline == 0) deadline = seconds() + LIMIT_SECONDS;
        if (seconds() > deadline) return -1;
    }
    return 0;
}

/* 0, or -1 when the other rank did not come for a minute. */
int limit_all_reduce(float *restrict first, float *restrict second, size_t elements,
                     struct flag *flags, int rank) {
    size_t half = elements / 2 / 16 * 16;
    size_t begin = rank ? half : 0, end = rank ? elements : half;
    if (barrier(flags, rank)) return -1;
    for (size_t i = begin; i < end; i++) {
        float sum = first[i] + second[i];
        first[i] = sum;
        second[i] = sum;
    }
    return barrier(flags, rank);
}
