"""The elementwise kernels against NumPy, to the byte, for every instruction set of this machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_reference import (
    HALVES,
    INTEGERS,
    ISAS,
    PAIRS,
    STORAGE,
    bits_of,
    combine,
    finish,
    from_float32,
    in_buffer,
    is_nan,
    operand_forms,
    quiet,
    sample,
    to_acc,
    to_float32,
)
from pycoll import _core

MAX_LENGTH = 130
FINISHED = [pair for pair in PAIRS if pair[1] in ("sum", "avg", "product")]


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """Overflow and invalid operations are part of the data."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


# ---- Combine ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_combine_at_every_length_and_alignment(dtype: str, op: str, isa: str) -> None:
    acc = _core.acc_dtype(dtype, op)
    for a_acc, b_acc in operand_forms(dtype, op):
        a_dtype, b_dtype = (acc if a_acc else dtype), (acc if b_acc else dtype)
        a, b = sample(a_dtype, MAX_LENGTH, 1), sample(b_dtype, MAX_LENGTH, 2)
        expected = combine(to_acc(a, a_dtype, acc), to_acc(b, b_dtype, acc), acc, op)
        for n in range(MAX_LENGTH + 1):
            want = expected[:n].tobytes()
            for shift in (0, 1 + n % 61):
                x = in_buffer(a[:n].tobytes(), shift)
                y = in_buffer(b[:n].tobytes(), shift * 3 % 64)
                room = in_buffer(b"\xa5" * (len(want) + 32), shift * 5 % 64)
                out = room[16 : 16 + len(want)]
                _core.reduce_local(x, y, dtype, op, isa, a_acc, b_acc, out)
                assert out.tobytes() == want, f"n={n}, shift={shift}, acc={a_acc, b_acc}"
                assert room[:16].tobytes() + room[16 + len(want) :].tobytes() == b"\xa5" * 32


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_instruction_sets_give_the_same_bytes(dtype: str, op: str) -> None:
    n = 20_011
    acc = _core.acc_dtype(dtype, op)
    for a_acc, b_acc in operand_forms(dtype, op):
        a = sample(acc if a_acc else dtype, n, 3)
        b = sample(acc if b_acc else dtype, n, 4)
        results = {
            isa: bytes(_core.reduce_local(a, b, dtype, op, isa, a_acc, b_acc)) for isa in ISAS
        }
        assert len(set(results.values())) == 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_combine_in_place(dtype: str, op: str, isa: str) -> None:
    acc = _core.acc_dtype(dtype, op)
    for n in (1, 7, 16, 63, 1009):
        for a_acc, b_acc in operand_forms(dtype, op):
            a = sample(acc if a_acc else dtype, n, 5)
            b = sample(acc if b_acc else dtype, n, 6)
            want = bytes(_core.reduce_local(a, b, dtype, op, isa, a_acc, b_acc))
            if a.itemsize == STORAGE[acc].itemsize:
                onto_a = a.copy()
                _core.reduce_local(onto_a, b, dtype, op, isa, a_acc, b_acc, onto_a)
                assert onto_a.tobytes() == want
            if b.itemsize == STORAGE[acc].itemsize:
                onto_b = b.copy()
                _core.reduce_local(a, onto_b, dtype, op, isa, a_acc, b_acc, onto_b)
                assert onto_b.tobytes() == want


# ---- 16-bit conversions ----

