"""The device kernels on the GPU simulator: every one against a reference of the CPU.

The program is tests/sim/device_kernels.cpp. A case is a call with a size, a type, an alignment
of its own; many cases share a group of ranks, whose kernels run one after the other, ranks as far
apart as they may be. Seed 0 is round robin, others are random schedules.
"""

from __future__ import annotations

import functools
import re

import pytest

import native_build

BUILDS = [pytest.param("", id="plain"), "thread", "address"]
OPTIONS = [
    "TSAN_OPTIONS=halt_on_error=1 exitcode=66 atexit_sleep_ms=0",
    "ASAN_OPTIONS=exitcode=67 detect_leaks=1 detect_stack_use_after_return=1",
    "UBSAN_OPTIONS=print_stacktrace=1",
]
DEADLINE_S = 240

# Cases a seed, in the gate and in all. There are 93 sizes, from 0 to 70, around powers of two, and
# odd ones; kernels (in "programs", algorithms) take turns, so that in all each comes to every size.
# "covering" has every pair of size, type and number of ranks.
SUITES = {
    "all_reduce": (186, 9 * 93),
    "programs": (160, 37 * 93),
    "sweep": (62, 5 * 93),
    "covering": (62, 22 * 31),
    "replay": (36, 180),
    "barriers": (8, 80),
    "messages": (96, 480),
    "shared_device": (248, 12 * 93),
    "cast": (93, 9 * 93),
    "scale": (93, 8 * 93),
    "fused": (93, 3 * 93),
    "encode": (120, 10 * 240),
    "decode": (60, 10 * 120),
    "choices": (1, 1),
    "failures": (1, 1),
}
# Those that bring every kernel to every size; what is aligned with one seed is not with the next.
SWEEPS = ["all_reduce", "sweep", "shared_device", "cast", "scale", "fused", "encode", "decode"]

# The first test of a build compiles it.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + DEADLINE_S)


@pytest.fixture(scope="module")
def kernels():
    """kernels(sanitizer): a function that runs the program of that build with its arguments."""

    @functools.cache
    def built(sanitizer: str):
        if reason := native_build.why_no_simulator(sanitizer):
            pytest.skip(reason)
        native_build.sync()
        program = native_build.build(sanitizer, "device_kernels", project="sim") / "device_kernels"
        command = ["env", *OPTIONS, program]
        return lambda *rest: native_build.run([*command, *map(str, rest)], DEADLINE_S)

    return built


def check_suite(run, suite: str, cases: int, seed: int) -> None:
    done = run(suite, cases, seed)
    assert done.returncode == 0, f"{suite} {cases} {seed}:\n{done.stdout[:6000]}"
    ran = re.fullmatch(rf"ok {suite}: (\d+) cases\n", done.stdout)
    assert ran and int(ran[1]) >= cases, done.stdout[:6000]


def test_the_table_has_every_suite(kernels):
    listed = kernels("thread")("--list").stdout
    assert {line.split()[0] for line in listed.splitlines()} == set(SUITES)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_kernels_are_right(kernels, sanitizer, suite, seed):
    check_suite(kernels(sanitizer), suite, SUITES[suite][0], seed)


@pytest.mark.parametrize("suite", SWEEPS)
def test_every_kernel_comes_to_every_size(kernels, suite):
    for seed in (0, 1, 2):
        check_suite(kernels(""), suite, SUITES[suite][1], seed)


@pytest.mark.sweep
@pytest.mark.parametrize("seeds", [range(2, 102), range(102, 202)], ids=["2-101", "102-201"])
def test_all_pairs_in_many_schedules(kernels, seeds):
    for seed in seeds:
        check_suite(kernels(""), "covering", SUITES["covering"][1], seed)


@pytest.mark.sweep
@pytest.mark.parametrize("sanitizer, seeds", [("", 200), ("thread", 50), ("address", 20)])
@pytest.mark.parametrize("suite", SUITES)
def test_many_schedules(kernels, sanitizer, seeds, suite):
    run = kernels(sanitizer)
    if suite == "choices":  # nothing runs there
        seeds = 1
    if suite == "failures":  # it waits for real deadlines
        seeds = min(seeds, 10)
    for seed in range(2, 2 + seeds):
        check_suite(run, suite, SUITES[suite][0], seed)


@pytest.mark.sweep
@pytest.mark.parametrize("sanitizer", BUILDS)
@pytest.mark.parametrize("suite", SUITES)
def test_many_cases(kernels, sanitizer, suite):
    for seed in (0, 1000, 1001, 1002):
        check_suite(kernels(sanitizer), suite, SUITES[suite][1], seed)
