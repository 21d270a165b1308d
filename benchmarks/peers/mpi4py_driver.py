"""One rank of an MPI job that measures on command (driver.py), through mpi4py on NumPy arrays."""

from __future__ import annotations

import numpy as np
from driver import Call, Library, serve
from mpi4py import MPI


def prepare(collective: str, array: np.ndarray) -> Call | None:
    if collective != "all_reduce":
        return None
    all_reduce, in_place = MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE
    return lambda: all_reduce(in_place, array)


if __name__ == "__main__":
    serve(Library(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), prepare))
