"""Flow control of messages: who has to drive, and when, so that nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pycoll
from helpers_threads import ThreadRanks

TRANSPORTS = ["shm", "tcp"]
ROOM = 16  # small messages for a rank that takes none out: four times PYCOLL_FIFO_DEPTH
TINY_COST = 256 + 8  # credit for one float64 (runtime/messages.h)
RUN_AHEAD = (1 << 20) // TINY_COST


@pytest.fixture(params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[ThreadRanks]:
    ranks = ThreadRanks(2, {"PYCOLL_TRANSPORT": request.param})
    yield ranks
    ranks.close()


def send_numbers(communicator: pycoll.Communicator, first: int, last: int) -> None:
    for number in range(first, last):
        communicator.send(np.full(1, float(number)), 1)


def receive_numbers(communicator: pycoll.Communicator, first: int, last: int) -> None:
    array = np.empty(1)
    for number in range(first, last):
        communicator.recv(array, 0)
        assert array[0] == number


def a_collective_first(communicator: pycoll.Communicator, collective: Callable[..., Any]) -> None:
    """More messages than a FIFO has slots for a rank that is in a collective before it receives."""
    if communicator.rank == 0:
        send_numbers(communicator, 0, 500)
        collective(communicator)
    else:
        collective(communicator)
        receive_numbers(communicator, 0, 500)


def sum_up(communicator: pycoll.Communicator) -> None:
    array = np.full(3, float(communicator.rank + 1))
    communicator.all_reduce(array)
    assert array.tolist() == [3.0] * 3


@pytest.mark.parametrize("collective", [pycoll.Communicator.barrier, sum_up])
def test_small_messages_to_a_rank_that_is_in_a_collective(pair, collective) -> None:
    pair.run(a_collective_first, collective)


def a_rank_that_is_elsewhere(communicator: pycoll.Communicator, sent: threading.Event) -> None:
    if communicator.rank == 0:
        send_numbers(communicator, 0, ROOM)
        sent.set()
    else:
        assert sent.wait(20), "the sends wait for a rank that computes"
        receive_numbers(communicator, 0, ROOM)


def test_a_few_small_messages_to_a_rank_that_is_not_in_pycoll(pair) -> None:
    pair.run(a_rank_that_is_elsewhere, threading.Event())


def credit_of_old_messages(communicator: pycoll.Communicator) -> None:
    """Rank 1 takes in all that there is credit for, and receives a part of it from its memory. With
    that the sender has credit again, though rank 1 asks for no other message before it meets it."""
    before, taken, after = RUN_AHEAD - 20, RUN_AHEAD * 3 // 4, RUN_AHEAD + 1000
    last = np.zeros(1)
    if communicator.rank == 0:
        send_numbers(communicator, 0, before)
        communicator.send(last, 1, tag=1)
        send_numbers(communicator, before, after)
        communicator.barrier()
    else:
        communicator.recv(last, 0, tag=1)
        receive_numbers(communicator, 0, taken)
        communicator.barrier()
        receive_numbers(communicator, taken, after)


def test_credit_comes_back_when_the_last_message_was_already_here(pair) -> None:
    pair.run(credit_of_old_messages)


def test_minus_one_is_not_any_rank(pair) -> None:
    """rank - 1 on rank 0, say: a message of somebody else must not be taken for it."""

    def body(communicator: pycoll.Communicator) -> int | None:
        array = np.zeros(2)
        if communicator.rank == 0:
            communicator.send(array + 5, 1)
            return None
        with pytest.raises(pycoll.InvalidArgumentError, match="rank -1 is not a rank"):
            communicator.recv(array, -1)
        assert array.tolist() == [0, 0]
        return communicator.recv(array)

    assert pair.run(body) == [None, 0]


def test_the_source_of_a_receive_is_known_when_it_is_done(pair) -> None:
    def body(communicator: pycoll.Communicator) -> tuple[int | None, int | None] | None:
        communicator.barrier()
        if communicator.rank == 0:
            communicator.barrier()
            communicator.send(np.ones(2), 1)
            return None
        work = communicator.recv(np.zeros(2), 0, async_op=True)
        before = work.source
        communicator.barrier()
        work.wait()
        return before, work.source

    assert pair.run(body)[1] == (None, 0)
