"""Every collective by every algorithm against NumPy, and the same bytes on all ranks.

The wide sweeps run ranks as threads (thousands of calls a second), narrower ones as processes.
References compute in float64 (integers: modulo 2^64) and round once; where the data are small
integers the result must be equal, elsewhere within the bound that float32 accumulation allows.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_threads import ThreadGroups
from pool import communicator_ranks

Array = npt.NDArray[Any]

WORLD_SIZES = [1, 2, 3, 4, 5, 7]
ALGORITHMS = {
    "all_reduce": ["one_shot", "two_shot", "ring", "tree", "recursive_doubling"],
    "all_gather": ["one_shot", "ring"],
    "reduce_scatter": ["one_shot", "ring"],
    "broadcast": ["one_shot", "tree"],
    "barrier": ["one_shot", "recursive_doubling"],
}
REDUCIBLE = ["float32", "float64", "float16", "bfloat16", "int32", "int64"]
MOVABLE = [*REDUCIBLE, "bool", "int8", "uint8", "int16", "uint16", "uint32", "uint64"]
OPS = ["sum", "avg", "product", "min", "max"]
# 64 float32 a message and 1024 a window: hundreds of elements cross many slice boundaries.
SMALL_SLICES = {"PYCOLL_SLOT_BYTES": 256, "PYCOLL_WINDOW_BYTES": 4096, "PYCOLL_FIFO_DEPTH": 2}
LARGEST = 1_000_000
GUARD_BYTES = 256
GUARD = 0xA5


@pytest.fixture(scope="module")
def groups() -> Iterator[ThreadGroups]:
    made = ThreadGroups()
    yield made
    made.close()


# ---- Data and references ----


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@functools.cache
def table(rank: int, dtype: str, kind: str, size: int) -> Array:
    """Values of one rank, different at every position; `kind` says what a reduction needs."""
    rng = np.random.default_rng([rank, size, len(kind)])
    if kind == "wrap":
        return rng.integers(-(2**63), 2**63 - 1, size, np.int64).astype(dtype)
    if kind == "small":
        values = rng.integers(-60, 60, size)
    elif kind == "factors":
        values = rng.integers(1, 4, size) * rng.choice([-1, 1], size)
    else:
        values = rng.normal(size=size) * 10.0 ** rng.integers(-2, 2, size)
    array: Array = values.astype(np.float64).astype(dtype_of(dtype))
    return array


def data(rank: int, dtype: str, op: str, n: int, kind: str | None = None) -> Array:
    if kind is None:
        kind = "factors" if op == "product" else "small"
        if "int" in dtype and op != "avg":
            kind = "wrap"
    size = 8192 if n <= 8192 else LARGEST
    return table(rank, dtype, kind, size)[:n]


def exact(parts: list[Array], op: str) -> Array:
    """The reduction in float64, or in wrapping int64, not yet rounded to the dtype."""
    integer = parts[0].dtype.kind == "i"
    stack = np.stack([part.astype(np.int64 if integer else np.float64) for part in parts])
    if op == "avg":
        total = stack.sum(0)
        # Integers: toward zero.
        return np.sign(total) * (np.abs(total) // len(parts)) if integer else total / len(parts)
    function = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    result: Array = function.reduce(stack, 0)
    return result


def reduced(parts: list[Array], op: str) -> Array:
    with np.errstate(over="ignore"):
        return exact(parts, op).astype(parts[0].dtype)


class Guarded:
    """A copy of an array between guard bytes, at an address that is aligned to its items only."""

    def __init__(self, values: Array, shift: int = 0) -> None:
        size = values.itemsize
        begin = GUARD_BYTES + shift % 8 * size
        self.memory = np.full(begin + values.nbytes + GUARD_BYTES, GUARD, np.uint8)
        self.inside = slice(begin, begin + values.nbytes)
        self.array = self.memory[self.inside].view(values.dtype).reshape(values.shape)
        self.array[...] = values

    def intact(self) -> bool:
        outside = [self.memory[: self.inside.start], self.memory[self.inside.stop :]]
        return all((part == GUARD).all() for part in outside)


def check_ranks(results: list[Guarded], expected: Array, what: Any) -> None:
    for rank, result in enumerate(results):
        assert result.intact(), f"{what}: rank {rank} wrote outside its array"
        np.testing.assert_array_equal(result.array, expected, err_msg=f"{what}, rank {rank}")
        assert result.array.tobytes() == results[0].array.tobytes(), (what, rank)


# ---- all_reduce ----


def all_reduce_cases(communicator, algorithm, cases, kind=None):
    results = []
    for dtype, op, n in cases:
        guarded = Guarded(data(communicator.rank, dtype, op, n, kind), shift=n + communicator.rank)
        communicator.all_reduce(guarded.array, op, algorithm=algorithm)
        results.append(guarded)
    return results


def check_all_reduce(group, algorithm, cases):
    by_rank = group.run(all_reduce_cases, algorithm, cases)
    for i, (dtype, op, n) in enumerate(cases):
        parts = [data(rank, dtype, op, n) for rank in range(group.world_size)]
        check_ranks([results[i] for results in by_rank], reduced(parts, op), (algorithm, cases[i]))


def edge_sizes(world_size: int) -> list[int]:
    return sorted({0, 1, 2, world_size - 1, world_size, world_size + 1, 2 * world_size - 1, 1009})


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce_every_dtype_and_op(groups, world_size, algorithm):
    cases = [(d, op, n) for d in REDUCIBLE for op in OPS for n in edge_sizes(world_size)]
    check_all_reduce(groups(world_size), algorithm, cases)


def boundary_sizes(world_size: int, slot_bytes: int, window_bytes: int, item: int) -> list[int]:
    """One element around whole slices: of one chunk, of all chunks, of the window."""
    slices = [slot_bytes // item, window_bytes // item, window_bytes // world_size // item]
    slices += [world_size * s for s in slices]
    return sorted({s + off for s in slices for off in (-1, 0, 1) if s + off <= LARGEST})


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce_at_boundaries_of_small_slices(groups, world_size, algorithm):
    cases = []
    for dtype, op in [
        ("float32", "sum"),
        ("bfloat16", "avg"),
        ("int64", "max"),
        ("float16", "sum"),
    ]:
        # A slice has as many elements as its widest form: 16-bit partial sums travel as float32.
        for item in {dtype_of(dtype).itemsize, max(4, dtype_of(dtype).itemsize)}:
            sizes = boundary_sizes(world_size, 256, 4096, item)
            cases += [(dtype, op, n) for n in sizes]
    check_all_reduce(groups(world_size, **SMALL_SLICES), algorithm, cases)


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce_at_boundaries_of_default_slices(groups, world_size, algorithm):
    sizes = boundary_sizes(world_size, 1 << 17, 1 << 19, 4)
    if world_size > 3:
        sizes = sizes[::2]  # every kind of boundary, not every neighbour
    check_all_reduce(groups(world_size), algorithm, [("float32", "sum", n) for n in sizes])


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce_of_a_million(groups, world_size, algorithm):
    # Which dtype meets which algorithm varies; `full` has all of them.
    pairs = [(d, op) for d in REDUCIBLE for op in OPS]
    start = 7 * world_size + 3 * ALGORITHMS["all_reduce"].index(algorithm)
    cases = [(*pairs[(start + 11 * i) % len(pairs)], LARGEST) for i in range(2)]
    check_all_reduce(groups(world_size), algorithm, cases)


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_all_reduce_of_a_million_every_dtype_and_op(groups, dtype, world_size, algorithm):
    check_all_reduce(groups(world_size), algorithm, [(dtype, op, LARGEST) for op in OPS])


EPS = {"float32": 2**-24, "float64": 2**-53, "float16": 2**-11, "bfloat16": 2**-8}


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_all_reduce_of_real_numbers_rounds_as_promised(groups, world_size, algorithm):
    n = 5003
    floats = [d for d in REDUCIBLE if "float" in d]
    cases = [(d, op, n) for d in floats for op in ["sum", "avg"]]
    by_rank = groups(world_size).run(all_reduce_cases, algorithm, cases, "normal")
    for i, (dtype, op, _) in enumerate(cases):
        parts = [
            data(rank, dtype, op, n, "normal").astype(np.longdouble) for rank in range(world_size)
        ]
        total, size = np.sum(parts, 0), np.sum(np.abs(parts), 0)
        if op == "avg":
            total, size = total / world_size, size / world_size
        # w - 1 additions in the accumulator (and a division), then one rounding to the dtype.
        accumulator = max(EPS[dtype] if dtype == "float64" else EPS["float32"], 2.0**-60)
        bound = world_size * accumulator * size
        if dtype in ("float16", "bfloat16"):
            tiny = 2.0**-25 if dtype == "float16" else 0  # subnormals have an absolute spacing
            bound = bound + EPS[dtype] * (np.abs(total) + bound) + tiny
        got = [results[i].array for results in by_rank]
        error = np.abs(got[0].astype(np.longdouble) - total)
        assert (error <= bound).all(), (cases[i], float((error / bound).max()))
        assert len({x.tobytes() for x in got}) == 1


def bytes_of_all_reduce(communicator, algorithm, inputs, op):
    array = inputs[communicator.rank].copy()
    communicator.all_reduce(array, op, algorithm=algorithm)
    return array


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_partial_sums_of_bfloat16_are_not_rounded(groups, algorithm):
    # 512 elements, each rank holding the 256 in turn; a bfloat16 256 + 1 would stay 256.
    inputs = [np.ones(512, dtype_of("bfloat16")) for _ in range(7)]
    for i in range(512):
        inputs[i % 7][i] = 256
    for options in ({}, SMALL_SLICES):
        results = groups(7, **options).run(bytes_of_all_reduce, algorithm, inputs, "sum")
        for result in results:
            np.testing.assert_array_equal(result.astype(np.float32), 262)


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_float16_average_does_not_overflow_and_a_sum_does(groups, algorithm):
    inputs = [np.full(100, 40000, np.float16)] * 3
    for result in groups(3).run(bytes_of_all_reduce, algorithm, inputs, "avg"):
        np.testing.assert_array_equal(result, np.float16(40000))
    for result in groups(3).run(bytes_of_all_reduce, algorithm, inputs, "sum"):
        np.testing.assert_array_equal(result, np.float16(np.inf))


def special_values(dtype: str, world_size: int) -> list[Array]:
    """All combinations of special values over three ranks: NaN payloads, zeros, inf, tiny."""
    item = dtype_of(dtype).itemsize
    unsigned = np.dtype(f"u{item}")
    one = dtype_of(dtype).type(1).tobytes()
    infinity = int.from_bytes(dtype_of(dtype).type(np.inf).tobytes(), "little")
    sign = 1 << (8 * item - 1)
    mantissa = infinity & -infinity  # the lowest exponent bit
    bits = [
        *[0, sign, infinity, infinity | sign, 1, 1 | sign],
        *[mantissa - 1, mantissa, int.from_bytes(one, "little")],
        *[
            infinity | mantissa >> 1,
            infinity | mantissa >> 1 | 5,
            infinity | mantissa >> 1 | sign | 3,
        ],
        infinity | 1,  # signalling
    ]
    grid = np.meshgrid(*[np.array(bits, unsigned)] * min(world_size, 3), indexing="ij")
    columns = [column.ravel().view(dtype_of(dtype)) for column in grid]
    return [columns[rank % len(columns)] for rank in range(world_size)]


def least_or_greatest(stack: Array, op: str) -> Array:
    """MIN or MAX with -0 < +0; NaN where any is NaN."""
    wide = stack.astype(np.float64)
    # Next to its neighbours a zero keeps its sign when it is the smallest subnormal.
    tiny = np.finfo(np.float64).smallest_subnormal
    keys = np.where(wide == 0, np.copysign(tiny, wide), wide * 4)
    chosen = (np.nanargmin if op == "min" else np.nanargmax)(
        np.where(np.isnan(keys), np.inf if op == "min" else -np.inf, keys), 0
    )
    result = np.take_along_axis(wide, chosen[None], 0)[0]
    result[np.isnan(wide).any(0)] = np.nan
    return result


def check_special(value: Array, expected: Array, what: Any) -> None:
    """Equal, signs of zeros included; any NaN for a NaN."""
    np.testing.assert_array_equal(value, expected, err_msg=str(what))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(value)[number], np.signbit(expected)[number])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_special_values_are_the_same_bytes_everywhere(groups, world_size, algorithm):
    for dtype in [d for d in REDUCIBLE if "float" in d]:
        inputs = special_values(dtype, world_size)
        stack = np.stack(inputs)
        accumulator = np.float64 if dtype == "float64" else np.float32
        for op in OPS:
            results = groups(world_size).run(bytes_of_all_reduce, algorithm, inputs, op)
            assert len({x.tobytes() for x in results}) == 1, (dtype, op)
            value = results[0].astype(np.float64)
            assert np.isnan(value[np.isnan(stack.astype(np.float64)).any(0)]).all(), (dtype, op)
            if op in ("min", "max"):
                check_special(value, least_or_greatest(stack, op), (dtype, op))
                continue
            if op == "sum":
                negative_zeros = (stack == 0).all(0) & np.signbit(stack).all(0)
                assert negative_zeros.any()
                assert (np.signbit(value) & (value == 0))[negative_zeros].all(), dtype
            if world_size == 2:  # one combination: no order to choose
                a, b = stack.astype(accumulator)
                once = a * b if op == "product" else a + b
                once = once / accumulator(2) if op == "avg" else once
                check_special(value, once.astype(inputs[0].dtype).astype(np.float64), (dtype, op))


def repeat_with_sleeps(communicator, algorithm, times):
    rng = random.Random(communicator.rank)
    source = data(communicator.rank, "float32", "sum", 2003, "normal")
    seen = set()
    for _ in range(times):
        array = source.copy()
        time.sleep(rng.uniform(0, 0.005))
        communicator.all_reduce(array, algorithm=algorithm)
        seen.add(array.tobytes())
    return seen


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_arrival_order_does_not_change_a_bit(groups, algorithm):
    results = groups(5).run(repeat_with_sleeps, algorithm, 50)
    assert len(set.union(*results)) == 1


def with_flushed_denormals(communicator, on_ranks):
    import torch

    # Made before: a conversion would flush, too.
    sources = [
        np.array([1e-40, 1e-45, -1e-45, 3.0] * 20, np.float32),
        np.array([6e-8] * 40, np.float16),
        np.array([1e-40] * 40, np.float32),
    ]
    if communicator.rank in on_ranks:
        assert torch.set_flush_denormal(True)
    out = []
    for algorithm in ALGORITHMS["all_reduce"]:
        wide, half, by_thread = [source.copy() for source in sources]
        communicator.all_reduce(wide, algorithm=algorithm)
        communicator.all_reduce(half, algorithm=algorithm)
        communicator.all_reduce(by_thread, algorithm=algorithm, async_op=True).wait()
        out.append((wide.tobytes(), half.tobytes(), by_thread.tobytes()))
    if communicator.rank in on_ranks:  # and the caller's setting is as it was
        kept = torch.tensor([1e-40], dtype=torch.float32) * 1.0
        out.append(float(kept) == 0.0)
    else:
        out.append(True)
    return out


@pytest.mark.parametrize("on_ranks", [(0, 1, 2), (1,)])
def test_a_callers_flush_to_zero_does_not_reach_the_sums(on_ranks):
    results = communicator_ranks(3, with_flushed_denormals, on_ranks)
    expected = (
        (np.array([1e-40, 1e-45, -1e-45, 3.0] * 20, np.float32) * np.float32(3)).tobytes(),
        (np.array([6e-8] * 40, np.float16) * np.float16(3)).tobytes(),
        (np.array([1e-40] * 40, np.float32) * np.float32(3)).tobytes(),
    )
    for result in results:
        assert result.value[-1], "the caller's flush-to-zero setting was changed"
        for algorithm, got in zip(ALGORITHMS["all_reduce"], result.value[:-1], strict=True):
            assert got == expected, (algorithm, result.rank)


# ---- The other collectives ----


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


def mixed(communicator, seed, steps):
    """The same random sequence of collectives and algorithms everywhere, checked by position."""
    rng = random.Random(seed)
    rank, w = communicator.rank, communicator.world_size
    for step in range(steps):
        collective = rng.choice(sorted(ALGORITHMS))
        algorithm = rng.choice(ALGORITHMS[collective])
        n = rng.choice([0, 1, 5, 64, 65, 300, 2000, 5000])
        root = rng.randrange(w)
        base = np.arange(n, dtype=np.float64) + step
        if collective == "all_reduce":
            array = base * (rank + 1)
            communicator.all_reduce(array, algorithm=algorithm)
            assert (array == base * (w * (w + 1) // 2)).all(), (step, algorithm, n)
        elif collective == "broadcast":
            array = base + 1000 * rank
            communicator.broadcast(array, root, algorithm=algorithm)
            assert (array == base + 1000 * root).all(), (step, algorithm, n)
        elif collective == "all_gather":
            output = np.empty((w, n))
            communicator.all_gather(output, base + 1000 * rank, algorithm=algorithm)
            assert (output == base + 1000 * np.arange(w)[:, None]).all(), (step, algorithm, n)
        elif collective == "reduce_scatter":
            output = np.empty(n)
            source = (base + np.arange(w)[:, None]) * (rank + 1)
            communicator.reduce_scatter(output, source, algorithm=algorithm)
            assert (output == (base + rank) * (w * (w + 1) // 2)).all(), (step, algorithm, n)
        else:
            communicator.barrier(algorithm=algorithm)
    return steps


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("options", [{}, SMALL_SLICES], ids=["default", "small_slices"])
def test_a_random_mix_of_collectives_and_algorithms(groups, world_size, options):
    assert groups(world_size, **options).run(mixed, 17, 400) == [400] * world_size


# ---- Shapes, strides, properties ----

GROUP_OF_THREE = ThreadGroups()


@pytest.fixture(scope="module", autouse=True)
def close_group_of_three() -> Iterator[None]:
    yield
    GROUP_OF_THREE.close()


@st.composite
def views(draw) -> Any:
    """How to cut a view out of an array: shape, steps (also negative), offsets, axis order."""
    ndim = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(0, 5)) for _ in range(ndim))
    steps = tuple(draw(st.sampled_from([1, 1, 2, 3, -1, -2])) for _ in range(ndim))
    offsets = tuple(draw(st.integers(0, 2)) for _ in range(ndim))
    order = tuple(draw(st.permutations(range(ndim))))
    return shape, steps, offsets, order


def cut(spec: Any, dtype: str, fill: int) -> tuple[Array, Array]:
    """(base, view): the view's elements are distinct in the base and lie `steps` apart."""
    shape, steps, offsets, order = spec
    extent = [o + max(n, 1) * abs(s) for n, s, o in zip(shape, steps, offsets, strict=True)]
    base = np.full(extent, fill, dtype_of(dtype))
    index = []
    for n, step, offset in zip(shape, steps, offsets, strict=True):
        part = slice(offset, offset + n * abs(step), abs(step))
        index.append(part)
    view = base[(*index, ...)]
    view = view[(*[slice(None, None, -1 if s < 0 else 1) for s in steps], ...)]
    return base, view.transpose(order)


