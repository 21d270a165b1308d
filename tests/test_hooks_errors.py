"""Wrong uses of compressed gradients, and errors of their collectives."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import pycoll
from helpers_hooks import Run, equal, gradients_of, options_of, ranks_of


def wrong_uses(rank, w):
    for arguments, text in (
        ({"codec": "int3"}, "'int3' is no codec"),
        ({"codec": 5}, "5 is no codec"),
        ({"codec": pycoll.TopK(), "two_way": True}, "two_way is for codecs"),
        ({"codec": "int8", "two_way": True, "error_feedback": False}, "needs error_feedback"),
        ({"codec": "int8", "exempt": "bias"}, "exempt is a function or names"),
        ({"codec": "int8", "predivide_factor": 0}, "predivide_factor"),
        ({"codec": "int8", "predivide_factor": math.nan}, "predivide_factor"),
        ({"codec": "int8", "unit_bytes": -1}, "unit_bytes"),
        ({"codec": "int8", "scaler": 5}, "scaler is a"),
    ):
        with pytest.raises(pycoll.InvalidArgumentError, match=text):
            pycoll.CompressionState(None, **arguments)
    for wrong in ({"ratio": 0}, {"ratio": 1.5}, {"ratio": "x"}):
        with pytest.raises(ValueError, match="ratio is a number"):
            pycoll.TopK(**wrong)
    for wrong in ({"rank": 0}, {"start_step": -1}, {"seed": -1}, {"min_compression_rate": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            pycoll.PowerSGD(**wrong)
    run = Run("int8")
    again = torch.nn.parallel.DistributedDataParallel(run.model)
    again.register_comm_hook(run.state, pycoll.compress_hook)
    with pytest.raises(pycoll.InvalidArgumentError, match="registered with 2 models"):
        run.step(gradients_of(rank, 0))
    other = Run(pycoll.CompressionState(None, "int8", model=torch.nn.Linear(3, 3)))
    with pytest.raises(pycoll.InvalidArgumentError, match="none of the model's"):
        other.step(gradients_of(rank, 0))
    sparse = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(10, 3, sparse=True))
    sparse.register_comm_hook(pycoll.CompressionState(None, "int8"), pycoll.compress_hook)
    with pytest.raises(pycoll.UnsupportedError, match="sparse gradients"):
        sparse(torch.tensor([1, 2])).sum().backward()


def test_wrong_uses_are_named():
    ranks_of(2, wrong_uses)


def dead_peer(rank, w, what):
    run = Run(**options_of(what))
    run.step(gradients_of(rank, 0))
    before = run.residuals()
    if rank == 1:
        return "gone"
    try:
        run.step(gradients_of(rank, 1))
    except dist.DistBackendError as error:
        assert equal(run.residuals(), before)
        return str(error)
    return "no error"


@pytest.mark.parametrize("what", ["int8", "two_way", "power_sgd", "top_k", "random_k"])
def test_an_error_of_a_collective_comes_out_of_backward(what):
    first, second = ranks_of(2, dead_peer, what)
    assert second.value == "gone"
    assert "rank 1" in first.value
