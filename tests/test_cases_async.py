"""Public bug reports, kind H: works and futures."""

from __future__ import annotations

import ctypes
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from helpers_cases import (
    TRANSPORTS,
    Guarded,
    error_of,
    finish,
    footprint,
    numbered,
    rss_bytes,
    run_case,
    same,
    still_works,
    total,
)

over_each_transport = pytest.mark.parametrize("transport", TRANSPORTS)
M_PERTURB = -6  # <malloc.h>: what mallopt() calls the byte that freed memory is filled with
MIB = 1 << 20


def store():
    return dist.distributed_c10d._get_default_store()


# ---- H1 ----


def h1_dropped(rank, w, rounds=500):
    assert ctypes.CDLL(None).mallopt(M_PERTURB, 0xA5) == 1
    rng = random.Random(rank)
    resident = []
    for i in range(rounds):
        # Each in turn keeps nothing of its call; the others see what it sent.
        values = [numbered(r, (4096,), salt=i) for r in range(w)]
        one = values[rank].clone()
        work = dist.all_reduce(one, async_op=True)
        if i % w == rank:
            del one, work
        lists = [torch.zeros(512) for _ in range(w)]
        gathering = dist.all_gather(lists, values[rank][:512].clone(), async_op=True)
        noise = [torch.full((rng.choice([512, 4096]),), -3.0) for _ in range(3)]
        del noise
        if i % w != rank:
            work.wait()
            same(one, total(values), i)
        if (i + 1) % w == rank:
            del lists, gathering
        else:
            gathering.wait()
            for output, value in zip(lists, values, strict=True):
                same(output, value[:512], i)
        if i in (rounds // 5, rounds - 1):
            dist.barrier()
            resident.append(rss_bytes())
    assert resident[1] - resident[0] < 8 * MIB, resident
    return "done"


@over_each_transport
def test_h1_works_and_tensors_that_nobody_keeps(transport):
    """H1: 500 rounds, freed memory is overwritten, peers get exact values, memory stays flat."""
    run_case(3, h1_dropped, transport=transport)


# ---- H2 ----


def h2_waiting_in_callbacks(rank, w):
    def level(depth, tensor):
        def callback(future):
            result = future.value()[0]
            return result if depth == 0 else level(depth - 1, result)

        return dist.all_reduce(tensor, async_op=True).get_future().then(callback).wait()

    for n in (5, 100_000):
        same(level(3, torch.ones(n)), torch.full((n,), float(w**4)), n)
    # Three levels below one future, each waiting for a collective of its own.
    seen = []

    def once(name):
        def callback(future):
            one = torch.tensor([float(rank)])
            dist.all_reduce(one, async_op=True).get_future().wait()
            seen.append((name, one.item()))
            return future.value()

        return callback

    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    future.then(once("a")).then(once("b")).then(once("c")).wait()
    assert seen == [(name, w * (w - 1) / 2) for name in "abc"]
    # A synchronous call in a callback, and a message.
    one = torch.zeros(4)

    def exchange(future):
        sent = dist.isend(numbered(rank, (4,)), (rank + 1) % w, tag=8)
        dist.recv(one, (rank - 1) % w, tag=8)
        sent.wait()
        dist.all_reduce(one)
        return future.value()[0]

    dist.all_reduce(torch.ones(3), async_op=True).get_future().then(exchange).wait()
    same(one, total([numbered(r, (4,)) for r in range(w)]))
    still_works(rank, w)
    return "done"


def h2_on_gloo(rank, w):
    def level(depth, tensor):
        def callback(future):
            result = future.value()[0]
            return result if depth == 0 else level(depth - 1, result)

        return dist.all_reduce(tensor, async_op=True).get_future().then(callback).wait()

    same(level(1, torch.ones(5)), torch.full((5,), float(w**2)))
    return "done"


@over_each_transport
def test_h2_waiting_in_callbacks(transport):
    """H2: three levels deep, nested and in a chain; synchronous calls and messages, too."""
    run_case(3, h2_waiting_in_callbacks, transport=transport)


def test_h2_control_on_gloo():
    """H2: Gloo manages one level."""
    run_case(3, h2_on_gloo, backend="gloo")


# ---- H3 ----


def h3_works(rank, w, ours=True):
    one = numbered(rank, (1000,))
    expected = total([numbered(r, (1000,)) for r in range(w)])
    if rank == 1:
        store().wait(["looked"])
    work = dist.all_reduce(one, async_op=True)
    future = work.get_future()
    if rank == 0:
        assert not work.is_completed()
        assert not future.done()
        store().set("looked", "")
    for _ in range(3):
        assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    same(one, expected)
    assert work.result()[0].data_ptr() == one.data_ptr()
    for value in (future.value(), work.get_future().value(), future.wait()):
        assert isinstance(value, list)
        assert value[0].data_ptr() == one.data_ptr()
    outputs = [torch.zeros(3) for _ in range(w)]
    value = dist.all_gather(outputs, torch.ones(3), async_op=True).get_future().wait()
    flat = value[0] if isinstance(value[0], list) else value
    assert [v.data_ptr() for v in flat] == [o.data_ptr() for o in outputs]
    if rank == 0:
        taken = torch.zeros(4)
        receive = dist.irecv(taken, None, tag=5)
        assert receive.wait()
        assert receive._source_rank() == 1
        same(taken, numbered(1, (4,)))
        if ours:
            assert receive.is_completed()
            assert receive.is_success()
            assert receive.result()[0].data_ptr() == taken.data_ptr()
            assert receive.get_future().value()[0].data_ptr() == taken.data_ptr()
    elif rank == 1:
        dist.send(numbered(1, (4,)), 0, tag=5)
    return "done"


def h3_failed(rank, w):
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(3 + rank), group=group, async_op=True)
    future = work.get_future()
    for _ in range(2):
        assert "sizes differ" in error_of(work.wait)
    assert work.is_completed()
    assert not work.is_success()
    assert "sizes differ" in error_of(future.wait)
    assert "sizes differ" in error_of(lambda: future.then(lambda f: f.value()).wait())
    still_works(rank, w)
    return "done"


