"""What a group tells of itself: calls that ended, why it ended, memory."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

import pycoll
from helpers_cases import TRANSPORTS, error_of, run_case, still_works

CPU = torch.device("cpu")


def told_of_all(rank, w):
    group = dist.new_group()
    still_works(rank, w, group)  # before: not told of
    found = []
    group._register_on_completion_hook(found.append)
    with pytest.raises(RuntimeError, match="has an on-completion hook already"):
        group._register_on_completion_hook(found.append)
    begin = time.monotonic()
    x = torch.ones(5)
    dist.all_reduce(x, group=group)  # at once, were there no hook
    dist.all_reduce(torch.ones(70_000), group=group)
    dist.barrier(group=group)
    works = [dist.all_reduce(torch.ones(9), group=group, async_op=True) for _ in range(4)]
    peer, data = 1 - rank, torch.full((7,), float(rank))
    works += [dist.isend(data, peer, group), dist.irecv(torch.empty(7), peer, group)]
    dist.all_reduce_coalesced([x, x.clone()], group=group)
    dist.all_reduce(torch.eye(3).to_sparse(), group=group)
    for work in works:
        work.wait()
    group._wait_for_pending_works()
    assert (x == w * w).all()
    names = sorted(str(info.op_type).rsplit(".")[-1] for info in found)
    wanted = ["ALLREDUCE"] * 7 + ["ALLREDUCE_COALESCED", "BARRIER", "RECV", "SEND"]
    assert names == wanted, names
    assert [info.seq for info in found] and len({info.seq for info in found}) == len(found)
    for info in found:
        assert info.time_finished >= info.time_started
        assert 0 <= info.active_duration.total_seconds() < time.monotonic() - begin
    dist.destroy_process_group(group)  # which waits for what is pending


def a_hook_that_fails(rank, w):
    def fail(info):
        raise ValueError("of the hook's own")

    group = dist.new_group()
    group._register_on_completion_hook(fail)
    still_works(rank, w, group)
    group._wait_for_pending_works()
    still_works(rank, w, group)
    dist.destroy_process_group(group)


def observed(rank, w):
    told_of_all(rank, w)
    a_hook_that_fails(rank, w)
    backend = dist.group.WORLD._get_backend(CPU)
    before = backend.memory_stats()
    held = pycoll.empty(100_000)
    after = backend.memory_stats()
    assert after["shareable_live_bytes"] >= before["shareable_live_bytes"] + held.nbytes
    dist.all_reduce(torch.ones(70_000))
    staged = backend.memory_stats()["staged_bytes"] - after["staged_bytes"]
    assert staged == 280_000
    assert not backend.supports_time_estimate


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_hooks_are_told_of_every_call(transport):
    run_case(2, observed, transport=transport)


def why_it_ended(rank, w, how):
    group = dist.new_group()
    backend = group._get_backend(CPU)
    still_works(rank, w, group)
    assert backend.get_error() == ErrorType.SUCCESS
    dist.barrier()
    if how == "abort" and rank == 0:
        backend.abort()
    if how == "differ":
        error_of(lambda: dist.all_reduce(torch.ones(3 + rank), group=group), RuntimeError)
    else:
        error_of(
            lambda: [dist.all_reduce(torch.ones(3), group=group) for _ in range(9)], RuntimeError
        )
    names = {"abort": ["REMOTE_ERROR"], "differ": ["COMM_ERROR", "REMOTE_ERROR"]}
    assert backend.get_error().name in names[how]
    return backend.get_error().name


@pytest.mark.parametrize("how", ["abort", "differ"])
def test_why_a_group_ended(how):
    found = [result.value for result in run_case(2, why_it_ended, how)]
    assert how == "abort" or "COMM_ERROR" in found
