"""Arguments of the command line: errors that are the caller's, and sizes."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path


class UsageError(Exception):
    """Arguments that cannot be used; the message says which ones can."""


def require_folder(option: str, file: str | os.PathLike[str] | None) -> None:
    """That a file can be written, before minutes have been spent on what goes into it."""
    if file is None:
        return
    folder = Path(file).absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{option} {os.fspath(file)}: there is no folder {folder}")
    if Path(file).is_dir():
        raise UsageError(f"{option} {os.fspath(file)} is a folder")


def require_matplotlib(option: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{option} needs matplotlib: pip install 'pycoll[demo]'")


def size(text: str) -> int:
    """An argument like 64M, in bytes."""
    from pycoll.bench.units import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size_list(text: str) -> list[int]:
    """An argument like 4,64K,1M."""
    return [size(part) for part in text.split(",")]
