"""Builds from a copy of the sources, and the commands that need one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [
    "CMakeLists.txt",
    "LICENSE",
    "README.md",
    "_pycoll_autoload.py",
    "cmake",
    "csrc",
    "pycoll",
    "pyproject.toml",
    "setup.py",
]


def copy_sources(target: Path) -> None:
    """The sources without anything that was built, as in a fresh clone; file times are kept.

    What `target` has of the sources is replaced, its `build` stays: a build there compiles what
    changed since the last one.
    """
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "build", "*.egg-info")
    target.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.rmtree(target / name, ignore_errors=True)
            shutil.copytree(ROOT / name, target / name, ignore=ignore)
        else:
            shutil.copy2(ROOT / name, target / name)


def run(
    command: list[object], cwd: Path | str, timeout: float = 120, **env: object
) -> subprocess.CompletedProcess[str]:
    """Runs it with these variables besides ours; both outputs together in `stdout`."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **{key: str(value) for key, value in env.items()}},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
        check=False,
    )


def clean(**variables: object) -> dict[str, str]:
    """Nothing of the Python that runs these tests, nor of its settings, gets into another one."""
    ours = {name: "" for name in os.environ if name.startswith("PYCOLL_")}
    python = {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**ours, **python, **{name: str(value) for name, value in variables.items()}}