def values_for(rank: int, shape: tuple[int, ...], dtype: str) -> Array:
    size = int(np.prod(shape))
    return data(rank, dtype, "sum", size, "small").reshape(shape)


def view_all_reduce(communicator, spec, dtype, op, algorithm):
    base, view = cut(spec, dtype, 77)
    view[...] = values_for(communicator.rank, view.shape, dtype)
    communicator.all_reduce(view, op, algorithm=algorithm)
    result = view.copy()
    view[...] = 77
    return result, bool((base == dtype_of(dtype).type(77)).all())


@settings(max_examples=150)
@given(
    spec=views(),
    dtype=st.sampled_from(REDUCIBLE),
    op=st.sampled_from(["sum", "min", "max", "avg"]),
    algorithm=st.sampled_from(["auto", *ALGORITHMS["all_reduce"]]),
)
def test_all_reduce_of_any_view_leaves_its_neighbours_alone(spec, dtype, op, algorithm):
    results = GROUP_OF_THREE(3).run(view_all_reduce, spec, dtype, op, algorithm)
    shape = results[0][0].shape
    expected = reduced([values_for(rank, shape, dtype) for rank in range(3)], op)
    for result, untouched in results:
        np.testing.assert_array_equal(result, expected)
        assert untouched


def view_moves(communicator, spec, dtype, root, asynchronous):
    w, rank = communicator.world_size, communicator.rank

    def finish(work):
        if asynchronous:
            work.wait()

    shape, steps, offsets, order = spec
    stacked = ((w, *shape), (2, *steps), (1, *offsets), (0, *[i + 1 for i in order]))
    _, source = cut(spec, dtype, 5)
    source[...] = values_for(rank, source.shape, dtype)
    gathered_base, gathered = cut(stacked, dtype, 77)
    finish(communicator.all_gather(gathered, source, async_op=asynchronous))
    gather_result = gathered.copy()
    gathered[...] = 77
    one_base, one = cut(spec, dtype, 77)
    one[...] = values_for(rank, one.shape, dtype)
    finish(communicator.broadcast(one, root, async_op=asynchronous))
    broadcast_result = one.copy()
    one[...] = 77
    kept = (source == values_for(rank, source.shape, dtype)).all()
    untouched = all((b == dtype_of(dtype).type(77)).all() for b in (gathered_base, one_base))
    return gather_result, broadcast_result, bool(kept), untouched


@settings(max_examples=100)
@given(
    spec=views(),
    dtype=st.sampled_from(MOVABLE),
    root=st.integers(0, 2),
    asynchronous=st.booleans(),
)
def test_all_gather_and_broadcast_of_any_view(spec, dtype, root, asynchronous):
    for gathered, sent, kept, untouched in GROUP_OF_THREE(3).run(
        view_moves, spec, dtype, root, asynchronous
    ):
        expected = [values_for(rank, sent.shape, dtype) for rank in range(3)]
        np.testing.assert_array_equal(gathered, np.stack(expected))
        np.testing.assert_array_equal(sent, expected[root])
        assert kept
        assert untouched


@settings(max_examples=150)
@given(
    world_size=st.integers(1, 7),
    n=st.integers(0, 3000),
    dtype=st.sampled_from(REDUCIBLE),
    op=st.sampled_from(OPS),
    algorithm=st.sampled_from(ALGORITHMS["all_reduce"]),
    small=st.booleans(),
)
def test_all_reduce_of_any_length(world_size, n, dtype, op, algorithm, small):
    group = GROUP_OF_THREE(world_size, **(SMALL_SLICES if small else {}))
    check_all_reduce(group, algorithm, [(dtype, op, n)])


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
