"""Parts of a group that one rank fails to make: the others are told, and the group goes on.

A group's first sparse all_reduce makes a part of it that has all ranks; one that has no memory for
it, or no descriptors to begin with, fails alone: the first while ranks connect, the other before it
has told them anything.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pool import torch_ranks
from test_network import use_up_descriptors
from test_torch_sparse import sparse_of

TRANSPORTS = ["shm", "tcp"]


def without_memory():
    """A few pages are left: not enough for what ranks share."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + (1 << 16)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size, most))


def with_all(limit):
    _, most = resource.getrlimit(limit)
    resource.setrlimit(limit, (most, most))


# What a rank lacks: how that is brought about, what is limited, and words of its error.
LACKS = {
    "memory": (without_memory, resource.RLIMIT_AS, ("mmap", "memory")),
    "descriptors": (lambda: use_up_descriptors(0), resource.RLIMIT_NOFILE, ("errno 24",)),
}


def sums_to(w, value):
    x = torch.full((1000,), float(value))
    dist.all_reduce(x)
    return bool((x == w * value).all())


def one_fails(rank, w, poor, lack):
    assert sums_to(w, 1)
    mine = sparse_of(rank)
    take_away, limit, _ = LACKS[lack]
    if rank == poor:
        take_away()
    start = time.monotonic()
    try:
        dist.all_reduce(mine)
        text = "no error"
    except (dist.DistBackendError, RuntimeError, MemoryError) as error:
        text = str(error)
    seconds = time.monotonic() - start
    with_all(limit)
    assert sums_to(w, 2), "the group itself goes on"
    again = sparse_of(rank)
    dist.all_reduce(again)
    expected = sum(sparse_of(r).to_dense() for r in range(w))
    assert torch.equal(again.to_dense(), expected)
    return text, seconds


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("poor", "lack"), [(0, "memory"), (2, "memory"), (1, "descriptors")])
def test_a_rank_that_fails_alone_is_heard_of(poor, lack, transport):
    env = {"PYCOLL_TRANSPORT": transport, "PYCOLL_CONNECT_TIMEOUT": "40"}
    ranks = torch_ranks(3, one_fails, poor, lack, env=env, group_timeout=60, timeout=120)
    for result in ranks:
        text, seconds = result.value
        assert seconds < 10, (result.rank, text)
        if result.rank == poor:
            assert any(word in text for word in LACKS[lack][2]), text
        else:
            assert "failed in split #" in text or "gave up" in text, text
