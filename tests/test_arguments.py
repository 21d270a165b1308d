"""What codecs, hooks and options are made with: numbers are numbers, switches are True or False."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

import pycoll

PLAIN, SEEDED = (pycoll.Fp16, pycoll.Bf16), (pycoll.Int8, pycoll.Int4, pycoll.UInt8, pycoll.UInt4)
SCALED = (pycoll.Fp8E4M3, pycoll.Fp8E5M2, pycoll.Sign)


def adam(**settings):
    return pycoll.OneBitAdam([torch.nn.Parameter(torch.ones(3))], **{"freeze_step": 5, **settings})


def state(**settings):
    return pycoll.CompressionState(None, "int8", **settings)


def encoded(**settings):
    return pycoll.encode(np.ones(64, np.float32), "int8", **settings)


# Kinds of arguments: what the errors say is allowed, and values that are none.
ANY = ("yes", None, [1], b"1", 1j, float("nan"))
WHOLE = (True, False, np.True_, 0.5, 1.0, "1", -1, *ANY)
REAL = (True, np.False_, "1", -1, math.inf, 10**400, *ANY)
SWITCH = ("yes", "", 0, 1, 0.0, [True], np.int64(1))

BLOCK = ("a power of two from 32 to 4096", WHOLE)
SEED = ("a number of 64 bits", (*WHOLE, 1 << 64))
STEP = ("a number of 32 bits", (*WHOLE, 1 << 32))
SIZE = ("from 0 on", WHOLE)
RATIO = ("a number above 0 and up to 1", (*REAL, 0, 1.5))
FROM_0 = ("a number from 0 on", REAL)
OR_NONE = ("True, False or None", SWITCH)


def optional(kind):
    allowed, wrong = kind
    return allowed, tuple(value for value in wrong if value is not None)


# What is made, its argument, what the error says is allowed, and what is no such thing.
TABLE = [
    *((codec, "block", *BLOCK) for codec in (*SEEDED, *SCALED, pycoll.Ternary)),
    *((codec, "stochastic", "True or False", (*SWITCH, None)) for codec in SEEDED),
    *((codec, "seed", *SEED) for codec in (*SEEDED, pycoll.Ternary)),
    (encoded, "step", *STEP),
    (encoded, "rank", *STEP),
    (encoded, "first", *SEED),
    (pycoll.Auto, "max_error", "a number above 0", (*REAL, 0)),
    (pycoll.Auto, "candidates", "candidates are codecs", ((), "int8", None)),
    (pycoll.Auto, "candidates", "is no codec", ((True,), [8], ["int3"])),
    (pycoll.Options, "min_bytes", *optional(SIZE)),
    (pycoll.Options, "codec", "is no codec", (True, 8, "int3", pycoll.Int8, pycoll.TopK())),
    (pycoll.Options, "determinism", "is one of 'ranks'", (True, 1, "runs")),
    (pycoll.Options, "table", "is a pycoll.selection.Table", (True, 1)),
    (pycoll.Options, "algo", "is a text like", (True, ["ring"])),
    (
        pycoll.Options,
        "variables",
        "is a dict of PYCOLL_* variables",
        (True, 5, None, "PYCOLL_ALGO"),
    ),
    (pycoll.TopK, "ratio", *RATIO),
    (pycoll.RandomK, "ratio", *RATIO),
    (pycoll.RandomK, "seed", *SEED),
    (pycoll.PowerSGD, "rank", "a number from 1 on", (*WHOLE, 0)),
    (pycoll.PowerSGD, "start_step", "a number of steps from 0 on", WHOLE),
    (pycoll.PowerSGD, "min_compression_rate", *FROM_0),
    (pycoll.PowerSGD, "seed", *SEED),
    (state, "error_feedback", *optional(OR_NONE)),
    (state, "two_way", *optional(OR_NONE)),
    (state, "exempt", "is a function or names of parameters", (True, 5, "bias", b"bias")),
    (state, "scaler", "is a torch.amp.GradScaler", (True, 5, "scaler")),
    (state, "predivide_factor", "a positive number", (*REAL, 0)),
    (state, "unit_bytes", *SIZE),
    (state, "min_bytes", *optional(SIZE)),
    (state, "model", "is a torch.nn.Module", (True, 5, torch.nn.Linear)),
    (adam, "lr", *FROM_0),
    (adam, "eps", *FROM_0),
    (adam, "weight_decay", *FROM_0),
    (adam, "variance_floor", *FROM_0),
    (adam, "betas", "two numbers from 0 to below 1", (True, 0.9, (0.9,), (0.9, 1), (True, 0.9))),
    (adam, "freeze_step", "a number of steps from 1 on", (*WHOLE, 0)),
]


@pytest.mark.parametrize(
    ("make", "name", "allowed", "wrong"),
    TABLE,
    ids=[f"{row[0].__name__}-{row[1]}" for row in TABLE],
)
def test_what_is_wrong_is_named(make, name, allowed, wrong):
    for value in wrong:
        with pytest.raises(ValueError) as caught:
            make(**{name: value})
        said = str(caught.value)
        assert isinstance(caught.value, pycoll.InvalidArgumentError), said
        shown = value[0] if "is no codec" in allowed and isinstance(value, list | tuple) else value
        assert allowed in said, (value, said)
        assert name in said or "is no codec" in allowed, (value, said)
        shown = shown.__name__ if isinstance(shown, type) else repr(shown)
        assert shown in said or type(value).__name__ in said, (value, said)


def test_the_table_has_every_setting():
    """One that is added belongs there."""
    made = {(make, name) for make, name, _, _ in TABLE}
    codecs = (*PLAIN, *SEEDED, *SCALED, pycoll.Ternary)
    settings = (pycoll.Auto, pycoll.Options, pycoll.TopK, pycoll.RandomK, pycoll.PowerSGD)
    for make in (*codecs, *settings):
        assert {(make, field.name) for field in dataclasses.fields(make)} <= made, make
    known = {name for make, name in made if make is state} | {"self", "group", "codec"}
    assert known == set(_arguments_of(pycoll.CompressionState.__init__))
    known = {name for make, name in made if make is adam} | {"self", "params"}
    assert known == set(_arguments_of(pycoll.OneBitAdam.__init__))


def _arguments_of(function):
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def test_scalars_of_numpy_are_plain_numbers():
    codec = pycoll.Int8(block=np.int64(64), stochastic=np.True_, seed=np.uint64(3))
    assert repr(codec) == "Int8(block=64, stochastic=True, seed=3)"
    assert repr(pycoll.TopK(np.float64(0.5))) == "TopK(ratio=0.5)"
    assert repr(pycoll.PowerSGD(np.int32(4), min_compression_rate=2).rank) == "4"
    assert repr(pycoll.Auto(np.float32(1)).max_error) == "1.0"
    assert repr(pycoll.Options(min_bytes=np.int16(7)).min_bytes) == "7"
    state(error_feedback=np.True_, two_way=np.False_, unit_bytes=np.int64(1), predivide_factor=2)
    adam(lr=np.float32(0.1), betas=[0, 0.5], freeze_step=np.int64(1))
    adam(lr=torch.tensor(0.1))


@pytest.mark.parametrize("wrong", [-1.0, math.nan, True, [0.1, 0.2]])
def test_tensors_as_numbers_are_looked_at(wrong):
    with pytest.raises(pycoll.InvalidArgumentError, match="OneBitAdam: lr is a number from 0 on"):
        adam(lr=torch.tensor(wrong))


class MyInt8(pycoll.Int8):
    """Of a caller's own."""


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("int8", pycoll.Int8(), True),
        ("int8", pycoll.Int8(block=np.int64(256)), True),
        ("int8", pycoll.Int8(seed=7), True),  # nothing is drawn by chance
        ("int8", MyInt8(), True),
        (None, "none", True),
        ("auto", pycoll.Auto(), True),
        (pycoll.Auto(1), pycoll.Auto(1.0, ["int8", pycoll.Bf16(), "fp16"]), True),
        (pycoll.Auto(candidates=["int8"]), pycoll.Auto(candidates=[MyInt8(seed=3)]), True),
        ("int8", pycoll.Int8(block=64), False),
        ("int8", pycoll.Int8(stochastic=True), False),
        (pycoll.Int8(stochastic=True), pycoll.Int8(stochastic=True, seed=7), False),
        ("ternary", pycoll.Ternary(seed=7), False),
        ("int8", "uint8", False),
        ("int8", None, False),
        ("auto", pycoll.Auto(0.5), False),
        ("auto", pycoll.Auto(candidates=["int8"]), False),
    ],
)
def test_ranks_compare_what_codecs_mean(one, other, alike):
    agreed = [pycoll.Options(codec=codec).agreed() for codec in (one, other)]
    assert (agreed[0] == agreed[1]) == alike, agreed
