"""Every collective by every algorithm through the core alone, in many slices and in one.

The reference is NumPy on all ranks' inputs. Blocks of different lengths run in the stress driver.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from helpers_threads import ThreadGroups, ThreadRanks
from pycoll import _core
from test_checker_against_executor import Vectors

ROWS = [(c, a.name) for c in _core.collectives() if c != "barrier" for a in _core.algorithms(c)]
SMALL = {"PYCOLL_SLOT_BYTES": 64, "PYCOLL_WINDOW_BYTES": 4096, "PYCOLL_FIFO_DEPTH": 2}


def call(collective: str, inputs, outputs, root: int = 0, algorithm: str = "auto"):
    return _core.Call(
        collective=collective,
        inputs=inputs,
        outputs=outputs,
        dtype="float32",
        op="sum" if "reduce" in collective else "none",
        factor=1.0,
        root=root,
        algorithm=algorithm,
        timeout=None,
        on_result=None,
    )


@pytest.mark.parametrize(("collective", "algorithm"), ROWS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("options", [{}, SMALL], ids=["default", "small_slices"])
def test_against_numpy(groups: ThreadGroups, collective, algorithm, world_size, options) -> None:
    def body(communicator, root: int, count: int) -> bool:
        programs = _core.build_programs(collective, algorithm, world_size, root)
        vectors = Vectors.of(programs[communicator.rank], count)
        return vectors.run(communicator, programs[communicator.rank], algorithm)

    ranks = groups(world_size, **options)
    for root, count in itertools.product(range(world_size), (0, 1, 2, 17, 33, 300)):
        assert ranks.run(body, root, count) == [True] * world_size, (root, count)


@pytest.mark.parametrize("count", [1, 100, 5000])
def test_lengths_that_a_pair_does_not_share(count: int) -> None:
    """Both ranks are told, however the slices fall."""
    for longer in (count + 1, 2 * count):
        ranks = ThreadRanks(2, {name: str(value) for name, value in SMALL.items()})

        def body(communicator, longer: int = longer) -> str:
            n = (count, longer)[communicator.rank]
            blocks = [np.zeros(n, np.float32) for _ in range(4)]
            try:
                communicator._core.run(call("all_to_all", blocks[:2], blocks[2:]))
            except _core.Error as error:
                return f"{type(error).__name__}: {error}"
            return "fine"

        try:
            texts = ranks.run(body)
        finally:
            ranks.close()
        assert any("another length than the" in text for text in texts), texts
        assert not any(text == "fine" for text in texts), texts


@pytest.mark.parametrize(
    ("collective", "inputs", "outputs", "text"),
    [
        ("all_reduce", 2, 1, "input has 2 blocks, not 1"),
        ("all_gather", 1, 1, "output has 1 blocks, not 3"),
        ("all_to_all", 3, 2, "output has 2 blocks, not 3"),
        ("reduce", 1, 1, "output has 1 blocks, not 0"),
        ("gather", 1, 3, "output has 3 blocks, not 0"),
        ("scatter", 3, 1, "input has 3 blocks, not 0"),
        ("broadcast", 2, 1, "input has 2 blocks, not 1"),
    ],
)
def test_blocks_that_do_not_fit(
    groups: ThreadGroups, collective: str, inputs: int, outputs: int, text: str
) -> None:
    """Refused by the rank that gave them, before anything happens: here by all but the root."""

    def body(communicator) -> str:
        if communicator.rank == 0 and collective in ("reduce", "gather", "scatter", "broadcast"):
            return text  # there it may be right
        blocks = [np.zeros(4, np.float32) for _ in range(inputs + outputs)]
        with pytest.raises(_core.InvalidArgumentError) as error:
            communicator._core.run(call(collective, blocks[:inputs], blocks[inputs:]))
        return str(error.value)

    for answer in groups(3).run(body):
        assert text in answer
