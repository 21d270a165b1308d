"""Public bug reports, kind F: failures, timeouts, dead and silent peers.

F9 is in test_torch_monitored_barrier.py.

Every case is a script of its own on every rank, which ends as a user's does; all run one after the
other on interpreters that are warm, and each test looks at how one of them ended.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers_cases import all_words, error_of, still_works
from helpers_scripts import Script, run_series, wait_for_end_of

WORLD = 4
PROMPTLY = 5.0  # seconds, far below every timeout here that is not what a case is about
LATE = 20.0


def begin(rank, w, directory, name="store", seconds=60.0):
    store = dist.FileStore(os.path.join(directory, name), w)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("pycoll", store=store, rank=rank, world_size=w, timeout=timeout)


class Notes:
    """Words between the ranks of a case that do not go through what is tested."""

    def __init__(self, directory):
        self.place = Path(directory)

    def write(self, name, text):
        new = self.place / f"{name}.{os.getpid()}"
        new.write_text(str(text))
        new.rename(self.place / name)

    def read(self, name, seconds=LATE):
        deadline = time.monotonic() + seconds
        while not (self.place / name).exists():
            assert time.monotonic() < deadline, f"no note {name}"
            time.sleep(0.01)
        return (self.place / name).read_text()

    def now(self, name):
        self.write(name, time.monotonic())  # one clock for all processes of a host

    def since(self, name):
        return time.monotonic() - float(self.read(name))


def timed(call, *kinds):
    """The text of its error, and after how long it came."""
    start = time.monotonic()
    return error_of(call, *kinds), time.monotonic() - start


# ---- Peers that are gone ----


def f1_f2(rank, w, directory):
    """A rank is killed, while others are in a call and before they make the next. The survivors
    catch an error and make a group of their own."""
    notes = Notes(directory)
    begin(rank, w, directory)
    tensor = torch.zeros(1 << 18)
    for _ in range(20):
        dist.all_reduce(tensor)
    if rank == 2:
        notes.now("death")
        os.kill(os.getpid(), signal.SIGKILL)
    text, cpu = "", time.process_time()
    try:
        for _ in range(1_000_000):
            cpu = time.process_time()
            dist.all_reduce(tensor)
    except RuntimeError as error:
        text = str(error)
    assert notes.since("death") < PROMPTLY
    assert time.process_time() - cpu < 1
    all_words(text, "rank 2", "died")
    again, seconds = timed(lambda: dist.all_reduce(tensor), RuntimeError)
    assert again == text
    assert seconds < 0.5
    dist.destroy_process_group()
    survivors = [0, 1, 3]
    begin(survivors.index(rank), len(survivors), directory, "again")
    still_works(survivors.index(rank), len(survivors))
    dist.destroy_process_group()


def f7(rank, w, directory, how):
    """A rank leaves before a call that the others make."""
    notes = Notes(directory)
    begin(rank, w, directory)
    still_works(rank, w)
    if rank == 1:
        notes.now("leaves")
        if how == "raise":
            raise ValueError("of the script's own")
        sys.exit(3 if how == "exit" else 0)
    text = error_of(lambda: dist.all_reduce(torch.ones(1000)), RuntimeError)
    assert notes.since("leaves") < PROMPTLY
    all_words(text, "rank 1")


def f8(rank, w, directory):
    """One rank raises, and all destroy the group in a `finally`."""
    begin(rank, w, directory)
    try:
        still_works(rank, w)
        if rank == 1:
            raise ValueError("the script's own mistake")
        dist.all_reduce(torch.ones(1000))
    finally:
        dist.destroy_process_group()


# ---- Timeouts ----


def f4(rank, w, directory):
    """The timeout of a group, and of one call, beside a long one of the default group."""
    notes = Notes(directory)
    begin(rank, w, directory)
    short = dist.new_group(timeout=datetime.timedelta(seconds=1))
    other = dist.new_group()
    options = dist.AllreduceOptions()
    options.timeout = datetime.timedelta(milliseconds=100)
    backend = other._get_backend(torch.device("cpu"))
    still_works(rank, w, short)
    still_works(rank, w, other)
    if rank == 1:
        notes.read("rank 0 has given up")
    else:
        text, seconds = timed(lambda: dist.all_reduce(torch.ones(9), group=short), RuntimeError)
        assert 0.9 < seconds < 3, seconds
        all_words(text, "all_reduce #2", "9 x float32", "rank 1", "after 1.")
        call = lambda: backend.allreduce([torch.ones(9)], options).wait()  # noqa: E731
        text, seconds = timed(call, RuntimeError)
        assert 0.09 < seconds < 2, seconds
        all_words(text, "all_reduce #2", "rank 1", "after 0.1")
        notes.write("rank 0 has given up", "")
    still_works(rank, w)


def f6(rank, w, directory):
    """A wait with a timeout ends, and the call goes on."""
    notes = Notes(directory)
    begin(rank, w, directory)
    still_works(rank, w)
    if rank == 1:
        notes.read("go on")
    tensor = torch.full((5000,), float(rank + 1))
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        limit = datetime.timedelta(milliseconds=300)
        text, seconds = timed(lambda: work.wait(limit), RuntimeError)
        assert 0.25 < seconds < 2, seconds
        all_words(text, "0.3 s", "all_reduce")
        assert not work.is_completed()
        notes.write("go on", "")
    work.wait()
    assert (tensor == w * (w + 1) / 2).all()
    still_works(rank, w)


# ---- Control-C ----


def f12(rank, w, directory, where):
    """While a rank waits for one that has not started, or that does not call."""
    notes = Notes(directory)
    if rank == 1 and where == "init":
        return

    def interrupt():
        notes.now("signal")
        os.kill(os.getpid(), signal.SIGINT)

    if rank == 0:
        notes.write("pid", os.getpid())
        if where == "init":
            threading.Timer(0.7, interrupt).start()
    try:
        begin(rank, w, directory)
        still_works(rank, w)
        if rank == 1:
            wait_for_end_of(int(notes.read("pid")))
            return
        threading.Timer(0.5, interrupt).start()
        dist.barrier() if where == "barrier" else dist.all_reduce(torch.ones(9))
    except KeyboardInterrupt:
        assert notes.since("signal") < 1
        raise


# ---- Silent peers ----


def f13(rank, w, directory):
    """A rank is stopped for longer than it takes to warn of it."""
    notes = Notes(directory)
    begin(rank, w, directory)
    still_works(rank, w)
    for again in range(2):  # a call that waits; and messages
        tensor = torch.full((5000,), float(rank + 1))
        if rank == 1:
            notes.write(f"pid {again}", os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
        elif rank == 0:
            wake = (int(notes.read(f"pid {again}")), signal.SIGCONT)
            threading.Timer(1.2, os.kill, wake).start()
        if again == 0:
            dist.all_reduce(tensor)
            assert (tensor == w * (w + 1) / 2).all()
        elif rank == 1:
            dist.send(tensor, 0)
        elif rank == 0:
            dist.recv(tensor, 1)
            assert (tensor == 2).all()
    still_works(rank, w)


STALL = {"PYCOLL_STALL_WARNING": "0.4"}
# name: (ranks, scenario, its arguments, variables)
CASES = {
    "f1_f2": (4, f1_f2, (), {}),
    "f4": (2, f4, (), {}),
    "f6": (3, f6, (), {}),
    "f7_return": (3, f7, ("return",), {}),
    "f7_exit": (3, f7, ("exit",), {}),
    "f7_raise": (3, f7, ("raise",), {}),
    "f8": (3, f8, (), {}),
    "f12_init": (2, f12, ("init",), {}),
    "f12_all_reduce": (2, f12, ("all_reduce",), {}),
    "f12_barrier": (2, f12, ("barrier",), {}),
    "f13": (3, f13, (), STALL),
}


def one_of(rank, w, directory, name):
    ranks, scenario, args, _ = CASES[name]
    if rank < ranks:
        scenario(rank, ranks, directory, *args)


# The gate has them over shared memory, test-full over TCP, too.
@pytest.fixture(scope="module", params=["shm", pytest.param("tcp", marks=pytest.mark.full)])
def outcomes(request):
    """{case: how it ended on each rank}"""
    scripts = []
    for name, (*_, env) in CASES.items():
        variables = {**env, "PYCOLL_TRANSPORT": request.param}
        scripts.append(Script(name, one_of, (name,), variables, seconds=60))
    before = set(os.listdir("/dev/shm"))
    found = run_series(WORLD, scripts)
    left = [name for name in set(os.listdir("/dev/shm")) - before if "pycoll" in name]
    assert not left
    return {name: ranks[: CASES[name][0]] for name, ranks in found.items()}


def check(ranks, codes):
    assert [ended.exitcode for ended in ranks] == codes, ranks
    for ended in ranks:
        assert "terminate called" not in ended.stderr, ended


def last_line(ended):
    """Without the rank that torch puts in front."""
    lines = ended.stderr.strip().splitlines()
    return lines[-1].removeprefix(f"[rank{ended.rank}]: ") if lines else ""


def test_f1_f2_a_killed_peer(outcomes):
    check(outcomes["f1_f2"], [0, 0, -signal.SIGKILL, 0])


@pytest.mark.parametrize("case", ["f4", "f6"])
def test_f4_f6_timeouts(outcomes, case):
    ranks = outcomes[case]
    check(ranks, [0] * len(ranks))


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("exit", 3), ("raise", 1)])
def test_f7_one_rank_leaves_early(outcomes, how, code):
    check(outcomes[f"f7_{how}"], [0, code, 0])


def test_f8_destroy_in_a_finally(outcomes):
    ranks = outcomes["f8"]
    check(ranks, [1, 1, 1])
    for ended in ranks:
        assert ended.seconds < 10, ended
    assert last_line(ranks[1]) == "ValueError: the script's own mistake"
    for ended in (ranks[0], ranks[2]):
        all_words(last_line(ended), "DistBackendError", "rank 1")


@pytest.mark.parametrize("where", ["init", "all_reduce", "barrier"])
def test_f12_control_c(outcomes, where):
    ranks = outcomes[f"f12_{where}"]
    check(ranks, [-signal.SIGINT, 0])
    assert last_line(ranks[0]) == "KeyboardInterrupt"


def test_f13_a_silent_peer_is_warned_of(outcomes):
    """By every rank that waits for it; by nobody once it goes on, and not by itself."""
    ranks = outcomes["f13"]
    check(ranks, [0, 0, 0])
    assert ranks[1].stderr == "", ranks[1]
    for rank, call in ((0, "all_reduce #2 "), (2, "all_reduce #2 "), (0, "recv ")):
        lines = [line for line in ranks[rank].stderr.splitlines() if f" s in {call}" in line]
        assert lines, ranks[rank]
        for line in lines:
            all_words(line, f"pycoll: rank {rank} of group", "has waited for", "rank 1")
    # They are said after 0.4 s, 0.8 s, ..., not all the time.
    assert all(len(ended.stderr.splitlines()) < 9 for ended in ranks), ranks
