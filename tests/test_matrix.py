"""Every collective over a pairwise covering set: algorithm, dtype, operation, size, layouts, place,
blocks, root and slices, for each world size, over shared memory and over TCP.

A failure names its cases; `python tests/matrix_run.py "CASE"` runs one alone. Groups that span
hosts: test_two_hosts.py.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from helpers_threads import ThreadGroups
from layouts import LAYOUTS, Buffer
from matrix import SLICES, VECTORS, Case, covering, sampled, seeded_part
from matrix_run import rank_cases, report, run_on_threads
from pool import communicator_ranks
from pycoll import _core
from reference import WORLD_SIZES

TRANSPORTS = ["shm", "tcp"]


def check(groups: ThreadGroups, cases: list[Case]) -> None:
    failures = []
    for case in cases:
        ranks = groups(case.world_size, **case.options)
        if case.world_size > 1:
            assert ranks.communicators[0].transport == case.transport
        problems = run_on_threads(ranks, case)
        if problems:
            failures.append(report(case, problems))
    assert not failures, f"{len(failures)} of {len(cases)} cases:\n" + "\n".join(failures[:10])


@pytest.mark.parametrize("collective", VECTORS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pairs(groups, transport, world_size, collective):
    cases = [case for case in covering(transport, world_size) if case.collective == collective]
    check(groups, cases)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [*WORLD_SIZES, 6, 8, 13])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_points(groups, transport, world_size, seed):
    check(groups, sampled(transport, world_size, 300, seed))


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_tenth_between_processes(transport, world_size, slices):
    cases = [case for case in covering(transport, world_size) if case.slices == slices]
    cases = seeded_part(cases, 10)
    env = cases[0].options
    results = communicator_ranks(world_size, rank_cases, cases, env=env, timeout=90)
    assert [result.value for result in results] == [[]] * world_size


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_set_holds_every_pair(transport):
    """Whatever pair a random point has, a case of the set has."""

    def pairs(case: Case) -> set[tuple[tuple[str, object], ...]]:
        return set(itertools.combinations(sorted(vars(case).items()), 2))

    for world_size in (2, 5):
        covered = set().union(*map(pairs, covering(transport, world_size)))
        for case in sampled(transport, world_size, 5000, seed=0):
            assert pairs(case) <= covered, (case, pairs(case) - covered)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_byte_goes_unseen(layout):
    """The matrix is as good as its comparison: one wrong bit anywhere, and a result not written."""
    buffer = Buffer((2, 3, 5), np.int16, LAYOUTS[layout])
    buffer.array[...] = 7
    buffer.freeze()
    assert buffer.problem() == ""
    inside = 0
    for at in range(len(buffer.memory)):
        buffer.memory[at] ^= 1
        problem = buffer.problem()
        assert problem
        inside += "of 30 elements" in problem
        assert ("of 30 elements" in problem) == bool((buffer.array != 7).any())
        buffer.memory[at] ^= 1
    assert inside == 2 * 30
    buffer.expected()[1, 2, 3] = 8
    assert f"the first is {1 * 15 + 2 * 5 + 3}: 7 instead of 8" in buffer.problem()


def test_no_collective_is_left_out():
    assert {*VECTORS, "barrier"} == set(_core.collectives())


def test_a_case_survives_its_text():
    for case in covering("shm", 3):
        assert Case.parse(str(case)) == case
