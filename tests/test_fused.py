"""The fused kernels against NumPy, byte for byte, for every instruction set of this machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fused_reference as reference
from fused_reference import CASTS, CHUNK, FLOATS, Array
from kernel_reference import ISAS, STORAGE, in_buffer, sample
from pycoll import _core

GUARD = 64


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """Overflow and invalid operations are part of the data."""
    with np.errstate(all="ignore"):
        yield


class Placed:
    """A copy of an array at some offset from a cache line, with guards around."""

    def __init__(self, x: Array, dtype: str, offset: int) -> None:
        self.x, self.dtype = x, dtype
        guard = bytes(range(GUARD))
        self._room = in_buffer(guard + x.tobytes() + guard, offset)

    @property
    def span(self) -> tuple[int, int, int]:
        return self._room.ctypes.data + GUARD, len(self.x), _core.dtypes().index(self.dtype)

    def contents(self) -> bytes:
        assert bytes(self._room[:GUARD]) == bytes(self._room[-GUARD:]) == bytes(range(GUARD))
        return self._room[GUARD:-GUARD].tobytes()


def spans(*placed: Placed) -> Array:
    return np.array([each.span for each in placed], np.uint64)


def finite(dtype: str, n: int, seed: int = 0) -> Array:
    """Gaussian values over a few magnitudes."""
    rng = np.random.default_rng([seed, n])
    return reference.from_float64(rng.standard_normal(n) * 2.0 ** rng.integers(-6, 6, n), dtype)


def check_unscale(
    tensors: Sequence[tuple[Array, str]], factor: float, isa: str, offsets: Sequence[int] = (0,)
) -> None:
    placed = [Placed(x, d, offsets[i % len(offsets)]) for i, (x, d) in enumerate(tensors)]
    found, total = _core.unscale(tensors=spans(*placed), factor=factor, isa=isa)
    expected = [(reference.multiplied(x, dtype, factor), dtype) for x, dtype in tensors]
    for one, (y, _) in zip(placed, expected, strict=True):
        assert one.contents() == y.tobytes()
    assert found == (not all(reference.all_finite(y, dtype) for y, dtype in expected))
    squares = reference.sum_of_squares(expected)
    assert np.float64(total).tobytes() == np.float64(squares).tobytes() or (
        math.isnan(total) and math.isnan(squares)
    )


def check_cast(x: Array, source: str, target: str, scale: float, isa: str, offset: int = 0) -> None:
    expected = reference.cast(x, source, target, scale)
    from_there = Placed(x, source, offset)
    to_here = Placed(np.zeros(len(x), STORAGE[target]), target, (offset * 5) % 64)
    found = _core.cast(targets=spans(to_here), sources=spans(from_there), scale=scale, isa=isa)
    assert to_here.contents() == expected.tobytes()
    assert from_there.contents() == x.tobytes()
    assert found == (not reference.all_finite(expected, target))


# ---- Unscaling ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_unscale_at_every_length(dtype: str, isa: str) -> None:
    lengths = [*range(70), 127, 128, 129, 255, 256, 257, 511, 1000]
    lengths += [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 300, 3 * CHUNK + 255]
    for n in lengths:
        check_unscale([(finite(dtype, n), dtype)], 1 / 3, isa, [n % 64])


class Case(NamedTuple):
    """A tensor of a list."""

    dtype: str
    n: int
    offset: int
    wild: bool
    seed: int


cases = st.builds(
    Case,
    st.sampled_from(FLOATS),
    st.one_of(st.integers(0, 300), st.integers(CHUNK - 2, 2 * CHUNK + 2)),
    st.integers(0, 63),
    st.booleans(),
    st.integers(0, 1 << 20),
)
factors = st.sampled_from([1.0, 0.5, 1 / 3, 2.0**-16, 2.0**-30, 1e-41, 3e4, 0.0, -1.0, math.inf])


@given(st.lists(cases, max_size=5), factors)
@settings(max_examples=60, deadline=None)
def test_unscale_of_lists(tensors: list[Case], factor: float) -> None:
    data = [
        (sample(c.dtype, c.n, c.seed) if c.wild else finite(c.dtype, c.n, c.seed), c.dtype)
        for c in tensors
    ]
    for isa in ISAS:
        check_unscale(data, factor, isa, [c.offset for c in tensors] or [0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_value_that_is_not_finite_is_found_anywhere(dtype: str, isa: str) -> None:
    n = CHUNK + 300
    x = finite(dtype, n)
    assert not _core.unscale(tensors=spans(Placed(x, dtype, 0)), factor=0.5, isa=isa)[0]
    bad = reference.from_float64(np.array([np.inf, -np.inf, np.nan]), dtype)
    for at in (0, 1, 255, 256, CHUNK - 1, CHUNK, CHUNK + 256, n - 1):
        y = x.copy()
        y[at] = bad[at % 3]
        check_unscale([(y, dtype)], 0.5, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_more_chunks_than_partial_sums(isa: str) -> None:
    check_unscale([(finite("float32", 300 * CHUNK + 17), "float32")], 1 / 3, isa)
    tiny = [(finite(FLOATS[i % 4], i % 7, i), FLOATS[i % 4]) for i in range(1200)]
    check_unscale(tiny, 1 / 3, isa, range(13))


def test_squares_beyond_float64_are_no_infinite_values() -> None:
    x = np.full(10, 1e200)
    for isa in ISAS:
        found, total = _core.unscale(tensors=spans(Placed(x, "float64", 0)), factor=1.0, isa=isa)
        assert (found, total) == (False, math.inf)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_multiply(dtype: str, isa: str) -> None:
    for n in (0, 1, 17, 300, CHUNK + 5):
        for x in (finite(dtype, n), sample(dtype, n, 3)):
            placed = Placed(x, dtype, n % 64)
            _core.multiply(tensors=spans(placed), factor=0.3, isa=isa)
            assert placed.contents() == reference.multiplied(x, dtype, 0.3).tobytes()


# ---- Casts ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("target", CASTS)
@pytest.mark.parametrize("source", CASTS)
def test_casts_at_every_length(source: str, target: str, isa: str) -> None:
    for n in (*range(70), 1000, 1024, 1025, 3000):
        check_cast(finite(source, n), source, target, 1 / 3, isa, n % 64)


@given(
    st.sampled_from(CASTS),
    st.sampled_from(CASTS),
    st.integers(0, 1100),
    st.integers(0, 63),
    st.integers(0, 1 << 20),
    factors,
)
@settings(max_examples=60, deadline=None)
def test_casts_of_anything(
    source: str, target: str, n: int, offset: int, seed: int, scale: float
) -> None:
    for isa in ISAS:
        check_cast(sample(source, n, seed), source, target, scale, isa, offset)


@pytest.mark.parametrize("target", CASTS)
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_casts_of_every_16_bit_value(source: str, target: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(STORAGE[source])
    for isa in ISAS:
        check_cast(every, source, target, 1.0, isa)
        check_cast(every, source, target, 0.1, isa)


@pytest.mark.parametrize(
    "target, least", [("float16", 65520.0), ("bfloat16", 3.3961775292304957e38)]
)
def test_what_rounds_to_infinity_is_found(target: str, least: float) -> None:
    largest = np.nextafter(np.float32(least), np.float32(0))
    for value, expected in ((least, True), (largest, False), (-least, True), (-largest, False)):
        for isa in ISAS:
            x = np.array([1, value], np.float32)
            placed = Placed(np.zeros(2, np.uint16), target, 0)
            source = Placed(x, "float32", 0)
            found = _core.cast(targets=spans(placed), sources=spans(source), scale=1.0, isa=isa)
            assert found == expected, (value, isa)
