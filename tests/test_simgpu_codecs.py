"""Collectives over codecs on GPU tensors under torch: on the simulated device, against the same
calls on CPU tensors of the same group."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import helpers_gpu_codecs as helpers
import native_build
import pycoll
import simgpu
from helpers_gpu import same
from helpers_gpu_codecs import tensor_of, twice
from helpers_hooks import Run, gradients_of, joined
from test_simgpu import DEVICE, on_gpu
from test_simgpu_shared import capture

# The first test compiles the device.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + 300)


def run(world_size, function, *arguments, **options):
    results = simgpu.ranks(world_size, function, *arguments, timeout=240, **options)
    return [result.value for result in results]


@pytest.mark.parametrize(("world_size", "devices"), [(2, 1), (3, 8)])
def test_direct_calls(world_size, devices):
    assert run(world_size, helpers.over_codecs, DEVICE, devices=devices) == ["done"] * world_size


def group_with_a_codec(rank, w):
    group = dist.new_group(pg_options=pycoll.Options(codec="int8"))
    n = 10_000
    reduced = twice(DEVICE, tensor_of(rank, n), lambda t: dist.all_reduce(t, group=group))
    exact = sum(tensor_of(r, n) for r in range(w))
    assert not torch.equal(reduced, exact)
    torch.testing.assert_close(reduced, exact, rtol=0.02, atol=0.2)
    wide = tensor_of(rank, w * n)
    here, cpu = torch.zeros(n, device=DEVICE), torch.zeros(n)
    dist.reduce_scatter_tensor(here, on_gpu(wide), group=group)
    dist.reduce_scatter_tensor(cpu, wide, group=group)
    same(here, cpu)
    gathered = torch.zeros(w * n, device=DEVICE)
    dist.all_gather_into_tensor(gathered, on_gpu(tensor_of(rank, n)), group=group)
    same(gathered, torch.cat([tensor_of(r, n) for r in range(w)]))
    small = twice(DEVICE, tensor_of(rank, 10), lambda t: dist.all_reduce(t, group=group))
    torch.testing.assert_close(small, sum(tensor_of(r, 10) for r in range(w)))
    # Several, seen as one; each travels as codes, or as it is.
    tensors = [tensor_of(rank, 9000), tensor_of(rank, 12), tensor_of(rank, 8192, "bfloat16")]
    on_device = [on_gpu(t) for t in tensors]
    with dist._coalescing_manager(group, torch.device(DEVICE), async_ops=True) as works:
        for tensor in on_device:
            dist.all_reduce(tensor, group=group)
    works.wait()
    for tensor, ours in zip(tensors, on_device, strict=True):
        dist.all_reduce(tensor, group=group)
        same(ours, tensor)
    return "done"


def test_groups_with_a_codec():
    assert run(2, group_with_a_codec, devices=1) == ["done"] * 2


@pytest.mark.parametrize(("devices", "hosts"), [(1, ""), (8, ""), (1, "ab")])
def test_replays_of_a_graph(devices, hosts):
    results = run(2, helpers.replayed_over_codecs, DEVICE, capture, devices=devices, hosts=hosts)
    assert results == ["done"] * 2


# ---- Stock DDP. ----


def given_gradients(rank, w, codec, options):
    """What a state makes of the same gradients on a GPU and on the CPU."""
    runs = [Run(codec, device=device, **options) for device in (DEVICE, "cpu")]
    for step in range(3):
        gradients = gradients_of(rank, step)
        if (step, rank) == (1, 0):
            gradients["b"].zero_()  # sends nothing, and keeps its residual
        means = []
        for one, device in zip(runs, (DEVICE, "cpu"), strict=True):
            given = {name: g.to(device) for name, g in gradients.items()}
            means.append({name: g.cpu() for name, g in one.step(given).items()})
        assert joined(means[0]).tobytes() == joined(means[1]).tobytes(), step
        exact = ["bias", "scale"]
        np.testing.assert_allclose(joined(means[0], exact), joined(means[1], exact), rtol=1e-6)
        ours, theirs = ({name: r.cpu() for name, r in one.residuals().items()} for one in runs)
        assert joined(ours, sorted(ours)).tobytes() == joined(theirs, sorted(ours)).tobytes()
    return "done"


@pytest.mark.parametrize(
    ("codec", "options"), [("int8", {}), ("ternary", {"two_way": True}), ("fp16", {})]
)
def test_compressed_gradients_are_those_of_the_cpu(codec, options):
    assert run(2, given_gradients, codec, options, devices=1) == ["done"] * 2


def in_regions(rank, w):
    """Messages travel as codes there: of GPU tensors as of CPU tensors, to the byte."""
    peer, n = 1 - rank, 9000

    def exchanged(device, way, dtype="float32", count=n):
        mine = tensor_of(rank, count, dtype).to(device)
        wide = torch.zeros(2 * count, dtype=mine.dtype, device=device)
        out = wide[::2]
        with pycoll.codec("int4"):
            way(mine, out)
        assert not wide[1::2].any()
        return out

    def batch(mine, out):
        operations = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, out, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def alone(mine, out):
        sent = dist.isend(mine, peer, tag=3)
        assert dist.recv(out, tag=3) == peer  # from any
        sent.wait()

    for way in (batch, alone):
        for dtype, count in (("float32", n), ("bfloat16", 20_000), ("float32", 10), ("int32", n)):
            here, cpu = (exchanged(device, way, dtype, count) for device in (DEVICE, "cpu"))
            same(here, cpu)
            exact = torch.equal(cpu, tensor_of(peer, count, dtype))
            assert exact == (count == 10 or dtype == "int32")
    # One side is in no region: both hear of it, and the group goes on.
    mine, out = on_gpu(tensor_of(rank, 40_000)), torch.zeros(40_000, device=DEVICE)
    with pytest.raises(dist.DistBackendError, match="over codes: int4 in blocks of 256"):
        if rank == 0:
            dist.send(mine, 1)
        else:
            with pycoll.codec("int4"):
                dist.recv(out, 0)
    assert not out.any()
    dist.barrier()
    same(exchanged(DEVICE, alone), exchanged("cpu", alone))
    return "done"


@pytest.mark.parametrize(("devices", "hosts"), [(1, ""), (8, ""), (1, "ab")])
def test_messages_in_regions(devices, hosts):
    assert run(2, in_regions, devices=devices, hosts=hosts) == ["done"] * 2


HOOKS = {
    "power": lambda: pycoll.PowerSGD(rank=2, start_step=2),
    "top": lambda: pycoll.TopK(0.1),
    "random": lambda: pycoll.RandomK(0.2),
    "adam": None,
}


def trained_by_hook(rank, device, name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8)).to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    if name == "adam":
        optimizer = pycoll.OneBitAdam(ddp.parameters(), lr=0.003, freeze_step=5)
        ddp.register_comm_hook(optimizer.compression(), pycoll.compress_hook)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        ddp.register_comm_hook(pycoll.CompressionState(None, HOOKS[name]()), pycoll.compress_hook)
    losses = []
    for step in range(20):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(16, 32, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(x.to(device)) - x[:, :8].tanh().to(device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.cat([p.detach().reshape(-1).cpu() for p in model.parameters()]), losses


def every_hook(rank, w, names):
    for name in names:
        here, losses = trained_by_hook(rank, DEVICE, name)
        cpu, cpu_losses = trained_by_hook(rank, "cpu", name)
        every = [torch.empty_like(here) for _ in range(w)]
        dist.all_gather(every, here)
        assert all(torch.equal(one.view(torch.int32), here.view(torch.int32)) for one in every)
        # The model's own sums differ in order: to rounding, which 20 steps make larger.
        np.testing.assert_allclose(losses, cpu_losses, rtol=1e-3, err_msg=name)
        torch.testing.assert_close(here, cpu, rtol=1e-2, atol=1e-3)
        assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), f"nothing was learnt with {name}"
    return "done"


def test_hooks_beside_codecs_train_as_on_the_cpu():
    assert run(2, every_hook, list(HOOKS), devices=1) == ["done"] * 2


def trained(rank, device, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 64), nn.Linear(64, 8))
    model = model.to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    ddp.register_comm_hook(pycoll.CompressionState(None, "int8"), pycoll.compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(16, 32, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(x.to(device)) - x[:, :8].tanh().to(device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.cat([p.detach().reshape(-1).cpu() for p in model.parameters()]), losses


def trains(rank, w):
    here, losses = trained(rank, DEVICE, 12)
    cpu, _ = trained(rank, "cpu", 12)
    every = [torch.empty_like(here) for _ in range(w)]
    dist.all_gather(every, here)
    assert all(torch.equal(one.view(torch.int32), here.view(torch.int32)) for one in every)
    torch.testing.assert_close(here, cpu, rtol=1e-3, atol=1e-4)
    every_loss = torch.tensor(losses)
    dist.all_reduce(every_loss, dist.ReduceOp.AVG)
    assert every_loss[-1] < 0.8 * every_loss[0], "nothing was learnt"
    return "done"


@pytest.mark.parametrize(("devices", "hosts"), [(8, ""), (1, "aabb")])
def test_training_with_a_compressed_hook(devices, hosts):
    world_size = len(hosts) or 2
    assert run(world_size, trains, devices=devices, hosts=hosts) == ["done"] * world_size


class Asked(TorchDispatchMode):
    """How often the host has asked for what is on a GPU: each stops it until the GPU is there."""

    def __init__(self):
        super().__init__()
        self.times = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        to_host = str(kwargs.get("device")) == "cpu"
        tensors = [x for x in args if isinstance(x, torch.Tensor) and x.device.type == DEVICE]
        asks = operation is torch.ops.aten._local_scalar_dense.default
        self.times += bool(tensors) and (asks or to_host)
        return operation(*args, **kwargs)


def asks_in_hooks(rank, w):
    """By whether the bucket is the last, how often a hook asks the GPU; one parameter is unused."""
    run, asked = Run("int8", device=DEVICE), {False: 0, True: 0}
    buckets = 0

    def hook(state, bucket):
        nonlocal buckets
        with Asked() as mode:
            future = pycoll.compress_hook(state, bucket)
        if state.step > 1 or (state.step == 1 and not bucket.is_last()):
            asked[bucket.is_last()] += mode.times
            buckets += 1
        return future

    ddp = DistributedDataParallel(run.model, bucket_cap_mb=0.02)
    ddp.register_comm_hook(pycoll.CompressionState(None, "int8", model=ddp), hook)
    for step in range(3):
        given = {name: g.to(DEVICE) for name, g in gradients_of(rank, step).items()}
        given["b"].mul_(float(step == 0))
        ddp(given).backward()
    assert buckets > 4
    return asked[False], asked[True]


def test_hooks_do_not_stop_the_backward_pass():
    """At its end they ask twice: whether the averages are finite, and for some of them."""
    assert run(2, asks_in_hooks, devices=1) == [(0, 4)] * 2
