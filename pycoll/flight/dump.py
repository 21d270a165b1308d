"""Flight records of this process, in a file."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from pycoll import _core


def dump_flight_records(directory: str | os.PathLike[str]) -> list[Path]:
    """Writes what this process's groups have called lately into `directory`, and returns the files.

    There are at most two: of groups made by torch, and of `pycoll.Communicator`s. Each is called
    `pycoll-<host>-<pid>-<kind>.flight`, replaces the one of an earlier call, and is there as a
    whole or not at all. `pycoll doctor --dump FILES` reads them, those of all ranks together. The
    same happens by itself where PYCOLL_DUMP_DIR names a directory: when a group fails, and on
    SIGUSR1. Raises `OperatingSystemError` that names the file that cannot be written.
    """
    where = os.fspath(directory)
    written = [module.dump_flight(where) for module in _modules()]
    return [Path(path) for path in written if path]


def _modules() -> list[Any]:
    from pycoll import _native

    # One that is not loaded has recorded nothing.
    return [_core, *_native.loaded()]


class _OnSignal:
    """Dumps when SIGUSR1 comes, then does what was done before on that signal."""

    def __init__(self, directory: str, before: Any) -> None:
        self.directory = directory
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            dump_flight_records(self.directory)
        except _core.Error as error:
            os.write(2, f"pycoll: {error}\n".encode())
        if callable(self.before):
            self.before(number, frame)


def dump_on_signal(variables: dict[str, str]) -> None:
    """Called for each new group, with its variables. Handlers are the main thread's to set: a group
    that is made in another one leaves things as they are.
    """
    directory = variables.get("PYCOLL_DUMP_DIR") or os.environ.get("PYCOLL_DUMP_DIR")
    if not directory or threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGUSR1)
    if isinstance(before, _OnSignal):
        before.directory = directory
    elif before is not None:  # None: it belongs to C code
        signal.signal(signal.SIGUSR1, _OnSignal(directory, before))
