"""What ranks do with tensors on GPUs, whatever their device is to torch.

tests/gpu runs these on "cuda", tests/test_simgpu_shared.py on "simgpu". A function is called as
`function(rank, world_size, device, ...)` with the default group made. References are computed from
the data of all ranks, which each rank knows, by torch on the CPU.
"""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from pycoll.demo.model import CharTransformer, ModelConfig

DONE = "done"


def numbers(rank: int, shape, dtype: str, salt: int = 0) -> torch.Tensor:
    """Whole numbers so small that sums and products of 8 ranks are exact in every type."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(0, 3, shape, generator=generator).to(getattr(torch, dtype))


def fractions(rank: int, shape, dtype: str, salt: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))


def same(here: torch.Tensor, reference: torch.Tensor) -> None:
    """The same shape and bytes; `here` is on a GPU."""
    assert here.device.type not in ("cpu", "meta")
    there = here.cpu()
    assert there.shape == reference.shape and there.dtype == reference.dtype
    assert torch.equal(
        there.reshape(-1).view(torch.uint8), reference.contiguous().reshape(-1).view(torch.uint8)
    )


def folded(op: dist.ReduceOp, tensors: list[torch.Tensor]) -> torch.Tensor:
    every = torch.stack(tensors)
    if op == dist.ReduceOp.SUM:
        return every.sum(0).to(every.dtype)
    if op == dist.ReduceOp.PRODUCT:
        return every.prod(0).to(every.dtype)
    return every.amax(0) if op == dist.ReduceOp.MAX else every.amin(0)


# ---- Every collective ----


def reductions(rank, w, device, dtype, n, salt):
    everyone = [numbers(r, (n,), dtype, salt) for r in range(w)]
    total = folded(dist.ReduceOp.SUM, everyone)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        mine = everyone[rank].to(device)
        dist.all_reduce(mine, op)
        same(mine, folded(op, everyone))
    root = salt % w
    mine = everyone[rank].to(device)
    dist.reduce(mine, dst=root)
    same(mine, total if rank == root else everyone[rank])
    blocks = [[numbers(r, (n,), dtype, salt + 100 * (b + 1)) for b in range(w)] for r in range(w)]
    part = torch.zeros_like(mine)
    dist.reduce_scatter_tensor(part, torch.cat(blocks[rank]).to(device))
    same(part, folded(dist.ReduceOp.SUM, [blocks[r][rank] for r in range(w)]))


def moves(rank, w, device, dtype, n, salt):
    everyone = [numbers(r, (n,), dtype, salt) for r in range(w)]
    mine, together = everyone[rank].to(device), torch.cat(everyone)
    root = salt % w
    everywhere = mine.clone()
    dist.broadcast(everywhere, root)
    same(everywhere, everyone[root])
    wide = torch.zeros(w * n, dtype=mine.dtype, device=device)
    dist.all_gather_into_tensor(wide, mine)
    same(wide, together)
    blocks = [torch.zeros_like(mine) for _ in range(w)]
    dist.all_gather(blocks, mine)
    for block, expected in zip(blocks, everyone, strict=True):
        same(block, expected)
    blocks = [torch.zeros_like(mine) for _ in range(w)]
    dist.gather(mine, blocks if rank == root else None, dst=root)
    for block, expected in zip(blocks, everyone, strict=True):
        same(block, expected if rank == root else torch.zeros_like(expected))
    sources = [numbers(root, (n,), dtype, salt + r + 1) for r in range(w)]
    got = torch.zeros_like(mine)
    dist.scatter(got, [s.to(device) for s in sources] if rank == root else None, src=root)
    same(got, sources[rank])
    send = [[numbers(r, (n,), dtype, salt + 10 * to + 1) for to in range(w)] for r in range(w)]
    wide.zero_()
    dist.all_to_all_single(wide, torch.cat(send[rank]).to(device))
    same(wide, torch.cat([send[r][rank] for r in range(w)]))
    following, previous = (rank + 1) % w, (rank - 1) % w
    got = torch.zeros_like(mine)
    pair = [dist.P2POp(dist.isend, mine, following), dist.P2POp(dist.irecv, got, previous)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    same(got, everyone[previous])


def collectives(rank, w, device, dtypes, sizes):
    for salt, n in enumerate(sizes):
        for dtype in dtypes:
            reductions(rank, w, device, dtype, n, salt)
            moves(rank, w, device, dtype, n, salt)
    dist.barrier()
    return DONE


# A sum of w rounded numbers is rounded at most w times.
EPSILON = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7, "float64": 2**-52}


def sums_of_fractions(rank, w, device, n):
    """Within rounding of float64, and the same bits on every rank and in a second call."""
    for dtype, epsilon in EPSILON.items():
        everyone = [fractions(r, (n,), dtype) for r in range(w)]
        exact = sum(t.double() for t in everyone)
        size = sum(t.double().abs() for t in everyone)
        for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, w)):
            results = [everyone[rank].to(device) for _ in range(2)]
            for result in results:
                dist.all_reduce(result, op)
            error = (results[0].cpu().double() - exact / divisor).abs()
            assert (error <= w * epsilon * size / divisor).all(), (dtype, op)
            same(results[1], results[0].cpu())
            blocks = [torch.empty_like(results[0]) for _ in range(w)]
            dist.all_gather(blocks, results[0])
            for block in blocks:
                same(block, results[0].cpu())
    return DONE


def asynchronous(rank, w, device, n, calls):
    """Calls in flight on two groups, from two streams; nothing waits for the GPU between them."""
    other = dist.new_group(list(range(w)))
    streams = [torch.Stream(device=device) for _ in range(2)]
    torch.accelerator.synchronize()
    ends = []
    for salt in range(calls):
        for group, stream in zip((dist.group.WORLD, other), streams, strict=True):
            with stream:
                mine = numbers(rank, (n,), "float32", salt).to(device)
                work = dist.all_reduce(mine, group=group, async_op=True)
                work.wait()  # orders the stream
                ends.append((salt, mine * 2))
    torch.accelerator.synchronize()
    for salt, doubled in ends:
        same(doubled, 2 * sum(numbers(r, (n,), "float32", salt) for r in range(w)))
    return DONE


def replayed(rank, w, device, capture, replays):
    """Calls in a graph, whose input changes from replay to replay, and eager calls of other sizes
    on the same group among them. `capture(calls)` makes a graph of what `calls()` enqueues, and
    returns the function that replays it on the current stream.
    """
    n = 5000
    source, total = torch.zeros(n, device=device), torch.zeros(n, device=device)
    wide = torch.zeros(w * n, device=device)
    dist.all_reduce(torch.ones(77, device=device))  # the group has met
    torch.accelerator.synchronize()

    def calls():
        total.copy_(source)
        dist.all_reduce(total)
        dist.all_gather_into_tensor(wide, source, async_op=True).wait()

    replay = capture(calls)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    every = torch.stack([numbers(r, (n,), "float32") for r in range(w)]).to(device)
    for i in range(replays):
        source.copy_(every[rank] + i % 50)
        replay()
        wrong += (total != (every + i % 50).sum(0)).sum()
        wrong += (wide != (every + i % 50).reshape(-1)).sum()
        if i % 7 == 3:
            mine = torch.full((i % 999 + 1,), float(rank), device=device)
            dist.all_reduce(mine)
            wrong += (mine != w * (w - 1) / 2).sum()
    assert wrong.item() == 0
    same(total, (every + (replays - 1) % 50).sum(0).cpu())
    return DONE


# ---- Training ----

CONFIG = ModelConfig(vocabulary=29, width=32, layers=2, heads=2, length=16)
BATCH = 4  # sequences a rank


def text(step: int, w: int) -> torch.Tensor:
    """Sequences of all ranks: each character follows from the one before it."""
    start = torch.arange(w * BATCH)[:, None] * 7 + 11 * step
    return (start + 3 * torch.arange(CONFIG.length + 1)) % CONFIG.vocabulary


def demo_model(device):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return CharTransformer(CONFIG).to(device)


def train(model, device, rows, w, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for step in range(steps):
        sequences = text(step, w)[rows].to(device)
        optimizer.zero_grad()
        logits = model(sequences[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, CONFIG.vocabulary), sequences[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trains_as_one_process(rank, w, device, hook, steps=8):
    """DistributedDataParallel of the demo's model, against the global batch in one process."""
    model = demo_model(device)
    here = [torch.accelerator.current_device_index()]
    parallel = DistributedDataParallel(model, device_ids=here, bucket_cap_mb=0.02)
    if hook:
        parallel.register_comm_hook(None, fp16_compress_hook)
    losses = train(parallel, device, slice(BATCH * rank, BATCH * (rank + 1)), w, steps)
    alone = demo_model(device)
    expected = train(alone, device, slice(0, BATCH * w), w, steps)
    assert expected[-1] < 0.9 * expected[0], "nothing was learnt"
    mean = torch.tensor(losses, device=device)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    tolerance = 2e-2 if hook else 1e-3
    torch.testing.assert_close(mean.cpu(), torch.tensor(expected), rtol=tolerance, atol=tolerance)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    blocks = [torch.empty_like(flat) for _ in range(w)]
    dist.all_gather(blocks, flat)
    for block in blocks:
        same(block, flat.cpu())
    return DONE


# ---- Errors ----


def last_rank_is_killed(rank, w, device):
    """The others say who it was. Returns (seconds until they knew, what they said)."""
    tensor = torch.ones(1000, device=device)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    if rank == w - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        work = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed() and time.monotonic() < began + 10:
            time.sleep(0.01)
        work.wait()
        dist.all_reduce(tensor)
    except RuntimeError as error:
        return time.monotonic() - began, str(error)
    return time.monotonic() - began, ""
