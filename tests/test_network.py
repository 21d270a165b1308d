"""One connection a pair of processes, for all of their groups: descriptors, deaths, strangers."""

from __future__ import annotations

import gc
import os
import random
import re
import resource
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import pycoll
from helpers_limits import PIDFD_OPEN, forbid_calls
from helpers_threads import ThreadRanks
from pool import communicator_ranks, run_ranks, torch_ranks
from pycoll import _core
from test_faults import PROMPTLY, error_of

TRANSPORTS = [name for name, _, reason in _core.try_transports() if not reason]

# ---- Descriptors ----


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def sum_of_ranks(communicator):
    array = np.full(100, communicator.rank + 1.0)
    communicator.all_reduce(array)
    return array[0]


def groups_of_all(rank, world_size, directory, limit):
    if limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    store = pycoll.FileStore(directory)
    kept, counts = [], []
    for i in range(11):
        kept.append(pycoll.Communicator(store, rank, world_size, name=f"group{i}", timeout=60))
        assert sum_of_ranks(kept[-1]) == world_size * (world_size + 1) / 2
        kept[-1].barrier()  # nobody is connecting the next group
        counts.append(descriptors())
        kept[-1].barrier()
    for communicator in kept:
        assert sum_of_ranks(communicator) == world_size * (world_size + 1) / 2
    return counts


# (I13) 64 descriptors are enough for eight ranks, however many groups they make.
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("world_size", "limit"), [(3, 0), (8, 64)])
def test_groups_share_descriptors(world_size, limit, transport):
    env = {"PYCOLL_TRANSPORT": transport}
    for result in run_ranks(world_size, groups_of_all, limit, timeout=120, env=env):
        assert len(set(result.value)) == 1, result.value


def use_up_descriptors(left: int) -> None:
    # The limit is on numbers, not on how many there are: holes would leave more.
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while (last := os.open("/dev/null", os.O_RDONLY)) <= highest:
        pass
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1 + left, most))


class LastRecordStore(pycoll.FileStore):
    """Knows all other records before it publishes its own, and leaves one descriptor for that: what
    remains is too little for the peers, however early they connect."""

    world_size = 0
    left = 1  # after that

    def set(self, key, value):
        if not key.endswith("/rank/0"):
            return super().set(key, value)
        prefix = key.removesuffix("/0")
        self.known = {}
        for rank in range(1, self.world_size):
            self.known[f"{prefix}/{rank}"] = super().get(f"{prefix}/{rank}")
        self.known[key] = value
        use_up_descriptors(1)
        super().set(key, value)
        if self.left == 0:
            os.open("/dev/null", os.O_RDONLY)

    def get(self, key, timeout=None):
        if key not in self.known:
            raise TimeoutError(key)  # without a descriptor
        return self.known[key]


def too_few_descriptors(rank, world_size, directory, transport, left):
    store = (LastRecordStore if rank == 0 else pycoll.FileStore)(directory)
    LastRecordStore.world_size = world_size
    LastRecordStore.left = left
    options = {"PYCOLL_CONNECT_TIMEOUT": "20", "PYCOLL_TRANSPORT": transport}
    start = time.monotonic()
    kind, text, _ = error_of(lambda: pycoll.Communicator(store, rank, world_size, options=options))
    return kind, text, time.monotonic() - start


@pytest.mark.parametrize("left", [1, 0])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_too_few_descriptors_are_named(transport, left):
    """(I13)"""
    results = run_ranks(6, too_few_descriptors, transport, left, timeout=60)
    assert "ulimit -n" in results[0].value[1], results[0].value
    assert "errno 24" in results[0].value[1], results[0].value
    for result in results:
        kind, text, waited = result.value
        assert kind == ("OperatingSystemError" if result.rank == 0 else "PeerError"), result.value
        assert "ulimit -n" in text, "not the reason"
        assert waited < 10, "the others waited for nothing"


class MuteStore(pycoll.FileStore):
    """Of the rank that all others dial: it has no descriptor left once some have, and can say
    nothing through the store."""

    world_size = 0
    is_dialled = False

    def set(self, key, value):
        if "/gave_up/" in key and self.is_dialled:
            raise OSError("this store takes nothing any more")
        before, deadline = descriptors(), time.monotonic() + 15
        super().set(key, value)
        if "/rank/" not in key:
            return
        prefix = key.rsplit("/", 1)[0]
        keys = [f"{prefix}/{r}" for r in range(self.world_size)]
        self.known = {k: super(MuteStore, self).get(k) for k in keys}
        ids = [re.search(rb"shm \d+ \S+ (\S+)", text).group(1) for text in self.known.values()]
        self.is_dialled = ids[int(key.rsplit("/", 1)[1])] == min(ids)
        if self.is_dialled:
            while descriptors() <= before and time.monotonic() < deadline:
                time.sleep(0.01)
            use_up_descriptors(0)

    def get(self, key, timeout=None):
        if not self.is_dialled:
            return super().get(key, timeout)
        if key not in self.known:
            raise TimeoutError(key)  # without a descriptor
        return self.known[key]


