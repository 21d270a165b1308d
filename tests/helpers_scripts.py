"""Runs a test function in interpreters of their own, which end as a user's script ends.

A rank of pool.py leaves through multiprocessing; here Python's own finalization runs, with all that
the function left behind in `__main__`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WITHOUT_TORCH = {"PYCOLL_TORCH": "0"}


@dataclass
class Ended:
    """How one interpreter ended; `exitcode` is None when it was killed at the deadline."""

    rank: int
    exitcode: int | None
    stdout: str
    stderr: str
    seconds: float = 0.0  # that it ran; of a series

    def check_quiet(self) -> None:
        for words in ("terminate called", "Fatal Python error", "Exception ignored", "Traceback"):
            assert words not in self.stderr, self


Outcomes = dict[str, list[Ended]]


def run_scripts(
    world_size: int,
    function: Callable[..., Any],
    *args: str,
    timeout: float = 60,
    env: Mapping[str, str] = WITHOUT_TORCH,
) -> list[Ended]:
    """`function(rank, world_size, directory, *args)` as the whole of a script, on every rank."""
    code = (
        f"import sys, {function.__module__} as tests\n"
        f"tests.{function.__name__}(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])"
    )
    with tempfile.TemporaryDirectory(prefix="pycoll-scripts-") as directory:
        commands = [
            [sys.executable, "-c", code, str(rank), str(world_size), directory, *args]
            for rank in range(world_size)
        ]
        return run_commands(commands, timeout, {"OMP_NUM_THREADS": "1", **env})


def run_commands(
    commands: Sequence[Sequence[str | Path]],
    timeout: float,
    env: Mapping[str, str],
    cwd: Path = Path(__file__).parent,
) -> list[Ended]:
    """Runs them at the same time, with these variables besides ours; their index is the rank."""
    ranks = range(len(commands))
    with tempfile.TemporaryDirectory(prefix="pycoll-scripts-") as directory:
        files = [[Path(directory) / f"{rank}.{kind}" for kind in "oe"] for rank in ranks]
        processes = []
        for command, (out, err) in zip(commands, files, strict=True):
            with out.open("wb") as stdout, err.open("wb") as stderr:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdout=stdout,
                        stderr=stderr,
                        env={**os.environ, **env},
                        cwd=cwd,
                        start_new_session=True,
                    )
                )
        codes = _wait(processes, time.monotonic() + timeout)
        return [Ended(r, codes[r], *(file.read_text() for file in files[r])) for r in ranks]


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    codes: list[int | None] = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for process, code in zip(processes, codes, strict=True):
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it forked
            process.wait()
    return codes


def keep(*things: Any) -> None:
    """Leaves `things` to the end of the interpreter, as the variables of a script are."""
    sys.modules["__main__"].__dict__.setdefault("kept", []).extend(things)


def wait_for_end_of(pid: int, timeout: float = 60) -> None:
    """Until that process has ended, reaped or not."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ready, _, _ = select.select([descriptor], [], [], timeout)
    os.close(descriptor)
    assert ready, f"process {pid} goes on"


def fork(child: Callable[[], Any], timeout: float = 20) -> tuple[int | str, str]:
    """Runs `child` in a forked process: (exit code, the text it returned), or ("hangs", "").

    A child that returns a text ends by os._exit(0); one that raises SystemExit finalizes Python.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.write(write, str(child()).encode())
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + timeout
    status = None
    while status is None and time.monotonic() < deadline:
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
        else:
            time.sleep(0.005)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    text = os.read(read, 1 << 16).decode() if status is not None else ""
    os.close(read)
    return ("hangs", "") if status is None else (status, text)


# ---- Many scripts, one after the other, on interpreters that are warm ----


@dataclass(frozen=True)
class Script:
    """One of a series. `function(rank, world_size, directory, *args)`, at module level."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    env: Mapping[str, str] | None = None
    seconds: float = 30  # then it is killed


@dataclass
class Series:
    """What a rank of `run_series` does: `next()` forks, and is over in the parent when all are."""

    rank: int
    world_size: int
    directory: Path
    scripts: Sequence[Script]

    def next(self) -> Callable[[], Any] | None:
        """What the child shall call; None in the parent, when all its children have ended."""
        for script in self.scripts:
            place = self.directory / script.name
            place.mkdir(exist_ok=True)
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                return self._begin(script, place)
            (place / f"{self.rank}.exit").write_text(json.dumps(_wait_for(pid, script.seconds)))
        return None

    def _begin(self, script: Script, place: Path) -> Callable[[], Any]:
        os.setpgid(0, 0)
        for descriptor, kind in ((1, "stdout"), (2, "stderr")):
            file = os.open(place / f"{self.rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, descriptor)
            os.close(file)
        # As Python has it in the main thread of a script, whoever started the tests.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(script.env or {})
        return lambda: script.function(self.rank, self.world_size, str(place), *script.args)


def _wait_for(pid: int, seconds: float) -> tuple[int | None, float]:
    """(exit code, or None when it had to be killed, seconds that it ran)"""
    start = time.monotonic()
    descriptor = os.pidfd_open(pid)
    ended, _, _ = select.select([descriptor], [], [], seconds)
    os.close(descriptor)
    took = time.monotonic() - start
    if not ended:
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return (os.waitstatus_to_exitcode(status) if ended else None), took


def run_series(
    world_size: int, scripts: Sequence[Script], imports: str = "torch, pycoll"
) -> Outcomes:
    """Runs each of them on `world_size` ranks: {name: [Ended of each rank]}.

    A rank is a process forked from an interpreter that has imported everything, and which ends as a
    script does: at the end of `__main__`, by an exception, or by SystemExit. Importing torch costs
    more than all that most of them do.
    """
    with tempfile.TemporaryDirectory(prefix="pycoll-series-") as directory:
        plan = Path(directory) / "plan"
        plan.write_bytes(pickle.dumps((world_size, Path(directory), list(scripts))))
        code = (
            f"import pickle, sys, {imports}, helpers_scripts\n"
            "plan = pickle.load(open(sys.argv[2], 'rb'))\n"
            "call = helpers_scripts.Series(int(sys.argv[1]), *plan).next()\n"
            "if call: call()\n"
        )
        commands = [[sys.executable, "-c", code, str(rank), plan] for rank in range(world_size)]
        limit = 60 + sum(script.seconds for script in scripts)
        for parent in run_commands(commands, limit, {"OMP_NUM_THREADS": "1"}):
            assert parent.exitcode == 0, parent
        return {
            script.name: [_ended(Path(directory) / script.name, r) for r in range(world_size)]
            for script in scripts
        }


def _ended(place: Path, rank: int) -> Ended:
    code, took = json.loads((place / f"{rank}.exit").read_text())
    texts = [(place / f"{rank}.{kind}").read_text() for kind in ("stdout", "stderr")]
    return Ended(rank, code, texts[0], texts[1], took)
