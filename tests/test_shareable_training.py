"""Shareable memory under torch.distributed: collectives, DDP and FSDP."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycoll
from pool import torch_ranks
from test_shareable import MIB, numbers


def collectives(rank, w):
    """The same bits as on ordinary memory, for shareable inputs on some ranks, all, or none."""
    for length in (1, 1000, 100_003, 2 * MIB):
        for who in (lambda r: True, lambda r: r == 0, lambda r: False):
            data = numbers(length, seed=rank)
            tensor = pycoll.share_(data.clone()) if who(rank) else data.clone()
            assert pycoll.is_shareable(tensor) == who(rank)
            plain = data.clone()
            dist.all_reduce(tensor)
            dist.all_reduce(plain)
            assert torch.equal(tensor, plain)
            gathered = pycoll.empty(w, length)
            dist.all_gather_into_tensor(gathered, data)
            assert torch.equal(gathered, torch.stack([numbers(length, seed=r) for r in range(w)]))


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_give_the_same_bits(world_size):
    torch_ranks(world_size, collectives, timeout=60)


class Model(nn.Sequential):
    """14 MiB in layers of 1 MiB and more: several buckets, before and after the rebuild."""

    def __init__(self):
        torch.manual_seed(3)
        super().__init__(*[nn.Linear(600, 600) for _ in range(10)])


def train(model, rank, steps=5):
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(numbers(4, 600, seed=10 * step + rank)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp(rank, w, views, inside):
    control = DistributedDataParallel(Model(), bucket_cap_mb=4, gradient_as_bucket_view=views)
    seen = []

    def hook(group, bucket):
        seen.append((bucket.index(), pycoll.is_shareable(bucket.buffer())))
        future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        return future.then(lambda f: f.value()[0] / w)

    model = Model()
    if inside:
        with pycoll.shareable():
            wrapped = DistributedDataParallel(model, bucket_cap_mb=4, gradient_as_bucket_view=views)
    else:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=4, gradient_as_bucket_view=views)
    wrapped.register_comm_hook(dist.group.WORLD, hook)
    losses = train(wrapped, rank)
    assert losses == train(control, rank)
    for one, other in zip(wrapped.parameters(), control.parameters(), strict=True):
        assert torch.equal(one, other)
    assert wrapped._has_rebuilt_buckets and "_pre_forward" not in vars(wrapped)
    buckets = {index for index, _ in seen}
    assert len(buckets) > 2 and len(seen) > 4 * len(buckets)
    assert {shareable for _, shareable in seen} == {inside}
    if views:
        assert all(pycoll.is_shareable(p.grad) == inside for p in model.parameters())
    # Communication buffers and nothing else.
    assert not any(pycoll.is_shareable(p) for p in model.parameters())
    assert not pycoll.is_shareable(torch.ones(MIB))
    return pycoll.shared_memory_stats()["allocations"]


@pytest.mark.parametrize("views", [False, True])
def test_ddp_has_all_its_buckets_there(views):
    torch_ranks(2, ddp, views, True, timeout=60)


def test_ddp_outside_has_none():
    """And so the test above sees something."""
    allocations = torch_ranks(2, ddp, True, False, timeout=60)
    assert [result.value for result in allocations] == [0, 0]


def ddp_corners(rank, w):
    made = []

    def make():  # on a thread that is in no scope
        made.append(DistributedDataParallel(Model()))

    with pycoll.shareable():
        ours = DistributedDataParallel(Model(), find_unused_parameters=True)
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    assert "_pre_forward" not in vars(made[0])
    expected = train(made[0], rank)
    assert train(ours, rank) == expected

    # Copied and saved before the rebuild, as checkpoints do with whole models.
    with pycoll.shareable():
        first = DistributedDataParallel(Model())
    second = copy.deepcopy(first)
    file = io.BytesIO()
    torch.save(first, file)
    file.seek(0)
    third = torch.load(file, weights_only=False)
    del first
    assert vars(third)["_pre_forward"].args[0] is third
    assert train(second, rank) == expected and train(third, rank) == expected


def test_ddp_in_unusual_ways():
    torch_ranks(2, ddp_corners, timeout=60)


def fsdp(rank, w):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    # torch has renamed them.
    gathers = ("all_gather_single", "all_gather_into_tensor")
    scatters = ("reduce_scatter_single", "reduce_scatter_tensor")
    seen = {name: [] for name in (*gathers, *scatters) if hasattr(dist, name)}

    def calls(names):
        return [pair for name in names for pair in seen.get(name, ())]

    def watched(name):
        original = getattr(dist, name)

        def call(output, input, *args, **kwargs):
            seen[name].append((pycoll.is_shareable(output), pycoll.is_shareable(input)))
            return original(output, input, *args, **kwargs)

        return call

    for name in seen:
        setattr(dist, name, watched(name))
    mesh = init_device_mesh("cpu", (w,))

    def build():
        model = Model()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    plain = train(build(), rank)
    assert calls(gathers) and calls(scatters)
    assert not any(any(pair) for pair in calls(gathers) + calls(scatters))
    for each in seen.values():
        each.clear()
    with pycoll.shareable():
        assert train(build(), rank) == plain
    assert calls(gathers) and calls(scatters)
    assert all(all(pair) for pair in calls(gathers) + calls(scatters)), seen

    # Without the scope, FSDP can ask the group.
    for each in seen.values():
        each.clear()
    model = build()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
    assert train(model, rank) == plain
    assert all(sent for _, sent in calls(scatters)), seen
    assert all(received for received, _ in calls(gathers)), seen


def test_fsdp_buffers():
    torch_ranks(2, fsdp, timeout=60)
