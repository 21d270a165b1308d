"""Training with every algorithm: ranks stay equal, and learn."""

from __future__ import annotations

import numpy as np
import pytest

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
