"""Ranks that die, stop, leave or are interrupted, and what a group leaves behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
import time

import numpy as np
import pytest

import pycoll
from pool import communicator_ranks, run_ranks, torch_ranks
from test_collectives import ALGORITHMS

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
PROMPTLY = 1.0  # seconds from the death of a rank to the error on every survivor


def error_of(function):
    """(class name, message, monotonic time) of the pycoll.Error that a call raises."""
    try:
        function()
    except pycoll.Error as error:
        return type(error).__name__, str(error), time.monotonic()
    raise AssertionError("no error was raised")


def die_at(moment):
    """SIGKILL to this process from a thread, once `moment` has come."""

    def kill():
        time.sleep(max(0.0, moment - time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


# ---- Death ----


def loop_until_error(communicator, victim, algorithm, size):
    array = np.zeros(size, np.float32)
    communicator.all_reduce(array, algorithm=algorithm)
    # The clock is the same in all processes of a host: they agree when the victim dies.
    now = np.array([time.monotonic()])
    communicator.all_reduce(now, "max")
    moment = float(now[0]) + 0.3
    if communicator.rank == victim:
        die_at(moment)

    def loop():
        while True:
            communicator.all_reduce(array, algorithm=algorithm)

    kind, text, when = error_of(loop)
    again = error_of(communicator.barrier)
    return kind, text, when - moment, again[:2], time.process_time()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_a_killed_rank_is_named_within_a_second(world_size, algorithm):
    victim = world_size - 1 if algorithm in ("ring", "two_shot") else 0
    args = (victim, algorithm, 1_000_000)
    results = communicator_ranks(world_size, loop_until_error, *args, check=False, timeout=20)
    assert results[victim].exitcode == -signal.SIGKILL
    kinds = set()
    for result in results:
        if result.rank == victim:
            continue
        assert result.exitcode == 0, result.report()
        assert result.error is None, result.report()
        assert "terminate called" not in result.stderr
        kind, text, after, again, _ = result.value
        kinds.add(kind)
        assert f"rank {victim} died" in text, text
        assert after < PROMPTLY
        assert again == (kind, text), "a later call does not tell the same"
    assert "PeerError" in kinds
    assert kinds <= {"PeerError", "AbortedError"}


def barrier_until_error(communicator, victim):
    communicator.barrier()
    if communicator.rank == victim:
        time.sleep(0.5)  # the others are asleep in the kernel by now
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.process_time(), time.monotonic()
    kind, text, when = error_of(communicator.barrier)
    return kind, text, when - start[1], time.process_time() - start[0]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_killed_while_the_others_sleep(world_size):
    results = communicator_ranks(world_size, barrier_until_error, 1, check=False)
    for result in results:
        if result.rank == 1:
            continue
        assert result.exitcode == 0, result.report()
        kind, text, waited, cpu = result.value
        assert kind in ("PeerError", "AbortedError")
        assert "rank 1 died" in text
        assert 0.4 < waited < 0.5 + PROMPTLY
        assert cpu < 0.2


def torch_loop_until_error(rank, world_size, victim):
    import torch
    import torch.distributed as dist

    tensor = torch.ones(1 << 18)
    dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(100_000):
            dist.all_reduce(tensor)
    except dist.DistBackendError as error:
        first = str(error)
    try:
        dist.all_reduce(tensor, async_op=True).wait()
    except dist.DistBackendError as error:
        return first, str(error)
    return None


def test_torch_survivors_get_a_dist_backend_error():
    results = torch_ranks(3, torch_loop_until_error, 2, check=False)
    for result in results[:2]:
        assert result.exitcode == 0, result.report()
        assert all("rank 2 died" in text for text in result.value)


def survivors_regroup(rank, world_size, directory):
    store = pycoll.FileStore(directory)
    communicator = pycoll.Communicator(store, rank, world_size, name="first")
    communicator.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error_of(lambda: [communicator.barrier() for _ in range(1000)])
    communicator.close()
    second = pycoll.Communicator(store, rank - (rank > 1), world_size - 1, name="second")
    array = np.full(1000, rank + 1.0)
    second.all_reduce(array)
    return array[0]


def test_survivors_can_form_a_new_group():
    results = run_ranks(3, survivors_regroup, check=False)
    assert [results[0].value, results[2].value] == [4.0, 4.0], results[0].report()


# ---- Stopped, late, leaving ----


def wait_for_stopped(communicator, victim):
    communicator.barrier()
    if communicator.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)  # the pool kills it at the end
    array = np.ones(300_000)
    start = time.monotonic()
    kind, text, when = error_of(lambda: communicator.all_reduce(array, timeout=1.0))
    os.kill(communicator_pids(communicator)[victim], signal.SIGCONT)
    return kind, text, when - start


def communicator_pids(communicator):
    """Filled by stopped_rank, which knows them."""
    return communicator.pids


def stopped_rank(communicator, victim):
    pids = np.zeros((communicator.world_size, 1), np.int64)
    communicator.all_gather(pids, np.array([os.getpid()], np.int64))
    communicator.pids = [int(pid) for pid in pids[:, 0]]
    if communicator.rank == victim:
        with contextlib.suppress(pycoll.Error):
            return wait_for_stopped(communicator, victim)
    return wait_for_stopped(communicator, victim)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_stopped_rank_is_named_at_the_deadline(world_size):
    results = communicator_ranks(world_size, stopped_rank, 1, check=False, timeout=15)
    for result in results:
        if result.rank == 1:
            continue
        assert result.error is None, result.report()
        kind, text, waited = result.value
        assert 0.9 < waited < 2.0
        assert "rank 1" in text
        if kind == "TimeoutError":
            for word in ("Timed out", "all_reduce #3", "300000 x float64", "barrier #2"):
                assert word in text, text
        else:  # another rank's deadline came first
            assert kind == "AbortedError"
            assert "Timed out" in text


def late_rank(communicator, seconds):
    communicator.barrier()
    timeout = 0.3
    if communicator.rank == 2:
        time.sleep(seconds)
        timeout = 60.0  # of its own it would wait long
    start = time.monotonic()
    kind, text, when = error_of(lambda: communicator.broadcast(np.ones(4), 2, timeout=timeout))
    return kind, text, start, when


def test_a_timeout_says_who_is_late_and_by_how_much():
    results = communicator_ranks(3, late_rank, 1.5)
    came = results[2].value[2]
    for rank in (0, 1):
        kind, text, start, when = results[rank].value
        assert when - start > 0.25
        assert when < came, "the error came with the late rank, not by the clock"
        for word in ("Timed out", "0.3", "broadcast #2", "root 2", "rank 2", "barrier #1"):
            assert word in text, text
        assert kind in ("TimeoutError", "AbortedError")
    assert "TimeoutError" in [results[rank].value[0] for rank in (0, 1)]
    # Whoever was late learns that the group is gone, at once.
    kind, text, start, when = results[2].value
    assert kind == "AbortedError"
    assert when - start < PROMPTLY


def raise_on_one(rank, world_size, directory):
    with pycoll.Communicator(pycoll.FileStore(directory), rank, world_size) as communicator:
        communicator.barrier()
        if rank == 1:
            raise ZeroDivisionError("the reason")
        start = time.monotonic()
        kind, text, when = error_of(communicator.barrier)
        return kind, text, when - start


def test_an_exception_on_one_rank_reaches_the_others():
    results = run_ranks(3, raise_on_one, check=False)
    assert results[1].error.is_a("ZeroDivisionError")
    for rank in (0, 2):
        kind, text, waited = results[rank].value
        assert kind == "AbortedError"
        assert "rank 1" in text
        assert "ZeroDivisionError: the reason" in text
        assert waited < PROMPTLY


def leave_on_one(communicator, how):
    communicator.barrier()
    if communicator.rank == 1:
        if how == "close":
            communicator.close()
        elif how == "collected":
            del communicator
            gc.collect()
        elif how == "exit":
            os._exit(3)
        return None
    start = time.monotonic()
    kind, text, when = error_of(lambda: communicator.all_reduce(np.ones(50_000)))
    return kind, text, when - start


@pytest.mark.parametrize("how", ["close", "collected", "exit", "return"])
def test_a_rank_that_leaves_is_named(how):
    results = communicator_ranks(3, leave_on_one, how, check=False)
    assert results[1].exitcode == (3 if how == "exit" else 0)
    for rank in (0, 2):
        kind, text, waited = results[rank].value
        assert kind in ("PeerError", "AbortedError"), text
        assert re.search(r"rank 1 (died|left|closed)", text), text
        assert waited < PROMPTLY + 0.5  # the process exits first


def last_to_finish(communicator, slow):
    total = np.ones(200_000)
    communicator.all_reduce(total, algorithm="ring")
    parts = np.zeros((communicator.world_size, 3))
    communicator.all_gather(parts, np.full(3, communicator.rank, float))
    array = np.full(20_000, 7.0 + communicator.rank)
    if communicator.rank == slow:
        time.sleep(0.4)
    communicator.broadcast(array, 0)  # the root leaves at once: what it sent is still there
    return total[-1], parts[:, 0].tolist(), array[0]


@pytest.mark.parametrize("slow", [1, 2])
def test_exit_without_close_is_no_error_for_those_who_still_read(slow):
    results = communicator_ranks(3, last_to_finish, slow)
    assert [result.value for result in results] == [(3.0, [0, 1, 2], 7.0)] * 3


def torch_exit_without_destroy(rank, world_size, directory, end):
    import torch
    import torch.distributed as dist

    store = dist.FileStore(os.path.join(directory, "store"), world_size)
    dist.init_process_group("pycoll", store=store, rank=rank, world_size=world_size)
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(50)]
    if end == "raise":
        raise ZeroDivisionError
    return len(works)


@pytest.mark.parametrize("end", ["return", "raise"])
def test_torch_exit_without_destroy_with_works_in_flight(end):
    results = run_ranks(2, torch_exit_without_destroy, end, check=False, timeout=15)
    for result in results:
        assert result.exitcode == 0, result.report()
        assert "terminate called" not in result.stderr
        assert not result.stuck
        assert (result.error is None) == (end == "return")


# ---- Interruption and abort ----


def interrupted(communicator, how):
    communicator.barrier()
    array = np.ones(1000)
    if communicator.rank == 0:
        time.sleep(2.5)
        start = time.monotonic()
        kind, text, when = error_of(lambda: communicator.all_reduce(array))
        return kind, text, when - start
    if communicator.rank == 1:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
    start = time.monotonic()
    try:
        if how == "async":
            communicator.all_reduce(array, async_op=True).wait()
        else:
            communicator.all_reduce(array)
    except KeyboardInterrupt:
        return "KeyboardInterrupt", "", time.monotonic() - start
    except pycoll.Error as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return None


def test_control_c_interrupts_a_waiting_rank_and_its_peers():
    results = [result.value for result in communicator_ranks(3, interrupted, "sync")]
    assert results[1][0] == "KeyboardInterrupt"
    assert 0.4 < results[1][2] < 0.5 + PROMPTLY
    for rank in (0, 2):
        kind, text, _ = results[rank]
        assert kind == "AbortedError"
        assert "rank 1" in text
        assert "interrupted" in text
    assert results[2][2] < 0.5 + PROMPTLY
    assert results[0][2] < PROMPTLY


def test_control_c_interrupts_the_wait_for_an_async_operation():
    results = [result.value for result in communicator_ranks(3, interrupted, "async", check=False)]
    assert results[1][0] == "KeyboardInterrupt"
    assert 0.4 < results[1][2] < 0.5 + PROMPTLY


def aborting(communicator):
    communicator.barrier()
    start = time.monotonic()
    if communicator.rank == 1:
        time.sleep(0.3)
        start = time.monotonic()
        communicator.abort("validation diverged")
        took = time.monotonic() - start
        kind, text, _ = error_of(communicator.barrier)
        return kind, text, took
    work = communicator.all_reduce(np.ones(100), async_op=True)
    if communicator.rank == 2:  # in a thread of its own, while the main thread waits
        kind, text, when = error_of(work.wait)
    else:
        kind, text, when = error_of(communicator.barrier)
    return kind, text, when - start


def test_abort_ends_everything_everywhere():
    for result in communicator_ranks(3, aborting):
        kind, text, waited = result.value
        assert kind == "AbortedError"
        assert "rank 1" in text
        assert "validation diverged" in text
        # Nothing is waited for: an operation that hangs would hold up a close() for seconds.
        assert waited < (PROMPTLY if result.rank == 1 else 0.3 + PROMPTLY)


def abort_in_thread(communicator):
    communicator.barrier()
    if communicator.rank == 0:
        threading.Timer(0.3, communicator.abort, ("from a thread",)).start()
    if communicator.rank == 2:
        time.sleep(0.6)
    start = time.monotonic()
    kind, text, when = error_of(communicator.barrier)
    return kind, text, when - start


def test_abort_from_another_thread_frees_a_waiting_one():
    for result in communicator_ranks(3, abort_in_thread):
        kind, text, waited = result.value
        assert kind == "AbortedError"
        assert "from a thread" in text
        assert waited < 0.3 + PROMPTLY
