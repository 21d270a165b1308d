"""Would cross-memory attach pay here? A two-shot all_reduce of two ranks over process_vm_readv.

It is a probe, not a data path: the library stages what is not in shareable memory. The measurement
flatters the contender where it can: it has no fallbacks and no pipeline to keep, and its reads are
cut so that what was read is still in the cache when it is added.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pycoll.communicator import Communicator

CHUNK = 256 << 10  # bytes of one read; 64 to 512 KiB are alike
ROUNDS = 21
BATCH_SECONDS = 0.003
AHEAD = 1.05  # times faster than staging: what counts as ahead


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True)
class Comparison:
    """Microseconds a call, of the slower rank."""

    bytes: int
    staged: float  # medians over rounds
    attached: float
    fastest_staged: float  # fastest rounds
    fastest_attached: float

    @property
    def ahead(self) -> bool:
        """In the median and in the fastest round: chance moves one of them easily."""
        return (
            self.staged > AHEAD * self.attached
            and self.fastest_staged > AHEAD * self.fastest_attached
        )


class PeerMemory:
    """The other rank's memory at given addresses, through process_vm_readv."""

    def __init__(self, group: Communicator) -> None:
        """Raises OSError when the other rank's memory cannot be read.

        A read of no bytes succeeds where reads are forbidden, and a pid may belong to another
        process in this namespace: so a number that the peer has just drawn is read and compared.
        """
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        nonce = np.array([secrets.randbits(62)], np.int64)
        mine = np.array([os.getpid(), nonce.ctypes.data, nonce[0]], np.int64)
        both = np.empty((2, 3), np.int64)
        group.all_gather(both, mine)
        self._pid, address, expected = (int(x) for x in both[1 - group.rank])
        seen = np.zeros(1, np.int64)
        problem = ""
        try:
            self.read(seen.ctypes.data, address, seen.nbytes)
            if seen[0] != expected:
                problem = "it is not the peer's memory"
        except OSError as error:
            problem = str(error)
        # Both give up when one has to; and nobody's nonce goes before it was read.
        failed = np.array([bool(problem)], np.int64)
        group.all_reduce(failed)
        if failed[0]:
            raise OSError(problem or "the other rank cannot read this one's memory")

    def read(self, to: int, address: int, length: int) -> None:
        """Raises OSError; also for fewer bytes than asked for, which the call does not call one."""
        here, there = _Vector(to, length), _Vector(address, length)
        count = self._read(self._pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"process_vm_readv: {os.strerror(code)}")
        if count != length:
            raise OSError(f"process_vm_readv: {count} of {length} bytes")


def compare(group: Communicator, sizes: Sequence[int]) -> list[Comparison]:
    """Both ways at each size (bytes, sums of int32), on a group of two ranks of one host.

    Raises OSError when a rank cannot read the other's memory; ValueError for another group.
    """
    if group.world_size != 2:
        raise ValueError("cross-memory attach is compared on two ranks")
    peer = PeerMemory(group)
    found = []
    for size in sizes:
        array = np.ones(max(2, size // 4), np.int32)
        attached = two_shot(group, peer, array)
        ways = (lambda a=array: group.all_reduce(a, algorithm="two_shot"), attached)
        rounds = by_turns(group, ways)
        figures = (*map(statistics.median, rounds), *map(min, rounds))
        found.append(Comparison(array.nbytes, *figures))
    return found


def two_shot(group: Communicator, peer: PeerMemory, array: NDArray[np.int32]) -> Callable[[], None]:
    """Each rank sums one half and takes the other from its peer. Checked once, here."""
    addresses = np.empty((2, 1), np.int64)
    group.all_gather(addresses, np.array([array.ctypes.data], np.int64))
    theirs = int(addresses[1 - group.rank, 0])
    half = array.size // 2
    begin, end = ((0, half), (half, array.size))[group.rank]
    scratch = np.empty(min(CHUNK // 4, end - begin), np.int32)
    mine = array.ctypes.data
    other = ((half, array.size), (0, half))[group.rank]

    def all_reduce() -> None:
        for at in range(begin, end, len(scratch)):
            part = array[at : min(at + len(scratch), end)]
            peer.read(scratch.ctypes.data, theirs + 4 * at, part.nbytes)
            np.add(part, scratch[: part.size], out=part)
        group.barrier()
        peer.read(mine + 4 * other[0], theirs + 4 * other[0], 4 * (other[1] - other[0]))
        group.barrier()

    array[:] = np.arange(array.size) % 97 + group.rank
    group.barrier()
    all_reduce()
    if not (array == np.arange(array.size) % 97 * 2 + 1).all():
        raise AssertionError("the sum over cross-memory attach is wrong")
    return all_reduce


def by_turns(group: Communicator, ways: Sequence[Callable[[], object]]) -> list[list[float]]:
    """Microseconds a call of each, of the slower rank, one value a round."""
    counts = []
    for way in ways:
        group.barrier()
        start = time.perf_counter()
        way()
        seconds = slowest(group, [time.perf_counter() - start])[0]
        counts.append(max(1, min(1000, int(BATCH_SECONDS / seconds))))
    rounds = []
    for _ in range(ROUNDS):
        times = []
        for way, count in zip(ways, counts, strict=True):
            group.barrier()
            start = time.perf_counter()
            for _ in range(count):
                way()
            times.append((time.perf_counter() - start) / count * 1e6)
        rounds.append(slowest(group, times))
    return [list(column) for column in zip(*rounds, strict=True)]


def slowest(group: Communicator, values: Sequence[float]) -> list[float]:
    """The maximum over ranks of each value."""
    array = np.array(values, np.float64)
    group.all_reduce(array, "max")
    return [float(value) for value in array]