@over_each_transport
def test_h3_what_a_work_says(transport):
    """H3: before and after, waited for twice, its future, its source, its error."""
    run_case(2, h3_works, transport=transport)
    run_case(2, h3_failed, transport=transport)


def test_h3_control_on_gloo():
    """H3: the same of Gloo's works."""
    run_case(2, h3_works, False, backend="gloo")


# ---- H5 ----


def h5_outstanding(rank, w, count=500):
    for order in ("reverse", "random"):
        start = time.process_time()
        pending = []
        for i in range(count):
            parts = [numbered(r, (257,), salt=i) for r in range(w)]
            one = parts[rank].clone()
            if i % 5 == 4:
                pending.append((dist.broadcast(one, i % w, async_op=True), one, parts[i % w]))
            else:
                pending.append((dist.all_reduce(one, async_op=True), one, total(parts)))
        threads = footprint()[1]
        if order == "reverse":
            pending.reverse()
        else:
            random.Random(rank).shuffle(pending)
        for work, one, expected in pending:
            work.wait()
            same(one, expected)
        # Of CPU: 0.2 s, and 1.5 s for Gloo. By the clock a machine under load takes a hundred times
        # as much: every message of a work waits until its receiver gets a CPU.
        assert time.process_time() - start < 5
        # A progress thread that loses its CPU in a callback makes room for one more, which stays.
        assert footprint()[1] <= threads + 4
    return "done"


@over_each_transport
def test_h5_many_outstanding_works(transport):
    """H5: 500 at once, waited for in reverse and in random order, mixed with broadcasts."""
    run_case(3, h5_outstanding, transport=transport)


def test_h5_control_on_gloo():
    """H5: Gloo manages it, too."""
    run_case(3, h5_outstanding, backend="gloo")


# ---- H6 ----


def h6_in_place(rank, w):
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        dtype = torch.int32 if name[0] == "B" else torch.float32
        for n in (3, 5000):
            for asynchronous in (False, True):
                one = Guarded(numbered(rank, (n,), dtype) + 1)
                address = one.tensor.data_ptr()
                alias = one.tensor.view(-1)
                work = dist.all_reduce(one.tensor, getattr(ReduceOp, name), async_op=asynchronous)
                if work:
                    work.wait()
                    assert work.result()[0].data_ptr() == address
                assert one.tensor.data_ptr() == address
                parts = [numbered(r, (n,), dtype) + 1 for r in range(w)]
                function = {
                    "SUM": lambda a, b: a + b,
                    "AVG": lambda a, b: (a + b) / 2,
                    "PRODUCT": lambda a, b: a * b,
                    "MIN": torch.minimum,
                    "MAX": torch.maximum,
                    "BAND": torch.bitwise_and,
                    "BOR": torch.bitwise_or,
                    "BXOR": torch.bitwise_xor,
                }[name]
                one.check(function(*parts), name)
                same(alias, one.tensor)
    return "done"


def h6_calls(rank, w, n, asynchronous, scatters):
    mine = Guarded(numbered(rank, (n,)))
    whole = Guarded(numbered(rank, (w, n)))
    lists = [torch.zeros(n) for _ in range(w)]
    several = torch.zeros(w, n)
    wanted = {"async_op": asynchronous}
    here = lists if rank == 0 else None
    rows = list(whole.tensor)
    yield mine, whole, dist.all_gather(lists, mine.tensor, **wanted)
    yield mine, whole, dist.gather(mine.tensor, here, **wanted)
    yield mine, whole, dist.scatter(lists[0], rows if rank == 0 else None, **wanted)
    yield mine, whole, dist.all_to_all_single(several, whole.tensor, **wanted)
    if scatters:
        yield mine, whole, dist.all_gather_into_tensor(several, mine.tensor, **wanted)
        yield mine, whole, dist.reduce_scatter(lists[0], rows, **wanted)
        yield mine, whole, dist.reduce_scatter_tensor(lists[0], whole.tensor, **wanted)
        yield mine, whole, dist.all_to_all(lists, rows, **wanted)


def h6_inputs_are_kept(rank, w, scatters=True):
    for n in (3, 5000):
        for asynchronous in (False, True):
            for i, call in enumerate(h6_calls(rank, w, n, asynchronous, scatters)):
                mine, whole, work = call
                finish(work)
                mine.check(numbered(rank, (n,)), (i, n, asynchronous))
                whole.check(numbered(rank, (w, n)), (i, n, asynchronous))
    return "done"


@over_each_transport
def test_h6_in_place_or_not(transport):
    """H6: all_reduce writes into the tensor it was given; other inputs keep every bit."""
    run_case(2, h6_in_place, transport=transport)
    run_case(2, h6_inputs_are_kept, transport=transport)


def test_h6_control_on_gloo():
    """H6: Gloo keeps inputs, too."""
    run_case(2, h6_inputs_are_kept, False, backend="gloo")


# Right for any number of ranks from 2 on, with these arguments: run over mixed transports, too.
ANY_WORLD = [
    (h1_dropped, ()),
    (h2_waiting_in_callbacks, ()),
    (h3_works, ()),
    (h3_failed, ()),
    (h5_outstanding, ()),
    (h6_inputs_are_kept, ()),
]
