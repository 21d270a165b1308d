"""How much CPU a rank uses that waits in a call for a peer that is late."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException

import pycoll  # noqa: F401  registers the backend
from pycoll.bench.launch import PRELOAD, RankFailed


def wait_for_work() -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()


def message(send: bool) -> None:
    dist.send(torch.ones(1), 0) if send else dist.recv(torch.ones(1), 1)


# What rank 0 waits in, and what rank 1 does at last.
CALLS: dict[str, Callable[[int], Any]] = {
    "all_reduce": lambda rank: dist.all_reduce(torch.ones(1)),
    "work.wait()": lambda rank: wait_for_work(),
    "recv": lambda rank: message(send=rank == 1),
}


def run_rank(rank: int, directory: str, seconds: float, runs: int, results: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), 2)
    limit = timedelta(seconds=60 + seconds)
    dist.init_process_group("pycoll", store=store, rank=rank, world_size=2, timeout=limit)
    used: dict[str, list[float]] = {name: [] for name in CALLS}
    for name, call in list(CALLS.items()) * runs:
        dist.barrier()
        if rank == 1:
            time.sleep(seconds)
        start = time.process_time()  # of all threads
        call(rank)
        used[name].append((time.process_time() - start) * 1e3)
    if rank == 0:
        results.send(used)
    dist.destroy_process_group()


def cpu_of_a_waiting_rank(seconds: float, runs: int) -> dict[str, list[float]]:
    """Milliseconds of CPU of rank 0 by call and run, where rank 1 comes `seconds` later.

    Raises RankFailed.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="pycoll-idle-") as directory, receiver:
        arguments = (directory, seconds, runs, sender)
        try:
            mp.start_processes(run_rank, arguments, nprocs=2, start_method="forkserver")
        except ProcessException as error:
            raise RankFailed(str(error)) from None
        used: dict[str, list[float]] = receiver.recv()
        return used
