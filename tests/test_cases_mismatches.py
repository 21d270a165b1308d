"""Public bug reports, kind D: ranks that do not call the same.

Every case ends a group of its own. What is promised of all: docs/semantics.md, "When ranks
disagree".
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from helpers_cases import (
    TRANSPORTS,
    Guarded,
    all_words,
    error_of,
    numbered,
    on_own_group,
    run_case,
    same,
)
from helpers_scripts import Script, run_series

over_each_transport = pytest.mark.parametrize("transport", TRANSPORTS)
GROUP_TIMEOUT = 20.0
# A difference is seen, and not waited for.
AT_ONCE = 5.0


class Call:
    """What one rank calls: its tensor is guarded, and must be as it was afterwards."""

    def __init__(self, rank, call, n, dtype=torch.float32):
        self.values = numbered(rank, (n,), dtype)
        self.memory = Guarded(self.values)
        self.run = lambda group, **options: call(self.memory.tensor, group=group, **options)

    def check_untouched(self, what):
        self.memory.check(self.values, what)


def all_reduce(tensor, **options):
    return dist.all_reduce(tensor, **options)


def maximum(tensor, **options):
    return dist.all_reduce(tensor, ReduceOp.MAX, **options)


def from_0(tensor, **options):
    return dist.broadcast(tensor, 0, **options)


def from_1(tensor, **options):
    return dist.broadcast(tensor, 1, **options)


def to_0(tensor, **options):
    return dist.reduce(tensor, 0, **options)


def barrier(tensor, **options):
    return dist.barrier(**options)


def gathered(tensor, **options):
    outputs = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    work = dist.all_gather(outputs, tensor, **options)
    return work


BF16, I32, I64 = torch.bfloat16, torch.int32, torch.int64
# name: (what rank 0 calls, what the others call, words of every rank's text)
MISMATCHES = {
    "d1_small": ((all_reduce, 4), (all_reduce, 6), ["4 x float32", "6 x float32"]),
    "d1_large": ((all_reduce, 100_000), (all_reduce, 200_000), ["100000 x", "200000 x"]),
    "d1_one_element": ((all_reduce, 1 << 20), (all_reduce, (1 << 20) + 1), ["1048576", "1048577"]),
    "d1_nothing": ((all_reduce, 0), (all_reduce, 3), ["0 x float32", "3 x float32"]),
    "d1_broadcast": ((from_0, 8), (from_0, 4), ["8 x float32", "4 x float32", "broadcast"]),
    "d1_broadcast_large": ((from_0, 900_000), (from_0, 800_000), ["900000", "800000"]),
    "d1_reduce": ((to_0, 8), (to_0, 5), ["8 x float32", "5 x float32", "reduce"]),
    "d1_all_gather": ((gathered, 8), (gathered, 5), ["8 x float32", "5 x float32", "all_gather"]),
    "d2": ((all_reduce, 64, BF16), (all_reduce, 64), ["64 x bfloat16", "64 x float32"]),
    "d2_large": ((all_reduce, 90_000, BF16), (all_reduce, 90_000), ["bfloat16", "float32"]),
    "d2_broadcast": ((from_0, 64, BF16), (from_0, 64), ["bfloat16", "float32"]),
    "d3_4_bytes": ((all_reduce, 2), (all_reduce, 2, I32), ["2 x float32", "2 x int32"]),
    "d3_8_bytes": (
        (all_reduce, 5000, I64),
        (all_reduce, 5000, torch.float64),
        ["int64", "float64"],
    ),
    "d3_1_byte": ((all_reduce, 9, torch.bool), (all_reduce, 9, torch.uint8), ["bool", "uint8"]),
    "d3_moved": ((gathered, 9, torch.bool), (gathered, 9, torch.uint8), ["bool", "uint8"]),
    "d3_from_root": ((from_0, 64), (from_0, 64, I32), ["float32", "int32"]),
    "d3_as_many_bytes": ((all_reduce, 4, BF16), (all_reduce, 2), ["4 x bfloat16", "2 x float32"]),
    "d5": ((all_reduce, 12), (from_1, 12), ["all_reduce #", "broadcast #"]),
    "d5_barrier": ((barrier, 12), (all_reduce, 12), ["barrier #", "all_reduce #"]),
    "d5_op": ((maximum, 12), (all_reduce, 12), ["max", "sum"]),
    "d5_root": ((from_0, 12), (from_1, 12), ["root 0"]),
}
# Who needs nothing of those that disagree may be through, and is told in the next call.
MAY_BE_THROUGH = {
    "d1_broadcast": [0],
    "d1_broadcast_large": [0],
    "d2_broadcast": [0],
    "d3_from_root": [0],
    "d1_reduce": [1, 2, 3, 4],
    "d5": [1, 2, 3, 4],
    "d5_root": [0, 1, 2, 3, 4],
}


def disagree(rank, w, name):
    """On a group of its own, which is used first, so that the call that goes wrong is its third."""
    odd, others, words = MISMATCHES[name]
    mine = Call(rank, *(odd if rank == 0 else others))

    def call(group):
        dist.barrier(group=group)
        start = time.monotonic()
        text = ""
        try:
            mine.run(group)
        except dist.DistBackendError as error:
            text = str(error)
        again = error_of(lambda: dist.barrier(group=group), dist.DistBackendError)
        assert time.monotonic() - start < AT_ONCE, name
        if text:
            assert again == text, (again, text)
            mine.check_untouched(name)
        else:
            assert rank in MAY_BE_THROUGH.get(name, []), (name, rank)
        all_words(again, "differ", "rank 0", "#3", *words)

    on_own_group(rank, w, GROUP_TIMEOUT, call)


def mismatches(rank, w):
    for name in MISMATCHES:
        disagree(rank, w, name)
    return "done"


@over_each_transport
@pytest.mark.parametrize("world_size", [3, pytest.param(5, marks=pytest.mark.full)])
def test_d1_d2_d3_d5_every_rank_is_told_what_differs(transport, world_size):
    """D1, D2, D3, D5: sizes, dtypes, dtypes of one size, collectives; with both, and the number of
    the call, on every rank at once; memory is as it was, and other groups go on."""
    run_case(world_size, mismatches, transport=transport, timeout=120)


# ---- D5 ----


def d5_in_another_order(rank, w, ahead):
    """Rank 0 begins [all_reduce, broadcast], the others [broadcast, all_reduce], `ahead` calls into
    the group's life."""

    def call(group):
        for _ in range(ahead):
            dist.barrier(group=group)
        calls = [Call(rank, all_reduce, 1000), Call(rank, from_1, 1000)]
        start = time.monotonic()
        texts, works = [], []
        for one in calls if rank == 0 else reversed(calls):
            try:
                works.append(one.run(group, async_op=True))
            except dist.DistBackendError as error:
                texts.append(str(error))  # the first had failed before the second was made
        for work in works:
            try:
                work.wait()
            except dist.DistBackendError as error:
                texts.append(str(error))
        assert time.monotonic() - start < AT_ONCE
        # Ranks 1 and 2 agree about the broadcast, which may be over before they hear of rank 0.
        assert len(texts) == 2 or (len(texts) == 1 and rank != 0), texts
        for text in texts:
            number = f"#{ahead + 2}"
            all_words(text, "all_reduce " + number, "broadcast " + number, "rank 0", "differ")
        calls[0].check_untouched("all_reduce")
        calls[1].memory.check(numbered(1 if len(texts) == 1 else rank, (1000,)), "broadcast")

    on_own_group(rank, w, GROUP_TIMEOUT, call)


