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
from helpers_shareable import shareable
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

# Those whose vectors are blocks, one or one a rank; the others cut one vector.
BLOCKS = {
    "all_gather": ("one", "world"),
    "reduce_scatter": ("world", "one"),
    "gather": ("one", "world"),
    "scatter": ("world", "one"),
    "all_to_all": ("world", "world"),
}

Array = npt.NDArray[np.float32]


@dataclass
class Shape:
    """Sizes such that every chunk has exactly `ROUNDS` slices, by message and by window alike."""

    slice: int
    count: int  # elements of a block

    @classmethod
    def of(cls, program: Program) -> Shape:
        slice_ = WINDOW_BYTES // max(program.window_chunks, 4) // 4 // 16 * 16
        blocks = program.collective in BLOCKS
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


@dataclass
class Vectors:
    """A rank's blocks for one call, and what its outputs must hold; sums are exact."""

    inputs: list[Array]
    outputs: list[Array]
    expected: list[Array]

    @classmethod
    def of(cls, program: Program, count: int) -> Vectors:
        w, rank, root = program.world_size, program.rank, program.root
        collective = program.collective
        parts = w if BLOCKS.get(collective, ("", ""))[0] == "world" else 1
        everybody = [data_of(r, parts * count).reshape(parts, count) for r in range(w)]
        if program.needs_lease:
            everybody[rank] = shareable(everybody[rank])
        total = np.sum(everybody, axis=0, dtype=np.float32)
        expected = {
            "all_reduce": total,
            "reduce": total,
            "reduce_scatter": total[rank % parts : rank % parts + 1],
            "broadcast": everybody[root],
            "all_gather": np.concatenate(everybody),
            "gather": np.concatenate(everybody),
            "scatter": everybody[root][rank % parts : rank % parts + 1],
            "all_to_all": np.stack([blocks[rank % parts] for blocks in everybody]),
        }[collective]
        if collective in ("reduce", "gather") and rank != root:
            expected = expected[:0]
        inputs = list(everybody[rank]) if collective != "scatter" or rank == root else []
        # In place where input and output are alike: the harder case.
        alike = collective not in BLOCKS
        outputs = inputs[: len(expected)] if alike else list(np.zeros_like(expected))
        return cls(inputs, outputs, [row.copy() for row in expected])

    def run(self, group: pycoll.Communicator, program: Program, algorithm: str = "auto") -> bool:
        """Whether this rank's result is right."""
        reduces = "reduce" in program.collective
        kept = [block.copy() for block in self.inputs]
        group._core.run(
            _core.Call(
                collective=program.collective,
                inputs=self.inputs,
                outputs=self.outputs,
                dtype="float32",
                op="sum" if reduces else "none",
                factor=1.0,
                root=program.root,
                algorithm=algorithm,
                timeout=None,
                on_result=None,
            )
        )
        if program.collective in ("reduce", "gather") and not self.outputs:
            return all((a == b).all() for a, b in zip(self.inputs, kept, strict=True))
        return all((a == b).all() for a, b in zip(self.outputs, self.expected, strict=True))


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
            vectors = Vectors.of(programs[rank], shape.count)
            results[rank] = vectors.run(group, programs[rank])
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
    verdict = _core.check(programs, depth=depth, rounds=ROUNDS, in_place=True, draws=0)
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
