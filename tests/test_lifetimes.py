"""Operations that outlive their caller, and groups that come again or go from several threads.

Interrupted callers, groups made again under the same name, results that cannot be copied back,
tensors whose last reference a progress thread drops. The end of processes: test_exit_and_fork.py.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import pycoll
from helpers_threads import ThreadRanks
from pool import run_ranks, torch_ranks
from test_faults import error_of

# ---- A caller that is interrupted while it waits behind another operation ----

GUARD = 7.0
N = 50_000


def interrupt_main_thread(ready, number):
    """Sends the signal `number`, whose handler raises, once `ready()`."""

    def raise_it(*_):
        raise KeyboardInterrupt

    def send():
        while not ready():
            time.sleep(0.01)
        time.sleep(0.1)  # the caller waits by now; nothing depends on it
        os.kill(os.getpid(), number)

    signal.signal(number, raise_it)
    threading.Thread(target=send, daemon=True).start()


def victims(collective, communicator):
    """(arrays that nobody may touch any more, the call that is interrupted)."""
    one, two = np.full(N, GUARD), np.full((2, N), GUARD)
    calls = {
        "all_reduce": ([one], lambda: communicator.all_reduce(one)),
        "strided": ([two], lambda: communicator.all_reduce(two[:, ::2])),
        "broadcast": ([one], lambda: communicator.broadcast(one, 1)),
        "all_gather": ([two], lambda: communicator.all_gather(two, np.ones(N))),
        "reduce_scatter": ([one], lambda: communicator.reduce_scatter(one, np.ones((2, N)))),
        "barrier": ([], communicator.barrier),
    }
    return calls[collective]


def interrupted_behind(rank, world_size, directory, collective, ahead, number):
    signals = pycoll.FileStore(os.path.join(directory, "signals"), timeout=30)
    communicator = pycoll.Communicator(pycoll.FileStore(directory), rank, world_size)
    arrays, call = victims(collective, communicator)
    first = np.ones(N)
    if rank == 1:  # comes when the caller has gone and its memory serves others
        signals.get("interrupted")
        errors = [error_of(c)[:2] for c in (lambda: communicator.all_reduce(first), call)]
        signals.set("joined", b"")
        return errors
    errors = []
    if ahead == "async":
        wait = communicator.all_reduce(first, async_op=True).wait
    else:
        in_thread = lambda: errors.append(error_of(lambda: communicator.all_reduce(first)))  # noqa: E731
        thread = threading.Thread(target=in_thread)
        thread.start()
        wait = None
    while communicator._core.sequence() < 1:
        time.sleep(0.01)
    interrupt_main_thread(lambda: communicator._core.sequence() >= 2, number)
    with pytest.raises(KeyboardInterrupt):
        call()
    if wait:
        errors.append(error_of(wait))
    else:
        thread.join()
    errors.append(error_of(communicator.barrier))
    kept = [array.copy() for array in arrays]
    del call
    guards = [np.full(N, GUARD) for _ in range(8)]  # some of them where freed memory was
    signals.set("interrupted", b"")
    signals.get("joined")
    time.sleep(0.2)
    assert all((array == GUARD).all() for array in [*guards, *kept, *arrays])
    return [error[:2] for error in errors]


CASES = [(c, "async", signal.SIGALRM) for c in ("strided", "broadcast", "all_gather")]
CASES += [("reduce_scatter", "async", signal.SIGALRM), ("barrier", "async", signal.SIGINT)]
CASES += [("all_reduce", ahead, signal.SIGINT) for ahead in ("async", "thread")]


@pytest.mark.parametrize(("collective", "ahead", "number"), CASES)
def test_an_interrupted_caller_takes_its_memory_along(collective, ahead, number):
    results = run_ranks(2, interrupted_behind, collective, ahead, number, timeout=60)
    for result in results:
        for kind, text in result.value:
            assert kind == "AbortedError"
            assert "rank 0" in text
            assert "interrupted" in text


def torch_interrupted_behind(rank, world_size, free):
    import torch
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    first, mine = torch.ones(N), torch.full((N,), GUARD)
    if rank == 1:
        store.wait(["interrupted"])
        texts = []
        for tensor in (first, mine):
            with pytest.raises(dist.DistBackendError) as caught:
                dist.all_reduce(tensor)
            texts.append(str(caught.value))
        store.set("joined", "")
        return texts
    work = dist.all_reduce(first, async_op=True)
    interrupt_main_thread(lambda: backend.get_sequence_number() >= 2, signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(mine)
    if free:
        del mine
        gc.collect()
        mine = torch.full((N,), GUARD)
    guards = [torch.full((N,), GUARD) for _ in range(8)]
    with pytest.raises(dist.DistBackendError) as caught:
        work.wait()
    store.set("interrupted", "")
    store.wait(["joined"])
    time.sleep(0.2)
    assert all((tensor == GUARD).all() for tensor in [mine, *guards])
    return [str(caught.value)]


@pytest.mark.parametrize("free", [False, True])
def test_an_interrupted_torch_caller_takes_its_memory_along(free):
    env = {"MALLOC_PERTURB_": "165"}
    for result in torch_ranks(2, torch_interrupted_behind, free, timeout=60, env=env):
        for text in result.value:
            assert "rank 0" in text
            assert "interrupted" in text


# ---- The same name again ----


class SlowStore(pycoll.FileStore):
    """Every call takes a while, another one each time: ranks meet each other at every stage."""

    def __init__(self, path, rank):
        super().__init__(path)
        self.random = random.Random(rank)

    def pause(self):
        time.sleep(self.random.choice([0, 0, 0.002, 0.02]))

    def set(self, key, value):
        self.pause()
        super().set(key, value)

    def get(self, key, timeout=None):
        self.pause()
        return super().get(key, timeout)

    def delete_key(self, key):
        self.pause()
        return super().delete_key(key)


def make_again(rank, world_size, directory, slow, rounds):
    store = SlowStore(directory, rank) if slow else pycoll.FileStore(directory)
    rng = random.Random(rank)
    options = {"PYCOLL_CONNECT_TIMEOUT": "30"}
    for i in range(rounds):
        time.sleep(rng.choice([0, 0, 0.01]))
        communicator = pycoll.Communicator(store, rank, world_size, options=options)
        if i % 4 == 3:  # else nothing makes the ranks wait for each other but the group itself
            total = np.full(100, i + rank + 1.0)
            communicator.all_reduce(total)
            assert (total == 3 * i + 6).all()
        if (i + rank) % 3:
            communicator.close()
        del communicator
    return rounds


@pytest.mark.parametrize("slow", [False, True])
def test_a_name_serves_again_and_again(slow):
    results = run_ranks(3, make_again, slow, 30, timeout=120)
    assert [result.value for result in results] == [30] * 3


def torch_make_again(rank, world_size, directory, kind, port):
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if kind == "file":
        store = dist.FileStore(os.path.join(directory, "c10d"), world_size)
    else:
        store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, use_libuv=True)
    rng = random.Random(rank)
    for i in range(30):
        time.sleep(rng.choice([0, 0, 0.01]))
        dist.init_process_group(
            "pycoll",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=60),
        )
        if i % 4 == 3:
            total = torch.full((100,), i + rank + 1.0)
            dist.all_reduce(total)
            assert (total == 3 * i + 6).all()
        time.sleep(rng.choice([0, 0, 0.01]))
        dist.destroy_process_group()
    if kind == "tcp":  # whoever has the server leaves last
        store.set(f"done/{rank}", "")
        store.wait([f"done/{r}" for r in range(world_size)])
        time.sleep(0.5 if rank == 0 else 0)


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_torch_groups_serve_again_and_again(kind):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_ranks(3, torch_make_again, kind, port, timeout=120, env={"PYCOLL_CONNECT_TIMEOUT": "30"})


# ---- Results that cannot be copied back ----


def swapped(rank, world_size, how):
    import torch
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    victim = torch.full((4, 6), rank + 1.0).t()
    others = [torch.full((5, 4), rank + 1.0) for _ in range(3)]
    text = ""
    if rank == 0:
        works = [dist.all_reduce(others[0], async_op=True)]
        bad = dist.all_reduce(victim, async_op=True)
        works += [dist.all_reduce(tensor, async_op=True) for tensor in (others[1], others[2].t())]
        victim.data = torch.zeros(3, 3)
        futures = [bad.get_future(), works[1].get_future()]
        store.set("swapped", "")
        if how == "wait":
            with pytest.raises(RuntimeError) as caught:
                bad.wait()
            text = str(caught.value)
            assert bad.is_completed()
            assert not bad.is_success()
            with pytest.raises(RuntimeError):
                futures[0].wait()
        elif how == "drop":
            del bad
        for work in works:
            assert work.wait()
            assert work.is_success()
        assert (futures[1].wait()[0] == 3).all()
        assert (victim == 0).all()
    else:
        store.wait(["swapped"])
        for tensor in (others[0], victim, others[1], others[2]):
            dist.all_reduce(tensor)
        assert (victim == 3).all()
    assert all((tensor == 3).all() for tensor in others)
    dist.all_reduce(others[0])
    assert (others[0] == 6).all()
    return text


@pytest.mark.parametrize("how", ["wait", "drop"])
def test_a_tensor_that_changed_its_shape_meanwhile(how):
    results = torch_ranks(2, swapped, how)
    assert all("terminate called" not in result.stderr for result in results)
    if how == "wait":
        assert "size" in results[0].value, "the error is not torch's own"


def test_an_array_that_became_read_only_meanwhile():
    group = ThreadRanks(2)
    ready = threading.Event()

    def use(communicator):
        outer = np.full((4, 6), communicator.rank + 1.0)
        victim = outer.T
        others = [np.full((4, 6), communicator.rank + 1.0) for _ in range(2)]
        if communicator.rank == 1:
            assert ready.wait(30)
        calls = [others[0].T, victim, others[1].T]
        works = [communicator.all_reduce(array, async_op=True) for array in calls]
        if communicator.rank == 0:
            victim.flags.writeable = False
            ready.set()
            with pytest.raises(ValueError, match="read-only"):
                works[1].wait()
            assert (victim == 1).all()
        for work in (works[0], works[2]):
            assert work.wait()
        assert all((array == 3).all() for array in others)
        communicator.barrier()

    group.run(use)
    group.close()


# ---- Last references that a progress thread drops ----


class Tag:
    """Python code that runs where the tensor dies."""

    def __del__(self):
        sum(range(50))


def drop_and_ask(rank, world_size, times):
    import torch
    import torch.distributed as dist

    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for _ in range(times):
        tensor = torch.ones(6, 4).t()
        if rank == 0:
            tensor.tag = Tag()
        work = dist.all_reduce(tensor, async_op=rank == 0)
        del tensor, work
        if rank == 0:
            backend.get_sequence_number()
    dist.barrier()
    assert backend.get_sequence_number() == times + 1


def test_asking_a_torch_group_while_dropped_tensors_die():
    torch_ranks(2, drop_and_ask, 8000, timeout=120, group_timeout=100)


def numpy_drop_and_ask(rank, world_size, directory, times):
    store = pycoll.FileStore(directory)
    communicator = pycoll.Communicator(store, rank, world_size)

    class Tagged(np.ndarray):
        def __del__(self):
            sum(range(50))

    work = None
    for i in range(times):
        array = np.ones((6, 4)).view(Tagged).T
        work = communicator.all_reduce(array, async_op=rank == 0)
        del array
        if rank == 0:
            assert communicator._core.sequence() == i + 1
            work.is_completed()
            communicator._core.dead()
            communicator.algorithm_for("all_reduce", 100)
    communicator.barrier()
    if rank == 0:
        for _ in range(50):
            communicator.all_reduce(np.ones((6, 4)).view(Tagged).T, async_op=True)
        communicator.abort("enough")
        communicator.abort("twice")
        store.set("aborted", b"yes")
    else:
        # A rank that leaves ends the calls of the other, which is not what this test looks at.
        store.get("aborted", timeout=60)
    return rank == 1 or communicator._core.dead()


def test_asking_a_group_while_dropped_arrays_die():
    results = run_ranks(2, numpy_drop_and_ask, 8000, timeout=120)
    assert all(result.value for result in results)


# ---- Closing from several threads ----


def close_at_once(rank, world_size, directory, in_flight):
    store = pycoll.FileStore(directory)
    for i in range(20):
        communicator = pycoll.Communicator(store, rank, world_size, name=f"group{i}")
        communicator.all_reduce(np.zeros(4), async_op=True).wait()
        if in_flight:
            communicator.all_reduce(np.zeros((50, 40)).T, async_op=True)
        threads = 2 + i % 7
        start = threading.Barrier(threads)

        def close(communicator=communicator, start=start):
            start.wait()
            communicator.close()

        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(close) for _ in range(threads)]:
                future.result()
        with pytest.raises(pycoll.AbortedError):
            communicator.barrier()


@pytest.mark.parametrize("in_flight", [False, True])
def test_several_threads_may_close(in_flight):
    run_ranks(2, close_at_once, in_flight, timeout=100)


def torch_shutdown_at_once(rank, world_size):
    import torch
    import torch.distributed as dist

    for i in range(20):
        group = dist.new_group()
        dist.all_reduce(torch.ones(30).view(5, 6).t(), group=group, async_op=True)
        backend = group._get_backend(torch.device("cpu"))
        threads = 2 + i % 4
        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(backend.shutdown) for _ in range(threads)]:
                future.result()
        dist.destroy_process_group(group)


def test_several_threads_may_shut_a_torch_group_down():
    torch_ranks(2, torch_shutdown_at_once, timeout=100)


def test_a_store_can_be_used_again_after_a_rank_gave_up_waiting(tmp_path):
    store = pycoll.FileStore(tmp_path)
    with pytest.raises(pycoll.TimeoutError, match="rank 1"):
        pycoll.Communicator(store, 0, 2, options={"PYCOLL_CONNECT_TIMEOUT": "0.3"})

    def join(rank):
        with pycoll.Communicator(store, rank, 2) as communicator:
            communicator.barrier()
            return communicator.rank

    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(join, 1)  # it must not be led to the rank that gave up
        time.sleep(0.3)
        assert [pool.submit(join, 0).result(), late.result()] == [0, 1]
