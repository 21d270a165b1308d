"""Interpreters that end with operations in flight, and forked children that inherit a group."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time

import numpy as np
import pytest

import pycoll
from helpers_scripts import WITHOUT_TORCH, fork, keep, run_scripts, wait_for_end_of
from test_faults import error_of

# ---- The end of the interpreter ----


def end(how):
    if how == "sys.exit":
        sys.exit(3)
    if how == "raise":
        raise ZeroDivisionError


def late(rank, directory, peer_comes):
    """Rank 0 tells its pid; rank 1 waits, for a while or until that process has ended."""
    signals = pycoll.FileStore(os.path.join(directory, "signals"), timeout=30)
    if rank == 0:
        signals.set("pid", str(os.getpid()))
    elif peer_comes == "never":
        wait_for_end_of(int(signals.get("pid")))
    else:
        time.sleep(float(peer_comes))


def exit_with_work(rank, world_size, directory, how, peer_comes):
    communicator = pycoll.Communicator(pycoll.FileStore(directory), rank, world_size)
    late(rank, directory, peer_comes)
    array = np.ones((50, 40))
    if how == "thread" and rank == 0:
        call = lambda: error_of(lambda: [communicator.all_reduce(array) for _ in range(3)])  # noqa: E731
        keep(communicator, array)
        threading.Thread(target=call, daemon=True).start()
        while communicator._core.sequence() == 0:
            time.sleep(0.01)
        return
    arrays = (array, array.T, array[:, ::2])
    if rank == 0:
        keep(communicator, array, [communicator.all_reduce(a, async_op=True) for a in arrays])
        end(how)
        return
    for a in arrays:
        try:
            # A call on a group that rank 0 has left may fail at once, or when it is waited for.
            communicator.all_reduce(a, async_op=True).wait()
        except pycoll.Error as error:
            print(type(error).__name__)


def check_exits(results, how):
    first, second = results
    assert second.exitcode == 0, second
    second.check_quiet()
    assert first.exitcode == {"sys.exit": 3, "raise": 1}.get(how, 0), first
    if how == "raise":
        assert "ZeroDivisionError" in first.stderr
        assert first.stderr.count("Traceback") == 1, first
        assert "terminate called" not in first.stderr
    else:
        first.check_quiet()


EXITS = [("end", "0"), ("end", "0.3"), ("end", "never"), ("sys.exit", "0.3"), ("raise", "0.3")]


@pytest.mark.parametrize(("how", "peer_comes"), [*EXITS, ("thread", "0.3"), ("thread", "never")])
def test_exit_with_operations_in_flight(how, peer_comes):
    check_exits(run_scripts(2, exit_with_work, how, peer_comes), how)


def torch_exit_with_work(rank, world_size, directory, how, peer_comes):
    import torch
    import torch.distributed as dist

    store = dist.FileStore(os.path.join(directory, "c10d"), world_size)
    dist.init_process_group("pycoll", store=store, rank=rank, world_size=world_size)
    late(rank, directory, peer_comes)
    tensors = [torch.ones(50, 40), torch.ones(50, 40).t(), torch.ones(50, 40)[:, ::2]]
    if rank == 0:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        chained = [work.get_future().then(lambda future: future.value()[0] + 1) for work in works]
        keep(tensors, works, chained, store)
        end(how)
        return
    for tensor in tensors:
        try:
            dist.all_reduce(tensor, async_op=True).wait()
        except dist.DistBackendError as error:
            print(error)


@pytest.mark.parametrize(
    ("how", "peer_comes"), [("end", "0"), ("end", "never"), ("sys.exit", "0.3")]
)
def test_torch_exit_with_operations_in_flight(how, peer_comes):
    check_exits(run_scripts(2, torch_exit_with_work, how, peer_comes, timeout=90, env={}), how)


# ---- Forked children ----


def children(drop, use, wait):
    """What the forked children do: (name, function, how often)."""

    def leave():
        sys.exit(7)

    def text_of(call):
        try:
            call()
        except pycoll.InvalidArgumentError as error:
            return f"InvalidArgumentError: {error}"
        except RuntimeError as error:
            return f"RuntimeError: {error}"
        return "nothing was raised"

    rows = [("use", lambda: text_of(use), 3), ("drop", drop, 5), ("exit", leave, 3)]
    return [*rows, ("wait", lambda: text_of(wait), 3)] if wait else rows


def fork_with_group(rank, world_size, directory, state):
    signals = pycoll.FileStore(os.path.join(directory, "signals"), timeout=100)
    group = [pycoll.Communicator(pycoll.FileStore(directory), rank, world_size)]
    keep(group)
    array, total = np.ones(1000), np.ones(1000)
    group[0].all_reduce(array, async_op=True).wait()  # its progress thread waits for more
    if rank == 1:
        signals.get("forked")
        if state == "busy":
            group[0].all_reduce(total)
        group[0].all_reduce(total)
    else:
        thread = threading.Thread(target=group[0].all_reduce, args=(total,))
        work = None
        if state == "busy":
            thread.start()
            while group[0]._core.sequence() < 2:
                time.sleep(0.01)
        work = group[0].all_reduce(total, async_op=True)

        def drop():
            group[0].close()
            group.clear()
            gc.collect()
            return "dropped"

        rows = children(drop, lambda: group[0].all_reduce(array), work.wait)
        ends = {name: [fork(child) for _ in range(n)] for name, child, n in rows}
        signals.set("forked", b"")
        if state == "busy":
            thread.join()
        work.wait()
        print(json.dumps(ends))
    for _ in range(20):
        group[0].all_reduce(array, "max")
        group[0].all_reduce(array, "max", async_op=True).wait()
    assert (array == 2).all()
    assert (total == (4 if state == "busy" else 2)).all()


def torch_fork_with_group(rank, world_size, directory, state):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    signals = pycoll.FileStore(os.path.join(directory, "signals"), timeout=100)
    store = dist.FileStore(os.path.join(directory, "c10d"), world_size)
    dist.init_process_group("pycoll", store=store, rank=rank, world_size=world_size)
    tensor, total = torch.ones(60, 10), torch.ones(60, 10)
    dist.all_reduce(tensor.t(), async_op=True).wait()
    if rank == 1:
        signals.get("forked")
        if state == "busy":
            dist.all_reduce(total)
    else:
        work = dist.all_reduce(total, async_op=True) if state == "busy" else None

        def drop():
            dist.destroy_process_group()
            gc.collect()
            return "dropped"

        rows = children(drop, lambda: dist.all_reduce(tensor), work and work.wait)
        ends = {name: [fork(child) for _ in range(n)] for name, child, n in rows}
        signals.set("forked", b"")
        if work:
            work.wait()
        print(json.dumps(ends))
    for _ in range(20):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True).wait()
    assert (tensor == 2).all()
    assert (total == (2 if state == "busy" else 1)).all()
    dist.destroy_process_group()


def check_children(results, error):
    for result in results:
        assert result.exitcode == 0, result
        result.check_quiet()
    ends = json.loads(results[0].stdout)
    assert ends["drop"] == [[0, "dropped"]] * 5
    assert ends["exit"] == [[7, ""]] * 3
    for code, text in ends["use"] + ends.get("wait", []):
        assert code == 0, ends
        assert text.startswith(error), text
        assert "forked" in text


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_forked_child_has_nothing_to_wait_for(state):
    results = run_scripts(2, fork_with_group, state, timeout=250, env=WITHOUT_TORCH)
    check_children(results, "InvalidArgumentError")


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_forked_child_of_torch_has_nothing_to_wait_for(state):
    check_children(
        run_scripts(2, torch_fork_with_group, state, timeout=250, env={}), "RuntimeError"
    )
