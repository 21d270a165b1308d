/* The loop that the native drivers share: a rank of a long-lived job that measures on command.
 *
 * A rank blocks in read() on a FIFO of its own between commands, so an idle job uses no CPU and
 * several jobs can take turns. (Waiting inside MPI would spin.) A command is one line:
 *
 *   COLLECTIVE BYTES ITERATIONS WARMUP each|batch check|- ordinary|shareable
 *
 * The rank makes WARMUP calls, which also bring the ranks together, and then times ITERATIONS
 * calls: all of them with two readings of the clock, or each of them. Seconds a call go into the
 * file of doubles that the controller maps as well; the answer is one JSON line. The controller
 * takes the slowest rank of each call: a collective is done when its last rank is.
 *
 * BYTES is what nccl-tests calls the size: the whole vector; of all_gather the output, of
 * reduce_scatter and all_to_all the input.
 *
 * Environment: PEERS_DIRECTORY, which holds command.R and answer.R (FIFOs) and times.R, and
 * PEERS_BYTES, the largest BYTES that will be asked for.
 */
#ifndef PYCOLL_BENCHMARKS_DRIVER_H
#define PYCOLL_BENCHMARKS_DRIVER_H

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { kMostTimes = 1 << 16 };

struct command {
  char collective[24];
  size_t bytes;
  long iterations;
  long warmup;
  int each;      /* clock read around each call */
  int check;     /* one call on fresh values, verified, instead of the timing */
  int shareable; /* the library's own memory, if it has one */
};

/* What a library brings. call() makes one call of the collective from input to output, which are
 * the same memory where the driver works in place (all_reduce, broadcast, barrier). It returns 0,
 * or something else when there is no such collective. */
struct library {
  const char* name;
  int rank;
  int world_size;
  void* state;
  int (*call)(void* state, const struct command* command, float* input, float* output);
  /* Memory that the library reads directly; null where there is none. */
  void* (*shareable)(void* state, size_t bytes);
};

