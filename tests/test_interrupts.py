"""Signals while ranks find each other, connect and wait.

A handler that does nothing must change nothing; one that raises must get its exception out of the
call that it interrupts, soon, whatever the call waits for.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

import pycoll
from pool import run_ranks, torch_ranks

# From the signal to the exception: waits look for signals about ten times a second, a wait in a
# store once a second. A call that does not look waits for a peer that never comes.
SOON = 5.0
NEVER = "100"  # seconds that the interrupted call would wait


class SlowStore(pycoll.FileStore):
    """Waits, as long as another rank may take, where `slow` is part of what is asked for."""

    def __init__(self, path, slow, seconds):
        super().__init__(path)
        self.slow = slow
        self.seconds = seconds

    def lag(self, what):
        end = time.monotonic() + (self.seconds if self.slow == what else 0)
        while time.monotonic() < end:
            time.sleep(0.01)

    def set(self, key, value):
        self.lag("set")
        super().set(key, value)

    def get(self, key, timeout=None):
        value = super().get(key, timeout)
        self.lag("get")
        return value

    def delete_key(self, key):
        self.lag("delete")
        return super().delete_key(key)


def count_alarms():
    seen = []
    signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    return seen


def raise_after(seconds, number=signal.SIGINT):
    """Sends a signal whose handler raises KeyboardInterrupt; [0] of the result is when."""
    sent = []

    def raise_it(*_):
        raise KeyboardInterrupt

    def send():
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    signal.signal(number, raise_it)
    timer = threading.Timer(seconds, send)
    timer.daemon = True
    timer.start()
    return sent


# ---- Handlers that do nothing ----


def connect_with_alarms(rank, world_size, directory, slow):
    seen = count_alarms()
    store = SlowStore(directory, slow, 0.5) if rank == 1 else pycoll.FileStore(directory)
    communicator = pycoll.Communicator(store, rank, world_size)
    signal.setitimer(signal.ITIMER_REAL, 0)
    array = np.full(5, rank + 1.0)
    communicator.all_reduce(array)
    communicator.close()
    return len(seen), array[0]


@pytest.mark.parametrize("slow", ["set", "get", "delete"])
def test_alarms_while_connecting_change_nothing(slow):
    for result in run_ranks(3, connect_with_alarms, slow):
        alarms, total = result.value
        assert total == 6
        assert alarms >= 3


def call_with_alarms(rank, world_size, directory, asynchronous):
    seen = count_alarms()
    communicator = pycoll.Communicator(pycoll.FileStore(directory), rank, world_size)
    arrays = [np.full((50, 40), rank + 1.0) for _ in range(3)]
    for i, array in enumerate(arrays):
        if rank == i:
            time.sleep(0.4)
        work = communicator.all_reduce(array[:, ::2], async_op=asynchronous)
        if work:
            work.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    communicator.close()
    assert len(seen) >= 5
    return all((a[:, ::2] == 6).all() and (a[:, 1::2] == rank + 1).all() for a in arrays)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_alarms_while_waiting_change_nothing(asynchronous):
    results = run_ranks(3, call_with_alarms, asynchronous)
    assert all(result.value for result in results)


def torch_with_alarms(rank, world_size):
    import torch
    import torch.distributed as dist

    seen = count_alarms()
    for i in range(4):
        if i % world_size == rank:
            time.sleep(0.3)
        group = dist.new_group()
        tensor = torch.full((60,), rank + 1.0)
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor.view(6, 10).t(), group=group, async_op=True).wait()
        assert (tensor == 6).all()
        dist.destroy_process_group(group)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return len(seen)


def test_alarms_change_nothing_for_torch():
    assert all(result.value >= 5 for result in torch_ranks(2, torch_with_alarms))


# ---- Handlers that raise ----


def connect_interrupted(rank, world_size, directory, missing, number):
    options = {"PYCOLL_CONNECT_TIMEOUT": NEVER}
    signals = pycoll.FileStore(os.path.join(directory, "signals"), timeout=60)

    class Stuck(pycoll.FileStore):
        """Its rank is in the store, and never at its peers' sockets."""

        def get(self, key, timeout=None):
            signals.set("stored", b"")
            signals.get("done")
            os._exit(0)

    if rank == 1:
        if missing == "connects":
            pycoll.Communicator(Stuck(directory), rank, world_size, options=options)
        return signals.get("done") and None
    if missing == "connects":
        signals.get("stored")
    sent = raise_after(0.5, number)
    with pytest.raises(KeyboardInterrupt):
        pycoll.Communicator(pycoll.FileStore(directory), rank, world_size, options=options)
    took = time.monotonic() - sent[0]
    signals.set("done", b"x")
    return took


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
@pytest.mark.parametrize("missing", ["joins", "connects"])
def test_a_connecting_rank_can_be_interrupted(missing, number):
    result = run_ranks(2, connect_interrupted, missing, number, check=False, timeout=40)[0]
    assert result.exitcode == 0, result.report()
    assert result.error is None, result.report()
    assert result.value < SOON


