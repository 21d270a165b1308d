/* One rank of an MPI job that measures on command (driver.h); built with each MPI's mpicc. */
#include <mpi.h>

#include "driver.h"

static int call(void* state, const struct command* command, float* input, float* output) {
  const int elements = (int)(command->bytes / sizeof(float));
  const int part = elements / *(const int*)state;
  const char* name = command->collective;
  /* MPI's default error handler ends the job: there is nothing to look at here. */
  if (!strcmp(name, "all_reduce"))
    MPI_Allreduce(MPI_IN_PLACE, output, elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  else if (!strcmp(name, "all_gather"))
    MPI_Allgather(input, part, MPI_FLOAT, output, part, MPI_FLOAT, MPI_COMM_WORLD);
  else if (!strcmp(name, "reduce_scatter"))
    MPI_Reduce_scatter_block(input, output, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  else if (!strcmp(name, "broadcast"))
    MPI_Bcast(output, elements, MPI_FLOAT, 0, MPI_COMM_WORLD);
  else if (!strcmp(name, "all_to_all"))
    MPI_Alltoall(input, part, MPI_FLOAT, output, part, MPI_FLOAT, MPI_COMM_WORLD);
  else if (!strcmp(name, "barrier"))
    MPI_Barrier(MPI_COMM_WORLD);
  else
    return 1;
  return 0;
}

int main(int argc, char** argv) {
  struct library library = {"mpi", 0, 0, NULL, call, NULL};
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &library.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &library.world_size);
  library.state = &library.world_size;
  driver_serve(&library);
  MPI_Finalize();
  return 0;
}
