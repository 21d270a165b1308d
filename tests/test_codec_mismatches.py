"""Ranks of which one gives a call a codec and another none: all are told at once, who called what.

Calls over codes travel in groups of their own, so neither rank waits for the other there: each
would wait until its time is up. Times given here are therefore far beyond what these tests take.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import pycoll
from codec_model import values_of
from helpers_threads import ThreadRanks

TRANSPORTS = ["shm", "tcp"]
FOREVER = 50.0  # seconds
AT_ONCE = 8.0  # on a busy machine; alone it is 0.2
N = 20_000

# What each collective reads and writes, for two ranks.
CALLS = {
    "all_reduce": lambda c, a, b, **how: c.all_reduce(b, **how),
    "reduce_scatter": lambda c, a, b, **how: c.reduce_scatter(b[: N // 2], a.reshape(2, -1), **how),
    "all_gather": lambda c, a, b, **how: c.all_gather(b.reshape(2, -1), a[: N // 2], **how),
    "all_to_all": lambda c, a, b, **how: c.all_to_all(b.reshape(2, -1), a.reshape(2, -1), **how),
    "broadcast": lambda c, a, b, **how: c.broadcast(b, 0, **how),
}


def called(communicator, name, codec, **how):
    """The error, whether the output is what it was, and how long it took."""
    a, b = values_of(communicator.rank, N, seed=1), values_of(communicator.rank, N, seed=2)
    before, start = b.copy(), time.monotonic()
    text = "no error"
    try:
        done = CALLS[name](communicator, a, b, codec=codec, **how)
        if done is not None:
            done.wait()
        # A root of a broadcast may be through before anybody else has come.
        communicator.barrier(timeout=FOREVER)
    except pycoll.Error as error:
        text = str(error)
    return text, b.tobytes() == before.tobytes(), time.monotonic() - start


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("exact", [0, 1])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_a_codec_and_one_without(name, exact, transport):
    group = ThreadRanks(2, {"PYCOLL_TRANSPORT": transport})

    def use(communicator):
        communicator.all_reduce(np.ones(N, np.float32), codec="int8")
        codec = None if communicator.rank == exact else "int8"
        return called(communicator, name, codec, timeout=FOREVER)

    results = group.run(use)
    group.close()
    for text, unchanged, seconds in results:
        assert seconds < AT_ONCE, (seconds, text)
        assert f"rank {1 - exact} called {name} #" in text, text
        assert f"rank {exact} called {name} #" in text, text
        assert "over codes (int8 in blocks of 256" in text, text
        assert "one call has a codec, the other has none" in text, text
        assert "the same codec, or be in the same region" in text, text
        # What only moves data may write before it can know, where ranks share no memory.
        assert unchanged or (transport == "tcp" and "reduce" not in name), text


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("exact", [0, 1])
def test_whoever_comes_late(exact, late, transport):
    """Later than ranks ask each other where they are."""
    group = ThreadRanks(2, {"PYCOLL_TRANSPORT": transport})

    def use(communicator):
        communicator.all_reduce(np.ones(N, np.float32), codec="int8")
        if communicator.rank == late:
            time.sleep(0.5)
        codec = None if communicator.rank == exact else "int8"
        return called(communicator, "all_reduce", codec, async_op=True, timeout=FOREVER)

    results = group.run(use)
    group.close()
    for text, unchanged, seconds in results:
        assert f"rank {exact} called all_reduce #" in text, text
        assert "over codes (int8 in blocks of 256, sum, 20000 x float32)" in text, text
        assert seconds < AT_ONCE, (seconds, text)
        assert unchanged, text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_call_alike_in_any_mix(transport):
    """Numbers of calls are the same on all ranks, whichever of them travel as codes, and however
    many are under way."""
    group = ThreadRanks(3, {"PYCOLL_TRANSPORT": transport})

    def use(communicator):
        rng, works = np.random.default_rng(5), []
        for i in range(200):
            codec = ("int8", None, "fp16")[rng.integers(3)]
            x = np.full(N if codec else rng.integers(1, N), 2.0**communicator.rank, np.float32)
            work = communicator.all_reduce(x, codec=codec, async_op=bool(rng.integers(2)))
            works.append((work, x))
            if i % 7 == communicator.rank:
                time.sleep(1e-3)
        for work, _ in works:
            if work is not None:
                work.wait()
        # fp16 and exact sums of powers of two are exact, and int8 codes of one magnitude nearly.
        assert all(np.allclose(x, 7, rtol=0.02) for _, x in works)

    group.run(use)
    group.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("exact", [0, 1])
def test_the_first_call_of_a_group(exact, transport):
    """Its ranks make connections first: errors name the call that was made, not what does that."""
    group = ThreadRanks(2, {"PYCOLL_TRANSPORT": transport})

    def use(communicator):
        codec = None if communicator.rank == exact else "int8"
        return called(communicator, "all_reduce", codec, timeout=FOREVER)

    for text, unchanged, seconds in group.run(use):
        assert f"rank {exact} called all_reduce #1 (sum, 20000 x float32)" in text, text
        over = (
            "called all_reduce over codes (int8 in blocks of 256, sum, float32), as all_gather #1"
        )
        assert f"rank {1 - exact} {over}" in text, text
        assert seconds < AT_ONCE, (seconds, text)
        assert unchanged, text
    group.close()


def test_the_first_call_of_a_group_that_a_rank_does_not_make():
    """Making the connections is bounded by the group's own timeout."""
    group = ThreadRanks(2, timeout=0.5)
    waited = threading.Event()

    def use(communicator):
        if communicator.rank:
            return waited.wait(FOREVER)
        try:
            return called(communicator, "broadcast", "uint4", timeout=FOREVER)[0]
        finally:
            waited.set()

    text = group.run(use)[0]
    group.close()
    assert "in broadcast over codes (uint4 in blocks of 256" in text, text
    assert "rank 1, which has made no call on this group" in text, text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_how_far_a_late_rank_has_come(transport):
    group = ThreadRanks(2, {"PYCOLL_TRANSPORT": transport})
    waited = threading.Event()

    def use(communicator):
        communicator.all_reduce(np.ones(N, np.float32), codec="int8")
        if communicator.rank:
            return waited.wait(FOREVER)
        try:
            with pytest.raises(pycoll.Error) as caught:
                communicator.barrier(timeout=0.5)
            return str(caught.value)
        finally:
            waited.set()

    text = group.run(use)[0]
    group.close()
    assert "rank 1, which has not come beyond all_reduce #" in text, text
    assert "over codes (int8 in blocks of 256, sum, 20000 x float32)" in text, text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_regions(transport):
    group = ThreadRanks(2, {"PYCOLL_TRANSPORT": transport})

    def use(communicator):
        communicator.all_reduce(np.ones(N, np.float32), codec="int8")
        with pycoll.codec("int8" if communicator.rank else None):
            return called(communicator, "all_reduce", None, timeout=FOREVER)

    for text, _, seconds in group.run(use):
        assert "be in the same region" in text, text
        assert seconds < AT_ONCE, (seconds, text)
    group.close()
