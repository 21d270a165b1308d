"""Codecs against NumPy, byte for byte, for every instruction set of this machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import codec_reference as reference
from codec_reference import BITS, Floats, Kind
from kernel_reference import ISAS, from_float32, to_float32
from pycoll import _core

BLOCKED = [name for name in BITS if name not in ("fp16", "bf16")]
STOCHASTIC = ["int8", "int4", "uint8", "uint4", "ternary"]
FLOATS = ["float32", "float16", "bfloat16"]


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """Overflow and invalid operations are part of the data."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def codec_of(kind: Kind, stochastic: bool = False) -> _core.Codec:
    return _core.Codec(kind=kind.name, block=kind.block, stochastic=stochastic)


def encode(
    kind: Kind,
    values: bytes,
    dtype: str = "float32",
    *,
    stochastic: bool = False,
    residual: Floats | None = None,
    isa: str = "",
    **key: int,
) -> bytes:
    codec = codec_of(kind, stochastic)
    size = 4 if dtype == "float32" else 2
    code = np.full(codec.code_bytes(len(values) // size), 0xA5, np.uint8)
    _core.encode(
        codec=codec,
        values=values,
        dtype=dtype,
        code=code,
        key=_core.RandomKey(**key),
        residual=residual,
        isa=isa,
    )
    return code.tobytes()


def decode(
    kind: Kind,
    codes: list[bytes],
    n: int,
    dtype: str = "float32",
    divisor: float = 1,
    isa: str = "",
) -> bytes:
    out = np.full(n * (4 if dtype == "float32" else 2), 0x5A, np.uint8)
    _core.decode(
        codec=codec_of(kind), codes=codes, values=out, dtype=dtype, divisor=divisor, isa=isa
    )
    return out.tobytes()


def gaussian(n: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(n, np.float32)


def numbers_for(name: str, n: int) -> Floats | None:
    return reference.uniform(n) if name == "ternary" else None


def rounded(x: Floats, dtype: str) -> tuple[bytes, Floats]:
    """The bytes of x in the type, and what they stand for."""
    if dtype == "float32":
        return x.tobytes(), x
    narrow = from_float32(x, dtype)
    return narrow.tobytes(), np.asarray(to_float32(narrow, dtype), np.float32)


# ---- Codes and values ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", BITS)
def test_codes_at_every_length(name: str, isa: str) -> None:
    kind = Kind(name, 32)
    x = gaussian(300)
    u = numbers_for(name, 300)
    for n in [*range(140), 255, 256, 257, 300]:
        code = reference.encode(kind, x[:n], u)
        assert encode(kind, x[:n].tobytes(), isa=isa) == code
        assert decode(kind, [code], n, isa=isa) == reference.decode(kind, [code], n).tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", BITS)
def test_types_and_blocks(name: str, dtype: str, isa: str) -> None:
    n = 9001
    values, x = rounded(gaussian(n) * np.float32(3), dtype)
    for block in (64, 256, 4096) if name in BLOCKED else (256,):
        kind = Kind(name, block)
        u = numbers_for(name, n)
        code = reference.encode(kind, x, u)
        assert encode(kind, values, dtype, isa=isa) == code
        expected = rounded(reference.decode(kind, [code], n), dtype)[0]
        assert decode(kind, [code], n, dtype, isa=isa) == expected


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_codes_follow_the_numbers(name: str, isa: str) -> None:
    kind, n = Kind(name), 5000
    x = gaussian(n)
    for key in ({}, {"seed": 2**63 + 5, "step": 7, "rank": 3}, {"seed": 1, "first": 2**33 + 31}):
        u = reference.uniform(n, **key)
        code = encode(kind, x.tobytes(), stochastic=True, isa=isa, **key)
        assert code == reference.encode(kind, x, u)


def test_random_numbers_do_not_depend_on_how_a_vector_is_cut() -> None:
    kind, x = Kind("int8", 32), gaussian(4096)
    whole = reference.unpack(encode(kind, x.tobytes(), stochastic=True, seed=9)[128 * 4 :], 8, 4096)
    for begin, end in ((0, 32), (32, 160), (1024, 4096), (4064, 4096)):
        part = encode(kind, x[begin:end].tobytes(), stochastic=True, seed=9, first=begin)
        codes = part[-(-(end - begin) // 32) * 4 + 15 & ~15 :]
        assert codes == whole[begin:end].tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", BITS)
def test_sums_of_several_codes(name: str, dtype: str, isa: str) -> None:
    kind, n = Kind(name, 64), 3001
    codes = [reference.encode(kind, gaussian(n, rank), numbers_for(name, n)) for rank in range(5)]
    for count, divisor in ((2, 1), (5, 5), (3, 7)):
        expected = rounded(reference.decode(kind, codes[:count], n, divisor), dtype)[0]
        assert decode(kind, codes[:count], n, dtype, divisor, isa=isa) == expected


@pytest.mark.parametrize("name", BITS)
def test_memory_at_any_alignment(name: str) -> None:
    kind, n = Kind(name, 32), 333
    x = gaussian(n)
    expected = encode(kind, x.tobytes())
    code = np.zeros(len(expected) + 64, np.uint8)
    values = np.zeros(n * 4 + 64, np.uint8)
    for shift in range(1, 20, 3):
        values[shift : shift + n * 4] = x.view(np.uint8)
        source, target = values[shift : shift + n * 4], code[shift : shift + len(expected)]
        arguments = {"codec": codec_of(kind), "dtype": "float32"}
        _core.encode(values=source, code=target, key=_core.RandomKey(), **arguments)
        assert target.tobytes() == expected
        source[:] = 0
        _core.decode(codes=[target], values=source, **arguments)
        assert source.tobytes() == decode(kind, [expected], n)


# ---- Values that are not ordinary ----

SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 9e-31, 1.1e-30, -1e-20, 1.0, -1.0, 65504.0, 65519.0]
SPECIAL += [65520.0, -131039.0, 3e38, -3e38, 3.4028235e38, -3.4028235e38]
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


def vectors(finite: bool) -> st.SearchStrategy[Floats]:
    special = st.sampled_from(SPECIAL if finite else SPECIAL + NOT_FINITE)
    ordinary = st.floats(width=32, allow_nan=not finite, allow_infinity=not finite)
    value = st.one_of(special, ordinary, st.floats(-4, 4, width=32))
    return st.lists(value, min_size=1, max_size=150).map(lambda x: np.array(x, np.float32))


def constant(value: float, n: int) -> Floats:
    return np.full(n, value, np.float32)


@pytest.mark.parametrize("name", BITS)
@given(x=vectors(finite=False), isa=st.sampled_from(ISAS))
@example(x=np.array([3.4028235e38, -3.4028235e38], np.float32), isa=ISAS[-1])
@example(x=constant(1e-30, 40), isa=ISAS[-1])
@example(x=constant(-7.25, 33), isa=ISAS[-1])
@settings(max_examples=150, deadline=None)
def test_any_values(name: str, x: Floats, isa: str) -> None:
    kind, n = Kind(name, 32), len(x)
    for stochastic in (False, True) if name in STOCHASTIC else (False,):
        u = reference.uniform(n) if stochastic or name == "ternary" else None
        code = encode(kind, x.tobytes(), stochastic=stochastic, isa=isa)
        assert code == reference.encode(kind, x, u)
        value = np.frombuffer(decode(kind, [code], n, isa=isa), np.float32)
        assert value.tobytes() == reference.decode(kind, [code], n).tobytes()


@pytest.mark.parametrize("name", BITS)
@given(x=vectors(finite=True))
@settings(max_examples=100, deadline=None)
def test_finite_values_stay_finite(name: str, x: Floats) -> None:
    if name == "bf16":
        x = np.clip(x, np.float32(-3.38e38), np.float32(3.38e38))
    kind = Kind(name, 32)
    value = np.frombuffer(decode(kind, [encode(kind, x.tobytes())], len(x)), np.float32)
    assert np.isfinite(value).all()


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("name", BLOCKED)
def test_a_value_that_is_not_finite_spoils_its_block_only(name: str, bad: float) -> None:
    kind, x = Kind(name, 32), gaussian(96)
    clean = np.frombuffer(decode(kind, [encode(kind, x.tobytes())], 96), np.float32)
    x[40] = bad
    value = np.frombuffer(decode(kind, [encode(kind, x.tobytes())], 96), np.float32)
    assert np.isnan(value[32:64]).all()
    assert value[:32].tobytes() == clean[:32].tobytes()
    assert value[64:].tobytes() == clean[64:].tobytes()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_value_that_is_not_finite_stays_itself(name: str) -> None:
    x = np.array([1, np.inf, -np.inf, np.nan, 70000, 2], np.float32)
    value = np.frombuffer(decode(Kind(name), [encode(Kind(name), x.tobytes())], 6), np.float32)
    assert list(value[:3]) == [1, np.inf, -np.inf]
    assert np.isnan(value[3])
    assert value[4] == pytest.approx(70000, rel=2**-8)
    assert value[5] == 2


@pytest.mark.parametrize("name", BLOCKED)
def test_blocks_next_to_nothing_are_zeros(name: str) -> None:
    kind = Kind(name, 32)
    x = np.concatenate([constant(9e-31, 32), constant(2e-30, 32)])
    value = np.frombuffer(decode(kind, [encode(kind, x.tobytes())], 64), np.float32)
    assert (value[:32] == 0).all()
    assert (value[32:] != 0).all()


@pytest.mark.parametrize("value", [1.0, -3.7, 0.0, 1e30, 1e-29])
@pytest.mark.parametrize("name", ["int8", "int4", "uint8", "uint4", "fp8_e4m3", "sign"])
def test_constant_blocks_are_exact(name: str, value: float) -> None:
    kind, x = Kind(name), constant(value, 600)
    got = np.frombuffer(decode(kind, [encode(kind, x.tobytes())], 600), np.float32)
    np.testing.assert_allclose(got, x, rtol=2e-7)


# ---- Errors of the formulas ----

# b.5 of the specification: relative L2 errors of gaussian values, blocks of 256.
GAUSSIAN = {
    ("bf16", False): 0.00166,
    ("fp16", False): 0.0002083,  # 0.0002 there, to one digit
    ("int8", False): 0.0070,
    ("int8", True): 0.0099,
    ("uint8", False): 0.0064,
    ("fp8_e4m3", False): 0.0261,
    ("fp8_e5m2", False): 0.0521,
    ("int4", False): 0.1265,
    ("int4", True): 0.1788,
    ("uint4", False): 0.1091,
    ("sign", False): 0.6017,
    ("ternary", True): 1.00,
}


def relative_error(kind: Kind, x: Floats, stochastic: bool) -> float:
    code = encode(kind, x.tobytes(), stochastic=stochastic)
    got = np.frombuffer(decode(kind, [code], len(x)), np.float32).astype(np.float64)
    return float(np.linalg.norm(got - x) / np.linalg.norm(x.astype(np.float64)))


@pytest.mark.parametrize(("name", "stochastic"), GAUSSIAN)
def test_error_of_gaussian_values(name: str, stochastic: bool) -> None:
    error = relative_error(Kind(name), gaussian(1 << 20), stochastic)
    bound = GAUSSIAN[name, stochastic]
    assert bound / 1.1 < error < bound * 1.1


@pytest.mark.parametrize(
    ("name", "block", "bound"),
    [
        ("int8", 64, 0.0059),
        ("int4", 64, 0.1077),
        ("int8", 2048, 0.0083),
        ("int4", 2048, 0.1506),
        ("fp8_e4m3", 2048, 0.0264),
    ],
)
def test_error_of_other_blocks(name: str, block: int, bound: float) -> None:
    assert relative_error(Kind(name, block), gaussian(1 << 20), False) < bound * 1.1


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    """The mean of N codes is as far off as chance has it; that of nearest rounding is not.

    Over 2048 values the norm of the error is within a few per cent of its expectation.
    """
    kind, n, repeats = Kind(name), 2048, 2000
    x = gaussian(n)
    if name == "ternary":  # what is clipped has another mean
        x = np.clip(x, -1, 1)
    total = np.zeros(n)
    for step in range(repeats):
        code = encode(kind, x.tobytes(), stochastic=True, step=step)
        total += np.frombuffer(decode(kind, [code], n), np.float32)
    one = relative_error(kind, x, True)
    scale = np.linalg.norm(x)
    assert np.linalg.norm(total / repeats - x) / scale < 1.15 * one / np.sqrt(repeats)
    if name != "ternary":
        assert relative_error(kind, x, False) > 10 * one / np.sqrt(repeats)


# ---- Error feedback ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", BITS)
def test_the_residual_is_what_the_code_lacks(name: str, isa: str) -> None:
    kind, n = Kind(name, 64), 1500
    x, residual = gaussian(n), gaussian(n, 1) * np.float32(0.1)
    x[100] = np.inf
    before = residual.copy()
    code = encode(kind, x.tobytes(), residual=residual, isa=isa)
    whole = x + before
    u = numbers_for(name, n)
    assert code == reference.encode(kind, whole, u)
    expected = whole - reference.decode(kind, [code], n)
    spoiled = ~np.isfinite(expected)
    expected[spoiled] = before[spoiled]
    assert spoiled[100]
    assert residual.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("name", "stochastic"), GAUSSIAN)
def test_residuals_telescope_and_do_not_grow(name: str, stochastic: bool) -> None:
    """Sum of what was sent + the last residual = sum of what was given (e_0 = 0)."""
    kind, n = Kind(name), 700
    residual = np.zeros(n, np.float32)
    sent, given_ = np.zeros(n), np.zeros(n)
    norms = []
    for step in range(1000):
        x = gaussian(n, step)
        code = encode(kind, x.tobytes(), stochastic=stochastic, residual=residual, step=step)
        sent += np.frombuffer(decode(kind, [code], n), np.float32)
        given_ += x
        norms.append(float(np.linalg.norm(residual)))
    np.testing.assert_allclose(sent + residual, given_, atol=2e-3)
    if name != "ternary":  # not a contraction: an error of 1.0
        assert max(norms[500:]) < 1.5 * max(norms[:100])


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "int4", "sign", "uint4", "fp8_e5m2"])
def test_codecs_contract(name: str) -> None:
    kind = Kind(name)
    for seed in range(5):
        x = gaussian(4096, seed) * np.float32(10.0 ** (seed - 2))
        assert relative_error(kind, x, False) < 1


# ---- Sizes and wrong use ----


@pytest.mark.parametrize("name", BITS)
def test_bytes_are_those_of_the_formula(name: str) -> None:
    for block in (32, 256, 4096):
        kind = Kind(name, block)
        for n in (1, 31, 256, 1000, 1 << 20):
            scale_bits = reference.scale_count(kind) * 32 if name in BLOCKED else 0
            bits = BITS[name] * n + scale_bits * -(-n // block)
            assert 0 <= codec_of(kind).code_bytes(n) - bits / 8 <= 47
    assert codec_of(Kind(name)).code_bytes(0) == 0


@pytest.mark.parametrize("block", [0, 1, 16, 48, 257, 8192])
def test_a_block_that_cannot_be(block: int) -> None:
    with pytest.raises(ValueError, match="power of two from 32 to 4096"):
        _core.Codec(kind="int8", block=block)


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="'int3' is no codec"):
        _core.Codec(kind="int3")
    with pytest.raises(ValueError, match="rounds to nearest only"):
        _core.Codec(kind="sign", stochastic=True)
    codec, x = _core.Codec(kind="int8"), np.zeros(10, np.float32)
    code = np.zeros(codec.code_bytes(10), np.uint8)
    with pytest.raises(ValueError, match="not float64"):
        _core.encode(codec=codec, values=x, dtype="float64", code=code, key=_core.RandomKey())
    with pytest.raises(ValueError, match="the code has"):
        _core.encode(codec=codec, values=x, dtype="float32", code=code[1:], key=_core.RandomKey())
    with pytest.raises(ValueError, match="the residual has 36 bytes, 40 are needed"):
        _core.encode(
            codec=codec,
            values=x,
            dtype="float32",
            code=code,
            key=_core.RandomKey(),
            residual=np.zeros(9, np.float32),
        )
    with pytest.raises(ValueError, match="there is no code"):
        _core.decode(codec=codec, codes=[], values=x, dtype="float32")


def test_flush_to_zero_changes_nothing() -> None:
    torch = pytest.importorskip("torch")
    x = gaussian(512) * np.float32(1e-29)
    expected = [encode(Kind(name), x.tobytes()) for name in BITS]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        assert [encode(Kind(name), x.tobytes()) for name in BITS] == expected
    finally:
        torch.set_flush_denormal(False)
