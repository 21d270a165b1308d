"""Forked children of a process with shareable tensors: they never write into their parent's memory.

Each test runs in a process of its own, which forks.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

import numpy as np
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

import pycoll
from helpers_scripts import fork, keep, run_scripts
from pool import alone, communicator_ranks, torch_ranks
from pycoll import _core

MIB = 1 << 20


def filled(value, elements=MIB):
    tensor = pycoll.empty(elements)
    tensor.fill_(value)
    assert pycoll.is_shareable(tensor)
    return tensor


def child_writes():
    tensor, array = filled(1), pycoll.empty_array(MIB)
    array[:] = 2

    def child():
        assert not pycoll.is_shareable(tensor) and not pycoll.is_shareable(array)
        before = float(tensor.sum()), float(array.sum())
        tensor.fill_(7)
        array[5:] = 8
        return (*before, float(tensor.sum()), float(array.sum()))

    status, text = fork(child)
    assert (status, eval(text)) == (0, (MIB, 2 * MIB, 7 * MIB, 8 * MIB - 30))
    assert float(tensor.sum()) == MIB and float(array.sum()) == 2 * MIB


def test_what_a_child_writes_its_parent_does_not_see():
    alone(child_writes)


def child_of_quarantine():
    """A range that a peer may still write is its owner's alone, and in a child that child's."""
    arena = _core.process_arena()
    before, tensor, behind = filled(1), filled(2), filled(3)
    ticket = arena.quarantine(arena.offset_of(tensor.data_ptr(), 4 * MIB), 4 * MIB)
    with open(f"/proc/self/fd/{arena.fd}", "r+b", 0) as late_peer:
        os.pwrite(late_peer.fileno(), b"x" * 4 * MIB, tensor.data_ptr() - arena.base)

    def sums():
        return float(before.sum()), float(tensor.sum()), float(behind.sum())

    def child():
        found = sums()
        for each in (before, tensor, behind):
            each.fill_(7)
        return (found, sums(), fork(sums))

    wanted = (MIB, 2 * MIB, 3 * MIB)
    status, text = fork(child)
    assert (status, eval(text)) == (0, (wanted, (7 * MIB,) * 3, (0, str((7.0 * MIB,) * 3))))
    assert sums() == wanted
    arena.release(ticket)
    assert sums() == wanted


def test_a_child_of_a_process_with_quarantined_memory():
    alone(child_of_quarantine)


def child_allocates():
    tensor = filled(1)
    size = pycoll.shared_memory_stats()

    def child():
        mine = [torch.full((4 * MIB,), float(i)) for i in range(3)]
        with pycoll.shareable():
            mine += [torch.full((4 * MIB,), 3.0), pycoll.empty(MIB).fill_(4)]
        mine.append(torch.from_numpy(pycoll.empty_array(MIB, np.float32)).fill_(5))
        assert not any(map(pycoll.is_shareable, mine))
        assert [float(t[-1]) for t in mine] == [0, 1, 2, 3, 4, 5]
        pycoll.share_(mine[0])
        assert not pycoll.is_shareable(mine[0])
        arena = _core.process_arena()
        assert (arena.fd, arena.allocate(5)) == (-1, None)
        assert arena.offset_of(tensor.data_ptr(), 4) is None
        arena.free(tensor.data_ptr())
        arena.release(arena.quarantine(0, MIB))
        assert pycoll.shared_memory_stats()["live"] == 0
        # The file is not kept open: the parent's memory ends with the parent.
        links = [
            os.readlink(f"/proc/self/fd/{n}")
            for n in os.listdir("/proc/self/fd")
            if n != "0" and os.path.exists(f"/proc/self/fd/{n}")
        ]
        assert not any("memfd:pycoll" in link for link in links), links
        return "well"

    for _ in range(2):
        assert fork(child) == (0, "well")
    assert pycoll.shared_memory_stats() == size and float(tensor.sum()) == MIB
    assert pycoll.is_shareable(filled(2))


def test_a_child_allocates_and_frees_elsewhere():
    alone(child_allocates)


def parent_goes_on():
    """The parent frees and reuses while the child lives; the child's own pages stay its own."""
    tensors = [filled(1)]
    pointer = tensors[0].data_ptr()
    go, done = os.pipe(), os.pipe()

    def child():
        tensors[0].fill_(5)
        os.write(done[1], b"1")
        assert os.read(go[0], 1) == b"1"
        assert bool((tensors[0] == 5).all())
        return "well"

    pid = os.fork()
    if pid == 0:
        os._exit(0 if child() == "well" else 1)
    assert os.read(done[0], 1) == b"1"
    assert float(tensors[0].sum()) == MIB
    tensors.clear()
    again = filled(9)
    assert again.data_ptr() == pointer
    os.write(go[1], b"1")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert float(again.sum()) == 9 * MIB


def test_the_parent_frees_and_reuses():
    alone(parent_goes_on)


def grandchildren():
    tensor = filled(1)

    def child():
        tensor.fill_(2)
        status, text = fork(lambda: tensor.add_(1)[0].item())
        return (status, text, float(tensor.sum()))

    status, text = fork(child)
    assert (status, eval(text)) == (0, (0, "3.0", 2 * MIB))
    assert float(tensor.sum()) == MIB


def test_children_of_children():
    alone(grandchildren)


