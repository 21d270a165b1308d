"""Transport, executor and communicator under ThreadSanitizer and Address/UBSanitizer.

The driver (tests/native) runs ranks as threads and checks every result element by element. Its
schedules come from seeds: a few here, many more under the mark `full`.
"""

from __future__ import annotations

import os
import subprocess

import pytest

import native_build

# Reports go to stderr and change the exit code; nothing may go on after the first of a kind.
OPTIONS = {
    "TSAN_OPTIONS": "exitcode=66 second_deadlock_stack=1",
    "ASAN_OPTIONS": "exitcode=67 detect_leaks=1 detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
SANITIZERS = ["thread", "address"]
GATE_SECONDS = {"thread": 1.0, "address": 0.3}  # a scenario; each runs its episodes at least once
FULL_SEEDS = range(100, 103)


@pytest.fixture(scope="session", params=SANITIZERS)
def sanitizer(request):
    reason = native_build.why_no_sanitizer(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="session")
def stress(sanitizer):
    """Runs the driver built with the sanitizer; fails on any report or failed check."""
    native_build.sync()
    program = native_build.build(sanitizer, "stress") / "stress"

    def run(*arguments, timeout: float = 500) -> str:  # against a hang: 165 s on a free machine
        done = subprocess.run(
            [str(program), *map(str, arguments)],
            env={**os.environ, **OPTIONS},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        report = f"{done.stdout[-4000:]}\n{done.stderr[:20000]}"
        assert done.returncode == 0, f"exit code {done.returncode}\n{report}"
        assert done.stderr == "", report
        return done.stdout

    return run


# The fixture may compile everything first.
@pytest.mark.timeout(native_build.BUILD_DEADLINE_S + 600)
def test_every_scenario_is_clean(stress, sanitizer):
    listed = stress("--list").splitlines()
    output = stress("--seed", 1, "--seconds", GATE_SECONDS[sanitizer])
    assert output.count("ok ") == len(listed) > 20


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", FULL_SEEDS)
def test_more_schedules_are_clean(stress, seed):
    stress("--seed", seed, "--seconds", 2, timeout=600)


# The gate runs fewer rounds, in test_mutants.py, which shows that a missing fence is found there.
@pytest.mark.full
@pytest.mark.timeout(native_build.BUILD_DEADLINE_S + 600)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_no_wake_up_is_lost_in_millions():
    reason = native_build.why_no_sanitizer("thread")
    if reason:
        pytest.skip(reason)
    native_build.sync()
    program = native_build.build("thread", "litmus") / "litmus"
    done = native_build.run([program, "5000000"], 500)
    assert done.returncode == 0, done.stdout


def test_a_sanitizer_is_really_on(sanitizer, tmp_path):
    """A race and an overflow are reported, so that silence above means something."""
    source = tmp_path / "wrong.cpp"
    source.write_text(
        "#include <thread>\n"
        "int main(int argc, char**) {\n"
        "  int* a = new int[2]();\n"
        "  std::thread other([&] { a[0] = 1; });\n"
        "  a[0] = 2;\n"
        "  other.join();\n"
        "  int wrong = a[1 + argc];\n"
        "  delete[] a;\n"
        "  return wrong == 12345;\n"
        "}\n"
    )
    flags = {"thread": "-fsanitize=thread", "address": "-fsanitize=address,undefined"}[sanitizer]
    program = tmp_path / "wrong"
    command = ["clang++", "-std=c++20", "-O1", "-g", flags, "-pthread", source, "-o", program]
    assert native_build.run(command, 120).returncode == 0
    done = native_build.run([program], 60)
    expected = {"thread": "data race", "address": "heap-buffer-overflow"}[sanitizer]
    assert done.returncode != 0 and expected in done.stdout, done.stdout
