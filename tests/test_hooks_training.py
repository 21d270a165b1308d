"""Training with every algorithm: ranks stay equal, and learn."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import codec_reference as reference
import pycoll
from helpers_hooks import ALGORITHMS, Training
from pool import torch_ranks

STEPS = 200


def train_all(rank, w):
    # One process for all: the first DDP of a process costs seconds of imports.
    results = {}
    for name in ALGORITHMS:
        training = Training(rank, name)
        losses = training.run(0, STEPS)
        results[name] = (training.weights(), np.mean(losses[:3]), np.mean(losses[-20:]))
        assert training.state.step == STEPS
    return results


WORLDS = [2, *(pytest.param(w, marks=pytest.mark.full) for w in (3, 5))]


@pytest.mark.parametrize("world_size", WORLDS)
def test_parameters_are_equal_after_200_steps(world_size):
    results = [r.value for r in torch_ranks(world_size, train_all, timeout=240)]
    for name in ALGORITHMS:
        assert len({result[name][0] for result in results}) == 1, f"{name}: ranks differ"
        for _, first, last in (result[name] for result in results):
            assert last < first / 3, (name, first, last)


@pytest.mark.parametrize("name", [*reference.BITS, "power_sgd"])
def test_feedback_that_suits_what_compresses(name):
    """Ternary codes have errors as large as the values: feedback on one way makes them worse."""
    codec = pycoll.PowerSGD() if name == "power_sgd" else name
    contracts = name != "ternary"

    def chosen(**options):
        state = pycoll.CompressionState(None, codec, **options).state_dict()
        return state["error_feedback"], state["two_way"]

    assert chosen() == (contracts, False)
    assert chosen(error_feedback=False) == (False, False)
    assert chosen(error_feedback=True) == (True, not contracts)
    warns = pytest.warns(UserWarning, match="Ternary.*trains badly")
    with contextlib.nullcontext() if contracts else warns:
        assert chosen(error_feedback=True, two_way=False) == (True, False)
    if name == "power_sgd":
        return
    assert chosen(two_way=True) == (True, True)
    with pytest.raises(pycoll.InvalidArgumentError, match="needs error_feedback"):
        chosen(error_feedback=False, two_way=True)
    optimizer = pycoll.OneBitAdam([torch.nn.Parameter(torch.ones(2, 2))], freeze_step=1)
    for options, expected in (({}, (True, True)), ({"error_feedback": False}, (False, False))):
        state = optimizer.compression(None, codec, **options).state_dict()
        assert (state["error_feedback"], state["two_way"]) == expected