def c_fork():
    """fork() called by C code: none of Python's hooks run."""
    tensor = filled(1)
    libc = ctypes.PyDLL(None)
    pid = libc.fork()
    if pid == 0:
        tensor.fill_(7)
        os._exit(int(tensor[3].item()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert float(tensor.sum()) == MIB


def test_a_fork_without_pythons_hooks():
    alone(c_fork)


def busy_fork():
    """Children forked while other threads are in the allocator: none hangs, none harms."""
    stop = threading.Event()
    guarded = filled(1)

    def work(seed):
        rng = np.random.default_rng(seed)
        with pycoll.shareable():
            while not stop.is_set():
                torch.empty(int(rng.integers(20_000, 2 * MIB)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()

    def child():
        with pycoll.shareable():
            guarded.fill_(3)
            return float((torch.ones(MIB) * guarded).sum())

    try:
        for _ in range(25):
            assert fork(child) == (0, str(3.0 * MIB))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert float(guarded.sum()) == MIB


def test_forks_among_busy_threads():
    alone(busy_fork, timeout=60)


def first_use_in_child():
    """A parent that never used it: the child has an arena of its own."""

    def child():
        return pycoll.is_shareable(filled(3))

    assert fork(child) == (0, "True")
    assert pycoll.shared_memory_stats()["size"] == 0
    filled(1)


def test_first_use_in_a_child():
    alone(first_use_in_child)


def exiting_child(rank, world_size, directory):
    tensors = [filled(i) for i in range(4)]
    keep(tensors)
    pid = os.fork()
    if pid == 0:
        del tensors[::2]
        sys.exit(4)  # finalizes Python, with tensors of the parent left
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), [float(t[9]) for t in tensors])


def test_a_child_that_ends_as_a_program_does():
    (result,) = run_scripts(1, exiting_child, env={})
    assert (result.exitcode, result.stderr) == (0, ""), result
    assert result.stdout == "4 [0.0, 1.0, 2.0, 3.0]\n"


# ---- DataLoader and multiprocessing ----


class InMemory(Dataset):
    """Spoils its own data, as a transform in place does."""

    def __init__(self):
        self.data = filled(1, 64 * 16384).view(64, 16384)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.data[index].mul_(0.5)


def load(workers, whole_process):
    if whole_process:
        from pycoll.shared_memory import serve_whole_process

        serve_whole_process()
    dataset = InMemory()
    # Not the pool's way of starting processes, which is this process's default.
    context = "fork" if workers else None
    loader = DataLoader(
        dataset, batch_size=16, num_workers=workers, multiprocessing_context=context
    )
    with pycoll.shareable():
        batches = [batch.clone() for _ in range(2) for batch in loader]
    assert len(batches) == 8 and all(map(pycoll.is_shareable, batches))
    # Without workers the dataset is spoilt as ever; with them, each epoch's workers start afresh.
    second = 0.5 if workers else 0.25
    assert [float(batch.mean()) for batch in batches] == [0.5] * 4 + [second] * 4
    assert float(dataset.data.mean()) == (1.0 if workers else 0.25)


def test_data_loader():
    for workers in (0, 2):
        alone(load, workers, False, timeout=60)
    alone(load, 2, True, timeout=60)


def add_one(queue, back):
    tensor = queue.get()
    tensor.add_(1)
    back.put(float(tensor.sum()))


def queues(method):
    context = torch.multiprocessing.get_context(method)
    queue, back = context.Queue(), context.Queue()
    process = context.Process(target=add_one, args=(queue, back))
    process.start()
    tensor = filled(1)
    queue.put(tensor)  # moves it into torch's own shared memory
    assert back.get(timeout=50) == 2 * MIB
    process.join()
    assert process.exitcode == 0
    assert float(tensor.sum()) == 2 * MIB
    assert tensor.is_shared() and not pycoll.is_shareable(tensor)


def test_queue_after_fork():
    alone(queues, "fork", timeout=60)


def test_queue_after_spawn():
    alone(queues, "spawn", timeout=90)


# ---- With a group ----


def group_and_child(rank, w):
    import torch.distributed as dist

    tensor = filled(rank + 1.0)
    stop = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(stop[1])
        tensor.fill_(100)
        os.read(stop[0], 1)  # lives on, and scribbles again
        tensor.fill_(200)
        os._exit(0)
    dist.all_reduce(tensor)
    os.close(stop[0])
    os.close(stop[1])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert bool((tensor == w * (w + 1) / 2).all())
    dist.all_reduce(tensor)
    assert bool((tensor == w * w * (w + 1) / 2).all())


def children_meet(communicator, directory):
    """The children of two ranks make a group, beside that of their parents."""
    rank, world = communicator.rank, communicator.world_size
    shared = pycoll.empty_array(MIB)
    shared[:] = rank + 1
    communicator.all_reduce(np.ones(4))

    def child():
        store = pycoll.FileStore(os.path.join(directory, "children"), timeout=20)
        with pycoll.Communicator(store, rank, world, name="children") as group:
            ordinary = np.full(MIB, 10.0 * (rank + 1), np.float32)
            group.all_reduce(ordinary)
            group.all_reduce(shared)  # its parent's, and its own from the fork on
            new = pycoll.empty_array(MIB)
            new[:] = np.arange(MIB) + rank
            group.all_reduce(new)
            sums = (ordinary.min(), ordinary.max(), shared.min(), shared.max())
            return all(np.equal(sums, (30, 30, 3, 3))) and new[7] == 15

    status, text = fork(child)
    assert (status, text) == (0, "True")
    communicator.all_reduce(shared)
    assert shared.min() == shared.max() == 3


def test_children_of_ranks_make_groups(tmp_path):
    for transport in ("shm", "tcp"):
        place = tmp_path / transport
        place.mkdir()
        env = {"PYCOLL_TRANSPORT": transport}
        communicator_ranks(2, children_meet, str(place), env=env, timeout=60)


def test_a_group_of_processes_with_children():
    torch_ranks(2, group_and_child)
