"""The loop that the Python drivers share: driver.h, for Python. Needs NumPy only, because it also
runs in the peers' environments."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MOST_TIMES = 1 << 16

# One call on the whole of an array, in place.
Call = Callable[[], object]


@dataclass(frozen=True)
class Library:
    """What a library brings.

    `prepare(collective, array)` returns the call that is timed, or None when there is none.
    `shareable(bytes)` is an array of the library's own memory.
    """

    rank: int
    world_size: int
    prepare: Callable[[str, np.ndarray], Call | None]
    shareable: Callable[[int], np.ndarray] | None = None


def values(rank: int, elements: int) -> np.ndarray:
    """Small integers that depend on rank and position: their sums are exact in float32."""
    at = np.arange(elements, dtype=np.int64)
    return ((at * 7 + at // 3 + rank * 13) % 251).astype(np.float32)


def count_wrong(library: Library, call: Call, array: np.ndarray) -> int:
    array[:] = values(library.rank, array.size)
    call()
    expected = sum(values(rank, array.size) for rank in range(library.world_size))
    return int(np.count_nonzero(array != expected))


def measure(call: Call, iterations: int, each: bool, times: np.ndarray) -> int:
    """Returns how many times were written."""
    clock = time.perf_counter
    if not each:
        start = clock()
        for _ in range(iterations):
            call()
        times[0] = (clock() - start) / iterations
        return 1
    stamps = np.empty(iterations + 1)
    stamps[0] = clock()
    for at in range(iterations):
        call()
        stamps[at + 1] = clock()
    times[:iterations] = np.diff(stamps)
    return iterations


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Server:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._bytes = int(os.environ["PEERS_BYTES"])
        self._memory: dict[str, np.ndarray] = {}
        directory = Path(os.environ["PEERS_DIRECTORY"])
        self._directory = directory
        self._times = np.memmap(
            directory / f"times.{library.rank}", dtype=np.float64, mode="r+", shape=(MOST_TIMES,)
        )

    def serve(self) -> None:
        """Serves commands until the controller closes the FIFO."""
        rank = self._library.rank
        with (
            (self._directory / f"command.{rank}").open() as commands,
            (self._directory / f"answer.{rank}").open("w") as answers,
        ):
            answer: dict[str, Any] = {"ready": sys.argv[0]}
            while True:
                print(json.dumps(answer), file=answers, flush=True)
                line = commands.readline()
                if not line:
                    return
                answer = self._answer(line)

    def _answer(self, line: str) -> dict[str, Any]:
        collective, size, iterations, warmup, mode, check, memory = line.split()
        array = self._array(memory, int(size))
        call = None if array is None else self._library.prepare(collective, array)
        if array is None or call is None:
            return {"unsupported": True}
        before = cpu_seconds()
        wrong = written = 0
        if check == "check":
            wrong = count_wrong(self._library, call, array)
        else:
            for _ in range(int(warmup)):
                call()
            written = measure(call, int(iterations), mode == "each", self._times)
        return {"times": written, "wrong": wrong, "cpu": cpu_seconds() - before}

    def _array(self, memory: str, size: int) -> np.ndarray | None:
        if memory not in self._memory:
            shareable = self._library.shareable
            if memory == "shareable":
                if shareable is None:
                    return None
                whole = shareable(self._bytes).view(np.float32)
            else:
                whole = np.empty(self._bytes // 4, np.float32)
            whole[:] = np.arange(whole.size) % 251 + 1
            self._memory[memory] = whole
        return self._memory[memory][: size // 4]


def serve(library: Library) -> None:
    Server(library).serve()
