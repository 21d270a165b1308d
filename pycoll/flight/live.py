"""Flight records of other processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pycoll.flight.records import Process, parse, settled, with_anchor

FILE_NAME = "/memfd:pycoll-flight"


@dataclass
class Found:
    """`forbidden`: processes of others, which may or may not use pycoll."""

    files: dict[Path, int] = field(default_factory=dict)  # the file, and whose it is
    forbidden: int = 0


def find(pids: Iterable[int] = ()) -> Found:
    """Where the records of these processes are; without any, of all that this user may see."""
    found = Found()
    wanted = list(pids) or sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    for pid in wanted:
        try:
            for file in Path(f"/proc/{pid}/fd").iterdir():
                if _target(file).startswith(FILE_NAME):
                    found.files[file] = pid
        except PermissionError:
            found.forbidden += 1
        except OSError:
            continue  # it has ended meanwhile
    return found


def _target(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:
        return ""  # closed meanwhile


def read(found: Found) -> list[Process]:
    """What they have recorded until now."""
    return [process for _, process, _ in _readings(found)]


def save(found: Found, directory: Path) -> list[Path]:
    """Copies of the files, as the processes themselves would dump them. Raises OSError."""
    saved = []
    for file, process, data in _readings(found):
        path = directory / f"pycoll-{os.uname().nodename}-{process.pid}-{file.name}.flight"
        path.write_bytes(data)
        saved.append(path)
    return saved


def _readings(found: Found) -> Iterator[tuple[Path, Process, bytes]]:
    for file, pid in found.files.items():
        try:
            data = with_anchor(settled(file.read_bytes(), file.read_bytes()))
            process = parse(data)
        except (OSError, ValueError):
            continue  # gone meanwhile, or of another version
        if process.groups and _is_its_own(process, pid):
            yield file, process, data


def _is_its_own(process: Process, pid: int) -> bool:
    """A forked child has its parent's file open. In a container a process has another number."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    numbers = next((line for line in status.splitlines() if line.startswith("NSpid:")), f": {pid}")
    return process.pid == int(numbers.split()[-1])
