"""Groups that span hosts: some peers over shared memory, some over TCP.

A second host is made of this one: a rank that moves into a mount namespace of its own has another
host identity, and is still reached over loopback.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time

import numpy as np
import pytest

import pycoll
from pool import run_ranks
from pycoll import _core
from test_faults import PROMPTLY, error_of

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000

REASONS = {name: reason for name, _, reason in _core.try_transports()}
pytestmark = pytest.mark.skipif(
    "tcp" not in REASONS or bool(REASONS["tcp"]), reason=f"no TCP: {REASONS.get('tcp')}"
)


def move_to_another_host():
    """Raises OSError where namespaces cannot be made."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0 and libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare of the mount namespace")


def on_two_hosts(rank, world_size, directory, function, split, *args):
    """`function(rank, world_size, store, *args)`; ranks with "b" in `split` are on one more host.

    The first of that host makes its namespace, the others join.
    """
    first = split.index("b")
    signals = pycoll.FileStore(os.path.join(directory, "signals"), timeout=30)
    if rank == first:
        try:
            move_to_another_host()
        except OSError as error:
            signals.set("pid", b"0")
            return f"skip: {error}"
        signals.set("pid", str(os.getpid()))
    pid = int(signals.get("pid"))
    if pid == 0:
        return "skip: no namespaces"
    if split[rank] == "b" and rank != first:
        join_namespace(pid)
    return function(rank, world_size, pycoll.FileStore(directory), *args)


def join_namespace(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "mnt"):
        theirs = f"/proc/{pid}/ns/{kind}"
        if os.stat(theirs).st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino:
            continue
        descriptor = os.open(theirs, os.O_RDONLY)
        if libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns to the {kind} namespace")
        os.close(descriptor)


def run_on_two_hosts(split, function, *args, **options):
    results = run_ranks(len(split), on_two_hosts, function, split, *args, **options)
    for result in results:
        if isinstance(result.value, str) and result.value.startswith("skip"):
            pytest.skip(result.value)
    return results


def data_of(rank, size):
    return np.random.default_rng(rank).standard_normal(size).astype(np.float32)


WITHOUT_WINDOWS = ("ring", "tree", "recursive_doubling", "halving_doubling", "hierarchical")
SIZES = (0, 1, 5, 1009, 300_000)


def collectives(rank, world_size, store, options):
    with pycoll.Communicator(store, rank, world_size, timeout=30, options=options) as group:
        for size in SIZES:
            inputs = [data_of(r, size) for r in range(world_size)]
            total = np.sum(np.array(inputs, np.float64), axis=0)
            for algorithm in ("auto", *WITHOUT_WINDOWS):
                array = inputs[rank].copy()
                group.all_reduce(array, algorithm=algorithm)
                np.testing.assert_allclose(array, total, rtol=1e-4, atol=1e-5)
            gathered = np.empty((world_size, size), np.float32)
            group.all_gather(gathered, inputs[rank])
            np.testing.assert_array_equal(gathered, inputs)
            scattered = np.empty(size, np.float32)
            group.reduce_scatter(scattered, np.array(inputs) * (rank + 1))
            factor = world_size * (world_size + 1) / 2
            np.testing.assert_allclose(scattered, inputs[rank] * factor, rtol=1e-4)
            for root in range(world_size):
                array = inputs[rank].copy()
                group.broadcast(array, root)
                np.testing.assert_array_equal(array, inputs[root])
            group.barrier()
        return group.transport


@pytest.mark.parametrize("split", ["ab", "aab", "abab", "abb", "aabbb"])
def test_a_group_spans_hosts(split):
    for result in run_on_two_hosts(split, collectives, {}, timeout=120):
        alone = split.count(split[result.rank]) == 1
        assert result.value == ("tcp" if alone else "shm+tcp")


def test_tcp_alone_serves_all_when_it_is_asked_for():
    options = {"PYCOLL_TRANSPORT": "tcp"}
    for result in run_on_two_hosts("abab", collectives, options, timeout=120):
        assert result.value == "tcp"


def idle_then_late(rank, world_size, store):
    """Sleepers are woken through either transport: each rank in turn comes late."""
    waits = []
    with pycoll.Communicator(store, rank, world_size, timeout=30) as group:
        for late in range(world_size):
            group.barrier()
            if rank == late:
                time.sleep(0.3)
            began = time.process_time()
            array = np.ones(10)
            group.all_reduce(array)
            assert array[0] == world_size
            waits.append(time.process_time() - began)
    return waits


def test_sleepers_wake_by_either_transport():
    for result in run_on_two_hosts("abab", idle_then_late, timeout=60):
        assert max(result.value) < 0.2, "a waiting rank burns CPU"


def shm_only(rank, world_size, store):
    options = {"PYCOLL_TRANSPORT": "shm"}
    return error_of(lambda: pycoll.Communicator(store, rank, world_size, options=options))


def test_a_pair_without_a_transport_is_named():
    for result in run_on_two_hosts("aba", shm_only, timeout=60):
        kind, text, _ = result.value
        assert kind == "PeerError"
        assert "no transport connects rank 0 and rank 1: shm: different hosts" in text


def inside_and_across(rank, world_size, store, split):
    """A group of all and one of each host, at the same time."""
    here = [r for r in range(world_size) if split[r] == split[rank]]
    everybody = pycoll.Communicator(store, rank, world_size, name="all", timeout=30)
    mine = pycoll.Communicator(
        store, here.index(rank), len(here), name=f"host-{split[rank]}", timeout=30
    )
    works, arrays = [], []
    for i in range(50):
        for group in (everybody, mine) if (i + rank) % 2 else (mine, everybody):
            arrays.append((group, np.full(1000, rank + 1.0)))
            works.append(group.all_reduce(arrays[-1][1], async_op=True))
    for work in works:
        work.wait()
    for group, array in arrays:
        members = range(world_size) if group is everybody else here
        assert array[0] == sum(r + 1 for r in members)
    return everybody.transport, mine.transport


def test_groups_across_and_inside_hosts_at_once():
    for result in run_on_two_hosts("abab", inside_and_across, "abab", timeout=60):
        assert result.value == ("shm+tcp", "shm")


def death(rank, world_size, store, victim):
    communicator = pycoll.Communicator(store, rank, world_size, timeout=30)
    communicator.barrier()
    if rank == victim:
        if os.fork() == 0:  # a worker that lives on
            time.sleep(5)
            os._exit(0)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    kind, text, when = error_of(lambda: [communicator.barrier() for _ in range(2)])
    return kind, text, when - start


@pytest.mark.parametrize("victim", [0, 3])
def test_a_death_is_named_on_both_hosts(victim):
    for result in run_on_two_hosts("abab", death, victim, timeout=60, check=False):
        if result.rank == victim:
            continue
        assert not result.failed, result.report()
        kind, text, waited = result.value
        assert kind in ("PeerError", "AbortedError")
        assert f"rank {victim} died" in text
        assert waited < 0.2 + PROMPTLY
