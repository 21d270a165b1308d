"""torch.distributed over pycoll: what is left when a call is refused or a group ends."""

from __future__ import annotations

import datetime
import threading
import time

import pytest
import torch
import torch.distributed as dist

from pool import torch_ranks


def coalesced(rank, w):
    """The second call of two is refused: the first must not have happened."""
    whole = torch.full((5000,), 6 + rank)
    broken = torch.full((5000,), 1.5)
    for asynchronous in (False, True):
        with (
            pytest.raises(RuntimeError, match="Cannot use BAND with non-integral"),
            dist._coalescing_manager(async_ops=asynchronous),
        ):
            dist.all_reduce(whole, op=dist.ReduceOp.BAND)
            dist.all_reduce(broken, op=dist.ReduceOp.BAND)
        time.sleep(0.2)  # whatever would be under way is through
        assert (whole == 6 + rank).all()
    dist.all_reduce(whole)
    assert (whole == 13).all()
    return "done"


def test_a_coalesced_call_with_a_refused_part_does_nothing():
    assert [r.value for r in torch_ranks(2, coalesced)] == ["done"] * 2


def waiting_callback(rank, w):
    """The group ends with two calls; the callback of the second waits for the first, which the
    thread that ends the group was driving."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if rank == 1:
        time.sleep(3)
        return None
    first = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    second = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    heard = threading.Event()
    texts = []

    def wait_for_first(_future):
        try:
            first.wait()
        except dist.DistBackendError as error:
            texts.append(str(error))
        heard.set()

    second.get_future().then(wait_for_first)
    assert heard.wait(10), "the callback does not come back"
    for work in (first, second):
        with pytest.raises(dist.DistBackendError, match="Timed out"):
            work.wait()
    return texts


def test_a_callback_may_wait_for_another_call_while_the_group_ends():
    (text,) = torch_ranks(2, waiting_callback, timeout=40)[0].value
    assert "Timed out" in text


def waiting_for_a_batch(rank, w):
    """Messages that end together; the callback of each waits for the future of all others."""
    for _ in range(20):
        tensors = [torch.zeros(1) for _ in range(4)]
        dist.barrier()
        if rank == 0:
            for tag in range(4):
                dist.isend(torch.full((1,), float(tag)), 1, tag=tag)
            dist.barrier()
            continue
        futures = [dist.irecv(t, 0, tag=tag).get_future() for tag, t in enumerate(tensors)]
        heard = [threading.Event() for _ in futures]

        def wait_for_others(_future, mine, futures=futures, heard=heard):
            for other in futures[:mine] + futures[mine + 1 :]:
                other.wait()
            heard[mine].set()

        for mine in range(1, 4):
            futures[mine].then(lambda f, mine=mine, call=wait_for_others: call(f, mine))
        dist.barrier()
        assert all(event.wait(10) for event in heard[1:]), "a callback does not come back"
        assert [t.item() for t in tensors] == [0, 1, 2, 3]
    return "done"


def test_callbacks_of_a_batch_may_wait_for_each_other():
    assert [r.value for r in torch_ranks(2, waiting_for_a_batch, timeout=60)] == ["done"] * 2
