"""Collectives over codecs that cannot be, and how they end."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time

import numpy as np
import pytest

import pycoll
from codec_model import values_of
from helpers_scripts import fork
from helpers_threads import ThreadRanks, ends_by_itself
from pool import communicator_ranks
from test_codec_collectives import reduce_here

# ---- Errors ----


@pytest.mark.parametrize("mine", ["int4", None, pycoll.Int8(block=64), "fp8_e4m3"])
def test_codecs_that_differ_are_named(mine):
    group = ThreadRanks(2)

    def use(communicator):
        x = values_of(communicator.rank, 20_000)
        codec = mine if communicator.rank else "int8"
        try:
            communicator.all_reduce(x, codec=codec, timeout=5)
        except pycoll.Error as error:
            return type(error).__name__, str(error)
        return None

    results = group.run(use)
    assert all(results), results
    if mine is not None:
        assert any("codecs differ" in text or "sizes differ" in text for _, text in results)
    group.close()


def test_a_dead_group_says_why():
    group = ThreadRanks(2)

    def use(communicator):
        x = values_of(communicator.rank, 20_000)
        communicator.all_reduce(x, codec="int8")
        if communicator.rank == 0:
            communicator._core.abort("enough")
        with pytest.raises(pycoll.Error, match="enough"):
            for _ in range(1000):
                communicator.all_reduce(x, codec="int8", timeout=10)
        with pytest.raises(pycoll.Error, match="enough"):
            communicator.all_reduce(x)

    group.run(use)
    group.close()


def test_memory_is_checked_as_without_a_codec(groups):
    group, n = groups(2), 10_000

    def use(communicator):
        memory = np.arange(3 * n, dtype=np.float32)
        input, output = memory[: 2 * n].reshape(2, n), memory[n // 2 : n // 2 + 2 * n].reshape(2, n)
        before = memory.copy()
        for codec in (None, "int8"):
            with pytest.raises(pycoll.InvalidArgumentError, match="overlapping"):
                communicator.all_to_all(output, input, codec=codec)
        assert memory.tobytes() == before.tobytes()
        x = np.ones(n, np.float32)
        communicator.all_reduce(x, codec="fp16")  # nothing was begun
        assert (x == 2).all()

    group.run(use)


# ---- Ends ----


def test_an_abort_ends_what_nobody_waits_for():
    """Nobody drives, and nobody looks: futures of DDP are waited for like this."""
    group, aborted = ThreadRanks(2), threading.Event()

    def use(communicator):
        x = values_of(communicator.rank, 20_000)
        communicator.all_reduce(x, codec="int8")
        if communicator.rank == 1:
            communicator.abort("enough")
            aborted.set()
            return
        assert aborted.wait(20)
        work = communicator.all_reduce(x, codec="int8", async_op=True)
        ends_by_itself(work)
        with pytest.raises(pycoll.Error, match="enough"):
            work.wait()

    def begun_before(communicator):
        x = values_of(communicator.rank, 20_000)
        if communicator.rank == 1:
            return
        work = communicator.all_reduce(x, codec="int8", async_op=True)
        communicator.abort("enough")
        ends_by_itself(work)
        with pytest.raises(pycoll.Error, match="enough"):
            work.wait()

    group.run(use)
    group.close()
    group = ThreadRanks(2)
    group.run(reduce_here, 20_000, "float32", "sum", {"codec": "int8"})
    group.run(begun_before)
    group.close()


def test_close_ends_a_first_call_whose_peer_does_not_come():
    group = ThreadRanks(2)
    communicator, errors = group.communicators[0], []

    def call():
        try:
            communicator.all_reduce(values_of(0, 20_000), codec="int8")
        except pycoll.Error as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.3)
    communicator.close()  # which waits some seconds, not GROUP_TIMEOUT
    thread.join(5)
    assert errors
    assert "closed the group" in errors[0]
    group.close()


def test_a_short_wait_is_short(groups):
    group = groups(2)

    def use(communicator):
        x = values_of(communicator.rank, 20_000)
        communicator.all_reduce(x, codec="int8")
        if communicator.rank == 1:
            time.sleep(0.5)
        work = communicator.all_reduce(x, codec="int8", async_op=True)
        if communicator.rank == 0:
            start = time.monotonic()
            waits = 0
            while not work.wait(1e-4):
                waits += 1
            assert waits > 100 * (time.monotonic() - start)
        assert work.wait(20)

    group.run(use)


def test_a_forked_child_cannot_wait():
    """It would wait for ever: the threads are the parent's."""
    group = ThreadRanks(2)
    group.run(reduce_here, 20_000, "float32", "sum", {"codec": "int8"})
    communicator, x = group.communicators[0], values_of(0, 20_000)
    work = communicator.all_reduce(x, codec="int8", async_op=True)

    def child():
        try:
            work.wait(20)
        except ValueError as error:
            return error
        return "waited"

    status, text = fork(child, 30)
    assert status == 0
    assert "forked" in text
    group.communicators[1].all_reduce(values_of(1, 20_000), codec="int8")
    assert work.wait(20)
    group.close()


