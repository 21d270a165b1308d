"""The program tests/gpu/kernels.cpp, made in the directory that pycoll was built in."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path

from helpers_build import ROOT, run

TARGET = "gpu_kernels"


def build_directories() -> list[Path]:
    """PYCOLL_BUILD_DIR; else those of setup.py, the newest first."""
    if chosen := os.environ.get("PYCOLL_BUILD_DIR"):
        return [ROOT / chosen]
    found = ROOT.glob("build/cmake-*/CMakeCache.txt")
    return [file.parent for file in sorted(found, key=lambda f: -f.stat().st_mtime)]


@functools.cache
def build() -> Path | str:
    """Compiles what is missing. Returns the program, or why there is none."""
    beside = shutil.which("cmake", path=str(Path(sys.executable).parent))
    cmake = beside or shutil.which("cmake")
    if cmake is None:
        return "no cmake"
    why = "no build directory (PYCOLL_BUILD_DIR)"
    for directory in build_directories():
        done = run([cmake, "--build", directory, "--target", TARGET], ROOT, timeout=300)
        if done.returncode == 0:
            return directory / TARGET
        why = f"{directory} cannot make {TARGET} (built without CUDA?): {done.stdout[-300:]}"
    return why
