"""torch.distributed on GPU tensors: the adapter's device path, on the simulated device "simgpu".

What is checked here are the calls and their results, and training, in several processes. The
reference is the same group's CPU path, on copies of the same tensors.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import native_build
import simgpu

# The first test compiles the device.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + 300)

DEVICE = "simgpu"
INTEGERS = ["int64", "int32", "uint8", "bool"]
FLOATS = ["float32", "float16", "bfloat16", "float64"]
SIZES = [(0,), (1,), (7,), (33, 3), (4099,)]


def numbers(rank, shape, dtype="float32", salt=0):
    """Small whole numbers: their sums are exact in every type, in any order."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    high = 2 if dtype == "bool" else 9
    return torch.randint(0, high, shape, generator=generator).to(getattr(torch, dtype))


def fractions(rank, shape, dtype, salt=0):
    generator = torch.Generator().manual_seed(77 * salt + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))


def on_gpu(tensor):
    return tensor.to(DEVICE)


def bytes_of(tensor):
    """Not the values: signed zeros and all."""
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same(gpu, cpu):
    """The same bytes, and still on its device."""
    assert gpu.device.type == DEVICE
    assert cpu.device.type == "cpu"
    here = gpu.cpu()
    assert here.dtype == cpu.dtype and here.shape == cpu.shape
    assert torch.equal(bytes_of(here), bytes_of(cpu))


def twice(call, *tensors):
    """The call on GPU tensors and on CPU tensors: the results must be the same to the byte."""
    gpu = [on_gpu(t) for t in tensors]
    cpu = [t.clone() for t in tensors]
    call(gpu)
    call(cpu)
    for one, other in zip(gpu, cpu, strict=True):
        same(one, other)


def every_collective(rank, w, dtypes, sizes):
    last = w - 1
    for dtype in dtypes:
        for salt, shape in enumerate(sizes):
            mine = numbers(rank, shape, dtype, salt)
            blocks = [torch.zeros_like(mine) for _ in range(w)]
            many = numbers(rank, (w * shape[0], *shape[1:]), dtype, salt + 50)
            wide = torch.zeros_like(many)

            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
                if dtype == "bool" and op == dist.ReduceOp.PRODUCT:
                    continue
                twice(lambda t, op=op: dist.all_reduce(t[0], op), mine)
            twice(lambda t: dist.broadcast(t[0], last), mine)
            twice(lambda t: dist.all_gather(t[1:], t[0]), mine, *blocks)
            twice(lambda t: dist.all_gather_into_tensor(t[1], t[0]), mine, wide)
            twice(lambda t: dist.reduce_scatter_tensor(t[1], t[0]), many, mine)
            twice(
                lambda t: dist.reduce_scatter(t[0], t[1:]),
                mine,
                *(numbers(rank, shape, dtype, salt + r) for r in range(w)),
            )
            twice(lambda t: dist.all_to_all_single(t[1], t[0]), many, wide)
            if rank == last:
                twice(lambda t: dist.gather(t[0], t[1:], dst=last), mine, *blocks)
                twice(lambda t: dist.scatter(t[0], t[1:], src=last), mine, *many.chunk(w))
                twice(lambda t: dist.reduce(t[0], dst=last), mine)
            else:
                twice(lambda t: dist.gather(t[0], None, dst=last), mine)
                twice(lambda t: dist.scatter(t[0], None, src=last), mine)
                gpu = on_gpu(mine)
                dist.reduce(gpu, dst=last)
                dist.reduce(mine.clone(), dst=last)
                same(gpu, mine)  # only the root's changes
    return "done"


@pytest.mark.parametrize(("world_size", "devices"), [(2, 8), (2, 1), (4, 2)])
def test_collectives_equal_those_of_the_cpu(world_size, devices):
    arguments = (["int64", "float32", "bfloat16"], [(1,), (33, 3)])
    results = simgpu.ranks(world_size, every_collective, *arguments, devices=devices, timeout=120)
    assert [r.value for r in results] == ["done"] * world_size


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "devices"), [(2, 8), (2, 1), (4, 8), (4, 2), (4, 1), (3, 8)]
)
def test_collectives_of_all_types_and_sizes(world_size, devices):
    arguments = (INTEGERS + FLOATS, SIZES)
    results = simgpu.ranks(world_size, every_collective, *arguments, devices=devices, timeout=600)
    assert [r.value for r in results] == ["done"] * world_size


