"""One rank of a short job on the pycoll backend: `python smoke_torch.py RANK WORLD_SIZE DIRECTORY`.

A script of its own with nothing but torch and pycoll: test_torch_versions.py runs it where there
are no test tools. It does not import pycoll: torch has to find the backend by its name. Each check
computes what it expects without communication. Prints "ok" and the checks' names at the end.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

STEPS = 3
ROWS = 4  # of the batch, a rank
COUNT = 1237  # odd: no block of a collective has a round length


def values(rank: int, count: int = COUNT) -> torch.Tensor:
    """Depends on rank and position; exact in float32, and so are sums over a few ranks."""
    return (torch.arange(count, dtype=torch.float32) * 7 + rank * 11) % 509 - 200


def expect(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def all_reduce(rank: int, world: int) -> None:
    every = torch.stack([values(r) for r in range(world)])
    for op, expected in (
        (dist.ReduceOp.SUM, every.sum(0)),
        (dist.ReduceOp.MAX, every.amax(0)),
        (dist.ReduceOp.AVG, every.sum(0) / world),
    ):
        x = values(rank)
        dist.all_reduce(x, op)
        expect(x, expected)
    x = values(rank)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    expect(x, every.sum(0))
    expect(work.get_future().wait()[0], every.sum(0))


def broadcast(rank: int, world: int) -> None:
    for root in range(world):
        x = values(rank)
        dist.broadcast(x, root)
        expect(x, values(root))


def names(*candidates: str) -> list[Callable[..., object]]:
    """What this torch has of them: 2.14 gave some functions a second name, dispatched apart."""
    return [getattr(dist, name) for name in candidates if hasattr(dist, name)]


def all_gather(rank: int, world: int) -> None:
    every = [values(r) for r in range(world)]
    for function in names("all_gather_into_tensor", "all_gather_single"):
        out = torch.full((world * COUNT,), -1.0)
        function(out, values(rank))
        expect(out, torch.cat(every))
    outs = [torch.full((COUNT,), -1.0) for _ in range(world)]
    dist.all_gather(outs, values(rank))
    expect(torch.stack(outs), torch.stack(every))


def reduce_scatter(rank: int, world: int) -> None:
    total = torch.stack([values(r, world * COUNT) for r in range(world)]).sum(0)
    for function in names("reduce_scatter_tensor", "reduce_scatter_single"):
        out = torch.full((COUNT,), -1.0)
        function(out, values(rank, world * COUNT))
        expect(out, total.view(world, COUNT)[rank])


def all_to_all(rank: int, world: int) -> None:
    equal = torch.full((world * COUNT,), -1.0)
    dist.all_to_all_single(equal, values(rank, world * COUNT))
    expect(equal, torch.cat([values(r, world * COUNT).view(world, -1)[rank] for r in range(world)]))

    # Rank r sends r + 2 * p elements to rank p.
    def splits(r: int) -> list[int]:
        return [r + 2 * p for p in range(world)]

    received = [splits(r)[rank] for r in range(world)]
    out = torch.full((sum(received),), -1.0)
    dist.all_to_all_single(out, values(rank, sum(splits(rank))), received, splits(rank))
    expected = [values(r, sum(splits(r))).split(splits(r))[rank] for r in range(world)]
    expect(out, torch.cat(expected))


def point_to_point(rank: int, world: int) -> None:
    following, before = (rank + 1) % world, (rank - 1) % world
    x = torch.full((COUNT,), -1.0)
    if rank == 0:
        dist.send(values(rank), following)
        dist.recv(x, before)
    else:
        dist.recv(x, before)
        dist.send(values(rank), following)
    expect(x, values(before))
    x = torch.full((COUNT,), -1.0)
    operations = [
        dist.P2POp(dist.isend, values(rank), following),
        dist.P2POp(dist.irecv, x, before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    expect(x, values(before))


def coalescing(rank: int, world: int) -> None:
    counts = [1, 5, COUNT]
    reduced = [values(rank, count) for count in counts]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in reduced:
            dist.all_reduce(x)
    manager.wait()
    for x, count in zip(reduced, counts, strict=True):
        expect(x, torch.stack([values(r, count) for r in range(world)]).sum(0))
    gathered = [torch.full((world * count,), -1.0) for count in counts]
    with dist._coalescing_manager():
        for out, count in zip(gathered, counts, strict=True):
            dist.all_gather_into_tensor(out, values(rank, count))
    for out, count in zip(gathered, counts, strict=True):
        expect(out, torch.cat([values(r, count) for r in range(world)]))


def groups(rank: int, world: int) -> None:
    whole = dist.new_group()
    alone = [dist.new_group([r]) for r in range(world)]
    for group, members in ((whole, range(world)), (alone[rank], [rank])):
        assert dist.get_backend(group) == "pycoll"
        x = values(rank)
        dist.all_reduce(x, group=group)
        expect(x, torch.stack([values(r) for r in members]).sum(0))
        dist.destroy_process_group(group)


def objects(rank: int, world: int) -> None:
    found: list[object] = [None] * world
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
    assert found == [{"rank": r, "text": "x" * r} for r in range(world)], found


def mismatch(rank: int, world: int) -> None:
    """The core's error arrives as torch's own class, on every rank, and ends that group alone."""
    group = dist.new_group()
    try:
        dist.all_reduce(values(rank, 3 + rank), group=group)
    except dist.DistBackendError as error:
        assert "all_reduce" in str(error), error
    else:
        raise AssertionError("ranks with different sizes were not refused")
    with contextlib.suppress(dist.DistBackendError):
        dist.destroy_process_group(group)


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2)).double()


def train(model: nn.Module, rows: slice, world: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(world * ROWS, 6, generator=generator, dtype=torch.float64)
        y = torch.randn(world * ROWS, 2, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()


def data_parallel(rank: int, world: int) -> None:
    """The same weights as one process with the whole batch, and the same bits on all ranks."""
    alone, start = net(), net()
    model = copy.deepcopy(start)
    if rank != 0:  # DDP has to broadcast rank 0's
        nn.init.zeros_(model[0].weight)
    model = nn.parallel.DistributedDataParallel(model)
    train(model, slice(rank * ROWS, (rank + 1) * ROWS), world)
    train(alone, slice(None), world)
    flat, expected, first = (
        nn.utils.parameters_to_vector(m.parameters()).detach() for m in (model, alone, start)
    )
    torch.testing.assert_close(flat, expected, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(flat, first, atol=1e-3), "nothing was learnt"
    every = torch.empty(world * flat.numel(), dtype=flat.dtype)
    dist.all_gather_into_tensor(every, flat)
    expect(every.view(world, -1), flat.expand(world, -1))


CHECKS: list[Callable[[int, int], None]] = [
    all_reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    all_to_all,
    point_to_point,
    coalescing,
    groups,
    objects,
    data_parallel,
    mismatch,
]


def main() -> None:
    rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    assert "pycoll" not in sys.modules, "torch itself must not load the backend"
    torch.set_num_threads(1)
    # The names that torch 2.14 calls deprecated are those that programs have.
    warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
    store = dist.FileStore(f"{directory}/store", world)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("pycoll", store=store, rank=rank, world_size=world, timeout=timeout)
    for check in CHECKS:
        check(rank, world)
    dist.barrier()
    dist.destroy_process_group()
    print("ok", torch.__version__, *(check.__name__ for check in CHECKS))


if __name__ == "__main__":
    main()
