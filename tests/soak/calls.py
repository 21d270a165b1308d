"""Random collectives whose results every rank can tell by itself, to the bit.

The same generator gives the same calls on all ranks. Data are small whole numbers that depend on
rank, position and call, so sums are exact in every order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import pycoll

Array = npt.NDArray[Any]
SIZES = [0, 1, 7, 130, 1000, 4096, 70_001, 300_000]
DTYPES = [np.float32, np.float64, np.float16, np.int64, np.int32, np.uint8]


class WrongValue(AssertionError):
    """A call ended well, with a result that is not the right one."""


class Calls:
    """`step()` makes one random call, or a few at once, and checks what came of them."""

    def __init__(self, group: pycoll.Communicator, seed: int) -> None:
        self.group = group
        self.rank, self.world = group.rank, group.world_size
        self.rng = random.Random(seed)
        self.number = 0
        self.kinds: list[Callable[[], None]] = [
            self.all_reduce,
            self.broadcast,
            self.reduce,
            self.all_gather,
            self.reduce_scatter,
            self.all_to_all,
            self.barrier,
            self.ring,
            self.burst,
        ]

    def step(self) -> None:
        self.number += 1
        self.rng.choice(self.kinds)()

    def data(self, rank: int, count: int, dtype: Any) -> Array:
        """What `rank` gives to this call: 0 to 5, so that sums of 40 ranks are exact in uint8."""
        return ((np.arange(count) * (rank + 1) + rank + self.number) % 6).astype(dtype)

    def all_data(self, count: int, dtype: Any) -> list[Array]:
        return [self.data(rank, count, dtype) for rank in range(self.world)]

    def check(self, got: Array, expected: Array, what: str) -> None:
        if got.tobytes() != np.asarray(expected, got.dtype).tobytes():
            where = int(np.argmax(got.ravel() != np.asarray(expected, got.dtype).ravel()))
            raise WrongValue(f"rank {self.rank}: {what} of call {self.number} at {where}")

    def shape(self) -> tuple[int, Any]:
        return self.rng.choice(SIZES), self.rng.choice(DTYPES)

    def all_reduce(self) -> None:
        count, dtype = self.shape()
        mine = self.data(self.rank, count, dtype)
        op = self.rng.choice(["sum", "max"])
        self.group.all_reduce(mine, op=op)
        parts = np.array(self.all_data(count, dtype))
        self.check(mine, parts.sum(0) if op == "sum" else parts.max(0), op)

    def broadcast(self) -> None:
        count, dtype = self.shape()
        root = self.rng.randrange(self.world)
        mine = self.data(self.rank, count, dtype)
        self.group.broadcast(mine, root)
        self.check(mine, self.data(root, count, dtype), "broadcast")

    def reduce(self) -> None:
        count, dtype = self.shape()
        root = self.rng.randrange(self.world)
        mine = self.data(self.rank, count, dtype)
        output = np.zeros_like(mine) if self.rank == root else None
        self.group.reduce(mine, root, out=output)
        self.check(mine, self.data(self.rank, count, dtype), "input of reduce")
        if output is not None:
            self.check(output, np.array(self.all_data(count, dtype)).sum(0), "reduce")

    def all_gather(self) -> None:
        count, dtype = self.shape()
        output = np.zeros((self.world, count), dtype)
        self.group.all_gather(output, self.data(self.rank, count, dtype))
        self.check(output, np.array(self.all_data(count, dtype)), "all_gather")

    def reduce_scatter(self) -> None:
        count, dtype = self.shape()
        total = count * self.world
        mine = self.data(self.rank, total, dtype).reshape(self.world, count)
        output = np.zeros(count, dtype)
        self.group.reduce_scatter(output, mine)
        whole = np.array(self.all_data(total, dtype)).sum(0).reshape(self.world, count)
        self.check(output, whole[self.rank], "reduce_scatter")

    def all_to_all(self) -> None:
        count, dtype = self.shape()
        count = min(count, 4096)
        mine = self.data(self.rank, count * self.world, dtype).reshape(self.world, count)
        output = np.zeros_like(mine)
        self.group.all_to_all(output, mine)
        parts = [data.reshape(self.world, count) for data in self.all_data(mine.size, dtype)]
        self.check(output, np.array([part[self.rank] for part in parts]), "all_to_all")

    def barrier(self) -> None:
        self.group.barrier()

    def ring(self) -> None:
        """Everybody sends to the next rank and receives from the one before."""
        count, dtype = self.shape()
        if self.world == 1:
            return
        before = (self.rank - 1) % self.world
        output = np.zeros(count, dtype)
        tag = self.number % 5
        received = self.group.recv(output, before, tag, async_op=True)
        self.group.send(self.data(self.rank, count, dtype), (self.rank + 1) % self.world, tag)
        received.wait()
        self.check(output, self.data(before, count, dtype), "recv")

    def burst(self) -> None:
        """Several at once, waited for in another order."""
        calls = []
        for _ in range(self.rng.randrange(2, 6)):
            count, dtype = self.shape()
            mine = self.data(self.rank, count, dtype)
            calls.append((self.group.all_reduce(mine, async_op=True), mine))
        order = list(range(len(calls)))
        self.rng.shuffle(order)
        for place in order:
            calls[place][0].wait()
        for _, mine in calls:
            parts = np.array(self.all_data(mine.size, mine.dtype))
            self.check(mine, parts.sum(0), "asynchronous sum")