def uneven(rank, w):
    """Blocks of different lengths, some of them empty; and the rarer operations."""
    rows = [[(3 * source + 2 * target) % 5 for target in range(w)] for source in range(w)]
    out_rows = [rows[source][rank] for source in range(w)]
    mine = numbers(rank, (sum(rows[rank]), 6), "int32")
    into = torch.full((sum(out_rows), 6), -1, dtype=torch.int32)
    twice(lambda t: dist.all_to_all_single(t[1], t[0], out_rows, rows[rank]), mine, into)
    inputs, outputs = mine.split(rows[rank]), into.split(out_rows)
    twice(lambda t: dist.all_to_all(t[w:], t[:w]), *inputs, *outputs)
    factor = dist._make_nccl_premul_sum(2.0)
    twice(lambda t: dist.all_reduce(t[0], factor), numbers(rank, (50,), "float32"))
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BXOR, dist.ReduceOp.MIN):
        twice(lambda t, op=op: dist.all_reduce(t[0], op), numbers(rank, (50,), "int64"))
    # More than any staging area takes at once.
    twice(lambda t: dist.all_reduce(t[0]), numbers(rank, (700_001,), "float32"))
    return "done"


@pytest.mark.parametrize(("world_size", "devices"), [(2, 8), (3, 1)])
def test_uneven_blocks_and_rarer_operations(world_size, devices):
    results = simgpu.ranks(world_size, uneven, devices=devices, timeout=120)
    assert [r.value for r in results] == ["done"] * world_size


# A sum of w rounded numbers is rounded at most w times.
EPSILON = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7, "float64": 2**-52}


def sums_of_fractions(rank, w):
    for dtype, epsilon in EPSILON.items():
        everyone = [fractions(r, (5000,), dtype) for r in range(w)]
        exact = sum(t.double() for t in everyone)
        size = sum(t.double().abs() for t in everyone)
        for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, w)):
            gpu = on_gpu(everyone[rank])
            dist.all_reduce(gpu, op)
            error = (gpu.cpu().double() - exact / divisor).abs()
            assert (error <= w * epsilon * size / divisor).all(), (dtype, op)
            # The same bits on every rank.
            all_of = [torch.empty_like(gpu) for _ in range(w)]
            dist.all_gather(all_of, gpu)
            for other in all_of:
                same(other, gpu.cpu())
    return "done"


@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_are_right_within_rounding_and_the_same_everywhere(world_size):
    results = simgpu.ranks(world_size, sums_of_fractions, timeout=60)
    assert [r.value for r in results] == ["done"] * world_size


def unusual_tensors(rank, w):
    base = numbers(rank, (6, 10), "float32")
    everyone = [numbers(r, (6, 10), "float32") for r in range(w)]
    total = sum(everyone)
    for view in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[2:4, 3:]):
        for asynchronous in (False, True):
            whole = on_gpu(base)
            work = dist.all_reduce(view(whole), async_op=asynchronous)
            if asynchronous:
                work.wait()
            expected = base.clone()
            view(expected).copy_(view(total))
            same(whole, expected)  # what lies between stays
    gathered = on_gpu(torch.zeros(w, 10, 6)).transpose(1, 2)
    dist.all_gather(list(gathered.unbind(0)), on_gpu(base))
    same(gathered, torch.stack(everyone))
    whole = on_gpu(torch.complex(base, -base))
    dist.all_reduce(whole)
    same(whole, torch.complex(total, -total))
    dist.broadcast(whole.conj().imag, 0)  # a negated view: its memory has other values
    same(whole.imag, -total)
    leaf = on_gpu(base).requires_grad_()
    dist.broadcast(leaf.detach(), 0)
    same(leaf.detach(), everyone[0])
    return "done"


def test_views_and_other_unusual_tensors():
    assert [r.value for r in simgpu.ranks(2, unusual_tensors, timeout=60)] == ["done"] * 2


# ---- Messages, groups, mixed calls ----