def too_few_descriptors_after_a_dial(rank, world_size, directory):
    options = {"PYCOLL_CONNECT_TIMEOUT": "20", "PYCOLL_TRANSPORT": "shm"}
    # The connections of a group that lives on stay: no end of theirs tells a peer anything.
    store = pycoll.FileStore(directory)
    first = pycoll.Communicator(store, rank, world_size, name="first", options=options)
    store = MuteStore(directory)
    MuteStore.world_size = world_size
    start = time.monotonic()
    kind, text, _ = error_of(lambda: pycoll.Communicator(store, rank, world_size, options=options))
    waited = time.monotonic() - start
    # The end of a process tells its peers, too: the poor one stays until they know.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Path(directory, f"over-{rank}").touch()
    while store.is_dialled and time.monotonic() < start + 20:
        if len(list(Path(directory).glob("over-*"))) == world_size:
            break
        time.sleep(0.01)
    first.close()
    return store.is_dialled, kind, text, waited


def test_who_has_dialled_is_told_without_the_store():
    results = run_ranks(4, too_few_descriptors_after_a_dial, timeout=60)
    assert sum(result.value[0] for result in results) == 1
    for result in results:
        dialled, kind, _, waited = result.value
        assert kind == ("OperatingSystemError" if dialled else "PeerError"), result.value
        assert waited < 10, "the others waited for nothing"


def destroyed_in_random_order(rank, world_size, directory):
    store = pycoll.FileStore(directory)
    # The first group makes the arena of shareable memory, which lives as long as the process.
    pycoll.Communicator(store, rank, world_size, name="first").close()
    before = descriptors()
    groups = [pycoll.Communicator(store, rank, world_size, name=f"{i}") for i in range(6)]
    order = list(range(6))
    random.Random(rank).shuffle(order)
    for count, i in enumerate(order):
        groups[i].close()
        if count == 2:  # one more while others are on their way out
            groups.append(pycoll.Communicator(store, rank, world_size, name="late"))
            assert sum_of_ranks(groups[-1]) == 6
    assert sum_of_ranks(groups[-1]) == 6
    groups[-1].close()
    groups.clear()
    return before, descriptors(), len(os.listdir("/proc/self/task"))


def test_groups_are_destroyed_in_any_order():
    for result in run_ranks(3, destroyed_in_random_order, timeout=60):
        before, after, threads = result.value
        assert after == before
        assert threads == 1


