"""libpycoll_cuda.so as nvcc makes it: it builds, opens without a GPU, and calls nothing that the
simulated runtime does not define, so nothing in it goes untested for want of a function."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

import cuda_symbols
import native_build
from pycoll import _core

BUILD = native_build.ROOT / "build" / "tests" / "cuda"


@pytest.fixture(scope="module")
def library() -> Path:
    if reason := native_build.why_not("cmake", "ninja") or cuda_symbols.why_not():
        pytest.skip(reason)
    if not native_build.find_nvcc():
        pytest.skip("nvcc not found (set CUDA_HOME, or put it on PATH)")
    configure = [
        native_build.find("cmake"), "-S", native_build.ROOT, "-B", BUILD, "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={native_build.find('ninja')}",
        f"-DPython_EXECUTABLE={sys.executable}", "-DPYCOLL_TORCH=OFF", "-DPYCOLL_CUDA=ON",
    ]  # fmt: skip
    for command in (configure, [native_build.find("ninja"), "-C", BUILD, "-j2", "pycoll_cuda"]):
        done = native_build.run(command, 900)
        assert done.returncode == 0, done.stdout[-4000:]
    return BUILD / "libpycoll_cuda.so"


@pytest.mark.full
@pytest.mark.timeout(1000)
def test_all_that_it_needs_is_simulated(library: Path) -> None:
    native_build.sync()
    simulated = native_build.build("", "pycoll_sim_cuda", project="sim") / "libpycoll_sim_cuda.so"
    needed = cuda_symbols.needed(library)
    assert {"cudaLaunchKernelExC", "cudaIpcOpenMemHandle"} < needed
    assert needed <= cuda_symbols.defined(simulated)


@pytest.mark.full
@pytest.mark.timeout(1000)
def test_it_opens_without_a_gpu(library: Path) -> None:
    """And has no undefined symbols of its own: with the core that _core has loaded."""
    assert _core.__file__
    runtime = native_build.run(["ldd", library], 60).stdout
    if "not found" in runtime.replace("libpycoll.so => not found", ""):
        pytest.skip(f"the loader does not find CUDA's runtime by itself:\n{runtime}")
    opened = ctypes.CDLL(str(library), mode=os.RTLD_NOW)
    opened.pycoll_device_library.restype = ctypes.c_void_p
    assert opened.pycoll_device_library(-1) is None  # no such version of the interface
