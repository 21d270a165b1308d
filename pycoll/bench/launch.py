"""Starts the ranks of a benchmark on this machine, or takes part in those that torchrun started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pycoll.bench.plan import Plan, Row

# Imported once, in the server that ranks are forked from; torch alone takes 1.6 s of CPU a process.
PRELOAD = ["torch", "torch.distributed", "pycoll.bench.measure"]


class RankFailed(RuntimeError):
    """A rank raised (the message has its traceback) or died; the others were ended."""


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def measure(plan: Plan, ranks: int) -> Iterator[Row]:
    """Runs `ranks` processes and yields each size's row as it comes.

    Raises RankFailed.
    """
    from torch.multiprocessing.spawn import ProcessException

    try:
        yield from _measure(plan, ranks)
    except ProcessException as error:
        raise RankFailed(str(error).strip()) from None


def _measure(plan: Plan, ranks: int) -> Iterator[Row]:
    import torch.multiprocessing as mp

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="pycoll-bench-") as directory, receiver:
        running = mp.start_processes(
            run_rank,
            args=(ranks, directory, plan, sender),
            nprocs=ranks,
            join=False,
            start_method="forkserver",
        )
        sender.close()  # so that end-of-file says that rank 0 is gone
        yield from rows_until_the_end(running, receiver)


def rows_until_the_end(running: Any, rows: Connection) -> Iterator[Any]:
    """What rank 0 sends until all have ended; raises what torch does when a rank failed.

    `running` is what torch.multiprocessing started without joining, `rows` the end that receives.
    """
    with contextlib.suppress(EOFError):
        while True:
            if rows.poll(0.2):
                yield rows.recv()
            else:
                running.join(timeout=0)  # raises when a rank failed
    while not running.join():
        pass


def run_rank(rank: int, ranks: int, directory: str, plan: Plan, rows: Connection) -> None:
    """One rank; rank 0 sends a Row for each size through `rows`."""
    import torch.distributed as dist

    store = dist.FileStore(str(Path(directory) / "store"), ranks)
    _in_group(plan, rows.send, store=store, rank=rank, world_size=ranks)


def take_part(plan: Plan) -> list[Row]:
    """This process's part of a run under torchrun; the rows in rank 0, nothing in the others."""
    rows: list[Row] = []
    _in_group(plan, rows.append)
    return rows


def _in_group(plan: Plan, report: Any, **arguments: Any) -> None:
    import torch.distributed as dist

    from pycoll.bench.measure import run

    dist.init_process_group("gloo", timeout=timedelta(seconds=plan.timeout), **arguments)
    try:
        run(plan, report)
    finally:
        dist.destroy_process_group()
