"""The pool that all tests with several ranks stand on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pool import RanksFailed, communicator_ranks, run_ranks, torch_ranks


def facts(rank, world_size, directory, factor):
    Path(directory, str(rank)).write_text("here")
    while len([name for name in os.listdir(directory) if name.isdigit()]) < world_size:
        time.sleep(0.001)
    return {
        "value": rank * factor,
        "pid": os.getpid(),
        "torch_was_loaded": "torch" in sys.modules,
        "env": os.environ.get("POOL_TEST"),
    }


def test_ranks_are_concurrent_fresh_processes_with_torch_loaded():
    first = run_ranks(3, facts, 10, env={"POOL_TEST": "yes"})
    second = run_ranks(3, facts, 10)
    assert [result.value["value"] for result in first] == [0, 10, 20]
    assert all(result.value["torch_was_loaded"] for result in first)
    assert [result.value["env"] for result in first] == ["yes"] * 3
    assert [result.value["env"] for result in second] == [None] * 3
    assert len({result.value["pid"] for result in first + second} | {os.getpid()}) == 7
    assert [result.exitcode for result in first] == [0] * 3


def test_a_warm_rank_starts_fast():
    run_ranks(1, facts, 1)
    start = time.monotonic()
    run_ranks(2, facts, 1)
    # An import of torch alone takes longer.
    assert time.monotonic() - start < 1.5


def fail_on_one(rank, world_size, directory):
    if rank == 1:
        raise KeyError("the reason")
    return "fine"


def test_an_exception_comes_back_with_its_traceback():
    results = run_ranks(2, fail_on_one, check=False)
    assert results[0].value == "fine"
    assert results[0].error is None
    error = results[1].error
    assert error.type == "builtins.KeyError"
    assert error.is_a("LookupError")
    assert not error.is_a("ValueError")
    assert error.message == "'the reason'"
    assert "fail_on_one" in error.traceback
    with pytest.raises(RanksFailed, match="ranks \\[1\\] of 2 failed in fail_on_one") as caught:
        run_ranks(2, fail_on_one)
    assert "the reason" in str(caught.value)


def return_what_cannot_travel(rank, world_size, directory):
    return threading.Lock()


def test_a_result_that_cannot_be_pickled_is_an_error():
    (result,) = run_ranks(1, return_what_cannot_travel, check=False)
    assert "pickle" in result.error.message


def return_a_lot(rank, world_size, directory, size):
    return bytes([rank]) * size


def test_results_larger_than_a_pipe():
    size = 5_000_000
    results = run_ranks(2, return_a_lot, size)
    assert [result.value for result in results] == [bytes(size), b"\x01" * size]


def die(rank, world_size, directory):
    if rank == 0:
        os.write(2, b"last words of native code\n")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        print("python's stderr", file=sys.stderr)
        os._exit(7)
    if rank == 2:
        os.abort()


def test_exit_codes_and_stderr_of_dying_ranks():
    results = run_ranks(4, die, check=False)
    assert [result.exitcode for result in results] == [-signal.SIGKILL, 7, -signal.SIGABRT, 0]
    assert [result.stuck for result in results] == [False] * 4
    assert results[0].stderr == "last words of native code\n"
    assert results[1].stderr == "python's stderr\n"
    assert "Fatal Python error: Aborted" in results[2].stderr
    with pytest.raises(RanksFailed, match=r"ranks \[0, 1, 2\] of 4"):
        run_ranks(4, die)


def hang(rank, world_size, directory, pid_file):
    """Rank 1 waits for ever, and so does a process that it started."""
    if rank == 1:
        child = subprocess.Popen(["sleep", "1000"])
        Path(pid_file).write_text(str(child.pid))
        a_telling_name()
    return rank


def a_telling_name():
    threading.Event().wait()


def slow(rank, world_size, directory, seconds):
    time.sleep(seconds)
    return os.getpid()


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_the_deadline_kills_the_stuck_ranks_and_nobody_else(tmp_path):
    survivors = []
    other = threading.Thread(target=lambda: survivors.extend(run_ranks(2, slow, 4.0)))
    other.start()
    pid_file = tmp_path / "pid"
    start = time.monotonic()
    results = run_ranks(3, hang, str(pid_file), timeout=2, check=False)
    assert time.monotonic() - start < 4
    assert [result.stuck for result in results] == [False, True, False]
    assert [result.value for result in results] == [0, None, 2]
    assert results[1].exitcode == -signal.SIGKILL
    assert "a_telling_name" in results[1].stack
    assert not is_alive(int(pid_file.read_text()))
    assert other.is_alive()
    other.join()
    assert [result.exitcode for result in survivors] == [0, 0]


def test_check_says_which_ranks_were_stuck_and_where(tmp_path):
    with pytest.raises(RanksFailed, match=r"stuck and killed: \[1\]") as caught:
        run_ranks(2, hang, str(tmp_path / "pid"), timeout=1.5)
    assert "a_telling_name" in str(caught.value)
    assert [result.rank for result in caught.value.results if result.stuck] == [1]


def linger(rank, world_size, directory):
    """Returns at once, but the process does not end: a thread that nobody stops."""
    threading.Thread(target=a_telling_name).start()
    return "returned"


def test_a_rank_that_returns_but_does_not_exit_is_stuck():
    (result,) = run_ranks(1, linger, timeout=1.5, check=False)
    assert (result.value, result.stuck) == ("returned", True)
    assert "a_telling_name" in result.stack


def test_nothing_is_left_in_the_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_ranks(2, facts, 1)
    assert list(tmp_path.iterdir()) == []


def sum_with_torch(rank, world_size, factor):
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([float(rank * factor)])
    dist.all_reduce(tensor)
    assert dist.get_world_size() == world_size
    return tensor.item()


def test_torch_ranks_makes_the_process_group():
    results = torch_ranks(3, sum_with_torch, 10, backend="gloo")
    assert [result.value for result in results] == [30.0] * 3


def sum_without_torch(communicator, factor):
    array = np.full(3, float(communicator.rank * factor))
    communicator.all_reduce(array)
    return array.tolist()


def test_communicator_ranks_makes_the_communicator():
    results = communicator_ranks(3, sum_without_torch, 10)
    assert [result.value for result in results] == [[30.0] * 3] * 3