ALL_HALVES = np.arange(65536, dtype=np.uint16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", HALVES)
def test_widen_every_pattern(dtype: str, isa: str) -> None:
    wide = np.frombuffer(_core.widen(ALL_HALVES, dtype, "sum", isa), np.uint32)
    np.testing.assert_array_equal(wide, bits_of(to_float32(ALL_HALVES, dtype)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", HALVES)
def test_every_pattern_comes_back(dtype: str, isa: str) -> None:
    wide = _core.widen(ALL_HALVES, dtype, "sum", isa)
    back = np.frombuffer(_core.finish(wide, dtype, "sum", 1, isa), np.uint16)
    nan = is_nan(ALL_HALVES, dtype)
    np.testing.assert_array_equal(back, np.where(nan, quiet(ALL_HALVES, dtype), ALL_HALVES))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", HALVES)
def test_rounding(dtype: str, isa: str) -> None:
    """Every upper half of a float32 with lower halves at, below and above both ties."""
    lower = [0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    for low in lower:
        x = (ALL_HALVES.astype(np.uint32) << 16 | low).view(np.float32)
        got = np.frombuffer(_core.finish(x, dtype, "sum", 1, isa), np.uint16)
        np.testing.assert_array_equal(got, from_float32(x, dtype), err_msg=f"lower half {low:#x}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", HALVES)
def test_short_calls_convert_alike(dtype: str, isa: str) -> None:
    """Seven elements fill no vector: the code after the vector loop sees every pattern too."""
    wide = (ALL_HALVES.astype(np.uint32) << 16 | 0x1000).view(np.float32)
    rounded, widened = from_float32(wide, dtype), bits_of(to_float32(ALL_HALVES, dtype))
    for start in range(0, 65536, 7):
        part = slice(start, start + 7)
        got = _core.finish(wide[part], dtype, "sum", 1, isa)
        assert got == rounded[part].tobytes(), f"rounding {wide[part]}"
        got = _core.widen(ALL_HALVES[part], dtype, "sum", isa)
        assert got == widened[part].tobytes(), f"widening {ALL_HALVES[part]}"


def test_rounding_by_hand() -> None:
    """A few values written out, so that kernel and reference cannot be wrong together."""
    x = np.array([65519.0, 65520.0, 2.0**-25, 2.0**-25 * 1.001, 1 + 2.0**-11, 1e-8], np.float32)
    half = np.frombuffer(_core.finish(x, "float16", "sum", 1, "baseline"), np.uint16)
    assert half.tolist() == [0x7BFF, 0x7C00, 0, 1, 0x3C00, 0]
    x = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, 3.4028235e38, -(2.0**-149)], np.float32)
    half = np.frombuffer(_core.finish(x, "bfloat16", "sum", 1, "baseline"), np.uint16)
    assert half.tolist() == [0x3F80, 0x3F82, 0x7F80, 0x7F80, 0x8000]


# ---- Finish ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "op"), FINISHED)
def test_finish_at_every_length_also_in_place(dtype: str, op: str, isa: str) -> None:
    acc = _core.acc_dtype(dtype, op)
    if acc == dtype and (op != "avg" or dtype == "bool"):
        with pytest.raises(_core.InvalidArgumentError, match="needs no finish"):
            _core.finish(b"", dtype, op, 3, isa)
        return
    x = sample(acc, 300, 7)
    for world_size in (1, 3, 7, 8):
        expected = finish(x, dtype, op, world_size)
        for n in range(0, 300, 1 if world_size == 3 else 37):
            want = expected[:n].tobytes()
            src = in_buffer(x[:n].tobytes(), n % 64)
            out = in_buffer(bytes(len(want)), n * 3 % 64)
            _core.finish(src, dtype, op, world_size, isa, out)
            assert out.tobytes() == want, f"n={n}"
            _core.finish(src, dtype, op, world_size, isa, src[: len(want)])
            assert src[: len(want)].tobytes() == want, f"in place, n={n}"


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40),
    world_size=st.integers(1, 2**31 - 1),
    dtype=st.sampled_from(INTEGERS),
    isa=st.sampled_from(ISAS),
)
def test_integer_average_truncates(
    values: list[int], world_size: int, dtype: str, isa: str
) -> None:
    acc_dtype = STORAGE[_core.acc_dtype(dtype, "avg")]
    acc = np.array(values, np.int64).astype(acc_dtype)
    got = np.frombuffer(_core.finish(acc, dtype, "avg", world_size, isa), STORAGE[dtype])
    want = [abs(x) // world_size * (-1 if x < 0 else 1) for x in acc.tolist()]
    np.testing.assert_array_equal(got, np.array(want, acc_dtype).astype(STORAGE[dtype]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_average_of_extremes(dtype: str, isa: str) -> None:
    """Exact below 64 bits; there the sum of the first two wraps like any other."""
    info = np.iinfo(STORAGE[dtype])
    for extreme in (info.max, info.min):
        x = np.full(19, extreme, info.dtype)
        total = _core.reduce_local(x, x, dtype, "avg", isa)
        wide = info.bits < 64
        total = _core.reduce_local(x, total, dtype, "avg", isa, False, wide)
        mean = np.frombuffer(_core.finish(total, dtype, "avg", 3, isa), info.dtype)
        wrapped = int(np.array([3 * extreme % 2**64], np.uint64).astype(info.dtype)[0])
        assert set(mean.tolist()) == {extreme if wide else (wrapped + (wrapped < 0) * 2) // 3}


def test_float16_average_of_large_values_does_not_overflow() -> None:
    x = np.full(33, 40000, np.float16)
    for isa in ISAS:
        total = _core.reduce_local(x, x, "float16", "avg", isa)
        mean = np.frombuffer(_core.finish(total, "float16", "avg", 2, isa), np.float16)
        assert mean.tolist() == [40000.0] * 33


def test_bfloat16_sum_is_rounded_once() -> None:
    """256 + 1 rounds back to 256 in bfloat16, so rounding at each step would lose all six ones."""
    one, many = np.full(20, 0x3F80, np.uint16), np.full(20, 0x4380, np.uint16)
    for isa in ISAS:
        total = _core.widen(many, "bfloat16", "sum", isa)
        for _ in range(6):
            total = _core.reduce_local(one, total, "bfloat16", "sum", isa, False, True)
        result = np.frombuffer(_core.finish(total, "bfloat16", "sum", 1, isa), np.uint16)
        assert to_float32(result, "bfloat16").tolist() == [262.0] * 20


# ---- Named cases ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_min_max_of_nan_and_signed_zeros(dtype: str, isa: str) -> None:
    storage = STORAGE[dtype]
    nan, inf = np.nan, np.inf
    a = np.array([0.0, -0.0, nan, 1.0, -inf, 2.0, -1.0] * 9, storage)
    b = np.array([-0.0, 0.0, 1.0, nan, nan, -3.0, -1.0] * 9, storage)
    least = np.array([-0.0, -0.0, nan, nan, nan, -3.0, -1.0] * 9, storage)
    most = np.array([0.0, 0.0, nan, nan, nan, 2.0, -1.0] * 9, storage)
    assert bytes(_core.reduce_local(a, b, dtype, "min", isa)) == least.tobytes()
    assert bytes(_core.reduce_local(a, b, dtype, "max", isa)) == most.tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap(dtype: str, isa: str) -> None:
    info = np.iinfo(STORAGE[dtype])
    a = np.full(70, info.max, info.dtype)
    total = np.frombuffer(_core.reduce_local(a, a, dtype, "sum", isa), info.dtype)
    square = np.frombuffer(_core.reduce_local(a, a, dtype, "product", isa), info.dtype)
    assert set(total.tolist()) == {-2 if info.min else info.max - 1}
    assert set(square.tolist()) == {1}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", ["sum", "product"])
def test_first_nan_payload_wins_everywhere(op: str, isa: str) -> None:
    """In vector body and tail alike, whatever order the compiler gave the operands."""
    first, second = 0x7FC00001, 0xFFC00002
    for n in range(MAX_LENGTH + 1):
        a, b = np.full(n, first, np.uint32), np.full(n, second, np.uint32)
        got = np.frombuffer(_core.reduce_local(a, b, "float32", op, isa), np.uint32)
        assert (got == first).all(), f"n={n}: {[hex(x) for x in got]}"


# ---- Several vectors in one pass ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", ["sum", "avg", "premul_sum"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sum_rows_at_every_length_and_alignment(dtype: str, op: str, isa: str) -> None:
    """Any number of terms and targets; some targets are terms, as in place."""
    rows = [sample(dtype, MAX_LENGTH, seed) for seed in range(5)]
    sums = [rows[0]]
    for row in rows[1:]:
        sums.append(combine(sums[-1], row, dtype, "sum"))
    for n in range(MAX_LENGTH + 1):
        for count, apart in ((1, 1), (2, 0), (2, 1), (3, 2), (5, 0)):
            shift = (7 * n + count) % 61
            terms = [in_buffer(row[:n].tobytes(), shift * (i + 1) % 64) for i, row in
                     enumerate(rows[:count])]  # fmt: skip
            rooms = [in_buffer(b"\xa5" * (n * rows[0].itemsize + 32), shift) for _ in range(apart)]
            targets = [room[16:-16] for room in rooms] + terms[count // 2 :]
            want = finish(sums[count - 1][:n], dtype, op, count).tobytes()
            assert _core.sum_rows(terms, targets, dtype, op, count, isa)
            for target in targets:
                assert target.tobytes() == want, f"n={n}, {count} terms, {apart} targets apart"
            for room in rooms:
                assert room[:16].tobytes() + room[-16:].tobytes() == b"\xa5" * 32
            assert [t.tobytes() for t in terms[: count // 2]] == [
                row[:n].tobytes() for row in rows[: count // 2]
            ]


# ---- Refusals ----


def test_bad_arguments_are_named() -> None:
    x = np.zeros(4, np.float32)
    refused = [
        (_core.InvalidArgumentError, "'median'", (x, x, "float32", "median", "baseline")),
        (_core.InvalidArgumentError, "'float7'", (x, x, "float7", "sum", "baseline")),
        (_core.InvalidArgumentError, "'mmx'.*baseline", (x, x, "float32", "sum", "mmx")),
        (_core.InvalidArgumentError, "4 elements.*3", (x, x[:3], "float32", "sum", "baseline")),
        (_core.InvalidArgumentError, "7 bytes", (bytes(7), x, "float32", "sum", "baseline")),
        (NotImplementedError, "non-integral", (x, x, "float32", "band", "baseline")),
        (ValueError, "contiguous", (np.zeros(8, np.float32)[::2], x, "float32", "sum", "baseline")),
    ]
    for error, message, arguments in refused:
        with pytest.raises(error, match=message):
            _core.reduce_local(*arguments)


def test_overlap_is_refused_before_anything_is_written() -> None:
    room = np.arange(20, dtype=np.float32)
    before = room.copy()
    with pytest.raises(_core.InvalidArgumentError, match="overlaps"):
        _core.reduce_local(room[:8], room[10:18], "float32", "sum", "baseline", out=room[1:9])
    half = room.view(np.uint16)
    with pytest.raises(_core.InvalidArgumentError, match="overlaps"):
        _core.widen(half[:4], "bfloat16", "sum", "baseline", half[:8])
    np.testing.assert_array_equal(room, before)


def test_best_isa_is_available() -> None:
    assert ISAS[0] == "baseline"
    assert _core.best_isa() == ISAS[-1]
