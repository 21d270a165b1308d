"""Every pair of dtype and reduce operation through the collectives that reduce."""

from __future__ import annotations

import numpy as np
import pytest

from reference import (
    ALGORITHMS,
    REDUCTIONS,
    Guarded,
    check_all_reduce,
    check_ranks,
    data,
    reduced,
)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_all_reduce_of_every_type(groups, algorithm, world_size):
    sizes = [0, 1, world_size + 1, 1009]
    cases = [(d, op, sizes[i % 4]) for i, (d, op) in enumerate(REDUCTIONS)]
    cases += [(d, op, 501) for d, op in REDUCTIONS]
    check_all_reduce(groups(world_size), algorithm, cases)


def scatter_cases(communicator, algorithm, cases):
    results = []
    for dtype, op, n in cases:
        values = data(communicator.rank, dtype, op, n * communicator.world_size).copy()
        output = Guarded(np.zeros(n, values.dtype))
        communicator.reduce_scatter(output.array, values.reshape(-1, n), op, algorithm=algorithm)
        results.append(output)
    return results


@pytest.mark.parametrize("algorithm", ALGORITHMS["reduce_scatter"])
def test_reduce_scatter_of_every_type(groups, algorithm):
    world_size = 3
    cases = [(d, op, 257) for d, op in REDUCTIONS]
    by_rank = groups(world_size).run(scatter_cases, algorithm, cases)
    for i, (dtype, op, n) in enumerate(cases):
        parts = [data(rank, dtype, op, n * world_size) for rank in range(world_size)]
        expected = reduced(parts, op).reshape(world_size, n)
        for rank in range(world_size):
            check_ranks([by_rank[rank][i]], expected[rank], (algorithm, cases[i], rank))


def odd_bools(communicator, op):
    """Bytes that NumPy would not write into a bool."""
    values = np.array([0, 2, 0, 255, 128, 1] * 30, np.uint8)
    if communicator.rank == 1:
        values = np.array([0, 0, 3, 1, 64, 255] * 30, np.uint8)
    communicator.all_reduce(values.view(np.bool_), op)
    return values


@pytest.mark.parametrize("op", ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"])
def test_bools_of_any_byte_give_zeros_and_ones(groups, op):
    either, both, one = [0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 0]
    want = {"sum": either, "max": either, "bor": either, "bxor": one}.get(op, both)
    for values in groups(2).run(odd_bools, op):
        assert values.tolist() == want * 30
