"""Collectives over codecs as one process computes them: the oracle of their bytes."""

from __future__ import annotations

import math

import numpy as np

import codec_reference as reference
from kernel_reference import from_float32, to_float32

RANDOM = {"ternary"}


def values_of(rank, n, dtype="float32", seed=0):
    x = np.random.default_rng([seed, rank]).standard_normal(n, np.float32) * np.float32(rank + 1)
    return to_dtype(x, dtype)


def to_dtype(x, dtype):
    if dtype == "float32":
        return x
    import ml_dtypes

    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    return from_float32(x, dtype).view(kind)


def to_f32(x):
    return x if x.dtype == np.float32 else np.asarray(to_float32(x.view(np.uint16), x.dtype.name))


def random_numbers(kind, n, rank, first, step):
    return reference.uniform(n, step=step, rank=rank, first=first) if kind.name in RANDOM else None


def through(kind, x, rank, first, step):
    return reference.encode(kind, x, random_numbers(kind, len(x), rank, first, step))


def round_up(n, unit):
    return math.ceil(n / unit) * unit


def pieces(kind, n, world_size):
    """(owner, begin, end): how an all_reduce cuts a vector."""
    unit = max(kind.block, 64)
    chunk = round_up(math.ceil(n / world_size), unit)
    piece = round_up(max(min(chunk, max(1 << 16, min(chunk // 8, 1 << 20))), 1), unit)
    for owner in range(world_size):
        begin, end = min(owner * chunk, n), min((owner + 1) * chunk, n)
        for at in range(begin, end, piece):
            yield owner, at, min(at + piece, end)


def all_reduced(kind, inputs, op="sum", step=0):
    world_size, n = len(inputs), len(inputs[0])
    result = np.zeros(n, np.float32)
    for owner, begin, end in pieces(kind, n, world_size):
        codes = [through(kind, x[begin:end], r, begin, step) for r, x in enumerate(inputs)]
        divisor = world_size if op == "avg" else 1
        total = reference.decode(kind, codes, end - begin, divisor)
        code = through(kind, total, owner | 0x80000000, begin, step)
        result[begin:end] = reference.decode(kind, [code], end - begin)
    return result