def messages(rank, w):
    following, previous = (rank + 1) % w, (rank - 1) % w
    for shape, dtype in (((5,), "float32"), ((0,), "int64"), ((300, 70), "bfloat16")):
        mine = on_gpu(numbers(rank, shape, dtype))
        expected = numbers(previous, shape, dtype)
        # One by one.
        got = torch.zeros_like(mine)
        sending = dist.isend(mine, following)
        receiving = dist.irecv(got, previous)
        receiving.wait()
        same(got, expected)
        sending.wait()
        # As a batch.
        got = torch.zeros_like(mine)
        strided = torch.zeros(*shape, 2, device=DEVICE, dtype=mine.dtype)
        operations = [
            dist.P2POp(dist.isend, mine, following),
            dist.P2POp(dist.irecv, got, previous),
            dist.P2POp(dist.isend, mine, following),
            dist.P2POp(dist.irecv, strided[..., 1], previous),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        same(got, expected)
        same(strided[..., 1], expected)
    # From whoever sends first.
    if rank == 0:
        got = torch.zeros(4, device=DEVICE)
        sources = sorted(dist.recv(got) for _ in range(1, w))
        assert sources == list(range(1, w))
    else:
        dist.send(torch.full((4,), float(rank), device=DEVICE), 0)
    return "done"


@pytest.mark.parametrize(("world_size", "devices"), [(2, 8), (4, 8), (3, 1)])
def test_messages(world_size, devices):
    results = simgpu.ranks(world_size, messages, devices=devices, timeout=60)
    assert [r.value for r in results] == ["done"] * world_size


def two_of_many(rank, w):
    """The first thing that happens in the group is a message: only its two ranks take part."""
    tensor = on_gpu(numbers(rank, (9,), "int32"))
    if rank == 0:
        dist.send(tensor, 2)
    elif rank == 2:
        dist.recv(tensor, 0)
        same(tensor, numbers(0, (9,), "int32"))
    return "done"


def test_a_message_needs_only_its_two_ranks():
    assert [r.value for r in simgpu.ranks(3, two_of_many, timeout=60)] == ["done"] * 3


def both_kinds(rank, w):
    """CPU and GPU tensors on one group, and subgroups."""
    total = sum(numbers(r, (100,), "float32") for r in range(w))
    native = dist.group.WORLD._get_backend(torch.device(DEVICE))
    before = native.get_sequence_number()
    for _ in range(4):
        gpu, cpu = on_gpu(numbers(rank, (100,), "float32")), numbers(rank, (100,), "float32")
        dist.all_reduce(gpu)
        torch.accelerator.synchronize()
        work = dist.all_reduce(cpu, async_op=True)
        work.wait()
        same(gpu, total)
        assert torch.equal(cpu, total)
    assert native.get_sequence_number() - before >= 8
    pairs = [dist.new_group([r, r + 1]) for r in range(0, w - 1, 2)]
    pair = pairs[rank // 2]
    gpu = on_gpu(torch.tensor([rank + 1]))
    dist.all_reduce(gpu, group=pair)
    assert gpu.item() == 2 * (rank // 2 * 2) + 3
    objects = [None] * w
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(w)]
    return "done"


@pytest.mark.parametrize("backend", ["pycoll", "cpu:pycoll,simgpu:pycoll"])
def test_cpu_and_gpu_tensors_on_one_group(backend):
    results = simgpu.ranks(2, both_kinds, backend=backend, timeout=60)
    assert [r.value for r in results] == ["done"] * 2


# ---- DistributedDataParallel ----


def train(model, device, rank, w, steps=6):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        x, y = (fractions(0, (w * 4, n), "float32", 10 * step + n) for n in (6, 3))
        rows = slice(4 * rank, 4 * rank + 4)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[rows].to(device)), y[rows].to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)
        )


def data_parallel(rank, w, hook):
    runs = {}
    for device in ("cpu", DEVICE):
        model = network().to(device)
        ids = [torch.accelerator.current_device_index()] if device == DEVICE else None
        parallel = DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=0.003)
        if hook:
            parallel.register_comm_hook(None, fp16_compress_hook)
        losses = train(parallel, device, rank, w)
        runs[device] = [*losses, *(p.detach().cpu() for p in model.parameters())]
    for here, there in zip(runs["cpu"], runs[DEVICE], strict=True):
        torch.testing.assert_close(there, here, rtol=1e-3 if hook else 1e-5, atol=1e-6)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    start = torch.cat([p.detach().reshape(-1) for p in network().parameters()])
    assert not torch.allclose(flat.cpu(), start, atol=1e-3)
    everyone = [torch.empty_like(flat) for _ in range(w)]
    dist.all_gather(everyone, flat)
    for other in everyone:
        same(other, flat.cpu())
    return "done"


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "fp16_hook"])
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_data_parallel_training_equals_that_on_the_cpu(world_size, hook):
    results = simgpu.ranks(world_size, data_parallel, hook, timeout=200)
    assert [r.value for r in results] == ["done"] * world_size