def opposite_orders(rank, world_size, directory, rounds):
    store = pycoll.FileStore(directory)
    sums = []

    def make(name):
        with pycoll.Communicator(store, rank, world_size, name=name) as communicator:
            sums.append(sum_of_ranks(communicator))

    for i in range(rounds):
        names = [f"a{i}", f"b{i}"] if rank % 2 else [f"b{i}", f"a{i}"]
        threads = [threading.Thread(target=make, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
            time.sleep(0.001 * (i % 3))
        for thread in threads:
            thread.join()
    return sums


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_groups_connect_at_once_in_opposite_order(transport):
    env = {"PYCOLL_TRANSPORT": transport}
    for result in run_ranks(3, opposite_orders, 20, env=env, timeout=120):
        assert result.value == [6.0] * 40


def test_ranks_of_one_process_are_peers_all_the_same():
    """Two ranks of a group never share a network; groups of one rank each do."""
    gc.collect()  # what earlier tests left
    group = ThreadRanks(2)
    with_group = descriptors()
    second = ThreadRanks(2)  # another store, the same name
    assert second.run(sum_of_ranks) == [3.0, 3.0]
    assert group.run(sum_of_ranks) == [3.0, 3.0]
    second.close()
    del second
    gc.collect()
    assert descriptors() == with_group
    group.close()


def new_groups(rank, world_size, times):
    import torch
    import torch.distributed as dist

    counts = []
    for _ in range(times):
        group = dist.new_group()
        tensor = torch.full((10,), rank + 1.0)
        dist.all_reduce(tensor, group=group)
        assert tensor[0] == 3
        dist.destroy_process_group(group)
        counts.append((descriptors(), len(os.listdir("/proc/self/task"))))
    return counts


def test_new_groups_come_and_go_without_a_trace():
    for result in torch_ranks(2, new_groups, 200, timeout=120):
        assert max(result.value[20:]) == result.value[20], result.value


# ---- Deaths ----


def death_with_forked_children(rank, world_size, directory, pidfds, transport, how):
    if not pidfds:
        try:
            forbid_calls(PIDFD_OPEN)
        except OSError as error:
            return ("skip", str(error), 0)
        with pytest.raises(PermissionError):
            os.pidfd_open(os.getpid())
    communicator = pycoll.Communicator(
        pycoll.FileStore(directory), rank, world_size, options={"PYCOLL_TRANSPORT": transport}
    )
    communicator.barrier()
    if rank == 1:
        if how == "loader":
            import torch

            loader = torch.utils.data.DataLoader(
                list(range(100)), num_workers=2, multiprocessing_context="fork"
            )
            next(iter(loader))
            keep = iter(loader)
            # One of each worker: a worker that begins after its parent's death never notices it.
            next(keep)
            next(keep)
        elif os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    kind, text, when = error_of(lambda: [communicator.barrier() for _ in range(2)])
    if rank == 0:
        # The child's copies are closed, so what it does to them cannot reach the others either.
        time.sleep(0.1)
    return kind, text, when - start


@pytest.mark.parametrize("how", ["fork", pytest.param("loader", marks=pytest.mark.full)])
@pytest.mark.parametrize("pidfds", [True, False], ids=["pidfd", "no_pidfd"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_children_do_not_hide_a_death(transport, pidfds, how):
    results = run_ranks(
        3, death_with_forked_children, pidfds, transport, how, timeout=60, check=False
    )
    for result in (results[0], results[2]):
        assert not result.failed, result.report()
        kind, text, waited = result.value
        if kind == "skip":
            pytest.skip(text)
        assert kind in ("PeerError", "AbortedError")  # seen itself, or heard from who saw it
        assert "rank 1 died" in text
        # A worker's start is in the time, not only the death.
        assert waited < PROMPTLY + (3 if how == "loader" else 0)


def child_with_sockets(communicator):
    """What a forked child still has open of its parent's connections."""
    communicator.barrier()
    own = {
        os.readlink(f"/proc/self/fd/{d}")
        for d in map(int, os.listdir("/proc/self/fd"))
        if d > 2 and os.path.exists(f"/proc/self/fd/{d}")
    }
    read, write = os.pipe()
    if os.fork() == 0:
        links = []
        for name in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{name}"))
            except OSError:
                continue
        left = [link for link in links if link in own]
        os.write(write, "\n".join(left).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        left = pipe.read().split("\n")
    os.wait()
    communicator.barrier()
    return own, left


def test_a_forked_child_keeps_no_socket():
    for result in communicator_ranks(2, child_with_sockets):
        own, left = result.value
        for kind in ("anon_inode:[eventpoll]", "anon_inode:[pidfd]"):
            assert kind in own, "the test looks for the wrong thing"
            assert kind not in left


def forks_in_threads(communicator):
    """Threads fork while groups come and go: nobody waits for a lock that nobody gives back."""
    done = threading.Event()

    def fork_often():
        while not done.is_set():
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)

    threads = [threading.Thread(target=fork_often) for _ in range(2)]
    if communicator.rank == 0:
        for thread in threads:
            thread.start()
    for _ in range(200):
        assert sum_of_ranks(communicator) == 3
    done.set()
    for thread in threads:
        if thread.ident:
            thread.join()


def test_two_threads_may_fork_at_once():
    communicator_ranks(2, forks_in_threads, timeout=60)


# ---- Choice and agreement ----


def test_an_unknown_transport_is_refused(tmp_path):
    options = {"PYCOLL_TRANSPORT": "shm,pigeon"}
    with pytest.raises(pycoll.InvalidArgumentError) as caught:
        pycoll.Communicator(pycoll.FileStore(tmp_path), 0, 2, options=options)
    for word in ("PYCOLL_TRANSPORT", "'pigeon'", "shm"):
        assert word in str(caught.value)
    assert not os.listdir(tmp_path), "the rank has announced itself"


def different_transports(rank, world_size, directory):
    options = {"PYCOLL_TRANSPORT": ("auto", "shm")[rank]}
    return error_of(
        lambda: pycoll.Communicator(pycoll.FileStore(directory), rank, world_size, options=options)
    )


def test_ranks_must_agree_on_transports():
    for result in run_ranks(2, different_transports):
        kind, text, _ = result.value
        assert kind == "MismatchError"
        assert "PYCOLL_TRANSPORT" in text
        assert "'auto' on rank 0, 'shm' on rank 1" in text


def test_the_host_is_the_same_for_all_ranks_here():
    names = run_ranks(2, lambda_free_host)
    assert names[0].value == names[1].value == _core.host_identity()
    assert len(names[0].value.split("/")) == 5  # boot, and four namespaces


def lambda_free_host(rank, world_size, directory):
    return _core.host_identity()
