"""reduce, gather, scatter, all_to_all, and blocks of different lengths, by every algorithm."""

from __future__ import annotations

import numpy as np
import pytest

import pycoll
from helpers_threads import ThreadRanks
from reference import (
    ALGORITHMS,
    MOVABLE,
    OPS,
    REDUCIBLE,
    SMALL_SLICES,
    WORLD_SIZES,
    Guarded,
    check_ranks,
    data,
    edge_sizes,
    reduced,
)

OPTIONS = pytest.mark.parametrize("options", [{}, SMALL_SLICES], ids=["default", "small_slices"])
LARGER = (63, 64, 65, 1023, 1024, 1025, 9000)


def parts_of(world_size, dtype, n, op="sum", kind=None):
    return [data(rank, dtype, op, n, kind) for rank in range(world_size)]


# ---- reduce ----


def reduce_cases(communicator, algorithm, cases):
    """The root's result, in place and out of place; everywhere else nothing may change."""
    results = []
    for dtype, op, n, root in cases:
        source = Guarded(data(communicator.rank, dtype, op, n), shift=n)
        before = source.memory.copy()
        out = None
        if communicator.rank == root:
            out = Guarded(np.zeros_like(source.array), shift=1)
        communicator.reduce(
            source.array, root, op, out=out.array if out else None, algorithm=algorithm
        )
        assert source.memory.tobytes() == before.tobytes(), "the input was changed"
        communicator.reduce(source.array, root, op, algorithm=algorithm)
        if communicator.rank != root:
            assert source.memory.tobytes() == before.tobytes(), "a rank that is not the root"
        results.append((out, source))
    return results


