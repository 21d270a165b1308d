"""DistributedDataParallel over pycoll equals one process with the global batch, and Gloo."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from pool import torch_ranks

STEPS = 12
BATCH = 6  # a rank


class Net(nn.Module):
    """Several buckets, a shared weight, a parameter that is not used in every step."""

    def __init__(self, dtype=torch.float64, batch_norm=False):
        super().__init__()
        generator = torch.random.fork_rng()
        with generator:
            torch.manual_seed(1)
            self.first = nn.Linear(9, 64, dtype=dtype)
            self.norm = nn.BatchNorm1d(64, dtype=dtype) if batch_norm else nn.Identity()
            self.middle = nn.Linear(64, 64, bias=False, dtype=dtype)
            self.side = nn.Linear(64, 64, dtype=dtype)
            self.last = nn.Linear(64, 3, dtype=dtype)
            self.scale = nn.Parameter(torch.tensor(0.5, dtype=dtype))

    def forward(self, x, use_side=True):
        x = torch.tanh(self.norm(self.first(x)))
        x = torch.tanh(self.middle(self.middle(x)))
        if use_side:
            x = x + self.side(x)
        return self.last(x) * self.scale


def batch(step: int, w: int, dtype=torch.float64):
    """(inputs, targets) of all ranks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(w * BATCH, 9, generator=generator, dtype=torch.float64)
    y = torch.randn(w * BATCH, 3, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def train(model, w, rows, case, wrap_steps=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, w, next(model.parameters()).dtype)
        use_side = case != "unused" or step % 3 != 1
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if case == "no_sync":  # two micro-steps, the first without communication
            half = BATCH // 2
            pieces = torch.arange(w * BATCH).reshape(w, 2, half)
            for micro in range(2):
                here = pieces[rows, micro].reshape(-1)
                quiet = model.no_sync() if micro == 0 and hasattr(model, "no_sync") else None
                with quiet or contextlib.nullcontext():
                    loss = nn.functional.mse_loss(model(x[here]), y[here]) / 2
                    loss.backward()
        else:
            here = torch.arange(w * BATCH).reshape(w, BATCH)[rows].reshape(-1)
            loss = nn.functional.mse_loss(model(x[here], use_side), y[here])
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


CASES = {
    "plain": {},
    "small_buckets": {"bucket_cap_mb": 0.01},
    "bucket_views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
    "unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.01},
    "static_graph": {"static_graph": True, "bucket_cap_mb": 0.01},
    "no_sync": {"bucket_cap_mb": 0.01},
}


def flat(model):
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()]).tolist()


def distributed(rank, w, case, dtype="float64", hook=False, batch_norm=False):
    model = DistributedDataParallel(Net(getattr(torch, dtype), batch_norm), **CASES[case])
    if hook:
        model.register_comm_hook(None, fp16_compress_hook)
    train(model, w, slice(rank, rank + 1), case)
    buffers = [b.tolist() for b in model.buffers()]
    return flat(model.module), buffers


def single(w, case, dtype=torch.float64):
    model = Net(dtype)
    train(model, w, slice(0, w), case)
    return flat(model)


def close(a, b, tolerance):
    return torch.allclose(torch.tensor(a), torch.tensor(b), rtol=tolerance, atol=tolerance)


def all_cases(rank, w):
    # One process for all: the first DDP of a process costs seconds of imports.
    return {case: distributed(rank, w, case)[0] for case in CASES}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ddp_equals_one_process_with_the_global_batch(world_size):
    results = torch_ranks(world_size, all_cases, timeout=90)
    start = flat(Net())
    for case in CASES:
        expected = single(world_size, case)
        assert not close(expected, start, 1e-3), "nothing was learnt"
        for result in results:
            assert result.value[case] == results[0].value[case], f"{case}: ranks differ"
            assert close(result.value[case], expected, 1e-11), case


# dtype, fp16_compress_hook, batch norm: tolerance
VARIANTS = {
    ("float64", False, True): 1e-11,
    ("float32", False, True): 1e-4,
    ("float32", True, False): 2e-3,
    ("bfloat16", False, False): 0.05,
}


def all_variants(rank, w):
    return {variant: distributed(rank, w, "small_buckets", *variant) for variant in VARIANTS}


def test_ddp_equals_gloo():
    ours = torch_ranks(3, all_variants, timeout=90)
    gloo = torch_ranks(3, all_variants, timeout=90, backend="gloo")
    for variant, tolerance in VARIANTS.items():
        first, _ = ours[0].value[variant]
        for mine, theirs in zip(ours, gloo, strict=True):
            parameters, buffers = mine.value[variant]
            others, other_buffers = theirs.value[variant]
            assert parameters == first, f"{variant}: ranks differ"
            assert close(parameters, others, tolerance), variant
            assert len(buffers) == (3 if variant[2] else 0)
            for buffer, other in zip(buffers, other_buffers, strict=True):
                assert close(buffer, other, max(tolerance, 1e-6)), variant


def large_half_gradients(rank, w):
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, fp16_compress_hook)
    (ddp(torch.full((1, 4), 40000.0))).sum().backward()
    return model.weight.grad.tolist(), str(model.weight.grad.dtype)


def test_half_precision_gradients_do_not_overflow():
    for result in torch_ranks(3, large_half_gradients):
        grad, dtype = result.value
        assert dtype == "torch.float32"
        assert close(grad, [[40000.0] * 4], 1e-3)


def initial_state(rank, w):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.register_buffer("mask", torch.tensor([rank == 0, True]))
    model.register_buffer("steps", torch.tensor(rank, dtype=torch.int16))
    ddp = DistributedDataParallel(model)
    state = {name: value.tolist() for name, value in ddp.module.state_dict().items()}
    return state, copy.deepcopy(state)["mask"]


def test_every_rank_starts_from_rank_0():
    results = torch_ranks(3, initial_state)
    assert results[0].value[1] == [True, True]
    for result in results:
        assert result.value == results[0].value
        assert result.value[0]["steps"] == 0


def different_models(rank, w):
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + (rank == 1))])
    try:
        DistributedDataParallel(model)
    except RuntimeError as error:
        return str(error)
    return None


def test_models_that_differ_are_refused():
    for result in torch_ranks(2, different_models):
        assert "2 params" in result.value
        assert "4" in result.value


def forward_twice(rank, w):
    ddp = DistributedDataParallel(Net(batch_norm=True))
    x, _ = batch(0, w)
    mine = x[rank * BATCH : (rank + 1) * BATCH]
    (ddp(mine) + ddp(mine * 2)).sum().backward()
    total = ddp.module.first.weight.grad.clone()
    dist.all_reduce(total)
    assert torch.allclose(total / w, ddp.module.first.weight.grad, atol=1e-13)
    return [b.tolist() for b in ddp.module.buffers()]


def test_forward_twice_before_backward():
    assert all(len(result.value) == 3 for result in torch_ranks(2, forward_twice))
