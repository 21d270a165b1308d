"""torch.distributed over pycoll: several collectives as one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from pool import torch_ranks
from test_torch_collectives import check, values


def coalesced(rank, w):
    group = dist.group.WORLD

    def parts(salt):
        return [
            [values(r, (n, 3), "float32", salt + i) for i, n in enumerate((2, 0, 5))]
            for r in range(w)
        ]

    def sums(everyone):
        return [sum(of[i] for of in everyone) for i in range(3)]

    for asynchronous in (False, True):
        everyone = parts(1)
        mine = [tensor.clone() for tensor in everyone[rank]]
        options = dist.AllreduceCoalescedOptions()
        options.asyncOp = asynchronous
        work = group.allreduce_coalesced(mine, options)
        if work is not None:
            assert work.wait()
            assert [t.data_ptr() for t in work.get_future().value()] == [t.data_ptr() for t in mine]
        for tensor, expected in zip(mine, sums(everyone), strict=True):
            check(tensor, expected)

        with _coalescing_manager(async_ops=asynchronous) as manager:
            mine = [tensor.clone() for tensor in everyone[rank]]
            for tensor in mine:
                dist.all_reduce(tensor)
        if asynchronous:
            manager.wait()
        for tensor, expected in zip(mine, sums(everyone), strict=True):
            check(tensor, expected)

        outputs = [torch.full((w * t.shape[0], 3), -1.0) for t in everyone[rank]]
        with _coalescing_manager(async_ops=asynchronous) as manager:
            for output, tensor in zip(outputs, everyone[rank], strict=True):
                dist.all_gather_into_tensor(output, tensor)
        if asynchronous:
            manager.wait()
        for i, output in enumerate(outputs):
            check(output, torch.cat([everyone[r][i] for r in range(w)]))

        wide = [[t.repeat(w, 1) + 10 * r for t in everyone[r]] for r in range(w)]
        outputs = [torch.full_like(t, -1.0) for t in everyone[rank]]
        with _coalescing_manager(async_ops=asynchronous) as manager:
            for output, tensor in zip(outputs, wide[rank], strict=True):
                dist.reduce_scatter_tensor(output, tensor)
        if asynchronous:
            manager.wait()
        for i, output in enumerate(outputs):
            n = output.shape[0]
            check(output, sum(wide[r][i][rank * n : (rank + 1) * n] for r in range(w)))

    lists = [[torch.zeros_like(t) for t in everyone[r]] for r in range(w)]
    dist.all_gather_coalesced(lists, everyone[rank])
    for r in range(w):
        for output, expected in zip(lists[r], everyone[r], strict=True):
            check(output, expected)
    return "done"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_coalesced_forms(world_size):
    assert [r.value for r in torch_ranks(world_size, coalesced, timeout=60)] == [
        "done"
    ] * world_size


def between_start_and_end(rank, w):
    cpu = torch.device("cpu")
    a, b, inner = (values(rank, (n,), salt=n) for n in (5, 900, 3))
    gathered = [torch.zeros(5) for _ in range(w)]
    with _coalescing_manager(device=cpu, async_ops=True) as manager:
        dist.broadcast(a, w - 1, async_op=True)
        dist.all_gather(gathered, a.clone(), async_op=True)
        dist.broadcast(inner, 0)  # synchronous: done here and now
        check(inner, values(0, (3,), salt=3))
        ring = torch.zeros(900)
        if w > 1:
            dist.isend(b, (rank + 1) % w)
            dist.irecv(ring, (rank - 1) % w)
    manager.wait()
    check(a, values(w - 1, (5,), salt=5))
    if w > 1:
        check(ring, values((rank - 1) % w, (900,), salt=900))
    # The future's value is the list of all tensors, in their order.
    group = dist.group.WORLD
    group._start_coalescing(cpu)
    dist.all_reduce(a, async_op=True)
    dist.broadcast(b, 0, async_op=True)
    work = group._end_coalescing(cpu)
    assert [t.data_ptr() for t in work.get_future().wait()] == [
        a.data_ptr(),
        b.data_ptr(),
    ]
    assert work.is_completed()
    assert work.is_success()
    group._start_coalescing(cpu)
    assert group._end_coalescing(cpu) is None
    with pytest.raises(RuntimeError, match="start_coalescing"):
        group._end_coalescing(cpu)
    # A block that an exception left open changes nothing for what comes later.
    group._start_coalescing(cpu)
    one = torch.ones(2)
    dist.all_reduce(one)
    assert one.tolist() == [w, w]
    return "done"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_start_and_end_coalescing(world_size):
    results = torch_ranks(world_size, between_start_and_end)
    assert [result.value for result in results] == ["done"] * world_size


def failing_part(rank, w):
    options = dist.AllreduceCoalescedOptions()
    options.asyncOp = True
    work = dist.group.WORLD.allreduce_coalesced(
        [torch.ones(3), torch.ones(3 + (rank == 1))], options
    )
    try:
        work.wait()
    except dist.DistBackendError as error:
        assert work.exception() is not None
        return str(error)
    return None


def test_a_part_that_fails_fails_the_whole():
    for result in torch_ranks(2, failing_part):
        assert "sizes differ" in result.value
