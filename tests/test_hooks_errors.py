"""Wrong uses of compressed gradients, and errors of their collectives."""

from __future__ import annotations

import contextlib
import gc
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
        ({"codec": "int8", "unit_bytes": -1}, "unit_bytes is a number from 0 on"),
        ({"codec": pycoll.PowerSGD}, r"CompressionState\(None, pycoll\.PowerSGD\("),
        ({"codec": "int8", "group": "int8"}, "group is a process group.*not 'int8'"),
        ({"codec": "int8", "scaler": 5}, "scaler is a"),
    ):
        with pytest.raises(pycoll.InvalidArgumentError, match=text):
            pycoll.CompressionState(**{"group": None, **arguments})
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
    optimizer = pycoll.OneBitAdam(layers().parameters(), freeze_step=1)
    for state in (None, optimizer, pycoll.TopK()):
        ddp = torch.nn.parallel.DistributedDataParallel(layers())
        ddp.register_comm_hook(state, pycoll.compress_hook)
        with pytest.raises(pycoll.InvalidArgumentError, match=r"CompressionState.*compression\(\)"):
            ddp(torch.ones(1, 96)).sum().backward()
    ddp = torch.nn.parallel.DistributedDataParallel(layers())
    optimizer = pycoll.OneBitAdam(ddp.parameters(), freeze_step=1)
    ddp.register_comm_hook(optimizer.compression(), pycoll.compress_hook)
    optimizer.param_groups[0]["steps"] = 5  # as if loaded, and the state not
    with pytest.warns(UserWarning, match="after 5 steps, its CompressionState begins anew"):
        ddp(torch.ones(1, 96)).sum().backward()
    # gc.freeze hides models, unless they are given.
    for given in (False, True):
        ddp = torch.nn.parallel.DistributedDataParallel(layers())
        state = pycoll.CompressionState(None, "int8", model=ddp if given else None)
        ddp.register_comm_hook(state, pycoll.compress_hook)
        gc.freeze()
        try:
            raises = pytest.raises(pycoll.InvalidArgumentError, match=r"model=ddp.*gc\.freeze")
            with contextlib.nullcontext() if given else raises:
                ddp(torch.ones(1, 96)).sum().backward()
        finally:
            gc.unfreeze()
        assert state.step == given


def sharded(rank, w):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    cpu = torch.device("cpu")
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = FullyShardedDataParallel(layers(), device_id=cpu, sharding_strategy=strategy)
        model.register_comm_hook(pycoll.CompressionState(None, "int8"), pycoll.compress_hook)
        with pytest.raises(pycoll.UnsupportedError, match="DistributedDataParallel.*Options"):
            model(torch.ones(1, 96)).sum().backward()


def test_sharded_models_are_refused():
    ranks_of(2, sharded)


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


def layers(dtypes=(torch.float32,) * 3):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(96, 96, dtype=dtype) for dtype in dtypes))


def refused_steps(rank, w):
    model = layers()
    state = pycoll.CompressionState(None, "int8")

    def wrapped(**options):
        ddp = torch.nn.parallel.DistributedDataParallel(model, **options)
        ddp.register_comm_hook(state, pycoll.compress_hook)
        return ddp

    def step(ddp):
        ddp(torch.ones(4, 96)).sum().backward()

    ddp = wrapped()
    step(ddp)
    del ddp
    model[0].requires_grad_(False)
    with pytest.raises(pycoll.InvalidArgumentError, match=r"trains other parameters.*0\.weight"):
        step(wrapped())
    # States of ranks that differ.
    for codec in (pycoll.RandomK(0.1, seed=rank), pycoll.Int8(block=64 << rank)):
        state = pycoll.CompressionState(None, codec)
        with pytest.raises(pycoll.MismatchError, match=r"ranks \[1\] are unlike"):
            step(wrapped())
    # Another group than the model's.
    alone = [dist.new_group([r]) for r in range(w)][rank]
    state = pycoll.CompressionState(alone, "int8")
    with pytest.raises(pycoll.InvalidArgumentError, match="state's group has ranks"):
        step(wrapped())


def test_steps_that_would_let_ranks_part_are_refused():
    ranks_of(2, refused_steps)


def static_graph_of_two_dtypes(rank, w):
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = layers((torch.float32, torch.bfloat16, torch.float32))

        def forward(self, x):
            for part in self.parts:
                x = part(x.to(part.weight.dtype))
            return x

    ddp = torch.nn.parallel.DistributedDataParallel(Mixed(), static_graph=True)
    state = pycoll.CompressionState(None, "int8")
    ddp.register_comm_hook(state, pycoll.compress_hook)
    for step in range(3):
        ddp(torch.full((4, 96), float(rank + step))).sum().backward()
    assert state.step == 3
    return [p.grad.float().numpy().tobytes() for p in ddp.parameters()]


def test_a_static_graph_of_two_dtypes():
    results = ranks_of(2, static_graph_of_two_dtypes)
    assert results[0].value == results[1].value
