"""Runs a test function in interpreters of their own, which end as a user's script ends.

A rank of pool.py leaves through multiprocessing; here Python's own finalization runs, with all that
the function left behind in `__main__`.
"""

from __future__ import annotations

import contextlib
import os
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

    def check_quiet(self) -> None:
        for words in ("terminate called", "Fatal Python error", "Exception ignored", "Traceback"):
            assert words not in self.stderr, self


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
