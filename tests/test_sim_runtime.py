"""The simulated CUDA runtime: its semantics, its errors, what it tells sanitizers, what it leaves.

The program is tests/sim/runtime.cpp with its scenarios, built plain and under both sanitizers. Each
scenario runs in a process of its own, because the state of the runtime is the process's; some fork
ranks.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess

import pytest

import cuda_symbols
import native_build

BUILDS = [pytest.param("", id="plain"), "thread", "address"]
REPORTED = 86  # kFailureExitCode of csrc/sim/simt.h
RACE, MEMORY = 66, 67
OPTIONS = {
    # Nothing runs any more when a scenario ends, so there is nothing to linger for.
    "TSAN_OPTIONS": f"exitcode={RACE} atexit_sleep_ms=0",
    "ASAN_OPTIONS": f"exitcode={MEMORY} detect_leaks=1 detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
DEADLINE_S = 120

# Machines that scenarios are written for.
ENVIRONMENT = {
    "errors/devices": {
        "CUDA_VISIBLE_DEVICES": "2,0",
        "PYCOLL_SIM_DEVICES": "4",
        "PYCOLL_SIM_RESIDENT": "3",
    },
    "errors/no_device": {"PYCOLL_SIM_DEVICES": "0"},
}
GROUPS = ["memory", "streams", "graphs", "errors", "driver", "processes"]
# They are tests of their own: below.
APART = ["memory/past_the_end", "errors/faults_of_environment", "errors/nobody_answers"]
# The host writes where a copy may be reading, to see that it does; that is a race.
RACES_ON_PURPOSE = ["memory/copy_timing"]

# The first test of a build compiles it.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + 300)


@functools.cache
def directory(sanitizer: str):
    """Where the programs of that build are; skips the test where they cannot be built."""
    if reason := native_build.why_no_simulator(sanitizer):
        pytest.skip(reason)
    native_build.sync()
    return native_build.build(sanitizer, "runtime", project="sim")


def run(sanitizer: str, scenario: str, **environment: str):
    settings = {**OPTIONS, **ENVIRONMENT.get(scenario, {}), **environment}
    assignments = [f"{name}={value}" for name, value in settings.items()]
    program = directory(sanitizer) / "runtime"
    return native_build.run(["env", *assignments, program, scenario], DEADLINE_S)


def scenarios(sanitizer: str, *groups: str) -> list[str]:
    listed = [line.split()[0] for line in run(sanitizer, "--list").stdout.splitlines()]
    apart = APART + (RACES_ON_PURPOSE if sanitizer == "thread" else [])
    chosen = [name for name in listed if name.split("/")[0] in groups and name not in apart]
    assert len(chosen) >= 5 * len(groups)
    return chosen


def check_clean(done, name: str) -> None:
    assert done.returncode == 0 and done.stdout == f"ok {name}\n", f"{name}:\n{done.stdout[:8000]}"


@pytest.mark.parametrize("sanitizer", BUILDS)
def test_semantics(sanitizer):
    for name in scenarios(sanitizer, *GROUPS):
        check_clean(run(sanitizer, name), name)


@pytest.mark.parametrize("seed", range(1, 6))
def test_semantics_hold_in_random_schedules(seed):
    for name in scenarios("", "memory", "streams", "graphs", "driver", "processes"):
        check_clean(run("", name, PYCOLL_SIM_SEED=str(seed)), name)


def test_processes_share_a_device_by_time_slices(tmp_path):
    """Ranks that are ordered by events never wait inside of a kernel; the scenarios check it."""
    for seed, name in enumerate(scenarios("", "processes")):
        file = tmp_path / name.replace("/", "-")
        slices = {"PYCOLL_SIM_TIME_SLICE": "1", "PYCOLL_SIM_SLICE_FILE": str(file)}
        check_clean(run("", name, PYCOLL_SIM_SEED=str(seed), **slices), name)


def test_what_cuda_does_not_order_is_a_race():
    for name in scenarios("thread", "unordered"):
        done = run("thread", name)
        assert done.returncode == RACE, f"{name}:\n{done.stdout[:8000]}"
        assert "WARNING: ThreadSanitizer: data race" in done.stdout


def test_what_cuda_orders_is_none():
    for name in scenarios("thread", "ordered"):
        for seed in range(3):
            check_clean(run("thread", name, PYCOLL_SIM_SEED=str(seed)), name)


def test_a_kernel_past_the_end_of_its_memory():
    done = run("address", "memory/past_the_end")
    assert done.returncode == MEMORY, done.stdout[:8000]
    assert "use-after-poison" in done.stdout and "in pycoll::sim::tests::fill" in done.stdout


def test_faults_come_from_the_environment():
    faults = "cudaEventCreateWithFlags:1=46,cudaStreamCreateWithFlags:0=kill"
    done = run("", "errors/faults_of_environment", PYCOLL_SIM_FAULTS=faults)
    # `env` runs the program in its own process, so the signal is seen.
    assert done.returncode == -signal.SIGKILL, done.stdout
    assert done.stdout == ""


def test_a_kernel_that_waits_for_nobody_is_reported():
    done = run("", "errors/nobody_answers", PYCOLL_SIM_TIMEOUT_S="1")
    assert done.returncode == REPORTED, done.stdout
    assert re.search(r"timeout: .*spin at .*runtime_errors.cpp:\d+", done.stdout, re.DOTALL)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PYCOLL_SIM_DEVICES", "many", "PYCOLL_SIM_DEVICES=many is no number"),
        ("PYCOLL_SIM_DEVICES", "-1", "PYCOLL_SIM_DEVICES must be 0 to 64"),
        ("PYCOLL_SIM_FAULTS", "cudaFree=3", "`cudaFree=3` is not function:calls=code or =kill"),
        ("PYCOLL_SIM_FAULTS", "a:b=3", "`a:b=3` is not function:calls=code or =kill"),
        ("PYCOLL_SIM_TIME_SLICE", "1", "PYCOLL_SIM_TIME_SLICE needs PYCOLL_SIM_SLICE_FILE"),
    ],
)
def test_settings_that_make_no_sense_are_refused(variable, value, message):
    done = run("", "memory/allocation", **{variable: value})
    assert done.returncode == REPORTED and message in done.stdout, done.stdout


def test_nothing_is_left_behind(tmp_path):
    def things() -> set[str]:
        return {entry for place in ("/dev/shm", "/tmp", tmp_path) for entry in os.listdir(place)}

    before = things()
    for name in ("processes/killed", "processes/memory", "processes/events"):
        check_clean(run("", name, TMPDIR=str(tmp_path)), name)
    others = ("pycoll-ranks-", "pycoll-threads-")  # tests of the other lane (conftest.py)
    left = {name for name in things() - before if "sim" in name or "pycoll" in name}
    left -= {name for name in left if name.startswith(others)}
    assert not left and not os.listdir(tmp_path)


def test_nvcc_needs_nothing_that_is_not_defined(tmp_path):
    """What nvcc leaves undefined in code that launches kernels is in the simulated runtime."""
    if reason := cuda_symbols.why_not():
        pytest.skip(reason)
    library = directory("") / "libpycoll_sim_cuda.so"
    defined = cuda_symbols.defined(library)
    assert {"cudaMalloc", "cudaIpcOpenEventHandle", "cudaGraphLaunch"} < defined
    assert len(defined) > 80
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc not found: only that the symbols are there was checked")
    source, compiled = tmp_path / "launches.cu", tmp_path / "launches.o"
    source.write_text(
        """#include "device/launch.cuh"
        __global__ void nothing() {}
        cudaError_t launch_nothing(cudaStream_t stream) {
          return pycoll::device::launch(&nothing, {dim3(1), dim3(1)}, stream);
        }"""
    )
    include = f"-I{native_build.ROOT / 'csrc'}"
    command = [nvcc, "-std=c++20", "-arch=sm_90", include, "-c", source, "-o", compiled]
    subprocess.run(command, check=True, timeout=300)
    needed = cuda_symbols.needed(compiled)
    assert "cudaLaunchKernelExC" in needed
    assert needed <= defined, sorted(needed - defined)
