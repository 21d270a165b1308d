"""Builds the native test programs from a copy of the sources, which a test may change.

There are two projects: tests/native, the core, and tests/sim, kernels on the GPU simulator.

The copy and its builds live in build/tests/native and are kept between runs: only what changed is
compiled again. A copy that an interrupted test left changed is mended by the next sync().
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "tests" / "native"
SOURCE = PLACE / "source"
COPIED = ["csrc", "cmake", "tests/native", "tests/sim", "tests/gpu"]
BUILD_DEADLINE_S = 900

NEEDED = {
    "clang++": "clang libclang-rt-dev (Debian 12: libclang-rt-14-dev)",
    "cmake": "cmake",
    "ninja": "ninja-build",
}


def find(tool: str) -> str | None:
    """Where a tool is; pip puts cmake and ninja beside this Python, which may not be on PATH."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(tool, path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))


def find_nvcc() -> str | None:
    """nvcc of CUDA_HOME, of /usr/local/cuda, or on PATH."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    inside = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    return next((path for path in inside if os.access(path, os.X_OK)), None) or find("nvcc")


def why_not(*tools: str) -> str:
    """What is missing and which Debian packages have it; empty when nothing is."""
    missing = [tool for tool in tools if find(tool) is None]
    if missing:
        packages = " ".join(NEEDED[tool] for tool in missing)
        return f"{', '.join(missing)} not found (Debian: apt-get install {packages})"
    return ""


@functools.cache
def why_no_sanitizer(sanitizer: str) -> str:
    """Why programs with that sanitizer cannot be built and run here; empty when they can."""
    reason = why_not("clang++", "cmake", "ninja")
    if reason:
        return reason
    PLACE.mkdir(parents=True, exist_ok=True)
    probe = PLACE / f"probe-{sanitizer}"
    command = ["clang++", f"-fsanitize={sanitizer}", "-x", "c++", "-", "-o", str(probe)]
    done = subprocess.run(
        command, input="int main() {}", capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        packages = NEEDED["clang++"]
        return f"clang++ has no {sanitizer} sanitizer (Debian: apt-get install {packages})"
    done = subprocess.run([probe], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        return f"programs with the {sanitizer} sanitizer do not run here: {done.stderr[:200]}"
    return ""


@functools.cache
def claim() -> int:
    """Keeps the copy and its builds for this process and what it forks: others that built there at
    once would find the sources that a mutant changed. Returns the descriptor that holds the lock.
    """
    PLACE.mkdir(parents=True, exist_ok=True)
    lock = os.open(PLACE / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise RuntimeError(
            f"another run of the tests builds in {PLACE}. Within one run only the lane `native` "
            "may (tests/conftest.py)"
        ) from None
    return lock


def sync() -> None:
    """Makes the copy equal to the sources, touching only files whose contents differ."""
    claim()
    for part in COPIED:
        there, here = SOURCE / part, ROOT / part
        wanted = {path.relative_to(here) for path in here.rglob("*") if path.is_file()}
        for path in there.rglob("*"):
            if path.is_file() and path.relative_to(there) not in wanted:
                path.unlink()
        for name in wanted:
            contents = (here / name).read_bytes()
            copy = there / name
            if not copy.exists() or copy.read_bytes() != contents:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(contents)  # with the time of now: whatever depends on it is stale


def run(command: list[str | Path | None], timeout: float) -> subprocess.CompletedProcess[str]:
    """Runs a command, stderr in stdout. After the deadline it is killed, and its code is None."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += f"\nkilled after {timeout} s"
    except BaseException:
        process.kill()
        process.wait()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, "")


@functools.cache
def why_no_cuda_headers() -> str:
    """Why nothing can be built for the GPU simulator here; empty when it can."""
    reason = why_not("clang++", "cmake", "ninja")
    if reason:
        return reason
    script = ROOT / "cmake" / "cuda_headers.cmake"
    found = run([find("cmake"), f"-DPYCOLL_PYTHON={sys.executable}", "-P", script], 60)
    if found.returncode == 0 and found.stdout.strip():
        return ""
    return (
        "no CUDA headers (pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl): "
        f"{found.stdout}"
    )


@functools.cache
def simulated(*targets: str) -> Path | str:
    """Where these libraries over the simulated runtime are; or, as text, why they cannot be."""
    reason = why_no_cuda_headers()
    if reason:
        return reason
    sync()
    return build("", *targets, project="sim")


@functools.cache
def why_no_simulator(sanitizer: str) -> str:
    """Why programs of tests/sim cannot be built with that sanitizer (or none); else empty."""
    reason = why_no_cuda_headers()
    return why_no_sanitizer(sanitizer) if not reason and sanitizer else reason


@functools.cache
def core_library() -> Path:
    """libpycoll.so of the package under test."""
    spec = importlib.util.find_spec("pycoll")
    assert spec is not None and spec.submodule_search_locations
    places = [Path(place) / "libpycoll.so" for place in spec.submodule_search_locations]
    return next(place for place in places if place.exists())


def configured_for(where: Path, core: Path) -> bool:
    cache = where / "CMakeCache.txt"
    if not (where / "build.ninja").exists():
        return False
    return f"PYCOLL_CORE:FILEPATH={core}\n" in cache.read_text()


def build(sanitizer: str, *targets: str, project: str = "native") -> Path:
    """Compiles targets of tests/<project>/CMakeLists.txt and returns the directory they are in.

    `sanitizer` is thread, address, or empty for a plain build. The simulator's groups run on the
    core of the package under test; with a sanitizer, on tests/native's, which has it too.
    """
    claim()
    where = PLACE / ("" if project == "native" else project) / (sanitizer or "plain")
    core = PLACE / sanitizer / "libpycoll.so" if sanitizer else core_library()
    if project == "sim" and sanitizer and "groups" in targets:
        build(sanitizer, "pycoll_core")
    if not configured_for(where, core):
        configure = [find("cmake"), "-S", SOURCE / "tests" / project, "-B", where, "-G", "Ninja"]
        options = [
            "-DCMAKE_CXX_COMPILER=clang++",
            f"-DCMAKE_MAKE_PROGRAM={find('ninja')}",
            f"-DPYCOLL_SANITIZER={sanitizer}",
            f"-DPYCOLL_PYTHON={sys.executable}",
            f"-DPYCOLL_CORE:FILEPATH={core}",
        ]
        done = run([*configure, *options], BUILD_DEADLINE_S)
        if done.returncode != 0:
            shutil.rmtree(where, ignore_errors=True)
            raise RuntimeError(f"cmake failed:\n{done.stdout}")
    jobs = f"-j{min(4, len(os.sched_getaffinity(0)))}"
    done = run([find("ninja"), "-C", where, jobs, *targets], BUILD_DEADLINE_S)
    if done.returncode != 0:
        raise RuntimeError(f"the native tests do not compile:\n{done.stdout[-4000:]}")
    return where
