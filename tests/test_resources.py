"""Forked children, and what groups and operations leave behind and cost."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time

import numpy as np
import pytest

import pycoll
from helpers_threads import ThreadRanks
from pool import communicator_ranks, run_ranks, torch_ranks
from test_collectives import ALGORITHMS
from test_faults import PROMPTLY, error_of

# ---- Fork ----


def fork_children(communicator):
    array = np.ones(1000)
    communicator.all_reduce(array)
    children = []
    for how in ("use", "drop", "exit"):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            text = b"nothing was raised"
            if how == "use":
                try:
                    communicator.all_reduce(array)
                except pycoll.InvalidArgumentError as error:
                    text = str(error).encode()
            elif how == "drop":
                communicator.close()
                del communicator
                gc.collect()
            os.write(write, text)
            os._exit(0)
        os.close(write)
        children.append((child, read))
    texts = []
    for child, read in children:
        texts.append(os.read(read, 4096).decode())
        _, status = os.waitpid(child, 0)
        assert status == 0
        os.close(read)
    for _ in range(20):
        communicator.all_reduce(array)
    communicator.all_reduce(array, async_op=True).wait()
    return texts[0], array[0]


def test_forked_children_do_no_harm():
    for result in communicator_ranks(2, fork_children):
        text, value = result.value
        assert "forked" in text
        assert value == 2.0**22


def death_with_a_living_child(communicator):
    """A forked child that lives on must not hide its parent's death."""
    communicator.barrier()
    if communicator.rank == 1:
        if os.fork() == 0:
            time.sleep(2)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    kind, text, when = error_of(lambda: [communicator.barrier() for _ in range(2)])
    return kind, text, when - start


def test_a_forked_child_does_not_hide_its_parents_death():
    result = communicator_ranks(2, death_with_a_living_child, check=False)[0]
    kind, text, waited = result.value
    assert kind == "PeerError"
    assert "rank 1 died" in text
    assert waited < PROMPTLY


class Squares:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return float(index * index)


def with_data_loader(rank, world_size):
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(3))
    totals = []
    for _ in range(3):
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork"
        )
        for batch in loader:
            total = batch.sum()
            dist.all_reduce(total)
            dist.all_reduce(total, async_op=True).wait()
            totals.append(float(total))
    return totals


def test_data_loader_workers_that_fork():
    results = torch_ranks(2, with_data_loader, timeout=60)
    expected = [4.0 * sum(i * i for i in range(a, a + 4)) for a in (0, 4, 8)] * 3
    assert [result.value for result in results] == [expected] * 2


# ---- What is left, what it costs ----


class Mallinfo(ctypes.Structure):
    """struct mallinfo2 of <malloc.h>."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def malloc_bytes():
    """What malloc has given out; 0 where nobody can tell (glibc before 2.33, musl)."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return 0
    function.restype = Mallinfo
    info = function()
    return info.uordblks + info.hblkhd


def resources():
    with open("/proc/self/statm") as file:
        reserved, pages = map(int, file.read().split()[:2])
    with open("/proc/self/maps") as file:
        mappings = sum("memfd:pycoll" in line for line in file)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": mappings,
        "megabytes": pages * 4096 / 2**20,
        "reserved": reserved * 4096 / 2**20,  # address space
        "malloc": malloc_bytes(),
        "objects": sys.getallocatedblocks(),  # of Python, of 16 to 512 bytes each
    }


def make_and_close(rank, world_size, directory, times):
    store = pycoll.FileStore(directory)
    measured = []
    for i in range(times):
        communicator = pycoll.Communicator(store, rank, world_size, name=f"group{i}")
        array = np.ones(3000)
        communicator.all_reduce(array)
        if i % 2:
            communicator.all_reduce(array, async_op=True).wait()
        if i % 3:
            communicator.close()
        del communicator
        if i in (20, times - 1):
            measured.append(resources())
    return measured


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("times", [200, pytest.param(2000, marks=pytest.mark.full)])
def test_making_and_closing_groups_leaves_nothing(times, transport):
    env = {"PYCOLL_TRANSPORT": transport}
    for result in run_ranks(2, make_and_close, times, env=env, timeout=200):
        early, late = result.value
        # As long as the process: the arena of shareable memory, the flight recorder's head, and the
        # records of the group that was closed last.
        assert late["mappings"] <= (3 if transport == "shm" else 2)
        assert late["reserved"] - early["reserved"] < 100
        assert late["descriptors"] <= early["descriptors"]
        assert late["threads"] <= early["threads"]
        assert late["megabytes"] - early["megabytes"] < 4


def torch_make_and_destroy(rank, world_size, times):
    import torch
    import torch.distributed as dist

    measured = []
    for i in range(times):
        group = dist.new_group()
        tensor = torch.ones(100)
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        dist.destroy_process_group(group)
        if i in (20, times - 1):
            measured.append(resources())
    return measured


def test_torch_groups_leave_nothing():
    for result in torch_ranks(2, torch_make_and_destroy, 100, timeout=60):
        early, late = result.value
        assert late["descriptors"] <= early["descriptors"] + 2
        assert late["threads"] <= early["threads"] + 1
        assert late["mappings"] <= early["mappings"]
        assert late["megabytes"] - early["megabytes"] < 10


def many_operations(communicator, times):
    array = np.ones(64)
    work = None
    for i in range(times):
        if i % 4 == 3:
            work = communicator.broadcast(array, i % 2, async_op=True)
            work.wait()
        else:
            communicator.all_reduce(array, "max", algorithm=ALGORITHMS["all_reduce"][i % 5])
        if i == times // 10:
            early = resources()
    return early, resources()


@pytest.mark.parametrize("times", [20_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_memory_is_flat_over_many_operations(times):
    for result in communicator_ranks(2, many_operations, times, timeout=250):
        early, late = result.value
        assert late["megabytes"] - early["megabytes"] < 2
        assert late["descriptors"] == early["descriptors"]
        assert late["threads"] <= early["threads"]


def waits_for_a_signal(rank, world_size, directory):
    store = pycoll.FileStore(directory)
    with pycoll.Communicator(store, rank, world_size) as communicator:
        communicator.barrier()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        os.kill(os.getpid(), signal.SIGUSR1)  # a thread that does not block it would die of it
        return signal.sigwait({signal.SIGUSR1})


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_threads_of_the_transport_take_no_signals(transport):
    for result in run_ranks(2, waits_for_a_signal, env={"PYCOLL_TRANSPORT": transport}):
        assert result.value == signal.SIGUSR1


def test_closing_twice_and_using_after_close():
    group = ThreadRanks(2)
    group.run(lambda communicator: communicator.close())
    group.run(lambda communicator: communicator.close())
    for communicator in group.communicators:
        kind, text, _ = error_of(communicator.barrier)
        assert kind == "AbortedError"
        assert "closed" in text
    group.close()
