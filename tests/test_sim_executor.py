"""The SIMT executor of the GPU simulator: what it computes, orders, reports and counts.

The programs are tests/sim/executor.cpp and its scenarios, built plain and under both sanitizers.
Each scenario runs in a process of its own, because a report ends it.
"""

from __future__ import annotations

import functools
import platform
import re

import pytest

import native_build

BUILDS = [pytest.param("", id="plain"), "thread", "address"]
REPORTED = 86  # kFailureExitCode of csrc/sim/simt.h
RACE, MEMORY = 66, 67
OPTIONS = [
    f"TSAN_OPTIONS=exitcode={RACE} atexit_sleep_ms=0",
    f"ASAN_OPTIONS=exitcode={MEMORY} detect_leaks=1 detect_stack_use_after_return=1",
    "UBSAN_OPTIONS=print_stacktrace=1",
]
SEEDS = [0, 1, 2]  # 0: round robin

# What the report of each fault must say.
FAULTS = {
    "divergent_barriers": r"different __syncthreads.*(wait at __syncthreads at .*:\d+)",
    "exit_before_barrier": r"(exited while others .* wait at __syncthreads"
    r"|__syncthreads after threads of the block have exited).*threads 3 have exited",
    "lane_exits": r"lane.* exited.*threads 7 have exited",
    "not_in_own_mask": r"a lane is not in the mask",
    "lanes_that_are_not_there": r"mask names lanes that the last warp .* does not have",
    "different_operations": r"a (shuffle|vote) at .*:\d+ and a (shuffle|vote) at .*:\d+",
    "half_waits_at_barrier": r"deadlock: .*"
    r"threads 0-15 wait at __syncthreads at .*fault_scenarios.cpp:\d+\n.*"
    r"threads 16-31 wait for the lanes of mask 0xffffffff at .*fault_scenarios.cpp:\d+",
    "flag_never_raised": r"deadlock: .*block \(1,0,0\): threads 0 spin at .*fault_scenarios.cpp:\d+"
    r"\n.*threads 1-2 wait at __syncthreads",
    "not_resident": r"deadlock: .*1 blocks wait for room on device 0 \(max_resident 2\)",
    "nobody_outside": r"timeout: .*for somebody outside.*threads 0 spin at",
    "misaligned_pack": r"thread 0 accesses 16 bytes at 0x\w+[4c], .*fault_scenarios.cpp:\d+",
    "misaligned_flag": r"thread 0 accesses 8 bytes at 0x\w+[4c], .*fault_scenarios.cpp:\d+",
    "invalid_launch": r"invalid launch: a block of \(1025,1,1\) threads",
}

# The first test of a build compiles it.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + 300)


@pytest.fixture(scope="module")
def executor():
    """executor(sanitizer): a function that runs the program of that build with its arguments."""

    @functools.cache
    def built(sanitizer: str):
        if reason := native_build.why_no_simulator(sanitizer):
            pytest.skip(reason)
        native_build.sync()
        program = native_build.build(sanitizer, "executor", project="sim") / "executor"
        return lambda *rest: native_build.run(["env", *OPTIONS, program, *map(str, rest)], 60)

    return built


def scenarios(run, *kinds: str) -> list[str]:
    listed = run("--list").stdout.splitlines()
    names = [line.split()[0] for line in listed]
    return [name for name in names if name.split("/")[0] in kinds]


def check_clean(done) -> None:
    assert done.returncode == 0, done.stdout[:6000]
    assert re.fullmatch(r"ok \S+\n", done.stdout), done.stdout[:6000]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sanitizer", BUILDS)
