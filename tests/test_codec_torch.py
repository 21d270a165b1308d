"""Codecs under torch: pycoll.all_reduce, groups with a codec, stock DDP."""

from __future__ import annotations

import time

import numpy as np
import pytest

import codec_reference as reference
import pycoll
from codec_model import all_reduced, values_of
from codec_reference import Kind
from pool import torch_ranks

torch = pytest.importorskip("torch")
dist = torch.distributed


def tensor_of(rank, n, dtype="float32", seed=0):
    return torch.from_numpy(values_of(rank, n, seed=seed)).to(getattr(torch, dtype))


def direct_calls(rank, world_size):
    results = []
    for n, name, op, dtype in (
        (10_000, "int8", "sum", "float32"),
        (100, "int4", "avg", "float32"),  # too small: exact
        (70_000, "int4", "avg", "bfloat16"),
        (9000, "sign", "sum", "float16"),
    ):
        tensor = tensor_of(rank, n, dtype)
        assert pycoll.all_reduce(tensor, op, codec=name) is None
        results.append(tensor.float().numpy())
    strided = tensor_of(rank, 20_000)[::2]
    work = pycoll.all_reduce(strided, codec=pycoll.Int8(block=64), async_op=True)
    assert work.wait()
    results.append(strided.clone().numpy())
    future = pycoll.all_reduce(tensor_of(rank, 10_000), codec="fp16", async_op=True).get_future()
    results.append(future.wait()[0].numpy())
    exact = torch.arange(10_000) + rank
    pycoll.all_reduce(exact, codec="sign")
    assert torch.equal(exact, torch.arange(10_000) * world_size + sum(range(world_size)))
    with pytest.raises(ValueError, match="'int3' is no codec"):
        pycoll.all_reduce(exact, codec="int3")
    return results


def rounded(x, dtype):
    return torch.from_numpy(x).to(getattr(torch, dtype)).float().numpy()


@pytest.mark.parametrize("world_size", [2, 3])
def test_direct_calls(world_size):
    def inputs(n, dtype="float32"):
        return [tensor_of(r, n, dtype).float().numpy() for r in range(world_size)]

    expected = [
        all_reduced(Kind("int8"), inputs(10_000)),
        sum(inputs(100)) / np.float32(world_size),
        rounded(all_reduced(Kind("int4"), inputs(70_000, "bfloat16"), "avg"), "bfloat16"),
        rounded(all_reduced(Kind("sign"), inputs(9000, "float16")), "float16"),
        all_reduced(Kind("int8", 64), [x[::2].copy() for x in inputs(20_000)]),
        all_reduced(Kind("fp16"), inputs(10_000)),
    ]
    for result in torch_ranks(world_size, direct_calls):
        for got, want in zip(result.value, expected, strict=True):
            assert got.tobytes() == want.tobytes()


def group_with_a_codec(rank, world_size):
    group = dist.new_group(pg_options=pycoll.Options(codec="int8"))
    n = 10_000
    reduced = tensor_of(rank, n)
    dist.all_reduce(reduced, group=group)
    gathered = torch.zeros(world_size * n)
    dist.all_gather_into_tensor(gathered, tensor_of(rank, n), group=group)
    scattered = torch.zeros(n)
    dist.reduce_scatter_tensor(scattered, tensor_of(rank, world_size * n), group=group)
    sent = tensor_of(rank, n)
    dist.broadcast(sent, 1, group=group)
    small = tensor_of(rank, 1000)
    dist.all_reduce(small, group=group)
    largest = tensor_of(rank, n)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    count = torch.tensor([2**62 + rank])
    dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
    works = [
        dist.all_reduce(tensor_of(rank, n, seed=k), group=group, async_op=True) for k in (1, 2)
    ]
    later = [work.result()[0].numpy() for work in works if work.wait()]
    return [x.numpy() for x in (reduced, gathered, scattered, sent, small, largest, count)], later


def test_a_group_with_a_codec():
    world_size, n, kind = 2, 10_000, Kind("int8")
    inputs = [values_of(r, n) for r in range(world_size)]
    halves = [values_of(r, world_size * n).reshape(world_size, n) for r in range(world_size)]
    for rank, result in enumerate(torch_ranks(world_size, group_with_a_codec)):
        got, later = result.value
        codes = [reference.encode(kind, x[rank]) for x in halves]
        expected = [
            all_reduced(kind, inputs),
            np.concatenate(inputs),  # what is gathered and broadcast is exact
            reference.decode(kind, codes, n),
            inputs[1],
            values_of(0, 1000) + values_of(1, 1000),
            np.maximum(*inputs),
            np.array([2**62 + 1]),
        ]
        for x, want in zip(got, expected, strict=True):
            assert x.tobytes() == want.tobytes()
        for k, x in zip((1, 2), later, strict=True):
            seeded = [values_of(r, n, seed=k) for r in range(world_size)]
            assert x.tobytes() == all_reduced(kind, seeded).tobytes()


def train(rank, world_size, codec):
    group = dist.new_group(pg_options=pycoll.Options(codec=codec, min_bytes=0))
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64), torch.nn.Linear(64, 8)
    )
    ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.002, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    teacher = torch.randn(64, 8, generator=torch.Generator().manual_seed(99))
    losses = []
    for _ in range(200):
        x = torch.randn(16, 64, generator=generator)
        loss = (ddp(x) - x @ teacher).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return parameters.numpy().tobytes(), float(np.mean(losses[:5])), float(np.mean(losses[-20:]))


@pytest.mark.parametrize("codec", ["int8", "fp16"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_stay_equal_over_200_steps_of_ddp(world_size, codec):
    results = [r.value for r in torch_ranks(world_size, train, codec, timeout=120)]
    assert len({parameters for parameters, _, _ in results}) == 1
    for _, first, last in results:
        assert last < first / 3


def destroyed_by_a_callback(rank, world_size):
    group = [dist.new_group(pg_options=pycoll.Options(codec="int8"))]
    x = torch.ones(20_000)
    dist.all_reduce(x, group=group[0])
    if rank == 1:
        time.sleep(0.2)
    future = dist.all_reduce(x, group=group[0], async_op=True).get_future()
    ended = future.then(lambda _: dist.destroy_process_group(group.pop()))
    del future
    ended.wait()
    return x[0].item()


def test_a_callback_destroys_the_group_of_its_call():
    """Nobody else holds the group then: it goes in the thread that runs its operations."""
    for _ in range(3):
        for result in torch_ranks(2, destroyed_by_a_callback):
            assert result.value == 4


def wrong_calls(rank, world_size):
    x = torch.full((200, 100), float(rank))
    with pytest.raises(TypeError, match="tensor"):
        pycoll.all_reduce("x", codec="int8")
    with pytest.raises(ValueError, match="step is"):
        pycoll.all_reduce(x, codec="int8", step=-1)
    alone = dist.new_group([0])
    if rank == 1:
        with pytest.warns(UserWarning, match="does not belong"):
            assert pycoll.all_reduce(x, codec="int8", group=alone) is None
        assert (x == 1).all()


def test_wrong_calls_are_those_of_torch():
    torch_ranks(2, wrong_calls)
