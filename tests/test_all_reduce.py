"""all_reduce by every algorithm against NumPy, and the same bytes on all ranks.

Ranks are threads: thousands of calls a second.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from pool import communicator_ranks
from reference import (
    ALGORITHMS,
    LARGEST,
    OPS,
    REDUCIBLE,
    SMALL_SLICES,
    WORLD_SIZES,
    Array,
    all_reduce_cases,
    check_all_reduce,
    data,
    dtype_of,
    edge_sizes,
)


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
