"""Runs a test function on N ranks, each a process forked from one warm server.

Importing torch costs 1.6 s of CPU a process, so a server imports it once and every rank is forked
from there in milliseconds. Each call makes fresh processes: no state leaks between tests.

    def sum_ranks(communicator): ...                       # module level: it travels by name
    results = communicator_ranks(4, sum_ranks, timeout=20)
    assert [result.value for result in results] == ...

A call has a deadline. When it passes, the ranks of that call (and what they started), and no other
process, are killed, and the error shows where each of them was stuck.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

# pytest and hypothesis too: the rank imports the test's module to find its function. The first
# forward of DDP imports torch._dynamo, and so does FSDP: seconds, here once and not in each rank.
PRELOAD = ["torch", "torch.distributed", "numpy", "pycoll", "pytest", "hypothesis"]
PRELOAD += ["torch._dynamo"]
PR_SET_PDEATHSIG = 1
# How long a stuck rank gets to write its Python stacks before it is killed.
STACK_SECONDS = 1.0
# With check=True: how long the others may go on once a rank has failed. They mostly wait for it.
GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class RankError:
    """An exception that ended a rank's function, as text: it may be of a class we cannot pickle."""

    types: tuple[str, ...]  # the exception's class and its bases, most derived first
    message: str
    traceback: str

    @property
    def type(self) -> str:
        return self.types[0]

    def is_a(self, name: str) -> bool:
        """Whether the class or one of its bases has this name, with or without its module."""
        return any(name in (full, full.rsplit(".", 1)[-1]) for full in self.types)


@dataclass
class RankResult:
    """What became of one rank."""

    rank: int
    value: Any = None
    error: RankError | None = None
    exitcode: int | None = None  # negative: killed by that signal
    stderr: str = ""  # all that the process wrote there, native code included
    stuck: bool = False  # the deadline passed, and the pool killed it
    stack: str = ""  # where it was then

    @property
    def failed(self) -> bool:
        return self.error is not None or self.exitcode != 0 or self.stuck

    def report(self) -> str:
        state = "stuck, killed at the deadline" if self.stuck else f"exit code {self.exitcode}"
        if not self.failed:
            state = "ok"
        parts = [f"--- rank {self.rank}: {state}"]
        if self.error:
            parts.append(self.error.traceback.rstrip())
        if self.stack:
            parts.append(self.stack.rstrip())
        if self.stderr and self.failed:
            parts.append(f"stderr:\n{self.stderr.rstrip()}")
        return "\n".join(parts)


class RanksFailed(AssertionError):
    """One or more ranks raised, died or were stuck; `results` has every rank's fate."""

    def __init__(self, message: str, results: list[RankResult]) -> None:
        super().__init__(message + "\n" + "\n".join(result.report() for result in results))
        self.results = results


@dataclass
class _Task:
    """What a rank's process needs to know; pickled into it."""

    rank: int
    world_size: int
    directory: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    env: dict[str, str] = field(default_factory=dict)

    def file(self, kind: str) -> Path:
        return Path(self.directory) / f".rank{self.rank}.{kind}"


def _describe(error: BaseException) -> RankError:
    names = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__)
    return RankError(names, str(error), traceback.format_exc())


