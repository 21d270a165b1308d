"""Compressed calls met by handlers of signals, callbacks, other threads and forked children."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest

import pycoll
from codec_model import values_of
from helpers_scripts import fork
from helpers_threads import ThreadRanks
from pool import communicator_ranks, torch_ranks

torch = pytest.importorskip("torch")
dist = torch.distributed

N = 20_000


def in_handler(communicator, what, lanes, tag):
    """Rank 0 is interrupted in a call for which rank 1 does not come; its handler does `what`."""
    x, y = values_of(communicator.rank, N), values_of(communicator.rank, N)
    if lanes:
        communicator.all_reduce(y, codec="int8")
    communicator.barrier()
    if communicator.rank == 1:
        time.sleep(3)
        with pytest.raises(pycoll.Error):
            communicator.all_reduce(y, codec="int8")
            communicator.all_reduce(y, codec="int8")
        return None

    def handler(*_):
        if what == "close":
            communicator.close()
        else:
            communicator.all_reduce(x, codec="int8")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    start = time.monotonic()
    with pytest.raises(pycoll.Error) as caught:
        communicator.all_reduce(x, codec=tag, timeout=20)
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize(
    ("what", "lanes", "tag", "text"),
    [
        ("close", False, "int8", "closed the group"),
        ("call", False, "int8", "signal handler"),
        ("call", True, None, "signal handler"),
    ],
)
def test_a_signal_handler_of_a_waiting_call(what, lanes, tag, text):
    """It may close the group; what would wait for the call that it interrupts is refused."""
    results = communicator_ranks(2, in_handler, what, lanes, tag, timeout=60)
    message, seconds = results[0].value
    assert text in message
    assert seconds < 10


def shut_down_beside_a_callback(rank, world_size, what):
    x, events = torch.ones(N), []
    pycoll.all_reduce(x, codec="int8")
    dist.barrier()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))

    def callback(future):
        events.append("begun")
        time.sleep(0.5)
        if what == "close":
            backend.shutdown()
        else:
            try:
                pycoll.all_reduce(torch.ones(N), codec="int8", async_op=True)
            except RuntimeError as error:
                events.append(str(error))
        events.append("through")
        return future.value()

    work = pycoll.all_reduce(torch.ones(15 * N), codec="int8", async_op=True)
    if rank == 1:
        time.sleep(0.2)
    work.get_future().then(callback)
    while not events:
        time.sleep(0.01)
    start = time.monotonic()
    backend.shutdown()
    seconds = time.monotonic() - start
    while events[-1] != "through":
        time.sleep(0.01)
    return seconds


@pytest.mark.parametrize("what", ["close", "call"])
def test_a_callback_while_the_group_is_shut_down(what):
    for result in torch_ranks(2, shut_down_beside_a_callback, what, timeout=60):
        assert result.value < 10


@pytest.mark.parametrize("what", ["close", "call"])
def test_a_child_that_is_forked_while_a_first_call_waits(what):
    group = ThreadRanks(2)
    communicator, x = group.communicators[0], values_of(0, N)
    caller = threading.Thread(target=lambda: communicator.all_reduce(x, codec="int8"))
    caller.start()
    time.sleep(0.3)

    def child():
        try:
            if what == "close":
                communicator.close()
            else:
                communicator.all_reduce(values_of(0, N), codec="int8")
        except ValueError as error:
            return error
        return "through"

    status, text = fork(child)
    assert status == 0
    assert text == "through" if what == "close" else "forked" in text
    group.communicators[1].all_reduce(values_of(1, N), codec="int8")
    caller.join(20)
    assert not caller.is_alive()
    group.close()


def test_calls_that_wait_for_others_do_not_time_out():
    """A call's time counts from when it runs, as without a codec."""
    group = ThreadRanks(2)

    def use(communicator):
        arrays = [np.ones(1 << 21, np.float32) for _ in range(16)]
        communicator.all_reduce(arrays[0], codec="int8")
        communicator.barrier()
        start = time.monotonic()
        communicator.all_reduce(arrays[0], codec="int8")
        one = time.monotonic() - start
        communicator.barrier()
        works = [
            communicator.all_reduce(x, codec="int8", async_op=True, timeout=max(5 * one, 1))
            for x in arrays
        ]
        if communicator.rank == 1:
            time.sleep(0.2)
        for work in works:
            assert work.wait()

    group.run(use)
    group.close()
