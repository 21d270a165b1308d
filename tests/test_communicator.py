"""pycoll.Communicator beyond the sums: works, groups, stores, what it says about itself."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import random
import threading
import time

import numpy as np
import pytest

import pycoll
from helpers_threads import ThreadRanks
from pool import communicator_ranks, run_ranks
from reference import dtype_of


@pytest.fixture(scope="module")
def three():
    group = ThreadRanks(3)
    yield group
    group.close()


def test_works(three):
    looked = threading.Event()

    def use(communicator):
        array = np.full(1000, communicator.rank + 1.0)
        if communicator.rank == 2:
            assert looked.wait(30)
        work = communicator.all_reduce(array, async_op=True)
        assert isinstance(work, pycoll.Work)
        if communicator.rank == 0:
            start = time.monotonic()
            assert work.wait(timeout=0.05) is False
            assert time.monotonic() - start >= 0.05
            assert not work.is_completed()
            looked.set()
        assert work.wait() is True
        assert work.wait(timeout=0) is True
        assert work.is_completed()
        assert (array == 6).all()
        assert communicator.all_reduce(array) is None

    three.run(use)


def test_many_works_waited_in_any_order(three):
    def use(communicator):
        rng = random.Random(communicator.rank)
        pending = []
        for i in range(300):
            array = np.full(257, float(communicator.rank + i), np.float32)
            pending.append((i, array, communicator.all_reduce(array, async_op=True)))
        rng.shuffle(pending)
        for i, array, work in pending:
            work.wait()
            assert (array == 3 + 3 * i).all()

    three.run(use)


def test_dropped_works_and_strided_outputs(three):
    def use(communicator):
        for _ in range(100):
            communicator.all_reduce(np.ones(5000), async_op=True)  # nobody keeps it
        base = np.zeros((50, 2))
        base[:, 0] = communicator.rank
        work = communicator.all_reduce(base[:, 0], async_op=True)
        work.wait()
        assert (base == [3.0, 0.0]).all()
        outputs = np.full((6, 4, 3), -1.0)
        part = np.full((3, 4), float(communicator.rank))
        work = communicator.all_gather(outputs[::2].transpose(0, 2, 1), part, async_op=True)
        work.wait()
        assert (outputs[1::2] == -1).all()
        assert (outputs[::2] == np.arange(3.0)[:, None, None]).all()
        communicator.barrier()
        gc.collect()

    three.run(use)


def test_an_error_comes_out_of_wait():
    group = ThreadRanks(2)

    def use(communicator):
        work = communicator.all_reduce(np.ones(3 + communicator.rank), async_op=True)
        with pytest.raises(pycoll.Error, match="sizes differ"):
            # The group may be dead before the second call, or while it is queued.
            communicator.barrier(async_op=True).wait()
        with pytest.raises((pycoll.MismatchError, pycoll.AbortedError), match="sizes differ"):
            work.wait()
        with pytest.raises(pycoll.Error, match="sizes differ"):
            communicator.barrier(async_op=True).wait()

    group.run(use)
    group.close()


def test_it_says_what_it_uses(three):
    def use(communicator):
        assert communicator.transport == "shm"
        assert communicator.algorithm_for("all_reduce", 4) == "one_shot"
        assert communicator.algorithm_for("all_reduce", 1 << 26) == "two_shot"
        with pytest.raises(ValueError, match="all_produce"):
            communicator.algorithm_for("all_produce", 4)

    three.run(use)


def test_the_error_classes():
    assert issubclass(pycoll.Error, RuntimeError)
    also = {
        pycoll.InvalidArgumentError: ValueError,
        pycoll.TimeoutError: TimeoutError,
        pycoll.UnsupportedError: NotImplementedError,
        pycoll.OperatingSystemError: OSError,
        pycoll.MismatchError: RuntimeError,
        pycoll.PeerError: RuntimeError,
        pycoll.AbortedError: RuntimeError,
    }
    for error, builtin in also.items():
        assert issubclass(error, pycoll.Error)
        assert issubclass(error, builtin)
        assert error.__doc__


def test_public_calls_are_documented():
    for name, member in inspect.getmembers(pycoll.Communicator):
        if not name.startswith("_"):
            assert inspect.getdoc(member), name


def several_groups(rank, world_size, directory):
    store = pycoll.FileStore(directory)
    groups = [pycoll.Communicator(store, rank, world_size, name=f"g{i}") for i in range(4)]
    if rank < 2:
        groups.append(pycoll.Communicator(store, rank, 2, name="two"))
    order = list(range(4))
    random.Random(rank).shuffle(order)
    arrays = [np.full(20_000, 10.0**i) for i in range(4)]
    works = [(i, groups[i].all_reduce(arrays[i], async_op=True)) for i in order]
    for _, work in works:  # each rank in its own order: groups go on by themselves
        work.wait()
    sums = [array[-1] for array in arrays]
    if rank < 2:
        array = np.ones(5)
        groups[-1].all_reduce(array)
        sums.append(array[0])
    groups[0].close()
    groups[1].barrier()
    again = pycoll.Communicator(store, rank, world_size, name="g0")  # the name is free again
    again.barrier()
    return sums


def test_several_groups_over_one_store():
    results = run_ranks(3, several_groups)
    assert results[2].value == [3.0, 30.0, 300.0, 3000.0]
    assert results[0].value == results[1].value == [3.0, 30.0, 300.0, 3000.0, 2.0]


def over_torch_store(rank, world_size, directory, kind, port):
    import torch.distributed as dist

    if kind == "file":
        store = dist.FileStore(os.path.join(directory, "c10d"), world_size)
    elif kind == "tcp":
        store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, use_libuv=True)
    else:
        store = dist.PrefixStore("a/b c", dist.FileStore(os.path.join(directory, "x"), world_size))
    with pycoll.Communicator(store, rank, world_size) as communicator:
        array = np.full(10, rank + 1.0)
        communicator.all_reduce(array)
        communicator.barrier()
    return array[0]


@pytest.mark.parametrize("kind", ["file", "tcp", "prefix"])
def test_torch_stores_serve(kind):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = run_ranks(2, over_torch_store, kind, port)
    assert [result.value for result in results] == [3.0, 3.0]


def messages(communicator):
    rank, w = communicator.rank, communicator.world_size
    target, source = (rank + 1) % w, (rank - 1) % w
    for n in (0, 1, 1000, 200_000):
        for dtype in ("float64", "bfloat16", "float8_e4m3fn", "bool", "complex128", "uint16"):
            kind = dtype_of(dtype)
            mine = (np.arange(n) % 7 + rank).astype(kind)
            base = np.full((n, 3), 5).astype(kind)
            work = communicator.send(mine, target, tag=n, async_op=True)
            assert communicator.recv(base[:, 1], source, tag=n) == source
            work.wait()
            assert work.source is None
            assert base[:, 1].tobytes() == (np.arange(n) % 7 + source).astype(kind).tobytes()
            assert (base[:, ::2] == kind.type(5)).all()
    communicator.barrier()
    seen = []
    if rank == 0:
        pending = []
        for i in range(2 * (w - 1)):
            array = np.zeros(3)
            if i % 2:
                seen.append((communicator.recv(array), array))
            else:
                pending.append((communicator.recv(array, async_op=True), array))
                assert isinstance(pending[-1][0], pycoll.Work)
                pending[-1][0].wait()
                seen.append((pending[-1][0].source, array))
    else:
        for i in range(2):
            communicator.send(np.full(3, 10.0 * rank + i), 0)
    return [(source, array.tolist()) for source, array in seen]


def test_messages(three):
    seen = three.run(messages)[0]
    by_source = {s: [a for source, a in seen if source == s] for s in (1, 2)}
    assert by_source == {s: [[10.0 * s + i] * 3 for i in range(2)] for s in (1, 2)}


def test_a_message_of_another_size_or_dtype_is_an_error_and_the_group_lives(three):
    def use(communicator):
        for sent, received in ((np.ones(4), np.zeros(5)), (np.ones(4), np.zeros(4, np.int64))):
            if communicator.rank == 1:
                with contextlib.suppress(pycoll.MismatchError):  # it may have gone before
                    communicator.send(sent, 2)
            if communicator.rank == 2:
                with pytest.raises(pycoll.MismatchError, match="recv"):
                    communicator.recv(received, 1)
                assert (received == 0).all()
        communicator.barrier()

    three.run(use)


class Dictionary:
    """The least that a store must have."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def get(self, key, timeout):
        if key not in self.values:
            raise TimeoutError
        return self.values[key]


