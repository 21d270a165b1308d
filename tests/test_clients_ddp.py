"""DistributedDataParallel in its forms, on pycoll and on Gloo; test_ddp.py has more of its own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from helpers_clients import (
    EXACT,
    WORLD,
    alike,
    batch,
    blocks,
    compare,
    fit,
    in_one_process,
    outcome,
)

SMALL_BUCKETS = 0.0005  # MiB: some buckets of a few parameters each


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def wrapped(model, **options):
    return DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS, **options)


def plain_form(rank, w):
    ddp = wrapped(blocks(), gradient_as_bucket_view=True)
    return outcome(ddp.module, fit(ddp, sgd(ddp), [rank]))


def static_graph(rank, w):
    ddp = wrapped(blocks(), static_graph=True)
    return outcome(ddp.module, fit(ddp, sgd(ddp), [rank]))


class Branches(nn.Module):
    """Uses another of its layers in every call."""

    def __init__(self):
        super().__init__()
        self.layers = blocks()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layers[2](self.layers[self.calls % 2](x))


def find_unused_parameters(rank, w):
    ddp = wrapped(Branches(), find_unused_parameters=True)
    return outcome(ddp.module, fit(ddp, sgd(ddp), [rank], steps=8))


def no_sync(rank, w):
    ddp = wrapped(blocks())
    optimizer = sgd(ddp)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        with ddp.no_sync():
            x, y = batch(1, rank)
            nn.functional.mse_loss(ddp(x), y).backward()
        own = [p.grad.clone() for p in ddp.parameters()]
        x, y = batch(2, rank)
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        assert all(not torch.equal(p.grad, g) for p, g in zip(ddp.parameters(), own, strict=True))
        optimizer.step()
        losses.append(loss.item())
    return outcome(ddp.module, losses)


def buffers(rank, w):
    """Running means of rank 0 reach everybody in each forward."""
    model = nn.Sequential(nn.BatchNorm1d(7, dtype=torch.float64), blocks())
    model.register_buffer("share", torch.full((3,), rank, dtype=torch.bfloat16))
    model.register_buffer("flags", torch.tensor([rank == 0, True]))
    ddp = wrapped(model)
    losses = fit(ddp, sgd(ddp), [rank])
    ddp.eval()(batch(3, rank)[0])
    assert ddp.module.share.tolist() == [0, 0, 0] and ddp.module.flags.tolist() == [True, True]
    return outcome(ddp.module, losses)


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        parts = torch.randn(2, 7, 7, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(torch.complex(*parts))
        self.layers = blocks()

    def forward(self, x):
        return self.layers((x.to(torch.complex128) @ self.weight).abs())


def complex_parameters(rank, w):
    ddp = wrapped(Waves())
    return outcome(ddp.module, fit(ddp, torch.optim.SGD(ddp.parameters(), 0.01), [rank], steps=6))


def join(rank, w):
    """Rank r has 3 + r batches; those that are done shadow the others' collectives."""
    ddp = wrapped(blocks())
    optimizer = sgd(ddp)
    losses = []
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(3 + rank):
            optimizer.zero_grad()
            x, y = batch(step, rank)
            loss = nn.functional.mse_loss(ddp(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    dist.barrier()
    return outcome(ddp.module, losses)


FORMS = [
    plain_form,
    static_graph,
    find_unused_parameters,
    no_sync,
    buffers,
    complex_parameters,
    join,
]


def all_forms(rank, w):
    return {form.__name__: form(rank, w) for form in FORMS}


@pytest.mark.parametrize(
    ("backend", "transport"), [("pycoll", "shm"), ("cpu:pycoll,cuda:gloo", "tcp")]
)
def test_ddp(backend, transport):
    env = {"PYCOLL_TRANSPORT": transport}
    results = compare(WORLD, all_forms, backend=backend, env=env)
    for result in results:
        for form in FORMS:
            state = result[form.__name__]["state"]
            alike(state, results[0][form.__name__]["state"], 0.0, form.__name__)
        alike(
            result["plain_form"]["state"],
            in_one_process(range(WORLD))["state"],
            EXACT,
            "one process",
        )


# ---- ZeroRedundancyOptimizer ----


def zero_redundancy(rank, w, overlap):
    ddp = wrapped(blocks())
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(),
        optimizer_class=torch.optim.Adam,
        parameters_as_bucket_view=overlap,
        lr=0.02,
    )
    losses = fit(ddp, optimizer, [rank])
    optimizer.consolidate_state_dict(to=1)
    moments = optimizer.state_dict()["state"] if rank == 1 else {}
    return {**outcome(ddp.module, losses), "moments": moments}


def zero_redundancy_joined(rank, w):
    ddp = wrapped(blocks())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    losses = []
    with Join([ddp, optimizer]):
        for step in range(2 + rank):
            optimizer.zero_grad()
            x, y = batch(step, rank)
            loss = nn.functional.mse_loss(ddp(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return outcome(ddp.module, losses)


def zero_redundancy_forms(rank, w):
    return {
        "parameters": zero_redundancy(rank, w, False),
        "buckets": zero_redundancy(rank, w, True),
        "join": zero_redundancy_joined(rank, w),
    }


def adam_alone():
    model = blocks()
    losses = fit(model, torch.optim.Adam(model.parameters(), lr=0.02), range(WORLD))
    return outcome(model, losses)


def test_zero_redundancy_optimizer():
    results = compare(WORLD, zero_redundancy_forms)
    expected = adam_alone()["state"]
    for result in results:
        for form in ("parameters", "buckets"):
            alike(result[form]["state"], expected, 1e-9, form)
    assert len(results[1]["parameters"]["moments"]) == len(expected)
