"""Collectives on the ranks' own arrays: the same bytes as through staging, whatever happens."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading

import numpy as np
import pytest

import pycoll
from helpers_shareable import shareable, shareable_empty
from helpers_threads import ThreadGroups
from pool import communicator_ranks, torch_ranks
from pycoll import _core
from pycoll._calls import Call
from reference import REDUCTIONS, data

STAGED = {
    "all_reduce": "two_shot",
    "reduce": "one_shot",
    "reduce_scatter": "one_shot",
    "all_gather": "one_shot",
    "broadcast": "one_shot",
    "gather": "one_shot",
    "scatter": "one_shot",
}
# Elements of the vector or of a block; a rank's part of 200,000 float32 has several portions.
SIZES = (1, 7, 1009, 200_003)


@pytest.fixture(scope="module")
def groups():
    made = ThreadGroups()
    yield made
    made.close()


def counted(group):
    statistics = group.statistics()
    return statistics["zero_copy_calls"], statistics["staged_calls"]


# ---- The same bytes as through staging ----


def call(group, collective, algorithm, source, target, root=0, op="none"):
    how = Call(collective, op, 1.0, root, algorithm, None)
    group._run(how, source, target, None, False)


def vectors(collective, rank, world_size, root, values):
    """(inputs, outputs) as lists of blocks, contiguous, or [] where this rank has none."""
    n = len(values) // world_size
    parts = [values[k * n : (k + 1) * n] for k in range(world_size)]
    at_root = rank == root
    if collective in ("all_reduce", "broadcast", "reduce"):
        has_output = collective != "reduce" or at_root
        return [values], [np.zeros_like(values)] if has_output else []
    zeros = list(np.zeros((world_size, n), values.dtype))
    if collective == "reduce_scatter":
        return parts, zeros[:1]
    if collective == "scatter":
        return parts if at_root else [], zeros[:1]
    return parts[:1], zeros if collective == "all_gather" or at_root else []


def lent(blocks, offset):
    """The blocks one behind the other in shareable memory."""
    if not blocks:
        return []
    whole = shareable(np.concatenate(blocks), offset)
    return np.split(whole, np.cumsum([len(block) for block in blocks])[:-1])


def run_both(group, collective, dtype, op, size, root, offset, in_place):
    """The outputs of this rank, staged and zero-copy."""
    rank, w = group.rank, group.world_size
    values = data(rank, dtype, "sum" if op == "none" else op, size * w)
    results = []
    for algorithm in (STAGED[collective], "zero_copy"):
        source, target = vectors(collective, rank, w, root, values.copy())
        if algorithm == "zero_copy":
            source, target = lent(source, offset), lent(target, offset)
        kept = [block.copy() for block in source]
        if in_place and target and source and len(source[0]) == len(target[0]):
            if len(target) == len(source):
                target = source
            elif len(target) > 1:
                target[rank][...] = source[0]
                source = [target[rank]]
            else:
                target = [source[rank]]
        before = counted(group)
        call(group, collective, algorithm, source, target, root, op)
        after = counted(group)
        which = 0 if algorithm == "zero_copy" else 1
        assert after[which] == before[which] + 1, (algorithm, before, after)
        if not in_place:
            assert all((a == b).all() for a, b in zip(source, kept, strict=True))
        results.append([block.tobytes() for block in target])
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("collective", STAGED)
def test_the_same_bytes_as_staged(groups, collective, world_size):
    ranks = groups(world_size)
    reducing = collective in ("all_reduce", "reduce", "reduce_scatter")
    pairs = [("int16", "none"), ("float64", "none")]
    if reducing:
        pairs = REDUCTIONS if world_size == 3 else [("bfloat16", "avg"), ("float32", "sum")]
    for number, (dtype, op) in enumerate(pairs):
        size = SIZES[number % len(SIZES)]
        root, offset, in_place = number % world_size, number % 3, number % 2 == 0
        found = ranks.run(run_both, collective, dtype, op, size, root, offset, in_place)
        for rank, (staged, direct) in enumerate(found):
            assert staged == direct, (dtype, op, size, root, offset, in_place, rank)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("in_place", [True, False])
def test_sizes_in_and_out_of_place(groups, size, in_place):
    for world_size in (2, 4):
        for collective in STAGED:
            op = "sum" if "reduce" in collective else "none"
            found = groups(world_size).run(
                run_both, collective, "float32", op, size, world_size - 1, 4, in_place
            )
            for staged, direct in found:
                assert staged == direct, (world_size, collective)


def test_uneven_blocks(groups):
    lengths = [1000, 0, 70_000]

    def gather(group):
        mine = shareable(data(group.rank, "float32", "sum", lengths[group.rank]))
        outputs = [np.zeros(n, np.float32) for n in lengths]
        before = counted(group)
        group.all_gather(outputs, mine, algorithm="zero_copy")
        assert counted(group)[0] == before[0] + 1
        return outputs

    for outputs in groups(3).run(gather):
        for rank, block in enumerate(outputs):
            assert (block == data(rank, "float32", "sum", lengths[rank])).all()


# ---- Who may go without ----


@pytest.mark.parametrize("private", [{0}, {2}, {0, 1}, {0, 1, 2}])
def test_one_private_array_and_all_are_staged(groups, private):
    def body(group):
        values = data(group.rank, "int64", "sum", 100_000)
        array = values.copy() if group.rank in private else shareable(values)
        before = counted(group)
        group.all_reduce(array)
        group.broadcast(array, root=0)
        after = counted(group)
        return array, after[0] - before[0], after[1] - before[1]

    total = sum(data(rank, "int64", "sum", 100_000) for rank in range(3))
    for array, direct, staged in groups(3).run(body):
        assert (array == total).all()
        # Of a broadcast only the root's array is read.
        assert (direct, staged) == ((1, 1) if 0 not in private else (0, 2))


def test_part_of_an_array_outside_of_shareable_memory_is_private(groups):
    def body(group):
        array = np.ones(100_000, np.float32)
        before = counted(group)
        group.all_reduce(array)
        after = counted(group)
        assert (array == group.world_size).all()
        return after[0] - before[0], after[1] - before[1]

    assert groups(2).run(body) == [(0, 1)] * 2


def test_small_arrays_are_staged_and_large_ones_are_not(groups):
    def body(group):
        for size, direct in ((16, 0), (1 << 20, 1)):
            array = shareable(np.ones(size, np.float32))
            before = counted(group)[0]
            group.all_reduce(array)
            assert counted(group)[0] - before == direct, size
            assert (array == group.world_size).all()

    groups(2).run(body)


# ---- Between processes ----


def alternate(communicator):
    rank, w = communicator.rank, communicator.world_size
    for step in range(30):
        size = 50_000 + 997 * step
        wanted = sum(data(r, "float32", "sum", size + r % 1) for r in range(w))
        values = data(rank, "float32", "sum", size)
        array = values.copy() if step % 5 == rank else shareable(values, 4 * (step % 3))
        communicator.all_reduce(array)
        assert np.allclose(array, wanted, rtol=1e-5, atol=1e-3), step
    return communicator.statistics()


def test_processes_with_and_without_shareable_arrays():
    results = communicator_ranks(3, alternate, timeout=40)
    # Steps 0, 1, 2 (mod 5) have a private array somewhere.
    for result in results:
        assert result.value["zero_copy_calls"] == 12, result.value


def mismatched(communicator):
    array = shareable(np.full(100_000 + communicator.rank, 7.0, np.float32))
    try:
        communicator.all_reduce(array)
    except pycoll.MismatchError as error:
        return str(error), bool((array == 7).all())
    except pycoll.AbortedError as error:
        return str(error), bool((array == 7).all())


def test_a_mismatch_writes_nothing():
    for result in communicator_ranks(3, mismatched, timeout=20):
        text, kept = result.value
        assert "sizes differ" in text
        assert kept


# ---- Failures ----


def pids_of(communicator):
    pids = np.zeros((communicator.world_size, 1), np.int64)
    communicator.all_gather(pids, np.array([os.getpid()], np.int64))
    return [int(pid) for pid in pids[:, 0]]


SIZE = 8 << 20  # elements: an all_reduce takes milliseconds


def die_in_the_middle(communicator):
    array = shareable_empty((SIZE,), np.float32)
    array[...] = 1
    pids = pids_of(communicator)
    if communicator.rank == 0:
        threading.Timer(0.2, os.kill, (pids[1], signal.SIGKILL)).start()
    try:
        while True:
            communicator.all_reduce(array, "max")
    except pycoll.Error as error:
        text = str(error)
    del array
    gc.collect()
    return text, _core.shareable_statistics()["quarantined"]


def test_a_rank_that_is_killed_in_the_middle_is_named_and_nothing_is_put_aside():
    results = communicator_ranks(3, die_in_the_middle, check=False, timeout=20)
    for result in (results[0], results[2]):
        assert result.error is None, result.report()
        text, quarantined = result.value
        assert "rank 1 died" in text
        assert quarantined == 0


# ---- Through torch ----


def torch_rank(rank, world_size):
    import torch
    import torch.distributed as dist

    tensor = torch.from_numpy(shareable(np.full(300_000, rank + 1.0, np.float32)))
    before = pycoll.statistics()
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    parts = torch.from_numpy(shareable_empty((world_size, 300_000), np.float32))
    dist.all_gather_into_tensor(parts, tensor)
    assert bool((parts == (world_size + 1) / 2).all())
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert bool((tensor == world_size * (world_size + 1) / 2).all())
    after = pycoll.statistics()
    return {name: after[name] - before[name] for name in after}


def test_torch_tensors_in_shareable_memory():
    for result in torch_ranks(3, torch_rank, timeout=40):
        assert result.value == {
            "zero_copy_calls": 3,
            "zero_copy_bytes": (2 + 3) * 300_000 * 4,
            "staged_calls": 0,
            "staged_bytes": 0,
        }


STEPS = 5


def ddp_losses(rank, group, shared):
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(7)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    scope = pycoll.shareable() if shared else contextlib.nullcontext()
    with scope:
        wrapped = DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=2, gradient_as_bucket_view=True
        )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        data = torch.randn(8, 512, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        loss = wrapped(data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, sum(p.numel() * 4 for p in model.parameters())


def ddp_rank(rank, world_size):
    import torch.distributed as dist

    gloo = dist.new_group(backend="gloo")
    wanted, _ = ddp_losses(rank, gloo, shared=False)
    before = pycoll.statistics()
    losses, parameters = ddp_losses(rank, None, shared=True)
    after = pycoll.statistics()
    return losses, wanted, parameters, {name: after[name] - before[name] for name in after}


def test_ddp_in_a_scope_has_no_bucket_staged_and_losses_as_gloo():
    for result in torch_ranks(2, ddp_rank, timeout=150, group_timeout=100):
        losses, wanted, parameters, counted_ = result.value
        assert losses == wanted  # of two ranks there is one sum
        assert counted_["zero_copy_bytes"] >= STEPS * parameters
        # DDP's own start sends the parameters, in ordinary memory, and the order of buckets.
        assert counted_["staged_bytes"] < 1.1 * parameters
