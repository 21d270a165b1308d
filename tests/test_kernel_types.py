"""What each type means to the kernels: 8-bit floats, bools, complex numbers, factors, refusals."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from kernel_reference import (
    FLOAT8S,
    INTEGERS,
    ISAS,
    NARROW,
    OPS,
    PAIRS,
    PARTS,
    STORAGE,
    Array,
    float8_values,
    from_float32,
    in_buffer,
    nearest_float8,
    sample,
    scale,
)
from pycoll import _core

ALL_BYTES = np.arange(256, dtype=np.uint8)
MOVE_ONLY = [
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "complex32",
]
SCALED = [dtype for dtype, op in PAIRS if op == "premul_sum"]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def all_pairs() -> tuple[Array, Array]:
    return np.repeat(ALL_BYTES, 256), np.tile(ALL_BYTES, 256)


# ---- 8-bit floats ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", ["sum", "product", "avg"])
@pytest.mark.parametrize("dtype", FLOAT8S)
def test_float8_of_every_pair(dtype: str, op: str, isa: str) -> None:
    """All 256 x 256: exact in float64 (float32 too), rounded once."""
    a, b = all_pairs()
    acc = _core.reduce_local(a, b, dtype, op, isa)
    got = np.frombuffer(_core.finish(acc, dtype, op, 2, isa), np.uint8)
    x, y = (float8_values(dtype)[codes].astype(np.float64) for codes in (a, b))
    exact = x * y if op == "product" else (x + y) / (2 if op == "avg" else 1)
    nan = np.isnan(exact)
    np.testing.assert_array_equal(got & 0x7F == 0x7F, nan)
    want = nearest_float8(exact, dtype)
    np.testing.assert_array_equal(got[~nan], want[~nan])
    # A NaN operand keeps its sign, the first one's when both are.
    operand = np.isnan(x) | np.isnan(y)
    signs = np.where(np.isnan(x), a, b)[operand] | 0x7F
    np.testing.assert_array_equal(got[operand], signs)


@pytest.mark.parametrize("dtype", FLOAT8S)
def test_float8_rounding_of_the_reference_is_that_of_ml_dtypes(dtype: str) -> None:
    """A third opinion, where all agree by definition: below overflow."""
    x = (np.arange(1 << 19, dtype=np.uint32) << 13).view(np.float32)
    x = x[np.abs(x) <= np.float32(ml_dtypes.finfo(dtype).max)]
    assert len(x) > 200_000
    want = x.astype(getattr(ml_dtypes, dtype)).view(np.uint8)
    np.testing.assert_array_equal(nearest_float8(x, dtype), want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOAT8S)
def test_float8_rounds_and_overflows(dtype: str, isa: str) -> None:
    """Every upper half of a float32 with lower halves around the ties, also in short calls."""
    upper = np.arange(65536, dtype=np.uint32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        x = (upper | low).view(np.float32)
        want = from_float32(x, dtype)
        got = np.frombuffer(_core.finish(x, dtype, "sum", 1, isa), np.uint8)
        np.testing.assert_array_equal(got, want, err_msg=f"lower half {low:#x}")
        for start in range(0, 65536, 1021):
            part = slice(start, start + 7)
            assert _core.finish(x[part], dtype, "sum", 1, isa) == want[part].tobytes()


def test_float8_overflow_by_hand() -> None:
    x = np.array([448, 464, 464.1, 1e9, np.inf, -np.inf, -500, np.nan], np.float32)
    got = np.frombuffer(_core.finish(x, "float8_e4m3fn", "sum", 1, "baseline"), np.uint8)
    assert got.tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7F]
    x = np.array([57344, 61439, 61440, np.inf, -1e9, np.nan], np.float32)
    got = np.frombuffer(_core.finish(x, "float8_e5m2", "sum", 1, "baseline"), np.uint8)
    assert got.tolist() == [0x7B, 0x7B, 0x7C, 0x7C, 0xFC, 0x7F]


def test_float8_sum_is_rounded_once() -> None:
    """16 + 1/2 rounds back to 16 in three bits: rounding at each step would lose all eight."""
    sixteen, half = (np.array([x], ml_dtypes.float8_e4m3fn).view(np.uint8) for x in (16, 0.5))
    for isa in ISAS:
        total = _core.widen(sixteen, "float8_e4m3fn", "sum", isa)
        for _ in range(8):
            total = _core.reduce_local(half, total, "float8_e4m3fn", "sum", isa, False, True)
        result = np.frombuffer(_core.finish(total, "float8_e4m3fn", "sum", 1, isa), np.uint8)
        assert float8_values("float8_e4m3fn")[result].tolist() == [20.0]


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", FLOAT8S)
def test_float8_order_of_every_pair(dtype: str, op: str) -> None:
    a, b = all_pairs()
    x, y = float8_values(dtype)[a], float8_values(dtype)[b]
    want = np.minimum(x, y) if op == "min" else np.maximum(x, y)
    zeros = (x == 0) & (y == 0)
    for isa in ISAS:
        got = np.frombuffer(_core.reduce_local(a, b, dtype, op, isa), np.uint8)
        np.testing.assert_array_equal(float8_values(dtype)[got], want)
        signs = (a | b) if op == "min" else (a & b)
        np.testing.assert_array_equal(got[zeros], signs[zeros])


# ---- Bool and integers ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", [op for op in OPS if op != "premul_sum"])
def test_bool_of_every_pair_of_bytes(op: str, isa: str) -> None:
    a, b = all_pairs()
    got = np.frombuffer(_core.reduce_local(a, b, "bool", op, isa), np.uint8)
    trues = (a != 0) + (b != 0).astype(np.int64)
    want = {"sum": trues > 0, "max": trues > 0, "bor": trues > 0, "bxor": trues == 1}
    np.testing.assert_array_equal(got, want.get(op, trues // 2 == 1).astype(np.uint8))
    assert _core.acc_dtype("bool", op) == "bool"


@pytest.mark.parametrize("op", ["sum", "product", "band", "bor", "bxor", "min", "max"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_against_python(dtype: str, op: str) -> None:
    """Whole Python integers, reduced modulo 2^bits."""
    info = np.iinfo(STORAGE[dtype])
    a, b = sample(dtype, 997, 8), sample(dtype, 997, 9)
    function = {
        "sum": int.__add__,
        "product": int.__mul__,
        "band": int.__and__,
        "bor": int.__or__,
        "bxor": int.__xor__,
        "min": min,
        "max": max,
    }[op]
    low, modulus = int(info.min), 2**info.bits
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    want = [(function(x, y) - low) % modulus + low for x, y in pairs]
    for isa in ISAS:
        got = np.frombuffer(_core.reduce_local(a, b, dtype, op, isa), info.dtype)
        assert got.tolist() == want


# ---- Complex numbers and factors ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", PARTS)
def test_complex_sum_and_average(dtype: str, isa: str) -> None:
    a = np.arange(37) * (3 + 2j)
    b = np.arange(37)[::-1] * (5 - 7j) + 4j
    total = _core.reduce_local(a.astype(dtype), b.astype(dtype), dtype, "sum", isa)
    np.testing.assert_array_equal(np.frombuffer(total, dtype), a + b)
    mean = np.frombuffer(_core.finish(total, dtype, "avg", 4, isa), dtype)
    np.testing.assert_array_equal(mean, (a + b) / 4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", SCALED)
def test_scale_at_every_length_also_in_place(dtype: str, isa: str) -> None:
    x = sample(dtype, 200, 11)
    for factor in (0.1, -3.0, 0.0, 1e-30, 1e30, np.nan, np.inf):
        expected = scale(x, dtype, factor)
        for n in range(0, 200, 1 if factor == 0.1 else 67):
            want = expected[:n].tobytes()
            src = in_buffer(x[:n].tobytes(), n % 64)
            out = in_buffer(bytes(len(want)), n * 3 % 64)
            _core.scale(src, dtype, factor, isa, out)
            assert out.tobytes() == want, f"n={n}, factor={factor}"
            _core.scale(src, dtype, factor, isa, src)
            assert src.tobytes() == want, f"in place, n={n}, factor={factor}"


def test_scale_by_hand() -> None:
    x = np.array([1 + 2**-10, 40000, 2**-24], np.float16)
    z = np.array([1 + 2j, -3j], np.complex64)
    for isa in ISAS:
        got = np.frombuffer(_core.scale(x, "float16", 1.5, isa), np.float16)
        assert got.tolist() == [1.5 + 2**-9, 60000.0, 2**-23]
        # 1/3 as a float16 would give 13328 for 13333.3: the factor is not rounded to 16 bits.
        third = np.frombuffer(_core.scale(x, "float16", 1 / 3, isa), np.float16)
        assert third[1] == np.float16(40000 / 3) == 13336
        got = np.frombuffer(_core.scale(z, "complex64", -2.0, isa), np.complex64)
        assert got.tolist() == [-2 - 4j, 6j]


# ---- What is not defined ----


@pytest.mark.parametrize("dtype", _core.dtypes())
def test_every_pair_is_there_or_says_why_not(dtype: str) -> None:
    for op, isa in itertools.product(["none", *OPS], ISAS):
        why = _core.why_not_reducible(dtype, op)
        if (dtype, op) in PAIRS:
            assert why == ""
            assert _core.reduce_local(b"", b"", dtype, op, isa) == b""
        else:
            assert why
            with pytest.raises(_core.UnsupportedError, match="no kernel for") as caught:
                _core.reduce_local(b"", b"", dtype, op, isa)
            assert why in str(caught.value)


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_what_partial_results_are_held_in(dtype: str, op: str) -> None:
    """Part of the promise: it decides what is rounded, what wraps and what travels."""
    acc = dtype
    if dtype in NARROW and op in ("sum", "avg", "product", "premul_sum"):
        acc = "float32"
    elif dtype in INTEGERS and op == "avg":
        sign, bits = dtype.split("int")
        acc = f"{sign}int{32 if int(bits) < 32 else 64}"
    assert _core.acc_dtype(dtype, op) == acc


def test_types_that_only_move() -> None:
    assert set(_core.dtypes()) == {*STORAGE, *MOVE_ONLY}
    for dtype in MOVE_ONLY:
        why = _core.why_not_reducible(dtype, "sum")
        assert why == f"Cannot use SUM with move-only dtype {dtype}: it can be sent but not reduced"


@pytest.mark.parametrize(
    ("dtype", "op", "words"),
    [
        ("float32", "band", "Cannot use BAND with non-integral dtype float32"),
        ("float8_e5m2", "bxor", "Cannot use BXOR with non-integral dtype float8_e5m2"),
        ("complex64", "max", "Cannot use MAX with complex dtype complex64"),
        ("complex128", "product", "defined are SUM, AVG, PREMUL_SUM"),
        ("int64", "premul_sum", "Cannot use PREMUL_SUM with integral dtype int64"),
        ("bool", "premul_sum", "Cannot use PREMUL_SUM with boolean dtype bool"),
        ("float32", "none", "No reduce operation"),
    ],
)
def test_reasons(dtype: str, op: str, words: str) -> None:
    assert words in _core.why_not_reducible(dtype, op)


def test_scale_is_refused_where_it_has_no_meaning() -> None:
    with pytest.raises(_core.UnsupportedError, match="PREMUL_SUM with integral"):
        _core.scale(b"", "int32", 2.0, "baseline")
    room = np.zeros(9, np.float32)
    with pytest.raises(_core.InvalidArgumentError, match="overlaps"):
        _core.scale(room[1:], "float32", 2.0, "baseline", room[:-1])
