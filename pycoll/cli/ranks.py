"""Ranks on this machine for a command: a function runs on each, rank 0's value comes back."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any

from pycoll.cli.usage import UsageError

LONGEST_SECONDS = 1800.0  # a rank that hangs must not hang the command


def on_local_ranks(
    count: int, function: Callable[..., Any], *args: Any, variables: Mapping[str, str] | None = None
) -> Any:
    """`function(communicator, *args)` on `count` fresh processes; the value that rank 0 returned.

    What is measured is pycoll, not the rules that happen to be in force: PYCOLL_ALGO and
    PYCOLL_TABLE do not count. `variables` are the group's own PYCOLL_* variables. `function` and
    `args` are pickled. Raises UsageError when a rank fails, which has said why on stderr, or when
    they take longer than LONGEST_SECONDS. No process is left in any case.
    """
    deadline = time.monotonic() + LONGEST_SECONDS
    with started(count, (dict(variables or {}), function, args)) as (processes, receiver):
        waiting = [receiver, *(process.sentinel for process in processes)]
        while time.monotonic() < deadline:
            if receiver in connection.wait(waiting, 1.0):
                try:
                    value = receiver.recv()
                except EOFError:
                    break
                for process in processes:
                    process.join(10)
                return value
            if any(process.exitcode not in (None, 0) for process in processes):
                break
    raise UsageError(f"a rank of {count} failed; what it said stands above")


@contextmanager
def started(count: int, work: tuple[Any, ...]) -> Iterator[tuple[list[Any], Any]]:
    """The processes, and the pipe on which rank 0 reports."""
    context = multiprocessing.get_context("spawn")  # the caller may have threads
    receiver, sender = context.Pipe(duplex=False)
    processes: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="pycoll-ranks-") as folder, receiver:
        try:
            with without_torch():
                for rank in range(count):
                    arguments = (rank, count, folder, sender, *work)
                    processes.append(context.Process(target=rank_process, args=arguments))
                    processes[-1].start()
            sender.close()  # so that end-of-file says that rank 0 is gone
            yield processes, receiver
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


@contextmanager
def without_torch() -> Iterator[None]:
    """Processes that are started inside do not import torch, which takes seconds."""
    before = os.environ.get("PYCOLL_TORCH")
    os.environ["PYCOLL_TORCH"] = "0"
    try:
        yield
    finally:
        os.environ.pop("PYCOLL_TORCH")
        if before is not None:
            os.environ["PYCOLL_TORCH"] = before


def rank_process(
    rank: int,
    world_size: int,
    folder: str,
    sender: Any,
    variables: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import pycoll

    options = pycoll.Options(algo="", table="builtin", variables=variables)
    store = pycoll.FileStore(folder)
    with pycoll.Communicator(store, rank, world_size, options=options) as group:
        value = function(group, *args)
    if rank == 0:
        sender.send(value)