static double driver_clock(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double driver_cpu_seconds(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

static void driver_fail(const struct library* library, const char* what) {
  fprintf(stderr, "%s rank %d: %s\n", library->name, library->rank, what);
  fflush(stderr);
  _exit(1);
}

/* Small integers that depend on rank and position: their sums are exact in float32. */
static float driver_value(int rank, size_t at) {
  return (float)((at * 7 + at / 3 + (size_t)rank * 13) % 251);
}

/* How many elements a rank gives and gets, and how many a block has. */
struct driver_shape {
  size_t given;
  size_t got;
  size_t block;
};

static struct driver_shape driver_shape_of(const struct command* command, int world_size) {
  struct driver_shape shape;
  const size_t elements = command->bytes / sizeof(float);
  shape.block = elements / (size_t)world_size;
  shape.given = shape.got = elements;
  if (!strcmp(command->collective, "barrier")) shape.given = shape.got = 0;
  if (!strcmp(command->collective, "all_to_all"))
    shape.given = shape.got = shape.block * (size_t)world_size;
  if (!strcmp(command->collective, "all_gather")) {
    shape.given = shape.block;
    shape.got = shape.block * (size_t)world_size;
  }
  if (!strcmp(command->collective, "reduce_scatter")) {
    shape.given = shape.block * (size_t)world_size;
    shape.got = shape.block;
  }
  return shape;
}

/* What element `at` of this rank's output must be. */
static float driver_expected(const struct library* library, const char* collective, size_t at,
                             size_t block) {
  float sum = 0;
  int rank;
  if (!strcmp(collective, "broadcast")) return driver_value(0, at);
  if (!strcmp(collective, "all_gather")) return driver_value((int)(at / block), at % block);
  if (!strcmp(collective, "all_to_all"))
    return driver_value((int)(at / block), (size_t)library->rank * block + at % block);
  if (!strcmp(collective, "reduce_scatter")) at += (size_t)library->rank * block;
  for (rank = 0; rank < library->world_size; ++rank) sum += driver_value(rank, at);
  return sum;
}

/* -1: the library has no such collective. */
static long driver_count_wrong(const struct library* library, const struct command* command,
                               float* input, float* output) {
  const struct driver_shape shape = driver_shape_of(command, library->world_size);
  long wrong = 0;
  size_t at;
  if (output != input) memset(output, 0xff, shape.got * sizeof(float));
  for (at = 0; at < shape.given; ++at) input[at] = driver_value(library->rank, at);
  if (library->call(library->state, command, input, output) != 0) return -1;
  for (at = 0; at < shape.got; ++at)
    wrong += output[at] != driver_expected(library, command->collective, at, shape.block);
  return wrong;
}

static int driver_in_place(const char* collective) {
  return !strcmp(collective, "all_reduce") || !strcmp(collective, "broadcast") ||
         !strcmp(collective, "barrier");
}

/* A vector of the same kind for every library: page-aligned, touched before anything is timed. */
static float* driver_allocate(const struct library* library, size_t bytes, int shareable) {
  size_t at;
  float* vector;
  bytes = (bytes + 4095) / 4096 * 4096;
  vector =
      (float*)(shareable ? library->shareable(library->state, bytes) : aligned_alloc(4096, bytes));
  if (vector == NULL) driver_fail(library, "no memory");
  /* Not zeros: some CPUs skip writing zeros over zeros. */
  for (at = 0; at < bytes / sizeof(float); ++at) vector[at] = (float)(at % 251 + 1);
  return vector;
}

static int driver_parse(const char* line, struct command* command) {
  char mode[8], check[8], memory[16];
  if (sscanf(line, "%23s %zu %ld %ld %7s %7s %15s", command->collective, &command->bytes,
             &command->iterations, &command->warmup, mode, check, memory) != 7)
    return 0;
  command->each = !strcmp(mode, "each");
  command->check = !strcmp(check, "check");
  command->shareable = !strcmp(memory, "shareable");
  return command->iterations >= 1 && (!command->each || command->iterations <= kMostTimes);
}

/* Returns how many times were written, or -1 when the library has no such collective. */
static long driver_time(const struct library* library, const struct command* command, float* input,
                        float* output, double* times) {
  long at;
  double start, before, now;
  for (at = 0; at < command->warmup; ++at) {
    if (library->call(library->state, command, input, output) != 0) return -1;
  }
  start = before = driver_clock();
  if (!command->each) {
    for (at = 0; at < command->iterations; ++at)
      library->call(library->state, command, input, output);
    times[0] = (driver_clock() - start) / (double)command->iterations;
    return 1;
  }
  for (at = 0; at < command->iterations; ++at) {
    library->call(library->state, command, input, output);
    now = driver_clock();
    times[at] = now - before;
    before = now;
  }
  return command->iterations;
}

static FILE* driver_open(const struct library* library, const char* what, const char* mode) {
  char path[4096];
  const char* directory = getenv("PEERS_DIRECTORY");
  FILE* file;
  snprintf(path, sizeof path, "%s/%s.%d", directory ? directory : ".", what, library->rank);
  file = fopen(path, mode);
  if (file == NULL) driver_fail(library, "cannot open what PEERS_DIRECTORY must hold");
  return file;
}

struct driver_answer {
  long times;
  long wrong; /* -1: the library has no such collective or memory */
  double cpu; /* seconds of this process */
};

/* Vectors are made when the first command needs them, and kept: input and output of each kind. */
static struct driver_answer driver_execute(const struct library* library,
                                           const struct command* command, size_t most_bytes,
                                           float* vectors[2][2], double* times) {
  struct driver_answer answer = {0, -1, 0};
  float** own = vectors[command->shareable];
  const int last = driver_in_place(command->collective) ? 0 : 1;
  int i;
  if (command->shareable && library->shareable == NULL) return answer;
  for (i = 0; i <= last; ++i) {
    if (own[i] == NULL) own[i] = driver_allocate(library, most_bytes, command->shareable);
  }
  answer.cpu = driver_cpu_seconds();
  if (command->check) {
    answer.wrong = driver_count_wrong(library, command, own[0], own[last]);
  } else {
    answer.times = driver_time(library, command, own[0], own[last], times);
    answer.wrong = answer.times < 0 ? -1 : 0;
  }
  answer.cpu = driver_cpu_seconds() - answer.cpu;
  return answer;
}

/* Serves commands until the controller closes the FIFO. */
static void driver_serve(const struct library* library) {
  FILE* commands = driver_open(library, "command", "r");
  FILE* answers = driver_open(library, "answer", "w");
  FILE* file = driver_open(library, "times", "r+");
  const char* largest = getenv("PEERS_BYTES");
  const size_t most_bytes = largest ? strtoull(largest, NULL, 10) : 0;
  double* times = (double*)mmap(NULL, kMostTimes * sizeof(double), PROT_READ | PROT_WRITE,
                                MAP_SHARED, fileno(file), 0);
  float* vectors[2][2] = {{NULL, NULL}, {NULL, NULL}};
  char line[256];
  if (times == MAP_FAILED || most_bytes == 0)
    driver_fail(library, "PEERS_BYTES or times.R is missing");
  fprintf(answers, "{\"ready\": \"%s\"}\n", library->name);
  fflush(answers);
  while (fgets(line, sizeof line, commands) != NULL) {
    struct command command;
    struct driver_answer answer;
    if (!driver_parse(line, &command) || command.bytes > most_bytes)
      driver_fail(library, "a command that is none, or larger than PEERS_BYTES");
    answer = driver_execute(library, &command, most_bytes, vectors, times);
    if (answer.wrong < 0)
      fprintf(answers, "{\"unsupported\": true}\n");
    else
      fprintf(answers, "{\"times\": %ld, \"wrong\": %ld, \"cpu\": %.6f}\n", answer.times,
              answer.wrong, answer.cpu);
    fflush(answers);
  }
}

#endif