def test_one_rank_needs_no_peer():
    communicator = pycoll.Communicator(Dictionary(), 0, 1)
    for algorithm in ("auto", "ring", "tree", "one_shot", "two_shot", "recursive_doubling"):
        array = np.arange(5.0)
        communicator.all_reduce(array, "avg", algorithm=algorithm)
        assert (array == np.arange(5.0)).all()
    output = np.zeros((1, 3))
    communicator.all_gather(output, np.arange(3.0))
    assert output.tolist() == [[0, 1, 2]]
    communicator.reduce_scatter(array, np.ones((1, 5)))
    assert (array == 1).all()
    communicator.broadcast(array)
    for use in (communicator.gather, communicator.scatter, communicator.all_to_all):
        moved = np.zeros((1, 5)) if use != communicator.scatter else np.zeros(5)
        given = np.arange(5.0) if use == communicator.gather else np.arange(5.0)[None]
        use(moved, given)
        assert moved.ravel().tolist() == [0, 1, 2, 3, 4]
    communicator.reduce(array, 0, "avg")
    assert (array == 1).all()
    communicator.barrier()
    communicator.close()


def threads_of_one_rank(communicator):
    """Calls from several threads of one process: the same sequence on each rank, by a lock."""
    arrays = [np.full(1000, float(communicator.rank)) for _ in range(8)]
    works = [communicator.all_reduce(array, async_op=True) for array in arrays]
    waiters = [threading.Thread(target=work.wait) for work in works]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join()
    return all((array == 3).all() for array in arrays)


