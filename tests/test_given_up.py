"""What a peer may still write after a zero-copy call was given up: it must reach nobody's data.

Rank 0 stops rank 1 amid such calls, and its call times out; what rank 1 writes when it goes on must
not show in memory that rank 0 has freed and reused meanwhile, nor in arrays that live on and were
filled anew. Where a rank is stopped is chance: each test tries until it was where it matters, and
fails when it never was.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time

import numpy as np
import pytest

import pycoll
from helpers_shareable import shareable, shareable_empty
from pool import run_ranks
from pycoll import _core

SIZE = 8 << 20  # elements: an all_reduce takes milliseconds
ATTEMPTS = 80  # one in three meets on an idle machine, fewer on a busy one
DEADLINE_S = 120
NEW = 0x77777777


def pids_of(communicator):
    pids = np.zeros((communicator.world_size, 1), np.int64)
    communicator.all_gather(pids, np.array([os.getpid()], np.int64))
    return [int(pid) for pid in pids[:, 0]]


def quarantined():
    return _core.shareable_statistics()["quarantined"]


def stop_self(sockets):
    null = os.open("/dev/null", os.O_RDWR)
    for fd in sockets:
        os.dup2(null, fd)  # whose number stays taken
    os.close(null)
    os.kill(os.getpid(), signal.SIGSTOP)


def sockets():
    def is_socket(fd):
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")

    return {int(fd) for fd in os.listdir("/proc/self/fd") if is_socket(fd)}


def call_until_stopped(group, array, attempt, before):
    """Rank 1 stops itself; with `before`, when it has closed all sockets but those.

    Returns its process id.
    """
    pids = pids_of(group)
    group.all_reduce(array, "max")  # both are under way
    stop = None
    if group.rank == 1:
        closing = () if before is None else sockets() - before
        stop = threading.Timer(0.02 + 0.002 * attempt, stop_self, (closing,))
        stop.start()
    with contextlib.suppress(pycoll.Error):
        while True:
            group.all_reduce(array, "max", timeout=0.4)
    if stop is not None:
        stop.join()
    return pids[1]


def resume(pid, hit):
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.5 if hit else 0)  # it does what it still does


class Attempts:
    """The attempts of both ranks, which keep step by files."""

    def __init__(self, rank, directory):
        self.rank, self.directory = rank, directory

    def __iter__(self):
        for attempt in range(ATTEMPTS):
            if os.path.exists(f"{self.directory}/done"):
                return
            yield attempt, pycoll.FileStore(f"{self.directory}/{attempt}")
            judged = f"{self.directory}/judged{attempt}"
            if self.rank == 0:
                open(judged, "w").close()
            while not os.path.exists(judged):
                time.sleep(0.01)

    def hit(self):
        open(f"{self.directory}/done", "w").close()

    def was_hit(self):
        return os.path.exists(f"{self.directory}/done")


def make(kind):
    """(array, array that holds its memory)"""
    if kind == "view":
        # Begins and ends amid pages which it shares with others.
        whole = shareable_empty((SIZE + 4096,), np.float32)
        return whole[1000 : 1000 + SIZE], whole
    array = shareable_empty((SIZE,), np.float32)
    return array, array


def judge(array, pid, kind):
    """Rank 0 uses the memory again; whether rank 1 had been stopped where it matters."""
    if kind == "freed":
        del array
        gc.collect()
        hit = quarantined() > 0
        other = shareable_empty((SIZE,), np.uint32)
    else:
        hit = not pycoll.is_shareable(array)
        other = array.view(np.uint32)
        if kind == "view":
            # But for the pages at its ends.
            other = other[1024:-1024]
    other[...] = NEW
    resume(pid, hit)
    assert (other == NEW).all(), "the peer wrote into memory that was filled anew"
    return hit


def write_after_the_end(rank, world_size, directory, kind, closes):
    attempts = Attempts(rank, directory)
    for attempt, store in attempts:
        before = sockets() if closes else None
        with pycoll.Communicator(store, rank, world_size) as group:
            array, whole = make(kind)
            whole[...] = 1
            pid = call_until_stopped(group, array, attempt, before)
            if rank == 1:
                with contextlib.suppress(pycoll.Error):
                    group.abort("resumed")
                continue
            del whole
            given, array = [array], None
            if judge(given.pop(), pid, kind):
                attempts.hit()
    return attempts.was_hit()


@pytest.mark.parametrize("closes", [False, True], ids=["stopped", "and without sockets"])
@pytest.mark.parametrize("kind", ["freed", "kept", "view"])
def test_a_stopped_peer_writes_into_nobodys_data(kind, closes):
    """Without its sockets the peer looks dead to who only looks at its connection."""
    results = run_ranks(2, write_after_the_end, kind, closes, timeout=DEADLINE_S)
    # Or the peer was never stopped where it matters, and nothing was shown.
    assert [result.value for result in results] == [True, True]


def memory_comes_back(rank, world_size, directory, ends):
    """No group and no connector is left of those times when the peer goes on, or is killed."""
    attempts = Attempts(rank, directory)
    for attempt, store in attempts:
        group = pycoll.Communicator(store, rank, world_size)
        array = shareable_empty((SIZE,), np.float32)
        array[...] = 1
        pid = call_until_stopped(group, array, attempt, None)
        del array
        with contextlib.suppress(pycoll.Error):
            group.close()
        del group
        gc.collect()
        if rank == 1:
            continue
        hit = quarantined() > 0
        if hit and ends == "killed":
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.3)
        else:
            resume(pid, hit)
        if hit:
            attempts.hit()
            pycoll.Communicator(pycoll.FileStore(f"{directory}/alone"), 0, 1).close()
            assert quarantined() == 0
    return attempts.was_hit()


@pytest.mark.parametrize("ends", ["goes on", "killed"])
def test_memory_comes_back_when_the_peer_is_out(ends):
    results = run_ranks(2, memory_comes_back, ends, timeout=DEADLINE_S, check=False)
    assert results[0].error is None, results[0].report()
    assert results[0].value is True


def filled_anew(rank, world_size, directory):
    """An array that lived through it is as good as any other, and so is its memory afterwards."""
    attempts = Attempts(rank, directory)
    for attempt, store in attempts:
        with pycoll.Communicator(store, rank, world_size) as group:
            array = shareable_empty((SIZE,), np.float32)
            array[...] = 1
            pid = call_until_stopped(group, array, attempt, None)
        hit = rank == 0 and not pycoll.is_shareable(array)
        if rank == 0:
            resume(pid, hit)
        with pycoll.Communicator(
            pycoll.FileStore(f"{directory}/next{attempt}"), rank, world_size
        ) as group:
            for _ in range(2):
                array[...] = np.arange(SIZE) % 100 + rank
                group.all_reduce(array)
                assert (array == np.arange(SIZE) % 100 * 2 + 1).all()
            before = array.ctypes.data
            del array
            gc.collect()
            array = shareable(np.full(SIZE, rank + 1, np.float32))
            assert array.ctypes.data == before and pycoll.is_shareable(array)
            direct = group.statistics()["zero_copy_calls"]
            group.all_reduce(array)
            assert group.statistics()["zero_copy_calls"] == direct + 1
            assert (array == 3).all()
            del array
            gc.collect()
        if hit:
            attempts.hit()
    return attempts.was_hit()


def test_arrays_that_lived_through_it_are_as_good_as_others():
    results = run_ranks(2, filled_anew, timeout=DEADLINE_S)
    assert [result.value for result in results] == [True, True]