def d5_orders(rank, w):
    for ahead in (1, 70):
        d5_in_another_order(rank, w, ahead)
    return "done"


@over_each_transport
def test_d5_asynchronous_calls_in_another_order(transport):
    """D5: both calls and their number, in the error of each work."""
    run_case(3, d5_orders, transport=transport)


def d5_one_call_fewer(rank, w):
    """Rank 0 leaves a call out, so it is one behind for the rest of the group's life."""

    def call(group):
        if rank != 0:
            dist.all_reduce(torch.ones(5), group=group, async_op=True)
        tensor = torch.full((9,), float(rank))
        text = error_of(lambda: dist.broadcast(tensor, 1, group=group), dist.DistBackendError)
        all_words(text, "all_reduce #2", "broadcast #2", "rank 0")
        assert (tensor == rank).all()

    on_own_group(rank, w, GROUP_TIMEOUT, call)
    return "done"


@over_each_transport
def test_d5_one_rank_leaves_a_call_out(transport):
    """D5: found at the call that takes its place."""
    run_case(3, d5_one_call_fewer, transport=transport)


# ---- D7 ----


def d7_script(rank, w, directory):
    """The sizes of the report, in bytes; the except clause of a script, and its ordinary end."""
    shared = dist.FileStore(os.path.join(directory, "store"), w)
    dist.init_process_group("pycoll", store=shared, rank=rank, world_size=w)
    group = dist.new_group()
    tensor = torch.full(((1046204 if rank == 0 else 1040256) // 4,), rank + 1.0)
    for again in range(3):
        try:
            dist.all_reduce(tensor, group=group)
        except RuntimeError as error:
            print(f"caught {again}: {error}")
    assert (tensor == rank + 1).all()
    one = torch.ones(3)
    dist.all_reduce(one)
    same(one, torch.full((3,), float(w)))
    dist.destroy_process_group()


def test_d7_the_except_clause_runs_and_the_script_ends_well():
    """D7: over both transports: RuntimeError each time, exit code 0, nothing on stderr."""
    scripts = [Script(t, d7_script, env={"PYCOLL_TRANSPORT": t}) for t in TRANSPORTS]
    for name, ranks in run_series(2, scripts).items():
        for ended in ranks:
            assert ended.exitcode == 0, (name, ended)
            assert ended.stderr == "", (name, ended)
            lines = ended.stdout.splitlines()
            assert len(lines) == 3, (name, ended)
            for line in lines:
                all_words(line, "caught", "261551 x float32", "260064 x float32", "all_reduce #1")
