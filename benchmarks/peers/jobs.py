"""Long-lived jobs that measure on command: starting them, asking them, ending them.

A job is N processes (ranks) of one library. Between commands each of them blocks in read() on a
FIFO, so an idle job uses no CPU and jobs of several libraries can take turns on the same cores.
driver.h has the protocol.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

MOST_TIMES = 1 << 16  # as in driver.h
START_SECONDS = 120.0
ANSWER_SECONDS = 120.0


class JobFailed(RuntimeError):
    """A rank ended, or did not answer in time; has what the job wrote to stderr."""


class Unsupported(RuntimeError):
    """The library has no such collective, or no such memory."""


@dataclass(frozen=True)
class Launch:
    """How a job is started: one command for all ranks (mpiexec), or one for each."""

    name: str
    command: Sequence[str]
    ranks: int
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: bool = True  # the command starts the ranks; else it is started once a rank


@dataclass(frozen=True)
class Command:
    """What a job measures; `shareable` asks for the library's own memory."""

    bytes: int
    iterations: int
    warmup: int = 1
    collective: str = "all_reduce"
    each: bool = False
    check: bool = False
    shareable: bool = False

    def line(self) -> str:
        mode = "each" if self.each else "batch"
        check = "check" if self.check else "-"
        memory = "shareable" if self.shareable else "ordinary"
        numbers = f"{self.bytes} {self.iterations} {self.warmup}"
        return f"{self.collective} {numbers} {mode} {check} {memory}\n"


@dataclass(frozen=True)
class Answer:
    """Seconds a call of the slowest rank, wrong elements and CPU seconds of all ranks."""

    seconds: np.ndarray
    wrong: int
    cpu: float


class Job:
    """Use as a context manager: leaving it ends the ranks and removes the FIFOs."""

    def __init__(self, launch: Launch, most_bytes: int) -> None:
        self.name = launch.name
        self._ranks = launch.ranks
        self._stack = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        with contextlib.ExitStack() as stack:
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix="pycoll-peers-"))
            self._directory = Path(made)
            self._log = stack.enter_context((self._directory / "log").open("w+b"))
            stack.callback(self._end)
            self._times = [self._make_rank_files(rank) for rank in range(launch.ranks)]
            self._start(launch, most_bytes)
            self._commands = [
                stack.enter_context(self._open_fifo(f"command.{rank}", os.O_WRONLY))
                for rank in range(launch.ranks)
            ]
            self._answers = [
                stack.enter_context(self._open_fifo(f"answer.{rank}", os.O_RDONLY))
                for rank in range(launch.ranks)
            ]
            self._collect(START_SECONDS)
            self._stack = stack.pop_all()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def pids(self) -> list[int]:
        """Of what was started: the launcher, or the ranks."""
        return [process.pid for process in self._processes]

    def run(self, command: Command) -> Answer:
        """Raises Unsupported, or JobFailed."""
        line = command.line().encode()
        for fifo in self._commands:
            fifo.write(line)
            fifo.flush()
        answers = self._collect(ANSWER_SECONDS)
        if any("unsupported" in answer for answer in answers):
            raise Unsupported(f"{self.name}: {line.decode().strip()}")
        count = answers[0]["times"]
        slowest = np.max([times[:count] for times in self._times], axis=0)
        return Answer(
            slowest,
            sum(answer["wrong"] for answer in answers),
            sum(answer["cpu"] for answer in answers),
        )

    def _make_rank_files(self, rank: int) -> np.ndarray:
        for kind in ("command", "answer"):
            os.mkfifo(self._directory / f"{kind}.{rank}")
        file = self._directory / f"times.{rank}"
        file.write_bytes(bytes(8 * MOST_TIMES))
        return np.memmap(file, dtype=np.float64, mode="r", shape=(MOST_TIMES,))

    def _start(self, launch: Launch, most_bytes: int) -> None:
        shared = {
            **os.environ,
            **launch.environment,
            "PEERS_DIRECTORY": str(self._directory),
            "PEERS_BYTES": str(most_bytes),
            "WORLD_SIZE": str(launch.ranks),
        }
        for rank in range(1 if launch.launcher else launch.ranks):
            process = subprocess.Popen(
                list(launch.command),
                env={**shared, "RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that the launcher's children can be ended with it
            )
            self._processes.append(process)

    def _open_fifo(self, name: str, how: int) -> IO[bytes]:
        """Opens one end when the rank has opened the other, and says so when it never does."""
        path = self._directory / name
        limit = time.monotonic() + START_SECONDS
        while how == os.O_WRONLY:
            try:
                descriptor = os.open(path, how | os.O_NONBLOCK)
                os.set_blocking(descriptor, True)
                return open(descriptor, "wb")
            except OSError:  # ENXIO: nobody reads yet
                self._check_alive(limit)
                time.sleep(0.02)
        return open(os.open(path, how | os.O_NONBLOCK), "rb", buffering=0)

    def _collect(self, seconds: float) -> list[dict[str, Any]]:
        """One line from each rank."""
        limit = time.monotonic() + seconds
        texts = [b""] * self._ranks
        open_ranks = set(range(self._ranks))
        while open_ranks:
            waiting = {self._answers[rank]: rank for rank in open_ranks}
            for fifo in select.select(list(waiting), [], [], 0.5)[0]:
                rank = waiting[fifo]
                texts[rank] += fifo.read() or b""
                if texts[rank].endswith(b"\n"):
                    open_ranks.remove(rank)
            if open_ranks:
                self._check_alive(limit)
        return [json.loads(text) for text in texts]

    def _check_alive(self, limit: float) -> None:
        if any(process.poll() is not None for process in self._processes):
            raise JobFailed(f"{self.name} has ended:\n{self._said()}")
        if time.monotonic() > limit:
            raise JobFailed(f"{self.name} does not answer:\n{self._said()}")

    def _said(self) -> str:
        return (self._directory / "log").read_text(errors="replace")[-3000:]

    def _end(self) -> None:
        """The FIFOs are closed by now, which ends a rank that still listens."""
        limit = time.monotonic() + 10
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, limit - time.monotonic()))
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
