"""Ranks as threads of one process: thousands of collectives a second, for sweeps.

The native part releases the GIL, so the threads really run side by side. Separate processes are
tested through pool.py; what is computed must not depend on which of the two it is.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pycoll

# A collective that waits for a peer which failed must give up before the test's own deadline.
GROUP_TIMEOUT = 30.0


class ThreadRanks:
    """A group of `world_size` ranks, each in a thread of its own; close() when done."""

    def __init__(
        self,
        world_size: int,
        options: dict[str, str] | pycoll.Options | None = None,
        timeout: float = GROUP_TIMEOUT,
    ) -> None:
        self.world_size = world_size
        self._pools = [ThreadPoolExecutor(1, f"rank{rank}") for rank in range(world_size)]
        self._directory = tempfile.mkdtemp(prefix="pycoll-threads-")
        store = pycoll.FileStore(self._directory)

        def connect(rank: int) -> pycoll.Communicator:
            return pycoll.Communicator(store, rank, world_size, timeout=timeout, options=options)

        self.communicators: list[pycoll.Communicator] = self._on_all(connect)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(communicator, *args)` on every rank at once; the values by rank."""
        return self._on_all(lambda rank: function(self.communicators[rank], *args))

    def _on_all(self, function: Callable[[int], Any]) -> list[Any]:
        futures = [pool.submit(function, rank) for rank, pool in enumerate(self._pools)]
        wait(futures)
        # One rank's failure makes the others fail: the first in time is not known, all are shown.
        errors = [(rank, f.exception()) for rank, f in enumerate(futures) if f.exception()]
        if errors:
            text = "\n".join(f"rank {rank}: {error!r}" for rank, error in errors)
            raise AssertionError(text) from errors[0][1]
        return [future.result() for future in futures]

    def close(self) -> None:
        for communicator in self.communicators:
            communicator.close()
        for pool in self._pools:
            pool.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)


class ThreadGroups:
    """Groups by (world size, options), each made once and used by many tests."""

    def __init__(self) -> None:
        self._groups: dict[Any, ThreadRanks] = {}

    def __call__(self, world_size: int, **options: Any) -> ThreadRanks:
        key = (world_size, tuple(sorted(options.items())))
        if key in self._groups and any(c._core.dead() for c in self._groups[key].communicators):
            self._groups.pop(key).close()  # an earlier test failed; this one starts afresh
        if key not in self._groups:
            variables = {name: str(value) for name, value in options.items()}
            self._groups[key] = ThreadRanks(world_size, variables)
        return self._groups[key]

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


def ends_by_itself(work: pycoll.Work, timeout: float = 20) -> float:
    """Looks until an operation has ended for which nobody waits; how long that took."""
    start = time.monotonic()
    while not work.is_completed():
        assert time.monotonic() < start + timeout
        time.sleep(0.01)
    return time.monotonic() - start
