"""Operations of every kind through torch, by the ten thousand: nothing that a process has grows."""

from __future__ import annotations

import ctypes
import gc
import itertools
import random

import pytest
import torch
import torch.distributed as dist

import pycoll
from pool import torch_ranks
from test_resources import resources

# By the way they take: in the line of a flag, in cells, staged, in place where memory allows it.
LENGTHS = (1, 16, 3000, 40_000)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
LEAK = 100  # bytes an operation: what must not pass


class Vectors:
    """One of a rank, and two that have a block for each rank, all in one kind of memory."""

    def __init__(self, length, dtype, world_size, shareable):
        empty = pycoll.empty if shareable else torch.empty
        self.one = empty(length, dtype=dtype)
        self.many, self.others = (empty(world_size * length, dtype=dtype) for _ in range(2))


class Mixture:
    """Operations that all ranks draw alike. A rank's values are its number plus one; each result is
    looked at."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size
        self.random = random.Random(1)
        self.vectors = [
            Vectors(length, dtype, world_size, shareable)
            for length in LENGTHS
            for dtype in DTYPES
            for shareable in (False, True)
        ]
        self.tiny = torch.empty(3)
        self.everyone = [*range(1, world_size + 1)]
        self.kinds = [
            *(self.all_reduce, self.direct, self.reduce, self.broadcast, self.all_gather),
            *(self.reduce_scatter, self.gather, self.scatter, self.all_to_all, self.message),
        ]

    def every_one(self):
        """What is made for a kind of call is made by its first."""
        for kind, vectors, run in itertools.product(
            self.kinds, self.vectors, (self.at_once, self.queued)
        ):
            for root in range(self.world_size):
                self.step(kind, vectors, root, run)

    def any_one(self):
        vectors = self.random.choice(self.vectors)
        if self.random.random() < 0.02:
            vectors = Vectors(max(LENGTHS), torch.float32, self.world_size, shareable=True)
        run = self.at_once if self.random.random() < 0.7 else self.queued
        root = self.random.randrange(self.world_size)
        self.step(self.random.choice(self.kinds), vectors, root, run)

    def step(self, kind, vectors, root, run):
        vectors.one.fill_(self.rank + 1)
        vectors.many.fill_(self.rank + 1)
        kind(vectors, root, run)

    @staticmethod
    def at_once(function, *arguments):
        function(*arguments)

    def queued(self, function, *arguments):
        """With a synchronous call behind it, which has to stand in line."""
        work = function(*arguments, async_op=True)
        self.tiny.fill_(1)
        dist.all_reduce(self.tiny)
        assert self.tiny[2] == self.world_size
        work.wait()

    def last_of_blocks(self, tensor):
        length = tensor.numel() // self.world_size
        return tensor[length - 1 :: length].tolist()

    def at_root(self, vectors, root):
        return list(vectors.many.chunk(self.world_size)) if self.rank == root else None

    def all_reduce(self, vectors, root, run):
        run(dist.all_reduce, vectors.one)
        assert vectors.one[-1] == sum(self.everyone)

    def direct(self, vectors, root, run):
        run(pycoll.all_reduce, vectors.one, "max")
        assert vectors.one[-1] == self.world_size

    def reduce(self, vectors, root, run):
        run(dist.reduce, vectors.one, root)
        assert self.rank != root or vectors.one[-1] == sum(self.everyone)

    def broadcast(self, vectors, root, run):
        run(dist.broadcast, vectors.one, root)
        assert vectors.one[-1] == root + 1

    def all_gather(self, vectors, root, run):
        run(dist.all_gather_into_tensor, vectors.many, vectors.one)
        assert self.last_of_blocks(vectors.many) == self.everyone

    def reduce_scatter(self, vectors, root, run):
        run(dist.reduce_scatter_tensor, vectors.one, vectors.many)
        assert vectors.one[-1] == sum(self.everyone)

    def gather(self, vectors, root, run):
        run(dist.gather, vectors.one, self.at_root(vectors, root), root)
        assert self.rank != root or self.last_of_blocks(vectors.many) == self.everyone

    def scatter(self, vectors, root, run):
        run(dist.scatter, vectors.one, self.at_root(vectors, root), root)
        assert vectors.one[-1] == root + 1

    def all_to_all(self, vectors, root, run):
        run(dist.all_to_all_single, vectors.others, vectors.many)
        assert self.last_of_blocks(vectors.others) == self.everyone

    def message(self, vectors, root, run):
        before, after = (self.rank + step for step in (-1, 1))
        received = vectors.others[: len(vectors.one)]
        sent = dist.isend(vectors.one, after % self.world_size)
        dist.recv(received, before % self.world_size)
        sent.wait()
        assert received[-1] == before % self.world_size + 1


def mixed_operations(rank, world_size, times, leak):
    """What is in use after the first of each kind, and `times` operations later; the counts."""
    mixture = Mixture(rank, world_size)
    malloc = ctypes.CDLL(None).malloc
    mixture.every_one()
    for _ in range(times // 10):
        mixture.any_one()
    gc.collect()
    early = resources()
    for _ in range(times):
        mixture.any_one()
        if leak:
            malloc(leak)
    gc.collect()
    return early, resources(), pycoll.statistics()


def check_flat(grown, times):
    assert grown["malloc"] + grown["objects"] < LEAK / 2, grown
    # Pages of slots and of malloc's heap are touched for the first time now and then: up to 2 MB,
    # which hides a leak over few operations, if it is not malloc's.
    assert grown["megabytes"] < max(LEAK / 2, 2 * 2**20 / times), grown


def growth(times, leak=0, **variables):
    """Bytes an operation on the rank that grew most, by who says so, and a group's counts."""
    units = {"malloc": 1, "objects": 16, "megabytes": 2**20}
    grown = dict.fromkeys(units, 0.0)
    for result in torch_ranks(2, mixed_operations, times, leak, env=variables, timeout=280):
        early, late, counted = result.value
        # A progress thread that loses its CPU in a callback makes room for one more, which stays.
        for name, more in (("descriptors", 0), ("threads", 3), ("mappings", 0)):
            assert late[name] <= early[name] + more, (name, early, late)
        for name, unit in units.items():
            grown[name] = max(grown[name], (late[name] - early[name]) * unit / times)
    return grown, counted


@pytest.mark.parametrize("times", [20_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_nothing_grows_over_mixed_operations(times):
    grown, counted = growth(times)
    check_flat(grown, times)
    # All ways were taken.
    assert counted["zero_copy_calls"] > times / 20
    assert counted["staged_calls"] > times / 5


@pytest.mark.parametrize("times", [10_000, pytest.param(50_000, marks=pytest.mark.full)])
def test_nothing_grows_over_mixed_operations_over_tcp(times):
    grown, _ = growth(times, PYCOLL_TRANSPORT="tcp")
    check_flat(grown, times)


def test_a_leak_would_show():
    grown, _ = growth(10_000, LEAK)
    assert grown["megabytes"] > LEAK / 2, grown
    assert grown["malloc"] == 0 or grown["malloc"] >= LEAK, grown
