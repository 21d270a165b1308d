"""Arguments of the command line: errors that are the caller's, files and sizes."""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path


class UsageError(Exception):
    """Arguments that cannot be used; the message says which ones can."""


def require_matplotlib(option: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{option} needs matplotlib: pip install 'pycoll[demo]'")


def output_file(text: str) -> Path:
    """An argument: the file that results go to. Refused here, and not when they have been made."""
    file = Path(text)
    folder = file.absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {folder}")
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    return file


def size(text: str) -> int:
    """An argument like 64M, in bytes."""
    from pycoll.bench.units import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """An argument like 5: a number from 1 on."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def amount(text: str) -> float:
    """An argument like 0.02: a finite number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number from 0 on")
    return value


def size_list(text: str) -> list[int]:
    """An argument like 4,64K,1M."""
    return [size(part) for part in text.split(",")]
