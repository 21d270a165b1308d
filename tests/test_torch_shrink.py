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

import pycoll
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
    """Parameters of the first rank, and averaged gradients."""
    rank = dist.get_rank(group)
    torch.manual_seed(rank)
    model = torch.nn.Linear(30, 20)
    first = [p.detach().clone() for p in model.parameters()]
    for parameter in first:
        dist.broadcast(parameter, group=group, group_src=0)
    ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    for parameter, wanted in zip(model.parameters(), first, strict=True):
        assert torch.equal(parameter, wanted)
    for _ in range(3):
        model.zero_grad()
        (ddp(torch.ones(4, 30)).sum() * rank).backward()
        assert (model.weight.grad == 4 * (w - 1) / 2).all()


def default_group(rank, w, directory):
    """It becomes the new default group, of three; then one leaves, and it is two."""
    begin(rank, directory)
    lose_one(rank)
    start = time.monotonic()
    group = pycoll.shrink_group([GONE])
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
    pycoll.shrink_group([0])
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
    shrunk = dist.shrink_group([GONE], group)  # for all but DDP
    assert dist.get_world_size(shrunk) == 3
    tensor = torch.ones(9)
    dist.all_reduce(tensor, group=shrunk)
    assert (tensor == 3).all()
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
    text = error_of(lambda: pycoll.shrink_group([rank], group), RuntimeError)
    all_words(text, "exclusion list")
    shrunk = pycoll.shrink_group([0], group, abort=True)
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
    text = error_of(lambda: pycoll.shrink_group([GONE] if rank else [GONE, 1]), RuntimeError)
    all_words(text, "to join the group", "shrink_group()", "PYCOLL_CONNECT_TIMEOUT")


def two_die(rank, w, directory):
    """Both at once, and both are excluded in one call."""
    begin(rank, directory)
    if rank in (0, GONE):
        os.kill(os.getpid(), signal.SIGKILL)
    error_of(lambda: [dist.all_reduce(torch.zeros(9)) for _ in range(99)], dist.DistBackendError)
    pycoll.shrink_group([0, GONE])
    trains(None, 2)
    dist.destroy_process_group()


def one_more_dies(rank, w, directory):
    """In the shrink; those that are left name it, and shrink once more."""
    begin(rank, directory)
    lose_one(rank)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    text = error_of(lambda: pycoll.shrink_group([GONE]), RuntimeError)
    all_words(text, "for rank 2 to join the group")  # of three
    pycoll.shrink_group([GONE, 3])
    trains(None, 2)
    dist.destroy_process_group()


# What it is, the ranks that are killed, PYCOLL_CONNECT_TIMEOUT.
CASES = [
    (default_group, [GONE], "30"),
    (other_group, [GONE], "30"),
    (living_ranks, [], "30"),
    (lists_differ, [GONE], "2"),
    (two_die, [0, GONE], "30"),
    (one_more_dies, [GONE, 3], "3"),
]


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.full)])
def test_survivors_go_on(transport):
    env = {"PYCOLL_TRANSPORT": transport}
    scripts = [
        Script(case.__name__, case, (), {**env, "PYCOLL_CONNECT_TIMEOUT": seconds}, 60)
        for case, _, seconds in CASES
    ]
    before = set(os.listdir("/dev/shm"))
    outcomes = run_series(W, scripts)
    for case, killed, _ in CASES:
        ranks = outcomes[case.__name__]
        codes = [-signal.SIGKILL if rank in killed else 0 for rank in range(W)]
        assert [ended.exitcode for ended in ranks] == codes, (case.__name__, ranks)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "pycoll" in name]