def answer_late(rank, world_size, directory):
    """Rank 1 has connected, and waits for an answer that rank 0 does not give."""
    options = {"PYCOLL_CONNECT_TIMEOUT": NEVER}
    signals = pycoll.FileStore(os.path.join(directory, "signals"), timeout=60)

    class Deaf(pycoll.FileStore):
        def get(self, key, timeout=None):
            if key.endswith("rank/1"):
                signals.get("done")
                os._exit(0)
            return super().get(key, timeout)

    if rank == 0:
        pycoll.Communicator(Deaf(directory), rank, world_size, options=options)
    sent = raise_after(0.5)
    with pytest.raises(KeyboardInterrupt):
        pycoll.Communicator(pycoll.FileStore(directory), rank, world_size, options=options)
    took = time.monotonic() - sent[0]
    signals.set("done", b"x")
    return took


def test_a_rank_that_waits_for_an_answer_can_be_interrupted():
    result = run_ranks(2, answer_late, check=False, timeout=40)[1]
    assert result.error is None, result.report()
    assert result.value < SOON


def torch_connect_interrupted(rank, world_size):
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        return store.wait(["done"])
    sent = raise_after(0.5)
    with pytest.raises(KeyboardInterrupt):
        dist.new_group()
    took = time.monotonic() - sent[0]
    store.set("done", "")
    return took


def test_torch_can_be_interrupted_while_it_makes_a_group():
    env = {"PYCOLL_CONNECT_TIMEOUT": NEVER}
    result = torch_ranks(2, torch_connect_interrupted, env=env, group_timeout=100)[0]
    assert result.value < SOON


def wait_interrupted(rank, world_size, directory, wait):
    signals = pycoll.FileStore(os.path.join(directory, "signals"), timeout=60)
    communicator = pycoll.Communicator(pycoll.FileStore(directory), rank, world_size)
    if rank == 1:
        return signals.get("done") and None
    array = np.ones((50, 40))
    calls = {
        "sync": lambda: communicator.all_reduce(array),
        "strided": lambda: communicator.all_reduce(array[:, ::2]),
        "work": communicator.all_reduce(array, async_op=True).wait if wait == "work" else None,
        "limited": lambda: communicator.barrier(async_op=True).wait(timeout=float(NEVER)),
        "barrier": communicator.barrier,
    }
    sent = raise_after(0.5)
    with pytest.raises(KeyboardInterrupt):
        calls[wait]()
    took = time.monotonic() - sent[0]
    signals.set("done", b"x")
    return took


@pytest.mark.parametrize("wait", ["sync", "strided", "work", "limited", "barrier"])
def test_every_wait_can_be_interrupted(wait):
    assert run_ranks(2, wait_interrupted, wait, timeout=40)[0].value < SOON


# ---- Handlers that use the group whose call they interrupt ----


def handler_uses_the_group(rank, world_size, directory, what):
    """What rank 0's handler and the call that it interrupted raised, and how long the handler took.

    Rank 1 comes when the handler is through.
    """
    store = pycoll.FileStore(directory)
    communicator = pycoll.Communicator(store, rank, world_size, timeout=20)
    raised = []

    def attempt(function):
        try:
            function()
            raised.append(None)
        except pycoll.Error as error:
            raised.append(f"{type(error).__name__}: {error}")

    communicator.barrier()
    if rank == 1:
        time.sleep(1)
        attempt(lambda: communicator.all_reduce(np.ones(3)))
        return raised, 0

    uses = {
        "close": communicator.close,
        "call": lambda: communicator.all_reduce(np.ones(3)),
        "send": lambda: communicator.send(np.ones(3), 1),
        "wait": lambda: communicator.barrier(async_op=True).wait(),
    }
    took = []

    def handle(*_):
        begin = time.monotonic()
        attempt(uses[what])
        took.append(time.monotonic() - begin)

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    attempt(lambda: communicator.all_reduce(np.ones(3)))
    return raised, took[0]


@pytest.mark.parametrize("what", ["call", "send"])
def test_a_handler_that_waits_for_the_interrupted_group_is_told_so(what):
    one, other = run_ranks(2, handler_uses_the_group, what, timeout=20)
    (in_handler, after), took = one.value
    assert "InvalidArgumentError" in in_handler
    assert "signal handler" in in_handler
    assert took < 1
    # The group is not harmed.
    assert after is None
    assert other.value[0] == [None]


def test_a_handler_may_close_the_interrupted_group():
    one, other = run_ranks(2, handler_uses_the_group, "close", timeout=20)
    (in_handler, after), took = one.value
    assert in_handler is None
    assert took < 3  # close() gives callers in other threads a second to get away
    assert "rank 0 closed the group" in after
    assert "rank 0 closed the group" in other.value[0][0]


def test_a_handler_that_waits_for_an_operation_behind_the_interrupted_one_is_told_so():
    one, other = run_ranks(2, handler_uses_the_group, "wait", timeout=20, check=False)
    (in_handler, after), _ = one.value
    assert "signal handler" in in_handler
    assert after is None
    assert other.value[0] == [None]
