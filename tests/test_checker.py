"""The prover accepts every algorithm: world sizes, roots, hosts, lengths, FIFO depths."""

from __future__ import annotations

import re

import pytest

from pycoll import _core

ROWS = [(c, a) for c in _core.collectives() for a in _core.algorithms(c)]
ROW_IDS = [f"{c}-{a.name}" for c, a in ROWS]
PLACE = r"rank \d+, lane \d+, step \d+ \("

Rows = pytest.mark.parametrize(("collective", "row"), ROWS, ids=ROW_IDS)


ROOTED = ("broadcast", "reduce", "gather", "scatter")
# Every rank with every other: as many FIFOs as pairs, too many for the largest worlds.
PAIRWISE = ("direct",)


def topologies(world_size: int) -> list[list[int]]:
    """Hosts of the ranks, numbered by first appearance."""
    numbered = [
        [r * 2 // world_size for r in range(world_size)],  # equal halves
        [r % 2 for r in range(world_size)],  # interleaved
        [0] * (world_size - 1) + [1],  # all but one
        [0] + [1] * (world_size - 1),
        [r % 3 for r in range(world_size)],
        [min(r, 2) for r in range(world_size)],  # one, one and the rest
        [(r // 2) % 3 if r < 6 else 0 for r in range(world_size)],
        list(range(world_size)),  # a host each
        [0] * world_size,
    ]
    return [hosts for i, hosts in enumerate(numbered) if hosts not in numbered[:i]]


def prove(collective: str, row: _core.AlgorithmInfo, world_sizes: range, rounds: int) -> None:
    for world_size in world_sizes:
        roots = {0, world_size // 2, world_size - 1} if collective in ROOTED else {0}
        for root in roots:
            programs = _core.build_programs(collective, row.name, world_size, root)
            for depth in {row.min_depth, 2, 4}:
                result = _core.check(programs, depth=depth, rounds=rounds, seed=world_size)
                assert result.ok, (world_size, root, depth, result)
                assert result.kind == "ok"
                assert result.message == ""


@Rows
@pytest.mark.parametrize("rounds", [1, 3])
def test_every_world_size_to_32(collective: str, row: _core.AlgorithmInfo, rounds: int) -> None:
    prove(collective, row, range(1, 33), rounds)


@pytest.mark.full
@Rows
@pytest.mark.parametrize("rounds", [1, 3])
def test_every_world_size_to_64(collective: str, row: _core.AlgorithmInfo, rounds: int) -> None:
    prove(collective, row, range(33, 65), rounds)


@Rows
@pytest.mark.parametrize("world_size", [65, 100, 128])
def test_larger_worlds(collective: str, row: _core.AlgorithmInfo, world_size: int) -> None:
    programs = _core.build_programs(collective, row.name, world_size, root=world_size // 3 % 2)
    result = _core.check(programs, depth=row.min_depth)
    assert result.ok, result


@pytest.mark.full
@Rows
@pytest.mark.parametrize("world_size", [127, 255, 1024])
def test_large_worlds(collective: str, row: _core.AlgorithmInfo, world_size: int) -> None:
    if row.name in PAIRWISE and world_size > 255:
        pytest.skip("a million FIFOs")
    result = _core.check(
        _core.build_programs(collective, row.name, world_size), depth=row.min_depth
    )
    assert result.ok, result


@pytest.mark.parametrize(
    ("collective", "row"),
    [(c, a) for c, a in ROWS if c in ROOTED],
    ids=lambda x: getattr(x, "name", x),
)
def test_every_root(collective: str, row: _core.AlgorithmInfo) -> None:
    for world_size in range(1, 14):
        for root in range(world_size):
            programs = _core.build_programs(collective, row.name, world_size, root)
            for in_place in (False, True):
                result = _core.check(programs, row.min_depth, in_place=in_place)
                assert result.ok, (world_size, root, in_place, result)


@Rows
def test_every_topology(collective: str, row: _core.AlgorithmInfo) -> None:
    for world_size in (*range(2, 10), 12, 17):
        for hosts in topologies(world_size):
            for root in {0, world_size - 1} if collective in ROOTED else {0}:
                programs = _core.build_programs(collective, row.name, world_size, root, hosts)
                for depth in {row.min_depth, 4}:
                    result = _core.check(programs, depth)
                    assert result.ok, (world_size, hosts, root, depth, result)


@pytest.mark.parametrize(
    ("collective", "row"),
    [(c, a) for c, a in ROWS if c in ("all_gather", "reduce_scatter", "all_to_all")],
    ids=lambda x: getattr(x, "name", x),
)
def test_blocks_of_any_lengths(collective: str, row: _core.AlgorithmInfo) -> None:
    for world_size in (2, 3, 4, 5, 8, 11):
        programs = _core.build_programs(collective, row.name, world_size)
        for rounds in (1, 2, 5):
            for depth in {row.min_depth, 3}:
                result = _core.check(programs, depth, rounds, draws=8, seed=rounds)
                assert result.ok, (world_size, rounds, depth, result)


@Rows
def test_many_rounds_and_separate_memory(collective: str, row: _core.AlgorithmInfo) -> None:
    for world_size in (2, 3, 4, 7, 12):
        programs = _core.build_programs(collective, row.name, world_size)
        for rounds in (2, 4, 9):
            assert _core.check(programs, row.min_depth, rounds, in_place=False).ok
            assert _core.check(programs, row.min_depth, rounds, in_place=True).ok


@Rows
def test_min_depth_is_exact(collective: str, row: _core.AlgorithmInfo) -> None:
    assert row.min_depth in (1, 2)
    kinds = {
        _core.check(_core.build_programs(collective, row.name, w), depth=1).kind
        for w in range(2, 10)
    }
    assert kinds <= {"ok", "deadlock"}
    assert ("deadlock" in kinds) == (row.min_depth == 2)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_ring_at_depth_one_names_the_cycle(world_size: int) -> None:
    result = _core.check(_core.build_programs("all_reduce", "ring", world_size), depth=1)
    assert result.kind == "deadlock"
    assert len(re.findall(PLACE, result.message)) == min(world_size, 8)
    assert "waits for a free slot to rank 1" in result.message
    if world_size < 8:
        assert result.message.endswith("which waits for rank 0 again")