def test_several_threads_wait_at_once():
    assert all(result.value for result in communicator_ranks(3, threads_of_one_rank))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("before", ["", "x"])  # cut before or in the middle of a character
def test_a_long_reason_in_any_language(transport, before):
    group = ThreadRanks(2, {"PYCOLL_TRANSPORT": transport})

    def use(communicator):
        if communicator.rank == 1:
            return communicator.abort(before + "ü" * 9000)
        with pytest.raises(pycoll.AbortedError, match=f"rank 1 aborted the group: {before}üüü"):
            communicator.barrier()

    group.run(use)
    group.close()


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ["one_shot", "tree"])
def test_more_than_two_gibibytes(algorithm):
    group = ThreadRanks(2)
    n = 2**31 + 5
    marks = [0, 2**31 - 1, 2**31, n - 1]

    def use(communicator):
        array = np.zeros(n, np.uint8)
        if communicator.rank == 1:
            array[marks] = [1, 2, 3, 4]
        communicator.broadcast(array, 1, algorithm=algorithm)
        assert array[marks].tolist() == [1, 2, 3, 4]
        assert np.count_nonzero(array) == 4
        del array
        wide = np.zeros(2**29 + 3, np.float32)
        places = [0, 2**29 - 1, 2**29, 2**29 + 2]
        wide[places] = [communicator.rank + i for i in range(4)]
        communicator.all_reduce(wide, "max", algorithm="two_shot" if "one" in algorithm else "ring")
        assert wide[places].tolist() == [1, 2, 3, 4]
        assert np.count_nonzero(wide) == 4

    group.run(use)
    group.close()
