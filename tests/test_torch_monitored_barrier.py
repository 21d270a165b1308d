"""monitored_barrier: who does not come is named, at rank 0 and to all others."""

from __future__ import annotations

import datetime
import time

import pytest
import torch
import torch.distributed as dist

from pool import torch_ranks

TRANSPORTS = ["shm", "tcp"]


def passed(rank, w):
    """torch.distributed.monitored_barrier() up to 2.13 knows Gloo's name only; this is what it
    calls."""
    group = dist.new_group()
    for _ in range(3):
        group.monitored_barrier(datetime.timedelta(seconds=10))
    if rank == w - 1:
        time.sleep(0.3)
    start = time.monotonic()
    group.monitored_barrier(datetime.timedelta(seconds=10), wait_all_ranks=True)
    waited = time.monotonic() - start
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=group)
    assert tensor[0] == w * (w - 1) / 2
    return waited


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_come(transport, world_size):
    ranks = torch_ranks(world_size, passed, env={"PYCOLL_TRANSPORT": transport}, timeout=60)
    assert all(result.value > 0.2 for result in ranks[:-1])


def some_are_late(rank, w, late, wait_all_ranks):
    group = dist.new_group(timeout=datetime.timedelta(seconds=30))
    dist.barrier()
    if rank in late:
        time.sleep(1.6)
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        group.monitored_barrier(datetime.timedelta(seconds=1), wait_all_ranks=wait_all_ranks)
    took = time.monotonic() - start
    assert took < 1.5, took  # late ranks are told, and do not wait for anybody
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(3), group=group)  # it has ended
    dist.barrier()  # others live
    return str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("late", "wait_all_ranks", "who"),
    # Rank 2 has come, though the time is over when rank 0 looks at it.
    [((1, 3), True, "Ranks 1, 3"), ((2, 3), False, "Rank 2")],
)
def test_who_is_late_is_named(transport, late, wait_all_ranks, who):
    """(F9) Public bug report: only one failed rank was named, healthy ranks passed."""
    ranks = torch_ranks(
        4, some_are_late, late, wait_all_ranks, env={"PYCOLL_TRANSPORT": transport}, timeout=60
    )
    text = f"[Rank 0]: {who} failed to pass monitoredBarrier in 1000 ms"
    assert text in ranks[0].value
    for result in ranks[1:]:
        assert f"Rank {result.rank} successfully reached monitoredBarrier" in result.value
        assert "check rank 0 logs" in result.value and text in result.value


def first_is_late(rank, w):
    group = dist.new_group(timeout=datetime.timedelta(seconds=30))
    if rank == 0:
        time.sleep(1.0)
        group.monitored_barrier(datetime.timedelta(seconds=1))
    else:
        # It has as much time as it gives to others.
        group.monitored_barrier(datetime.timedelta(seconds=1))
    return "done"


def test_rank_0_may_come_last():
    assert [r.value for r in torch_ranks(3, first_is_late, timeout=60)] == ["done"] * 3


def without_time(rank, w):
    group = dist.new_group()
    if rank > 0:
        return ""
    with pytest.raises(dist.DistBackendError) as caught:
        group.monitored_barrier(datetime.timedelta(0))
    return str(caught.value)


def test_rank_0_without_time_blames_nobody_else():
    assert "Rank 0 timed out in monitoredBarrier" in torch_ranks(2, without_time)[0].value
