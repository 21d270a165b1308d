"""An operation that gets nowhere is reported on stderr after PYCOLL_STALL_WARNING seconds.

Public bug report F13: a peer that stands still was waited for in silence.
"""

from __future__ import annotations

import os
import re
import signal
import time

import numpy as np
import pytest

from helpers_cases import TRANSPORTS
from pool import communicator_ranks

# test_cases_failure.py has the same in short.
pytestmark = pytest.mark.full
WORDS = "has waited for"
# Over TCP, of a rank that stands still and has not had to send this one anything before.
UNSEEN = "made no call on this group that is known here"
STOPPED_FOR = 1.2
SOONER = {"PYCOLL_STALL_WARNING": "0.4"}


def stand_still():
    """This process stops, until a child continues it."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(STOPPED_FOR)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)


def summed(communicator, count):
    array = np.arange(count, dtype=np.float64) + communicator.rank
    communicator.all_reduce(array)
    return np.array_equal(array, 3 * np.arange(count, dtype=np.float64) + 3)


def calls_with_pauses(communicator, pause):
    """Before an all_reduce, and before a message to rank 0, rank 1 does `pause`."""
    right = [summed(communicator, 1000)]
    if communicator.rank == 1:
        pause()
    right.append(summed(communicator, 300_000))
    if communicator.rank == 1:
        pause()
        communicator.send(np.arange(7.0), 0, tag=3)
    elif communicator.rank == 0:
        message = np.zeros(7)
        communicator.recv(message, 1, tag=3)
        right.append(np.array_equal(message, np.arange(7.0)))
    if communicator.rank == 1:
        pause()
    array = np.full(5000, communicator.rank + 1.0)
    work = communicator.all_reduce(array, async_op=True)
    time.sleep(STOPPED_FOR)  # the thread of the group drives it, and reports
    work.wait()
    right.append((array == 6).all())
    communicator.close()
    return right


def reports(result):
    return [line for line in result.stderr.splitlines() if WORDS in line]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_f13_a_stopped_peer_is_named_and_is_waited_for(transport):
    env = {**SOONER, "PYCOLL_TRANSPORT": transport}
    results = communicator_ranks(3, calls_with_pauses, stand_still, env=env)
    assert all(all(result.value) for result in results)
    for rank in (0, 2):
        for number in (2, 3):
            (line, *_) = [
                line for line in reports(results[rank]) if f"in all_reduce #{number}" in line
            ]
            assert f"rank {rank} of group" in line and "timeout" in line, line
            culprit = rf"rank 1,?( which)? has (not come beyond all_reduce #{number - 1}|{UNSEEN})"
            assert re.search(culprit, line), line
    (message,) = [line for line in reports(results[0]) if "recv" in line][:1]
    assert "rank 1" in message and "tag 3" in message, message
    # Rank 1 has waited for nobody: the time in which it was stopped does not count.
    assert not reports(results[1]), results[1].stderr


def short_pause():
    time.sleep(0.4)


@pytest.mark.parametrize(
    ("seconds", "pause"), [("30", stand_still), ("0", stand_still), ("1.5", short_pause)]
)
def test_f13_no_report_below_the_time(seconds, pause):
    env = {"PYCOLL_STALL_WARNING": seconds}
    results = communicator_ranks(3, calls_with_pauses, pause, env=env)
    assert all(all(result.value) for result in results)
    assert not any(reports(result) for result in results), [r.stderr for r in results]