def _prepare_process(task: _Task) -> None:
    # The group lets the pool kill what a rank started along with it; the death signal lets no rank
    # outlive the server, which itself ends with the test run, however that ends.
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A shell that starts the tests in the background makes them ignore it, and ranks after them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stderr = os.open(task.file("stderr"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(stderr, 2)
    os.close(stderr)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    stack = task.file("stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    task.file("ready").touch()
    os.environ.update(task.env)


def _run_rank(task: _Task, channel: connection.Connection) -> None:
    _prepare_process(task)
    try:
        value = task.function(task.rank, task.world_size, task.directory, *task.args)
        channel.send((value, None))
    except BaseException as error:
        channel.send((None, _describe(error)))
    finally:
        sys.stderr.flush()


class _Rank:
    """The parent's side of one rank."""

    def __init__(self, context: Any, task: _Task) -> None:
        self.task = task
        self.result = RankResult(task.rank)
        self.channel, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_run_rank, args=(task, theirs))
        self.process.start()
        theirs.close()  # so that end-of-file says the rank is gone
        self.receiving = True

    def waits_for(self) -> list[Any]:
        waits: list[Any] = [self.channel] if self.receiving else []
        return [*waits, self.process.sentinel] if self.process.exitcode is None else waits

    def receive(self) -> None:
        """Takes the result, if it is there; an exit without one leaves both fields empty."""
        if not self.receiving or not self.channel.poll():
            return
        self.receiving = False
        try:
            self.result.value, self.result.error = self.channel.recv()
        except EOFError:
            pass
        except Exception as error:  # a value that cannot be unpickled here
            self.result.error = _describe(error)

    def has_failed(self) -> bool:
        return self.result.error is not None or self.process.exitcode not in (None, 0)

    def ask_for_stack(self) -> None:
        self.result.stuck = True
        # Before the handler is installed the signal would end the process without a word.
        if self.task.file("ready").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR1)

    def stack_size(self) -> int:
        file = self.task.file("stack")
        return file.stat().st_size if file.exists() else 0

    def kill(self) -> None:
        """Ends this rank, and what it started, if it still runs. Safe to call again."""
        if self.process.exitcode is not None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()  # killed before it made its group
        self.process.join()

    def finish(self) -> RankResult:
        self.receive()
        self.process.join()
        self.result.exitcode = self.process.exitcode
        for kind in ("stderr", "stack"):
            file = self.task.file(kind)
            text = file.read_text(errors="replace") if file.exists() else ""
            setattr(self.result, kind, text)
        self.channel.close()
        return self.result


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _wait(ranks: list[_Rank], deadline: float, check: bool) -> None:
    """Until every rank has ended, or the deadline."""
    while pending := [item for rank in ranks for item in rank.waits_for()]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return
        connection.wait(pending, remaining)
        for rank in ranks:
            rank.receive()
        if check and any(rank.has_failed() for rank in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            check = False  # the deadline moves once


def _stop_stuck(ranks: list[_Rank]) -> list[int]:
    """Kills the ranks that still run, after they have said where they are."""
    stuck = [rank for rank in ranks if rank.process.exitcode is None]
    for rank in stuck:
        rank.ask_for_stack()
    deadline = time.monotonic() + STACK_SECONDS
    seen: list[int] = []
    while stuck and time.monotonic() < deadline:
        time.sleep(0.03)
        sizes = [rank.stack_size() for rank in stuck]
        if all(sizes) and sizes == seen:
            break  # all have written, and none is still writing
        seen = sizes
    for rank in stuck:
        rank.kill()
    return [rank.task.rank for rank in stuck]


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 30,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> list[RankResult]:
    """Calls `function(rank, world_size, directory, *args)` in `world_size` fresh processes.

    Args:
        function: module-level (it travels by name); its return value is pickled back.
        timeout: seconds for the whole call, exit of the processes included.
        env: environment variables, set before the function runs (but after torch and pycoll were
            imported: what they read at import time does not see them).
        check: raise RanksFailed with every rank's traceback unless all ranks ended well. The others
            then get 10 s more once a rank has failed; with check=False they have the whole timeout.

    `directory` is fresh and shared by the ranks (for a FileStore), removed afterwards.
    """
    directory = tempfile.mkdtemp(prefix="pycoll-ranks-")
    # One thread a rank, as a launcher does: the tests run more ranks than there are CPUs.
    variables = {"OMP_NUM_THREADS": "1", **(env or {})}
    deadline = time.monotonic() + timeout
    ranks: list[_Rank] = []
    try:
        for rank in range(world_size):
            task = _Task(rank, world_size, directory, function, args, variables)
            ranks.append(_Rank(_context(), task))
        _wait(ranks, deadline, check)
        stuck = _stop_stuck(ranks)
        results = [rank.finish() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        shutil.rmtree(directory, ignore_errors=True)
    if check and any(result.failed for result in results):
        failed = [result.rank for result in results if result.failed]
        message = f"ranks {failed} of {world_size} failed in {function.__name__}"
        if stuck:
            message += f"; stuck and killed: {stuck} (timeout {timeout:g} s)"
        raise RanksFailed(message, results)
    return results


def _with_process_group(
    rank: int,
    world_size: int,
    directory: str,
    function: Callable[..., Any],
    backend: str,
    group_timeout: float,
    prepare: Callable[[int], Any] | None,
    args: tuple[Any, ...],
) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if prepare is not None:
        prepare(rank)
    store = dist.FileStore(os.path.join(directory, "c10d-store"), world_size)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=group_timeout),
    )
    try:
        return function(rank, world_size, *args)
    finally:
        dist.destroy_process_group()


def torch_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "pycoll",
    group_timeout: float = 20,
    prepare: Callable[[int], Any] | None = None,
    **options: Any,
) -> list[RankResult]:
    """`function(rank, world_size, *args)` with the default process group made; see `run_ranks`.

    `prepare(rank)` runs before that.
    """
    arguments = (function, backend, group_timeout, prepare, args)
    return run_ranks(world_size, _with_process_group, *arguments, **options)


def _with_communicator(
    rank: int, world_size: int, directory: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    import pycoll

    store = pycoll.FileStore(os.path.join(directory, "store"), timeout=20)
    return function(pycoll.Communicator(store, rank, world_size), *args)


def communicator_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, **options: Any
) -> list[RankResult]:
    """`function(communicator, *args)` over a pycoll.FileStore, without torch; see `run_ranks`."""
    return run_ranks(world_size, _with_communicator, function, args, **options)


def alone(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`function(*args)` in one process of the pool, without a group; what it returned."""
    return run_ranks(1, _alone, function, args, **options)[0].value


def _alone(
    rank: int, world_size: int, directory: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    import torch

    torch.set_num_threads(1)  # a forked child does not have its parent's
    return function(*args)
