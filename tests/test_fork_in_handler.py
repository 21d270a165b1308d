"""A signal handler forks amid a call: the child is out of it, and the parent's call is untouched.

The child leaves the handler on the stack of a call that is its parent's. Whatever it did there it
would do to its parent's peers: their segments are shared with it.
"""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import pycoll
from helpers_shareable import shareable
from pool import run_ranks

SIZE = 300_000
CALLS = 30


class HandlerError(Exception):
    pass


def values(rank, number):
    return np.arange(SIZE, dtype=np.float32) % 101 + 7 * rank + number


def call(group, array, way):
    if way == "sync":
        group.all_reduce(array)
    else:
        group.all_reduce(array, async_op=True).wait()


def end_of_child(group, array, text, pipe):
    """Tells how its call ended, and that it may drop everything."""
    try:
        group.all_reduce(array)
    except pycoll.InvalidArgumentError:
        group.close()
    else:
        text += ", and the group could be used"
    finally:
        os.write(pipe, text.encode())
        os._exit(0)


def fork_amid_a_call(rank, world_size, directory, how, way, lent):
    make = shareable if lent else np.array
    parent = os.getpid()
    read, write = os.pipe()
    children = []

    def handler(*_):
        children.append(os.fork())
        if children[0] == 0 and how == "raises":
            raise HandlerError("of the child")

    with pycoll.Communicator(pycoll.FileStore(f"{directory}/s"), rank, world_size) as group:
        array = make(values(rank, 0))
        group.all_reduce(array)
        array[...] = values(rank, 1)
        if rank == 0:
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        else:
            time.sleep(0.6)
        text = "nothing was raised"
        try:
            call(group, array, way)
        except (pycoll.Error, HandlerError) as error:
            text = f"{type(error).__name__}: {error}"
        if os.getpid() != parent:
            end_of_child(group, array, text, write)
        assert text == "nothing was raised"
        for number in range(1, CALLS):
            assert (array == sum(values(r, number) for r in range(world_size))).all(), number
            array[...] = values(rank, number + 1)
            group.all_reduce(array)
    if rank == 1:
        return ""
    os.close(write)
    text = os.read(read, 2000).decode()
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    return text


@pytest.mark.parametrize("lent", [False, True], ids=["ordinary", "shareable"])
@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("how", ["returns", "raises"])
def test_the_parents_call_is_its_own(how, way, lent):
    results = run_ranks(2, fork_amid_a_call, how, way, lent, timeout=30)
    text = results[0].value
    if how == "raises":
        assert text == "HandlerError: of the child"
    else:
        assert text.startswith("InvalidArgumentError") and "forked" in text
