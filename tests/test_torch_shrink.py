"""torch.distributed.shrink_group(): the ranks that stay go on without the others.

Scripts of their own on every rank (helpers_scripts.run_series): ranks are killed.
"""

from __future__ import annotations

import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from helpers_cases import all_words, error_of, still_works
from helpers_scripts import Script, run_series

W = 4
GONE = 2


def begin(rank, directory):
    store = dist.FileStore(os.path.join(directory, "store"), W)
    timeout = datetime.timedelta(seconds=40)
    dist.init_process_group("pycoll", store=store, rank=rank, world_size=W, timeout=timeout)
    still_works(rank, W)


def lose_one(rank, group=None):
    """A rank is killed amid calls; the others get their error."""
    tensor = torch.zeros(1 << 16)
    for step in range(1_000_000):
        if rank == GONE and step == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(tensor, group=group)
        except dist.DistBackendError as error:
            all_words(str(error), f"rank {GONE}")
            return


def trains(group, w):
    """A step as of data parallelism: parameters from the first rank, gradients averaged."""
    rank = dist.get_rank(group)
    parameter = torch.full((1000,), 3.0 if rank == 0 else -1.0)
    dist.broadcast(parameter, group=group, group_src=0)
    gradient = torch.full((1000,), float(rank))
    dist.all_reduce(gradient, dist.ReduceOp.AVG, group)
    assert (parameter - gradient == 3 - (w - 1) / 2).all()


def default_group(rank, w, directory):
    """It becomes the new default group, of three; then one leaves, and it is two."""
    begin(rank, directory)
    lose_one(rank)
    start = time.monotonic()
    group = dist.shrink_group([GONE])
    assert time.monotonic() - start < 10
    assert group == dist.group.WORLD
    assert (dist.get_world_size(), dist.get_rank()) == (3, rank - (rank > GONE))
    trains(None, 3)
    again = torch.ones(1 << 16)
    for _ in range(50):
        dist.all_reduce(again)
        again /= 3
    assert (again == 1).all()
    if dist.get_rank() == 0:
        return dist.destroy_process_group()
    dist.shrink_group([0])
    assert (dist.get_world_size(), dist.get_rank()) == (2, 0 if rank == 1 else 1)
    trains(None, 2)
    still_works(dist.get_rank(), 2)
    dist.new_group()
    dist.destroy_process_group()
    return None


def other_group(rank, w, directory):
    """Of another than the default group, with a call under way that must end first."""
    begin(rank, directory)
    group = dist.new_group()
    lose_one(rank, group)
    shrunk = dist.shrink_group([GONE], group)
    assert dist.get_world_size(shrunk) == 3
    trains(shrunk, 3)
    dist.destroy_process_group()


def living_ranks(rank, w, directory):
    """Nobody has died; SHRINK_ABORT ends what is under way in the old group."""
    begin(rank, directory)
    group = dist.new_group()
    still_works(rank, w, group)
    dist.barrier()
    if rank == 0:
        dist.barrier()
        return dist.destroy_process_group()
    work = dist.all_reduce(torch.ones(9), group=group, async_op=True) if rank == 1 else None
    shrunk = dist.shrink_group([0], group, dist.distributed_c10d.SHRINK_ABORT)
    trains(shrunk, 3)
    if work is not None:
        error_of(work.wait, dist.DistBackendError)
    dist.barrier()
    dist.destroy_process_group()
    return None


def lists_differ(rank, w, directory):
    """Ranks that do not exclude the same wait for each other, and say for whom."""
    begin(rank, directory)
    lose_one(rank)
    text = error_of(lambda: dist.shrink_group([GONE] if rank else [GONE, 1]), RuntimeError)
    all_words(text, "to join the group", "PYCOLL_CONNECT_TIMEOUT")


CASES = [default_group, other_group, living_ranks, lists_differ]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_survivors_go_on(transport):
    env = {"PYCOLL_TRANSPORT": transport}
    scripts = [
        Script(case.__name__, case, (), {**env, "PYCOLL_CONNECT_TIMEOUT": seconds}, 60)
        for case, seconds in zip(CASES, ["30", "30", "30", "2"], strict=True)
    ]
    before = set(os.listdir("/dev/shm"))
    for name, ranks in run_series(W, scripts).items():
        codes = [0] * W
        if name != "living_ranks":
            codes[GONE] = -signal.SIGKILL
        assert [ended.exitcode for ended in ranks] == codes, (name, ranks)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "pycoll" in name]
