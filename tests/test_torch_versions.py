"""Builds and runs pycoll with other versions of torch than the one these tests run with.

Each version gets a virtual environment of its own, with whatever build of torch pip's index has for
it: one for the CPU where there is one (0.9 GB), else the one with CUDA's libraries (up to 6 GB).

  PYCOLL_TEST_TORCH  the versions, e.g. "2.11 2.12.1 2.14"
  PYCOLL_TEST_CACHE  a directory where the environments and builds stay for the next run; without it
                     they are in a temporary one, each removed before the next is made
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import pycoll
from helpers_build import ROOT, clean, copy_sources, run
from helpers_scripts import Ended, run_commands

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]

VERSIONS = os.environ.get("PYCOLL_TEST_TORCH", "2.11 2.14").split()
NEEDED_GIB = 10  # with CUDA's libraries: 3 GiB of wheels, 6 GiB installed
INSTALL_SECONDS = 1200
BUILD_SECONDS = 1000
WORLD = 2
SCRIPT = ROOT / "tests" / "smoke_torch.py"
# torch 2.11 and 2.12 refuse newer setuptools; pip would not heed that in a second command.
TOOLS = ["setuptools>=77,<82", "cmake", "ninja", "pybind11", "numpy"]
# What pip says when its index has no such torch, or its configuration excludes it.
NOT_OFFERED = ("No matching distribution found for torch", "The user requested (constraint) torch")

INIT = """
import torch, torch.distributed as dist, pycoll
try:
    dist.init_process_group("pycoll", store=dist.HashStore(), rank=0, world_size=1)
except ImportError as error:
    print(error)
"""


def short(version: str) -> str:
    """ "2.14.1+cu130": "2.14" """
    return ".".join(version.split(".")[:2])


def running_torch() -> str:
    import torch

    return short(torch.__version__)


@dataclass
class Environment:
    """A virtual environment with a torch, and pycoll built and installed for it."""

    python: Path
    version: str  # "2.14"
    installation: str  # pip's output
    package: Path  # the installed pycoll


def make_venv(directory: Path, version: str) -> Path:
    """With that torch and the build tools, made once in a kept directory. Returns its Python."""
    python, complete = directory / "venv" / "bin" / "python", directory / "complete"
    if complete.exists():
        return python
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    free = shutil.disk_usage(directory).free / 2**30
    if free < NEEDED_GIB:
        pytest.skip(f"torch {version} needs {NEEDED_GIB} GiB in {directory}, which has {free:.1f}")
    made = run([sys.executable, "-m", "venv", directory / "venv"], "/", **clean())
    assert made.returncode == 0, made.stdout
    wanted = version if version.count(".") > 1 else f"{version}.*"
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir"]
    # TMPDIR: pip unpacks gigabytes, and /tmp may be small.
    done = run(
        [*command, f"torch=={wanted}", *TOOLS],
        directory,
        INSTALL_SECONDS,
        **clean(TMPDIR=directory),
    )
    if any(words in done.stdout for words in NOT_OFFERED):
        python_version = ".".join(map(str, sys.version_info[:2]))
        pytest.skip(f"pip offers no torch {wanted} for Python {python_version}")
    assert done.returncode == 0, done.stdout
    complete.touch()
    return python


def install_pycoll(python: Path, source: Path) -> str:
    copy_sources(source)
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--force-reinstall"]
    done = run(
        [*command, "--no-build-isolation", "--no-deps", "--verbose", "."],
        source,
        BUILD_SECONDS,
        **clean(),
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module", params=VERSIONS)
def environment(request) -> Iterator[Environment]:
    cache = os.environ.get("PYCOLL_TEST_CACHE")
    root = Path(cache).resolve() if cache else Path(tempfile.mkdtemp(prefix="pycoll-torch-"))
    directory = root / f"torch-{request.param}-{sys.implementation.cache_tag}"
    try:
        python = make_venv(directory, request.param)
        output = install_pycoll(python, directory / "source")
        where = run([python, "-c", "import pycoll; print(pycoll.__path__[0])"], "/", **clean())
        package = Path(where.stdout.strip())
        yield Environment(python, short(request.param), output, package)
    finally:
        if not cache:
            shutil.rmtree(root, ignore_errors=True)


def copied(package: Path, directory: Path) -> Path:
    """A directory for PYTHONPATH that has this installed package and nothing else."""
    shutil.copytree(package, directory / "pycoll", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "_pycoll_autoload.py", directory)
    return directory


def test_builds_for_the_torch_that_is_there(environment):
    built = {file.name.split(".")[0] for file in environment.package.glob("*.so")}
    tag = environment.version.replace(".", "_")
    # With nvcc on the machine, and torch a build for CUDA.
    built.discard("libpycoll_cuda")
    assert built == {"_core", "libpycoll", f"_c10d_{tag}"}, environment.package
    assert environment.package.is_relative_to(environment.python.parent.parent)
    for line in environment.installation.splitlines():
        assert "warning:" not in line or "pycoll" not in line, line


def test_trains_and_communicates(environment, tmp_path):
    script = shutil.copy(SCRIPT, tmp_path)  # alone: a script's directory is on its path
    shared = tmp_path / "shared"
    shared.mkdir()
    ends = run_commands(
        [[environment.python, script, str(rank), str(WORLD), str(shared)] for rank in range(WORLD)],
        timeout=180,
        env=clean(OMP_NUM_THREADS=1),
        cwd=tmp_path,
    )
    for end in ends:
        check_end(end, environment.version)


def check_end(end: Ended, version: str) -> None:
    assert end.exitcode == 0, end
    words = end.stdout.split()
    assert words[0] == "ok" and short(words[1]) == version, end
    assert "data_parallel" in words, end
    # Nothing at all: neither pycoll nor torch has a reason to write there.
    assert end.stderr == "", end


def test_our_module_is_refused_by_that_torch(environment, tmp_path):
    """The package that these tests run with, under the other torch."""
    if environment.version == running_torch():
        pytest.skip("the same version of torch")
    path = copied(Path(pycoll.__path__[0]), tmp_path)
    done = run([environment.python, "-c", INIT], tmp_path, **clean(PYTHONPATH=path))
    check_refusal(done.stdout, built_for=running_torch(), running=environment.version)


def test_its_module_is_refused_by_our_torch(environment, tmp_path):
    if environment.version == running_torch():
        pytest.skip("the same version of torch")
    path = copied(environment.package, tmp_path)
    done = run([sys.executable, "-c", INIT], tmp_path, **clean(PYTHONPATH=path))
    check_refusal(done.stdout, built_for=environment.version, running=running_torch())


def check_refusal(output: str, built_for: str, running: str) -> None:
    message = (
        f"pycoll was built for torch {built_for}, this is torch {running}: rebuild with "
        "`pip install --no-build-isolation --force-reinstall --no-deps .`"
    )
    assert output.strip() == message, output
