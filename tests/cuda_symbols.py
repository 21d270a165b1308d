"""Which functions of the CUDA runtime a binary defines, or needs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path


def why_not() -> str:
    return "" if shutil.which("nm") else "nm not found (Debian: apt-get install binutils)"


def _symbols(binary: Path, *options: str) -> set[str]:
    command = ["nm", *options, str(binary)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    names = {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines() if line}
    # Names with a small letter behind are not of the runtime's API, those with __ are nvcc's own.
    return {name for name in names if re.fullmatch(r"cuda[A-Z]\w*", name)}


def defined(library: Path) -> set[str]:
    """Of a shared library: what programs can link to."""
    return _symbols(library, "--dynamic", "--defined-only")


def needed(binary: Path) -> set[str]:
    """Of an object file or a shared library: what somebody else has to define."""
    dynamic = ["--dynamic"] if ".so" in binary.name else []
    return _symbols(binary, *dynamic, "--undefined-only")
