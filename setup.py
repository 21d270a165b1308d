"""A thin bridge from pip to CMake: CMakeLists.txt is the one description of the native targets.

Environment:
  PYCOLL_TORCH=0             build only the torch-free core, even where torch is installed
  PYCOLL_CUDA=0|1            leave out, or insist on, the CUDA part (default: where there are nvcc
                             and a torch that is built for CUDA); see cmake/cuda.cmake
  PYCOLL_BUILD_DIR           where CMake works (default: build/cmake-<python>-<torch>, kept between
                             builds, so that a rebuild compiles only what changed)
  CMAKE_ARGS                 more arguments for CMake's configure step
  CMAKE_BUILD_PARALLEL_LEVEL number of compile jobs (default: the CPUs this process may use)
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import NoReturn

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
WITH_TORCH = os.environ.get("PYCOLL_TORCH", "1") != "0"
CUDA = {"": "AUTO", "0": "OFF", "1": "ON"}
BUILD_TOOLS = ["cmake", "ninja", "pybind11"]

NO_TORCH = """
pycoll builds against the torch that is installed, and none can be imported here.
(A plain `pip install` builds in an isolated environment, which hides the installed torch.)

  With torch installed:     pip install -U "setuptools>=77,<82" cmake ninja pybind11
                            pip install --no-build-isolation .
  Without torch (the core): PYCOLL_TORCH=0 pip install .
"""

NO_COMPILER = """
pycoll needs a C++20 compiler and found none (looked for: {looked_for}).

  Debian, Ubuntu:           apt-get install build-essential
  Another compiler:         CXX=/path/to/g++ pip install --no-build-isolation .
"""

OLD_SETUPTOOLS = """
pycoll needs setuptools 77 or newer to build, and this is {version}.

  pip install --upgrade "setuptools>=77,<82"     (torch 2.11 and 2.12 refuse newer ones)
"""

NO_TOOLS = """
pycoll builds with CMake and Ninja, and this environment lacks: {missing}.

  pip install {missing}
"""


def stop(message: str) -> NoReturn:
    raise SystemExit(message)


def cuda_option() -> str:
    value = os.environ.get("PYCOLL_CUDA", "")
    if value not in CUDA:
        stop(f"PYCOLL_CUDA={value} is neither 0 nor 1")
    return CUDA[value]


def find_tool(name: str) -> str | None:
    """The executable beside this Python first: a venv's bin is not on PATH unless activated."""
    scripts = sysconfig.get_path("scripts")
    return shutil.which(name, path=scripts) or shutil.which(name)


def check_compiler() -> None:
    chosen = os.environ.get("CXX")
    candidates = [shlex.split(chosen)[0]] if chosen else ["c++", "g++", "clang++"]
    if not any(shutil.which(candidate) for candidate in candidates):
        stop(NO_COMPILER.format(looked_for=", ".join(candidates)))


def check_tools() -> None:
    missing = [tool for tool in ("cmake", "ninja") if find_tool(tool) is None]
    if importlib.util.find_spec("pybind11") is None:
        missing.append("pybind11")
    if missing:
        stop(NO_TOOLS.format(missing=" ".join(missing)))


def build_directory() -> Path:
    """One per Python and torch: CMake caches what it learnt about both."""
    if chosen := os.environ.get("PYCOLL_BUILD_DIR"):
        return Path(chosen).resolve()
    torch_tag = "core"
    if WITH_TORCH:
        torch_tag = "torch" + re.sub(r"[^0-9a-zA-Z.]+", "_", installed_version("torch"))
    return ROOT / "build" / f"cmake-{sys.implementation.cache_tag}-{torch_tag}"


class CMakeBuild(build_ext):
    """Configures, builds and installs everything in one go, whatever extension was asked for."""

    def run(self) -> None:
        check_compiler()
        check_tools()
        # The install step puts the modules into <prefix>/pycoll: the source tree for -e.
        prefix = ROOT if self.inplace else Path(self.build_lib).resolve()
        build = build_directory()
        build.mkdir(parents=True, exist_ok=True)
        cmake, ninja = find_tool("cmake"), find_tool("ninja")
        configure = [
            cmake, "-S", ROOT, "-B", build, "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DPYCOLL_TORCH={'ON' if WITH_TORCH else 'OFF'}",
            f"-DPYCOLL_CUDA={cuda_option()}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]  # fmt: skip
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or len(os.sched_getaffinity(0))
        self.call(configure)
        self.call([cmake, "--build", build, "--parallel", str(jobs)])
        if not self.inplace:
            # setuptools reuses this directory: a wheel must not carry an earlier build's modules.
            for stale in (prefix / "pycoll").glob("*.so"):
                stale.unlink()
        self.call([cmake, "--install", build, "--prefix", prefix])

    @staticmethod
    def call(command: list[object]) -> None:
        status = subprocess.run([str(part) for part in command], check=False).returncode
        if status != 0:
            stop(f"pycoll: {command[0]} failed with exit code {status}; its output is above")

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # the in-place files come straight from CMake's install step

    def get_outputs(self) -> list[str]:
        return []


def main() -> None:
    if not sys.platform.startswith("linux"):
        stop("pycoll runs on Linux only (it builds on memfd, futex and pidfd)")
    if int(setuptools.__version__.split(".")[0]) < 77:
        stop(OLD_SETUPTOOLS.format(version=setuptools.__version__))
    if WITH_TORCH and importlib.util.find_spec("torch") is None:
        stop(NO_TORCH)
    setup(
        ext_modules=[Extension("pycoll._core", sources=[])],
        cmdclass={"build_ext": CMakeBuild},
        # What pip fetches into an isolated environment; not asked for with --no-build-isolation.
        setup_requires=BUILD_TOOLS,
    )


main()