@pytest.mark.parametrize("algorithm", ALGORITHMS["reduce"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@OPTIONS
def test_reduce(groups, world_size, algorithm, options):
    cases = [
        (dtype, op, n, (i + j + n) % world_size)
        for i, dtype in enumerate(REDUCIBLE)
        for j, op in enumerate(OPS)
        for n in edge_sizes(world_size)
    ]
    cases += [("float32", "sum", n, root) for n in LARGER for root in range(world_size)]
    by_rank = groups(world_size, **options).run(reduce_cases, algorithm, cases)
    for i, (dtype, op, n, root) in enumerate(cases):
        expected = reduced(parts_of(world_size, dtype, n, op), op)
        check_ranks(list(by_rank[root][i]), expected, cases[i])


# ---- gather, scatter ----


def gather_cases(communicator, algorithm, cases):
    results = []
    for dtype, n, root, as_list in cases:
        w = communicator.world_size
        source = Guarded(data(communicator.rank, dtype, "sum", n, "small"), shift=n)
        before = source.memory.copy()
        output = None
        if communicator.rank == root:
            output = Guarded(np.zeros((w, n), source.array.dtype), shift=1)
        given = None if output is None else list(output.array) if as_list else output.array
        communicator.gather(given, source.array, root, algorithm=algorithm)
        assert source.memory.tobytes() == before.tobytes(), "the input was changed"
        results.append(output)
    return results


def scatter_cases(communicator, algorithm, cases):
    results = []
    for dtype, n, root, as_list in cases:
        w = communicator.world_size
        source = Guarded(np.stack(parts_of(w, dtype, n, kind="small")), shift=n)
        before = source.memory.copy()
        output = Guarded(np.zeros(n, source.array.dtype), shift=1)
        given = list(source.array) if as_list else source.array
        communicator.scatter(
            output.array, given if communicator.rank == root else None, root, algorithm=algorithm
        )
        assert source.memory.tobytes() == before.tobytes(), "the input was changed"
        results.append(output)
    return results


def moving_cases(world_size):
    cases = [
        (dtype, n, (i + n) % world_size, i % 2 == 0)
        for i, dtype in enumerate(MOVABLE)
        for n in edge_sizes(world_size)
    ]
    return cases + [("float32", n, r, n % 2 == 0) for n in LARGER for r in range(world_size)]


@pytest.mark.parametrize("algorithm", ALGORITHMS["gather"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@OPTIONS
def test_gather(groups, world_size, algorithm, options):
    cases = moving_cases(world_size)
    by_rank = groups(world_size, **options).run(gather_cases, algorithm, cases)
    for i, (dtype, n, root, _) in enumerate(cases):
        expected = np.stack(parts_of(world_size, dtype, n, kind="small"))
        check_ranks([by_rank[root][i]], expected, cases[i])


@pytest.mark.parametrize("algorithm", ALGORITHMS["scatter"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@OPTIONS
def test_scatter(groups, world_size, algorithm, options):
    cases = moving_cases(world_size)
    by_rank = groups(world_size, **options).run(scatter_cases, algorithm, cases)
    for i, (dtype, n, _, _) in enumerate(cases):
        for rank, results in enumerate(by_rank):
            check_ranks([results[i]], data(rank, dtype, "sum", n, "small"), (cases[i], rank))


# ---- all_to_all ----


def table_of_lengths(world_size, seed):
    """lengths[s][r]: what rank s sends rank r; some are 0, some cross many slices."""
    rng = np.random.default_rng(seed)
    return rng.choice([0, 1, 2, 63, 65, 700, 2100], (world_size, world_size)).tolist()


def sent(source, target, n, dtype):
    return (data(source, dtype, "sum", n, "small") + target).astype(dtype)


def all_to_all_cases(communicator, algorithm, cases):
    results = []
    rank, w = communicator.rank, communicator.world_size
    for dtype, lengths in cases:
        inputs = [Guarded(sent(rank, r, lengths[rank][r], dtype), shift=r) for r in range(w)]
        before = [block.memory.copy() for block in inputs]
        outputs = [Guarded(np.zeros(lengths[s][rank], dtype), shift=s) for s in range(w)]
        if len({n for row in lengths for n in row}) == 1 and communicator.world_size > 1:
            output = np.zeros((w, lengths[0][0]), dtype)
            stacked = np.stack([block.array for block in inputs])
            communicator.all_to_all(output, stacked, algorithm=algorithm)
            for block, row in zip(outputs, output, strict=True):
                block.array[...] = row
        else:
            communicator.all_to_all(
                [b.array for b in outputs], [b.array for b in inputs], algorithm=algorithm
            )
        for block, memory in zip(inputs, before, strict=True):
            assert block.memory.tobytes() == memory.tobytes(), "the input was changed"
        results.append(outputs)
    return results


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_to_all"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@OPTIONS
def test_all_to_all(groups, world_size, algorithm, options):
    w = world_size
    cases = [("float64", table_of_lengths(w, seed)) for seed in range(12)]
    cases += [(dtype, [[n] * w] * w) for dtype in ("int32", "uint8") for n in (0, 1, 64, 1009)]
    by_rank = groups(w, **options).run(all_to_all_cases, algorithm, cases)
    for i, (dtype, lengths) in enumerate(cases):
        for r, results in enumerate(by_rank):
            for s in range(w):
                check_ranks([results[i][s]], sent(s, r, lengths[s][r], dtype), (i, s, r))


# ---- Different lengths that all ranks know ----


def uneven_cases(communicator, algorithms, cases):
    results = []
    rank, w = communicator.rank, communicator.world_size
    for dtype, lengths in cases:
        source = Guarded(data(rank, dtype, "sum", lengths[rank], "small"))
        outputs = [Guarded(np.zeros(n, source.array.dtype), shift=i) for i, n in enumerate(lengths)]
        communicator.all_gather(
            [block.array for block in outputs], source.array, algorithm=algorithms[0]
        )
        inputs = [data(rank + r, dtype, "sum", lengths[r], "small") for r in range(w)]
        scattered = Guarded(np.zeros(lengths[rank], source.array.dtype), shift=3)
        communicator.reduce_scatter(scattered.array, inputs, algorithm=algorithms[1])
        results.append((outputs, scattered))
    return results


@pytest.mark.parametrize(
    "i", range(max(len(ALGORITHMS[c]) for c in ("all_gather", "reduce_scatter")))
)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@OPTIONS
def test_blocks_of_different_lengths(groups, world_size, i, options):
    algorithms = [
        ALGORITHMS[name][i % len(ALGORITHMS[name])] for name in ("all_gather", "reduce_scatter")
    ]
    w = world_size
    rows = [table_of_lengths(w, seed)[0] for seed in range(10)] + [[0] * (w - 1) + [5000]]
    cases = [(dtype, row) for row in rows for dtype in ("float32", "bfloat16", "int64")]
    by_rank = groups(w, **options).run(uneven_cases, algorithms, cases)
    for case, (dtype, lengths) in enumerate(cases):
        for r in range(w):
            expected = data(r, dtype, "sum", lengths[r], "small")
            check_ranks([results[case][0][r] for results in by_rank], expected, cases[case])
            terms = [data(s + r, dtype, "sum", lengths[r], "small") for s in range(w)]
            check_ranks([by_rank[r][case][1]], reduced(terms, "sum"), (cases[case], r))


def test_lists_that_differ_between_ranks_are_a_mismatch():
    group = ThreadRanks(3)

    def use(communicator):
        lengths = [5, 6, 7] if communicator.rank != 2 else [6, 5, 7]
        outputs = [np.full(n, -1.0) for n in lengths]
        with pytest.raises(pycoll.Error, match="lengths differ"):
            communicator.all_gather(outputs, np.ones(lengths[communicator.rank]))
        assert all((output == -1).all() for output in outputs)

    group.run(use)
    group.close()


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_a_block_that_does_not_fit_is_told_to_all(collective):
    group = ThreadRanks(3)

    def use(communicator):
        blocks = [np.full(n, 2.0) for n in (5, 6, 7)]
        mine = np.ones(blocks[communicator.rank].size + (communicator.rank == 1))
        before = mine.copy()
        error = pycoll.InvalidArgumentError if communicator.rank == 1 else pycoll.AbortedError
        with pytest.raises(error, match=r"rank 1's (in|out)put has shape \(7,\).*\(6,\)"):
            if collective == "all_gather":
                communicator.all_gather(blocks, mine)
            else:
                communicator.reduce_scatter(mine, blocks)
        assert (mine == before).all()
        assert all((block == 2).all() for block in blocks)

    group.run(use)
    group.close()


# ---- Refused ----


def test_wrong_arguments(groups):
    def refuse(communicator):
        rank, w = communicator.rank, communicator.world_size
        other = (rank + 1) % w
        one, stack = np.ones(4), np.ones((w, 4))
        strided = np.ones((w, 8))

        def refused(match, function, *args, **kwargs):
            with pytest.raises(pycoll.InvalidArgumentError, match=match):
                function(*args, **kwargs)

        refused("only the root", communicator.reduce, one, other, out=one.copy())
        refused("only the root", communicator.gather, stack, one, other)
        refused("only the root", communicator.scatter, one, stack, other)
        refused("it must be an array", communicator.gather, None, one, rank)
        refused("it must be an array", communicator.all_gather, [one] * (w + 1), one)
        refused("root 9", communicator.reduce, one, 9)
        refused("root -1", communicator.gather, None, one, -1)
        refused("dtype", communicator.all_gather, [one.astype("f4")] * w, one)
        refused("dtype", communicator.reduce, one, rank, out=one.astype("f4"))
        refused("shape", communicator.reduce, one, rank, out=np.ones(5))
        refused("world size", communicator.all_to_all, stack[1:], stack)
        refused("overlapping", communicator.all_gather, [strided[0, ::2]] * w, one)
        refused("overlapping", communicator.all_gather, [one[:]] * w, np.ones(4))
        refused("overlapping", communicator.all_to_all, stack, stack)
        refused("factor", communicator.all_reduce, one, "sum", factor=2.0)
        refused("same as the rank", communicator.send, one, rank)
        refused("same as the rank", communicator.recv, one, rank)
        refused("rank", communicator.send, one, w)
        refused("read-only", communicator.recv, np.broadcast_to(1.0, 4), other)
        with pytest.raises(pycoll.UnsupportedError, match="complex"):
            communicator.all_reduce(np.ones(3, np.complex64), "max")
        with pytest.raises(pycoll.UnsupportedError, match="non-integral"):
            communicator.reduce(one, rank, "bxor")
        communicator.barrier()

    groups(2).run(refuse)


def premul(communicator, dtype):
    source = np.arange(1, 6) * (communicator.rank + 1)
    array = source.astype(dtype)
    communicator.all_reduce(array, "premul_sum", factor=0.5 * (communicator.rank + 1))
    root = np.empty_like(array) if communicator.rank == 0 else None
    communicator.reduce(source.astype(dtype), 0, "premul_sum", out=root, factor=2.0)
    return array, root


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_premul_sum_scales_by_each_ranks_factor(groups, world_size):
    results = groups(world_size).run(premul, "float64")
    ranks = np.arange(1, world_size + 1)
    for array, _ in results:
        np.testing.assert_array_equal(array, np.arange(1, 6) * 0.5 * (ranks**2).sum())
    np.testing.assert_array_equal(results[0][1], np.arange(1, 6) * 2.0 * ranks.sum())
