"""Two thousand random mutations of Programs, in the real executor over real shared memory.

What the checker accepts computes right; what it calls a deadlock times out. Ranks are threads; each
mutant gets a group of its own, because a deadlock is the end of a group.
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

import pycoll
from pycoll import _core
from pycoll._core import Program
from test_checker_against_machine import ROWS, mutants

TOTAL = 2000
ROUNDS = 3
WINDOW_BYTES = 4096
# A loaded machine must not fake a deadlock where there is none; a real one lasts for ever, so it is
# not missed however short the wait, and hundreds of them must fit.
PATIENCE = 30.0
DEADLOCK_PATIENCE = 0.2
AT_ONCE = 4

Array = npt.NDArray[np.float32]


@dataclass
class Shape:
    """Sizes such that every chunk has exactly `ROUNDS` slices, by message and by window alike."""

    slice: int
    count: int  # elements of the smaller vector: of one block for all_gather and reduce_scatter

    @classmethod
    def of(cls, program: Program) -> Shape:
        slice_ = WINDOW_BYTES // max(program.window_chunks, 4) // 4 // 16 * 16
        blocks = program.collective in ("all_gather", "reduce_scatter")
        chunks = 1 if blocks else max(program.input_chunks, program.output_chunks)
        return cls(slice_, slice_ * ROUNDS * chunks)

    def options(self, depth: int, window_chunks: int) -> dict[str, str]:
        window = self.slice * 4 * max(window_chunks, 1)
        return {
            "PYCOLL_SLOT_BYTES": str(self.slice * 4),
            "PYCOLL_WINDOW_BYTES": str(max(4096, (window + 63) // 64 * 64)),
            "PYCOLL_FIFO_DEPTH": str(depth),
        }


def data_of(rank: int, count: int) -> Array:
    return np.random.default_rng(rank).integers(-1000, 1000, count).astype(np.float32)


def call(group: pycoll.Communicator, collective: str, count: int) -> bool:
    """Runs the collective; whether this rank's result is right."""
    w, rank = group.world_size, group.rank
    if collective == "all_reduce":
        array = data_of(rank, count)
        group.all_reduce(array)
        return bool((array == sum(data_of(r, count) for r in range(w))).all())
    if collective == "all_gather":
        output = np.zeros((w, count), np.float32)
        group.all_gather(output, data_of(rank, count))
        return all((output[r] == data_of(r, count)).all() for r in range(w))
    if collective == "reduce_scatter":
        result = np.zeros(count, np.float32)
        group.reduce_scatter(result, data_of(rank, w * count).reshape(w, count))
        whole = sum(data_of(r, w * count) for r in range(w))
        return bool((result == np.asarray(whole).reshape(w, count)[rank]).all())
    array = data_of(rank, count)
    group.broadcast(array, root=0)
    return bool((array == data_of(0, count)).all())


def run_mutant(programs: list[Program], depth: int, patience: float) -> list[object]:
    """Each rank's result: True, False, or the exception."""
    world_size = len(programs)
    shape = Shape.of(programs[0])
    results: list[object] = [None] * world_size
    finished = threading.Barrier(world_size)

    def rank_main(rank: int, directory: str) -> None:
        group = pycoll.Communicator(
            pycoll.FileStore(directory),
            rank,
            world_size,
            timeout=patience,
            options=shape.options(depth, programs[0].window_chunks),
        )
        try:
            group._core.override_program(programs[rank])
            results[rank] = call(group, programs[0].collective, shape.count)
        except pycoll.Error as error:
            results[rank] = error
        finally:
            # A rank that left would be an error of its own to those that still wait.
            finished.wait(timeout=4 * PATIENCE)
            group.close()

    with tempfile.TemporaryDirectory() as directory:
        threads = [
            threading.Thread(target=rank_main, args=(rank, directory)) for rank in range(world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def judge(programs: list[Program], depth: int) -> tuple[str, str | None]:
    """The checker's verdict, and what the executor did that disagrees with it."""
    verdict = _core.check(programs, depth=depth, rounds=ROUNDS, in_place=True)
    if verdict.ok:
        results = run_mutant(programs, depth, PATIENCE)
        if results != [True] * len(programs):
            return verdict.kind, f"accepted, but the ranks got {results}"
    elif verdict.kind == "deadlock":
        results = run_mutant(programs, depth, DEADLOCK_PATIENCE)
        if not any(isinstance(result, pycoll.TimeoutError) for result in results):
            return verdict.kind, f"{verdict.message}, but the ranks got {results}"
    return verdict.kind, None


@pytest.mark.timeout(600)
def test_mutants_in_the_executor() -> None:
    each = -(-TOTAL // len(ROWS))
    jobs = [
        (collective, algorithm, number, programs)
        for collective, algorithm in ROWS
        for number, programs in enumerate(mutants(collective, algorithm, each))
    ]
    assert len(jobs) >= TOTAL
    with ThreadPoolExecutor(AT_ONCE) as pool:
        verdicts = list(pool.map(lambda job: judge(job[3], depth=2 << job[2] % 2), jobs))
    seen = Counter(kind for kind, _ in verdicts)
    disagreements = [
        (collective, algorithm, number, text)
        for (collective, algorithm, number, _), (_, text) in zip(jobs, verdicts, strict=True)
        if text is not None
    ]
    assert not disagreements, f"{len(disagreements)}: {disagreements[:3]}"
    # The sample has enough of both, or it shows nothing.
    assert seen["ok"] >= 300 and seen["deadlock"] >= 100, seen
