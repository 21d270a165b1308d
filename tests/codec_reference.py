"""What csrc/kernels/codec.h defines, in NumPy: the oracle of codes, values and random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kernel_reference import from_float32

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

LARGEST = np.float32(np.finfo(np.float32).max)
NAN = np.uint32(0x7FC00000).view(np.float32)
FP8 = {"fp8_e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "fp8_e5m2": (ml_dtypes.float8_e5m2, 57344.0)}
BITS = {"int8": 8, "int4": 4, "uint8": 8, "uint4": 4, "sign": 1, "ternary": 2}
BITS |= {"fp8_e4m3": 8, "fp8_e5m2": 8, "fp16": 16, "bf16": 16}


@dataclass(frozen=True)
class Kind:
    name: str
    block: int = 256


# ---- Random numbers ----


def philox(counters: Any, step: int, rank: int, seed: int) -> list[Any]:
    """Philox4x32-10 (Salmon et al., SC 2011) of 64-bit counters: four arrays of words."""
    word = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    counters = np.asarray(counters, np.uint64)
    c = [counters & word, counters >> shift]
    c += [np.full_like(counters, step), np.full_like(counters, rank)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (b >> shift) ^ c[1] ^ np.uint64(key[0]),
            b & word,
            (a >> shift) ^ c[3] ^ np.uint64(key[1]),
            a & word,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def uniform(n: int, *, seed: int = 0, step: int = 0, rank: int = 0, first: int = 0) -> Floats:
    index = np.arange(first, first + n, dtype=np.uint64)
    words = philox(index // 64 * 16 + index % 16, step, rank, seed)
    which = (index % 64 // 16).astype(int)
    word = np.choose(which, words)
    return (word >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)


# ---- Blocks ----


def lane_sum(terms: Floats) -> np.float32:
    rows = np.zeros(-(-len(terms) // 16) * 16, np.float32)
    rows[: len(terms)] = terms
    sums = np.zeros(16, np.float32)
    for row in rows.reshape(-1, 16):
        sums = sums + row
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return sums[0]


def scale_for(largest: np.float32, most: float) -> np.float32:
    scale = np.float32(largest / np.float32(most))
    if scale * np.float32(most) > LARGEST:
        scale = np.nextafter(scale, np.float32(0))
    return scale


def scales_of(kind: Kind, x: Floats) -> tuple[np.float32, ...]:
    largest = np.abs(x).max()
    half, n = np.float32(0.5), np.float32(len(x))
    bits = BITS[kind.name]
    if kind.name.startswith("uint"):
        least = x.min()
        if least == 0 and np.signbit(x[x == 0]).any():
            least = np.float32(-0.0)
        step = (half * x.max() - half * least) / np.float32(2**bits - 1)
        return least, step if step >= np.float32(1e-37) else np.float32(0)
    if kind.name in FP8:
        return (scale_for(largest, FP8[kind.name][1]),)
    if kind.name == "sign":
        mean = lane_sum(np.abs(x) * np.float32(2.0**-12)) / n / np.float32(2.0**-12)
        return (min(mean, LARGEST),)
    if kind.name == "ternary":
        ratio = x / largest
        clip = np.float32(2.5) * np.sqrt(lane_sum(ratio * ratio) / n)
        return (clip * largest if clip < 1 else largest,)
    return (scale_for(largest, 2 ** (bits - 1) - 1),)


def codes_of(kind: Kind, x: Floats, scales: tuple[np.float32, ...], u: Floats | None) -> Bytes:
    bits = BITS[kind.name]
    scale = scales[0]
    if kind.name in FP8:
        return (x / scale).astype(FP8[kind.name][0]).view(np.uint8)
    if kind.name == "sign":
        return (x < 0).astype(np.uint8)
    if kind.name == "ternary":
        assert u is not None
        return np.where(u < np.abs(x) / scale, np.where(x < 0, 3, 1), 0).astype(np.uint8)
    if kind.name.startswith("uint"):
        half = np.float32(0.5)
        low, high = 0, 2**bits - 1
        above = half * x - half * scale
        place = above / scales[1] if scales[1] > 0 else np.zeros_like(x)
    else:
        high = 2 ** (bits - 1) - 1
        low = -high
        place = x / scale
    code = np.rint(place) if u is None else np.floor(place + u)
    return (np.clip(code, low, high).astype(np.int32) & (2**bits - 1)).astype(np.uint8)


def values_of(kind: Kind, codes: Bytes, scales: tuple[np.float32, ...]) -> Floats:
    bits = BITS[kind.name]
    scale = scales[0]
    if kind.name in FP8:
        return codes.view(FP8[kind.name][0]).astype(np.float32) * scale
    if kind.name == "sign":
        return np.where(codes == 1, -scale, scale).astype(np.float32)
    if kind.name.startswith("uint"):
        above = codes.astype(np.float32) * scales[1]
        x = np.float32(2) * (np.float32(0.5) * scale + above)
        return np.clip(x, -LARGEST, LARGEST)
    sign = 1 << (bits - 1)
    return ((codes.astype(np.int32) ^ sign) - sign).astype(np.float32) * scale


def pack(codes: Bytes, bits: int) -> bytes:
    planes = (codes[:, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(planes.reshape(-1), bitorder="little").tobytes()


def unpack(packed: bytes, bits: int, n: int) -> Bytes:
    ones = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")[: n * bits]
    return (ones.reshape(n, bits) << np.arange(bits, dtype=np.uint8)).sum(1).astype(np.uint8)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 16)


def scale_count(kind: Kind) -> int:
    return 2 if kind.name.startswith("uint") else 1


# ---- Vectors ----


def half_exponent(x: Floats) -> int:
    finite = np.abs(x[np.isfinite(x)])
    largest = float(finite.max()) if len(finite) else 0.0
    exponent = 0
    while largest * 2.0**-exponent >= 65520:
        exponent += 1
    return exponent


def encode(kind: Kind, x: Floats, u: Floats | None = None) -> bytes:
    """The code of float32 values; `u` for stochastic rounding."""
    if len(x) == 0:
        return b""
    with np.errstate(all="ignore"):
        if kind.name == "bf16":
            return padded(from_float32(x, "bfloat16").tobytes())
        if kind.name == "fp16":
            exponent = half_exponent(x)
            half = from_float32(x * np.float32(2.0**-exponent), "float16")
            return padded(np.int32(exponent).tobytes()) + padded(half.tobytes())
        scales, codes = b"", []
        for first in range(0, len(x), kind.block):
            part = slice(first, first + kind.block)
            block = x[part]
            zeros = np.zeros(len(block), np.uint8)
            if not np.isfinite(block).all():
                block_scales, code = (NAN,) * scale_count(kind), zeros
            elif np.abs(block).max() < np.float32(1e-30):
                block_scales, code = (np.float32(0),) * scale_count(kind), zeros
            else:
                block_scales = scales_of(kind, block)
                code = codes_of(kind, block, block_scales, None if u is None else u[: len(x)][part])
            scales += np.array(block_scales, np.float32).tobytes()
            codes.append(code)
        return padded(scales) + padded(pack(np.concatenate(codes), BITS[kind.name]))


def decode_one(kind: Kind, code: bytes, n: int) -> Floats:
    if n == 0:
        return np.zeros(0, np.float32)
    if kind.name == "bf16":
        halves = np.frombuffer(code, np.uint16)[:n].astype(np.uint32)
        return (halves << np.uint32(16)).view(np.float32)
    if kind.name == "fp16":
        exponent = int(np.frombuffer(code, np.int32)[0])
        half = np.frombuffer(code, np.float16, n, 16).astype(np.float32)
        scaled = half * np.float32(2.0**exponent)
        return np.where(np.isfinite(half), np.clip(scaled, -LARGEST, LARGEST), scaled)
    blocks = -(-n // kind.block)
    each = scale_count(kind)
    scales = np.frombuffer(code, np.float32, blocks * each).reshape(blocks, each)
    begin = len(padded(scales.tobytes()))
    codes = unpack(code[begin:], BITS[kind.name], n)
    parts = [
        values_of(kind, codes[k * kind.block : (k + 1) * kind.block], tuple(scales[k]))
        for k in range(blocks)
    ]
    return np.concatenate(parts)


def decode(kind: Kind, codes: Sequence[bytes], n: int, divisor: float = 1) -> Floats:
    with np.errstate(all="ignore"):
        total = decode_one(kind, codes[0], n)
        for code in codes[1:]:
            total = total + decode_one(kind, code, n)
        total = total / np.float32(divisor)
    return np.where(np.isnan(total), NAN, total)
