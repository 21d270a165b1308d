"""Collectives but all_reduce by every algorithm against NumPy; all with real processes."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from pool import communicator_ranks
from reference import (
    ALGORITHMS,
    MOVABLE,
    OPS,
    REDUCIBLE,
    SMALL_SLICES,
    WORLD_SIZES,
    Array,
    Guarded,
    all_reduce_cases,
    check_ranks,
    data,
    edge_sizes,
    reduced,
)


def all_gather_cases(communicator, algorithm, cases):
    results = []
    for dtype, n in cases:
        source = data(communicator.rank, dtype, "sum", n, "small")
        source = Guarded(source, shift=n)
        output = Guarded(np.zeros((communicator.world_size, n), source.array.dtype), shift=1)
        before = source.memory.copy()
        communicator.all_gather(output.array, source.array, algorithm=algorithm)
        assert source.memory.tobytes() == before.tobytes(), "the input was changed"
        results.append(output)
    return results


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_gather"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("options", [{}, SMALL_SLICES], ids=["default", "small_slices"])
def test_all_gather(groups, world_size, algorithm, options):
    cases = [(dtype, n) for dtype in MOVABLE for n in edge_sizes(world_size)]
    cases += [("float32", n) for n in (63, 64, 65, 1023, 1024, 1025, 40_000)]
    by_rank = groups(world_size, **options).run(all_gather_cases, algorithm, cases)
    for i, (dtype, n) in enumerate(cases):
        expected = np.stack([data(r, dtype, "sum", n, "small") for r in range(world_size)])
        check_ranks([results[i] for results in by_rank], expected, cases[i])


def block_data(rank: int, world_size: int, dtype: str, op: str, n: int) -> Array:
    return data(rank, dtype, op, n * world_size).reshape(world_size, n)


def reduce_scatter_cases(communicator, algorithm, cases):
    results = []
    rank, world_size = communicator.rank, communicator.world_size
    for dtype, op, n in cases:
        source = Guarded(block_data(rank, world_size, dtype, op, n), shift=n)
        output = Guarded(np.zeros(n, source.array.dtype), shift=rank)
        before = source.memory.copy()
        communicator.reduce_scatter(output.array, source.array, op, algorithm=algorithm)
        assert source.memory.tobytes() == before.tobytes(), "the input was changed"
        results.append(output)
    return results


@pytest.mark.parametrize("algorithm", ALGORITHMS["reduce_scatter"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("options", [{}, SMALL_SLICES], ids=["default", "small_slices"])
def test_reduce_scatter(groups, world_size, algorithm, options):
    cases = [(d, op, n) for d in REDUCIBLE for op in OPS for n in edge_sizes(world_size)]
    cases += [("float32", "sum", n) for n in (63, 64, 65, 1023, 1024, 1025, 40_000)]
    by_rank = groups(world_size, **options).run(reduce_scatter_cases, algorithm, cases)
    for i, (dtype, op, n) in enumerate(cases):
        inputs = [block_data(r, world_size, dtype, op, n) for r in range(world_size)]
        for rank, results in enumerate(by_rank):
            expected = reduced([x[rank] for x in inputs], op)
            check_ranks([results[i]], expected, (cases[i], rank))


def broadcast_cases(communicator, algorithm, cases):
    results = []
    for dtype, n, root in cases:
        array = Guarded(data(communicator.rank, dtype, "sum", n, "small"), shift=n)
        communicator.broadcast(array.array, root, algorithm=algorithm)
        results.append(array)
    return results


@pytest.mark.parametrize("algorithm", ALGORITHMS["broadcast"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("options", [{}, SMALL_SLICES], ids=["default", "small_slices"])
def test_broadcast_from_every_root(groups, world_size, algorithm, options):
    cases = [(d, n, (i + n) % world_size) for i, d in enumerate(MOVABLE) for n in (0, 1, 1009)]
    sizes = (1, 2, 63, 64, 65, 1023, 1024, 1025, 3000)
    cases += [("float32", n, root) for n in sizes for root in range(world_size)]
    by_rank = groups(world_size, **options).run(broadcast_cases, algorithm, cases)
    for i, (dtype, n, root) in enumerate(cases):
        expected = data(root, dtype, "sum", n, "small")
        check_ranks([results[i] for results in by_rank], expected, cases[i])


def barrier_times(communicator, algorithm, times):
    rng = random.Random(communicator.rank)
    spans = []
    for _ in range(times):
        time.sleep(rng.uniform(0, 0.003))
        arrival = time.monotonic()
        communicator.barrier(algorithm=algorithm)
        spans.append((arrival, time.monotonic()))
    return spans


@pytest.mark.parametrize("algorithm", ALGORITHMS["barrier"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_nobody_leaves_a_barrier_before_the_last_has_come(groups, world_size, algorithm):
    for spans in zip(*groups(world_size).run(barrier_times, algorithm, 20), strict=True):
        assert min(left for _, left in spans) >= max(arrival for arrival, _ in spans)


def run_ahead(communicator, algorithm):
    """The root does not wait for the others: its next values must not overtake unread ones."""
    seen = []
    for step in range(60):
        array = np.full(700, 1000 * step + 0.0, np.float32)
        if communicator.rank != 1:
            array[:] = -1
            if step % 20 == 3 * communicator.rank:
                time.sleep(0.01)
        communicator.broadcast(array, 1, algorithm=algorithm)
        seen.append((array == 1000 * step).all())
    return all(seen)


@pytest.mark.parametrize("algorithm", ALGORITHMS["broadcast"])
@pytest.mark.parametrize("options", [{}, SMALL_SLICES], ids=["default", "small_slices"])
def test_a_root_that_runs_ahead_overwrites_nothing(groups, algorithm, options):
    assert groups(4, **options).run(run_ahead, algorithm) == [True] * 4


def mixed_all_reduce(communicator, algorithm, base, root):
    rank, w = communicator.rank, communicator.world_size
    array = base * (rank + 1)
    communicator.all_reduce(array, algorithm=algorithm)
    return (array == base * (w * (w + 1) // 2)).all()


def mixed_broadcast(communicator, algorithm, base, root):
    array = base + 1000 * communicator.rank
    communicator.broadcast(array, root, algorithm=algorithm)
    return (array == base + 1000 * root).all()


def mixed_all_gather(communicator, algorithm, base, root):
    output = np.empty((communicator.world_size, base.size))
    communicator.all_gather(output, base + 1000 * communicator.rank, algorithm=algorithm)
    return (output == base + 1000 * np.arange(communicator.world_size)[:, None]).all()


def mixed_reduce_scatter(communicator, algorithm, base, root):
    rank, w = communicator.rank, communicator.world_size
    output = np.empty(base.size)
    source = (base + np.arange(w)[:, None]) * (rank + 1)
    communicator.reduce_scatter(output, source, algorithm=algorithm)
    return (output == (base + rank) * (w * (w + 1) // 2)).all()


def mixed_reduce(communicator, algorithm, base, root):
    rank, w = communicator.rank, communicator.world_size
    array = base * (rank + 1)
    communicator.reduce(array, root, algorithm=algorithm)
    return (array == base * (w * (w + 1) // 2 if rank == root else rank + 1)).all()


def mixed_gather(communicator, algorithm, base, root):
    rank, w = communicator.rank, communicator.world_size
    output = np.empty((w, base.size)) if rank == root else None
    communicator.gather(output, base + 1000 * rank, root, algorithm=algorithm)
    return output is None or (output == base + 1000 * np.arange(w)[:, None]).all()


def mixed_scatter(communicator, algorithm, base, root):
    rank, w = communicator.rank, communicator.world_size
    source = base + 1000 * np.arange(w)[:, None] if rank == root else None
    output = np.empty(base.size)
    communicator.scatter(output, source, root, algorithm=algorithm)
    return (output == base + 1000 * rank).all()


def mixed_all_to_all(communicator, algorithm, base, root):
    rank, w = communicator.rank, communicator.world_size
    output = np.empty((w, base.size))
    ranks = np.arange(w)[:, None]
    communicator.all_to_all(output, base + 1000 * rank + 10_000 * ranks, algorithm=algorithm)
    return (output == base + 1000 * ranks + 10_000 * rank).all()


def mixed_barrier(communicator, algorithm, base, root):
    communicator.barrier(algorithm=algorithm)
    return True


MIXED = {
    "all_reduce": mixed_all_reduce,
    "broadcast": mixed_broadcast,
    "all_gather": mixed_all_gather,
    "reduce_scatter": mixed_reduce_scatter,
    "reduce": mixed_reduce,
    "gather": mixed_gather,
    "scatter": mixed_scatter,
    "all_to_all": mixed_all_to_all,
    "barrier": mixed_barrier,
}


def mixed(communicator, seed, steps):
    """The same random sequence of collectives and algorithms everywhere, checked by position."""
    assert MIXED.keys() == ALGORITHMS.keys()
    rng = random.Random(seed)
    for step in range(steps):
        collective = rng.choice(sorted(ALGORITHMS))
        algorithm = rng.choice(ALGORITHMS[collective])
        n = rng.choice([0, 1, 5, 64, 65, 300, 2000, 5000])
        root = rng.randrange(communicator.world_size)
        base = np.arange(n, dtype=np.float64) + step
        right = MIXED[collective](communicator, algorithm, base, root)
        assert right, (step, collective, algorithm, n, root)
    return steps


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("options", [{}, SMALL_SLICES], ids=["default", "small_slices"])
def test_a_random_mix_of_collectives_and_algorithms(groups, world_size, options):
    assert groups(world_size, **options).run(mixed, 17, 400) == [400] * world_size


# ---- The same with processes ----


def process_sweep(communicator):
    w, rank = communicator.world_size, communicator.rank
    for algorithm in ALGORITHMS["all_reduce"]:
        cases = [(d, op, n) for d in REDUCIBLE for op in OPS for n in (0, 1, w + 1, 1009)]
        cases += [("float32", "sum", n) for n in (32769, 200_003)]
        for (dtype, op, n), result in zip(
            cases, all_reduce_cases(communicator, algorithm, cases), strict=True
        ):
            expected = reduced([data(r, dtype, op, n) for r in range(w)], op)
            check_ranks([result], expected, (algorithm, dtype, op, n, rank))
    return mixed(communicator, 3, 200)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_collectives_between_processes(world_size):
    results = communicator_ranks(world_size, process_sweep, timeout=90)
    assert [result.value for result in results] == [200] * world_size


def process_bytes(communicator):
    out = []
    for algorithm in ALGORITHMS["all_reduce"]:
        for dtype in REDUCIBLE:
            array = data(communicator.rank, dtype, "sum", 5003, "normal").copy()
            communicator.all_reduce(array, "avg", algorithm=algorithm)
            out.append(array.tobytes())
    return out


@pytest.mark.parametrize("world_size", [3, 5])
def test_processes_and_threads_get_the_same_bytes(groups, world_size):
    processes = [result.value for result in communicator_ranks(world_size, process_bytes)]
    threads = groups(world_size).run(process_bytes)
    assert all(result == threads[0] for result in processes + threads)