def test_kernels_compute_and_are_ordered(executor, sanitizer, seed):
    run = executor(sanitizer)
    names = scenarios(run, "value", "order")
    assert len(names) > 15
    for name in names:
        check_clean(run(name, seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_missing_order_is_a_race(executor, seed):
    run = executor("thread")
    names = scenarios(run, "race")
    assert len(names) > 10
    for name in names:
        done = run(name, seed)
        assert done.returncode == RACE, f"{name}: {done.stdout[:6000]}"
        assert "data race" in done.stdout and "order_scenarios.cpp:" in done.stdout


def test_only_a_sanitizer_sees_missing_order(executor):
    """Results are right without it, so those reports come from nothing else."""
    run = executor("")
    for name in ("race/store_relaxed", "race/load_relaxed", "race/acquire_of_device_scope"):
        check_clean(run(name))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sanitizer", BUILDS)
def test_faults_are_reported(executor, sanitizer, seed):
    run = executor(sanitizer)
    names = scenarios(run, "fault")
    assert {name.split("/")[1] for name in names} == set(FAULTS)
    for name in names:
        done = run(name, seed)
        assert done.returncode == REPORTED, f"{name}: {done.stdout[:6000]}"
        report = done.stdout
        assert report.startswith("simt: "), report
        assert re.search(FAULTS[name.split("/")[1]], report, re.DOTALL), report
        assert ("round robin" if seed == 0 else f"random, seed {seed}") in report


def test_writing_out_of_bounds_is_reported(executor):
    run = executor("address")
    names = scenarios(run, "bounds")
    assert len(names) == 3
    for name in names:
        done = run(name)
        assert done.returncode == MEMORY, f"{name}: {done.stdout[:6000]}"
        assert "heap-buffer-overflow" in done.stdout
        assert re.search(r"fault_scenarios.cpp:\d+", done.stdout), done.stdout


# Kernels of the scenarios below tell the host what they did without ordering it: not for
# ThreadSanitizer.


@pytest.mark.parametrize("seed", SEEDS)
def test_schedules_occupancy_and_time_slices(executor, seed):
    run = executor("")
    names = scenarios(run, "schedule", "slice")
    names = [name for name in names if name.split("/")[1] not in ("trace", "failure_handler")]
    assert len(names) >= 7
    for name in names:
        check_clean(run(name, seed))


def test_a_schedule_is_a_function_of_its_seed(executor):
    """In processes of their own: nothing depends on addresses or time."""
    run = executor("")

    def trace(seed: int) -> str:
        return run("schedule/trace", seed).stdout.splitlines()[0]

    assert trace(0).startswith("trace ")
    traces = {seed: trace(seed) for seed in range(8)}
    assert len(set(traces.values())) == len(traces)
    for seed, before in traces.items():
        assert trace(seed) == before


def test_a_report_goes_to_the_handler(executor):
    done = executor("")("schedule/failure_handler")
    assert done.returncode == REPORTED
    assert done.stdout.startswith("handler: simt: ")
    assert done.stdout.count("simt: ") == 1


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_context_switch_keeps_what_a_call_keeps(tmp_path, machine):
    """On the other machine by emulation: the program needs no library."""
    reason = native_build.why_not("clang++")
    runner = []
    link = []
    if machine != platform.machine():
        emulator = native_build.find(f"qemu-{machine}")
        linker = native_build.find("ld.lld") or native_build.find("ld.lld-14")
        if not reason and not (emulator and linker):
            reason = "needs an emulator and a linker (Debian: apt-get install qemu-user lld)"
        runner = [emulator]
        link = [f"--ld-path={linker}"]
    if reason:
        pytest.skip(reason)
    program = tmp_path / "context_switch"
    root = native_build.ROOT
    command = ["clang++", f"--target={machine}-linux-gnu", "-std=c++20", "-O2", "-ffreestanding"]
    command += ["-nostdlib", "-static", "-fno-stack-protector", "-I", root / "csrc", *link]
    command += [root / "tests/sim/context_switch.cpp", root / "csrc/sim/context_switch.cpp"]
    done = native_build.run([*command, "-o", program], 120)
    assert done.returncode == 0, done.stdout
    assert native_build.run([*runner, program], 60).returncode == 0
