"""Environments in which clients are installed that need packages: accelerate, Lightning, Ray.

Each is a virtual environment that sees the packages of the Python that runs these tests, its torch
and pycoll among them, and has the client's own packages in front.

  PYCOLL_TEST_CACHE  a directory where they stay for the next run; without it each is temporary
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import pycoll
from helpers_build import ROOT, clean, run

INSTALL_SECONDS = 900


def missing_entry_points(directory: Path) -> list[str]:
    """What a new interpreter needs on its path to find pycoll and its entry points; written there.

    Nothing where pycoll is installed: pip wrote them. A package on PYTHONPATH has none.
    """
    try:
        importlib.metadata.distribution("pycoll")
        return []
    except importlib.metadata.PackageNotFoundError:
        done = run([sys.executable, "setup.py", "-q", "egg_info", "--egg-base", directory], ROOT)
        assert done.returncode == 0, done.stdout
        return [str(directory), str(Path(pycoll.__path__[0]).parent)]


@contextlib.contextmanager
def environment(name: str, *packages: str) -> Iterator[Path]:
    """The Python of one that has these packages (pip's words); skips the test where pip fails."""
    cache = os.environ.get("PYCOLL_TEST_CACHE")
    root = Path(cache).resolve() if cache else Path(tempfile.mkdtemp(prefix="pycoll-client-"))
    directory = root / f"client-{name}-{sys.implementation.cache_tag}"
    try:
        yield _made(directory, packages)
    finally:
        if not cache:
            shutil.rmtree(root, ignore_errors=True)


def _made(directory: Path, packages: tuple[str, ...]) -> Path:
    python, complete = directory / "venv" / "bin" / "python", directory / "complete"
    if not (complete.exists() and complete.read_text().split() == list(packages)):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        made = run([sys.executable, "-m", "venv", directory / "venv"], "/", **clean())
        assert made.returncode == 0, made.stdout
        _share_packages(directory)
        _install(python, directory, packages)
        complete.write_text(" ".join(packages))
    _share_packages(directory)  # a kept one may have been made for another pycoll
    return python


def _share_packages(directory: Path) -> None:
    """The packages of this Python behind those of that one; `.pth` files of editable ones count."""
    version = "python{}.{}".format(*sys.version_info)
    ours = [sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]
    lines = [f"import site; site.addsitedir({path!r})" for path in dict.fromkeys(ours)]
    lines += missing_entry_points(directory)
    target = directory / "venv" / "lib" / version / "site-packages" / "shared.pth"
    target.write_text("\n".join(lines) + "\n")


def _install(python: Path, directory: Path, packages: tuple[str, ...]) -> None:
    constraints = directory / "constraints.txt"
    # Never another torch. torch.__version__ may say more than pip's version does: "+cu130".
    constraints.write_text(f"torch=={importlib.metadata.version('torch')}\n")
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir"]
    # TMPDIR: pip unpacks hundreds of megabytes, and /tmp may be small.
    done = run(
        [*command, "-c", constraints, *packages],
        directory,
        INSTALL_SECONDS,
        **clean(TMPDIR=directory),
    )
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
        reason = " ".join(errors) or done.stdout[-500:]
        pytest.skip(f"pip cannot install {' '.join(packages)}: {reason}")
