"""One rank of a pycoll job that measures on command (driver.py), from Python.

    pycoll_driver.py direct    pycoll.all_reduce on a torch tensor over the NumPy array's memory
    pycoll_driver.py array     pycoll.Communicator.all_reduce on the NumPy array, without torch

Environment: RANK, WORLD_SIZE, PEERS_DIRECTORY.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from driver import Call, Library, serve

import pycoll


def shareable(size: int) -> np.ndarray:
    return pycoll.empty_array((size,), np.uint8)


def serve_arrays(rank: int, world_size: int, store: str) -> None:
    group = pycoll.Communicator(pycoll.FileStore(store), rank, world_size)

    def prepare(collective: str, array: np.ndarray) -> Call | None:
        if collective != "all_reduce":
            return None
        all_reduce = group.all_reduce
        return lambda: all_reduce(array)

    own = shareable if hasattr(pycoll, "empty_array") else None
    serve(Library(rank, world_size, prepare, own))


def serve_direct(rank: int, world_size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "pycoll", init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    direct = getattr(pycoll, "all_reduce", None)

    def prepare(collective: str, array: np.ndarray) -> Call | None:
        if collective != "all_reduce" or direct is None:
            return None
        tensor = torch.from_numpy(array)
        return lambda: direct(tensor)

    own = shareable if hasattr(pycoll, "empty_array") else None
    try:
        serve(Library(rank, world_size, prepare, own))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    how = {"direct": serve_direct, "array": serve_arrays}[sys.argv[1]]
    place = os.path.join(os.environ["PEERS_DIRECTORY"], "store")
    how(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), place)