def without_descriptors(communicator, left):
    x = values_of(communicator.rank, 20_000)
    communicator.all_reduce(x)
    if communicator.rank == 1:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + left, most))
    start = time.monotonic()
    with pytest.raises(pycoll.Error) as caught:
        communicator.all_reduce(x, codec="int8")
    with pytest.raises(pycoll.Error):
        communicator.all_reduce(x)
    return str(caught.value), time.monotonic() - start


# A lane takes descriptors in shared memory alone, in two steps.
@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_rank_without_lanes_tells_its_peers(left):
    env = {"PYCOLL_TRANSPORT": "shm"}
    ranks = communicator_ranks(2, without_descriptors, left, env=env, timeout=60)
    results = [rank.value for rank in ranks]
    assert "open files" in results[1][0]
    assert results[0][1] < 10


def waits_alone(communicator):
    x = values_of(communicator.rank, 20_000)
    communicator.all_reduce(x)
    if communicator.rank == 1:
        time.sleep(6)  # does not come
        with pytest.raises(pycoll.Error, match="interrupted"):
            communicator.all_reduce(x, codec="int8")
        return None
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        communicator.all_reduce(x, codec="int8")
    return time.monotonic() - start


def test_the_wait_of_a_first_call_can_be_interrupted():
    results = communicator_ranks(2, waits_alone, timeout=60)
    assert results[0].value < 5


@pytest.mark.parametrize(
    "mine",
    [{"n": 262_144}, {"op": "avg"}, {"dtype": "float16"}],
    ids=["length", "op", "dtype"],
)
def test_calls_that_differ_are_named(mine):
    """What travels would fit: only what ranks compare can tell."""
    group = ThreadRanks(2)

    def use(communicator):
        how = {"n": 131_072, "op": "sum", "dtype": "float32"}
        how |= mine if communicator.rank else {}
        x = values_of(communicator.rank, how["n"], how["dtype"])
        before = x.copy()
        try:
            communicator.all_reduce(x, how["op"], codec="fp16", timeout=10)
        except pycoll.Error as error:
            return str(error), x.tobytes() == before.tobytes()
        return "no error", False

    for text, unchanged in group.run(use):
        assert "differ" in text and "all_reduce over codes" in text
        assert unchanged
    group.close()


def test_a_timeout_is_for_the_whole_call():
    group = ThreadRanks(2)

    def use(communicator):
        x = values_of(communicator.rank, 1 << 22)
        communicator.all_reduce(x, codec="int8")
        start = time.monotonic()
        if communicator.rank:
            time.sleep(1.5)
        with pytest.raises(pycoll.Error):
            communicator.all_reduce(x, codec="int8", timeout=0.5)
        return time.monotonic() - start

    assert max(group.run(use)) < 5
    group.close()
