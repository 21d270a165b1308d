"""Building and installing, and what a user is told when it cannot work."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import pycoll
from helpers_build import ROOT, copy_sources, run

PACKAGE = Path(pycoll.__file__).parent


@pytest.fixture
def source(tmp_path) -> Path:
    copy = tmp_path / "source"
    copy_sources(copy)
    return copy


@pytest.fixture
def installed_copy(tmp_path) -> Path:
    """A directory for PYTHONPATH with a copy of the built package, to take modules out of."""
    copy = tmp_path / "installed"
    shutil.copytree(PACKAGE, copy / "pycoll", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "_pycoll_autoload.py", copy)
    return copy


def pip_install(source, *arguments, timeout=120, **env):
    command = [sys.executable, "-m", "pip", "install", "--no-deps", *arguments, "."]
    return run(command, source, timeout, **env)


def python(path, code, **env):
    return run([sys.executable, "-c", code], path, PYTHONPATH=path, **env)


def test_an_isolated_install_stops_at_once_with_the_commands(source, tmp_path):
    done = pip_install(source, "--target", tmp_path / "target")
    assert done.returncode != 0
    assert "pip install --no-build-isolation ." in done.stdout
    assert "PYCOLL_TORCH=0 pip install ." in done.stdout
    assert "Traceback" not in done.stdout
    assert "Collecting torch" not in done.stdout
    assert not (source / "build").exists()
    assert not (tmp_path / "target").exists()


def test_no_compiler(source, tmp_path):
    arguments = ("--no-build-isolation", "--target", tmp_path / "target")
    done = pip_install(source, *arguments, CXX="/nonexistent/g++")
    assert done.returncode != 0
    assert "needs a C++20 compiler" in done.stdout
    assert "/nonexistent/g++" in done.stdout
    assert "apt-get install build-essential" in done.stdout


def test_missing_build_tools_are_named(source, tmp_path):
    """An environment that has torch and setuptools, but none of the build tools."""
    hide = tmp_path / "hide"
    hide.mkdir()
    code = (
        "import importlib.util as util, shutil\n"
        "find, which = util.find_spec, shutil.which\n"
        "util.find_spec = lambda name, *a: None if name == 'pybind11' else find(name, *a)\n"
        "shutil.which = lambda x, **k: None if x in ('cmake', 'ninja') else which(x, **k)\n"
    )
    (hide / "sitecustomize.py").write_text(code)
    arguments = ("--no-build-isolation", "--target", tmp_path / "target")
    done = pip_install(source, *arguments, PYTHONPATH=hide)
    assert done.returncode != 0
    assert "pip install cmake ninja pybind11" in done.stdout


INIT = """
import torch, torch.distributed as dist
{setup}
try:
    dist.init_process_group("pycoll", store=dist.HashStore(), rank=0, world_size=1)
except ImportError as error:
    print(error)
"""
OTHER_TORCH = 'torch.__version__ = "2.99.0+cpu"'


def test_a_module_for_another_torch_says_how_to_rebuild(installed_copy):
    done = python(installed_copy, INIT.format(setup=OTHER_TORCH))
    major, minor = running_torch()
    assert (
        f"pycoll was built for torch {major}.{minor}, this is torch 2.99: rebuild with "
        "`pip install --no-build-isolation --force-reinstall --no-deps .`" in done.stdout
    )


def test_a_renamed_module_is_not_loaded_under_the_running_torch(installed_copy):
    major, minor = running_torch()
    for module in (installed_copy / "pycoll").glob("_c10d_*"):
        module.rename(module.with_name(module.name.replace(f"_{major}_{minor}", "_2_99")))
    done = python(installed_copy, INIT.format(setup=""))
    assert f"was built for torch 2.99, this is torch {major}.{minor}" in done.stdout


def test_without_a_torch_module_the_core_works_and_torch_says_why_not(installed_copy):
    for module in (installed_copy / "pycoll").glob("_c10d_*"):
        module.unlink()
    done = python(installed_copy, INIT.format(setup="import pycoll; print(pycoll.__file__)"))
    assert str(installed_copy) in done.stdout
    assert "was built without torch" in done.stdout


def test_import_torch_knows_the_backend_and_loads_no_native_code():
    """What the entry point does at the end of `import torch`, without `import pycoll`."""
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "assert 'pycoll' not in sys.modules, 'imported'\n"
        "assert 'libpycoll' not in open('/proc/self/maps').read(), 'mapped'\n"
        "print(dist.is_backend_available('pycoll'))"
    )
    done = run([sys.executable, "-c", code], "/")
    assert done.stdout.strip().endswith("True"), done.stdout


def test_import_pycoll_leaves_torch_alone_when_asked():
    code = "import sys, pycoll; print('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], "/").stdout.strip() == "True"
    assert run([sys.executable, "-c", code], "/", PYCOLL_TORCH="0").stdout.strip() == "False"


def running_torch() -> tuple[str, str]:
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return major, minor


@pytest.mark.full
@pytest.mark.timeout(900)
def test_installs_against_the_torch_that_is_there(source, tmp_path):
    target = tmp_path / "target"
    done = pip_install(source, "--no-build-isolation", "--target", target, timeout=800)
    assert done.returncode == 0, done.stdout
    major, minor = running_torch()
    built = {file.name.split(".")[0] for file in (target / "pycoll").glob("*.so")}
    assert built == {"_core", "libpycoll", f"_c10d_{major}_{minor}"}
    code = (
        "import torch, torch.distributed as dist, pycoll\n"
        "dist.init_process_group('pycoll', store=dist.HashStore(), rank=0, world_size=1)\n"
        "x = torch.arange(5.0); dist.all_reduce(x); print(pycoll.__file__, x.tolist())\n"
        "dist.destroy_process_group()"
    )
    used = python(target, code)
    assert used.returncode == 0, used.stdout
    assert str(target) in used.stdout
    assert "[0.0, 1.0, 2.0, 3.0, 4.0]" in used.stdout


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_core_builds_and_works_without_torch(source, tmp_path):
    target = tmp_path / "target"
    arguments = ("--no-build-isolation", "--target", target)
    done = pip_install(source, *arguments, timeout=500, PYCOLL_TORCH=0)
    assert done.returncode == 0, done.stdout
    built = {file.name.split(".")[0] for file in (target / "pycoll").glob("*.so")}
    assert built == {"_core", "libpycoll"}
    code = (
        "import sys, tempfile, numpy, pycoll\n"
        "c = pycoll.Communicator(pycoll.FileStore(tempfile.mkdtemp()), 0, 1)\n"
        "x = numpy.arange(5.0); c.all_reduce(x); print(x.tolist(), 'torch' in sys.modules)"
    )
    used = python(target, code, PYCOLL_TORCH=0)
    assert used.returncode == 0, used.stdout
    assert "[0.0, 1.0, 2.0, 3.0, 4.0] False" in used.stdout
