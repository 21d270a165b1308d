"""Bugs put in on purpose are found, each by the check that is there for it.

A mutant that survives fails its test: then the check has lost its sight, which no green run of it
would show. mutants.py is the table.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import native_build
from mutants import MUTANTS, Mutant

SECONDS = 4  # a scenario looks for the bug that long; most are found in its first milliseconds
PATIENCE_S = 3  # with an operation that hangs
LITMUS_ROUNDS = 100_000  # without a fence a wake-up is lost within a few hundred
DEADLINE_S = 100
ONE_CPU = 77  # exit code of litmus

# The first test compiles everything.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + DEADLINE_S)


@pytest.fixture(scope="module")
def tree():
    """The copy of the sources, unchanged before and after."""
    reason = native_build.why_no_sanitizer("thread")
    if reason:
        pytest.skip(reason)
    native_build.sync()
    yield native_build.SOURCE
    native_build.sync()
    for program in ("stress", "litmus"):  # nobody shall run the last mutant by mistake
        (native_build.PLACE / "thread" / program).unlink(missing_ok=True)


def build_for(check: str) -> Path:
    program = "litmus" if check == "litmus" else "stress"
    return native_build.build("thread", program) / program


def run_check(check: str, seconds: float = SECONDS):
    program = build_for(check)
    if check == "litmus":
        done = native_build.run([program, str(LITMUS_ROUNDS)], DEADLINE_S)
        if done.returncode == ONE_CPU:
            pytest.skip("the litmus test needs two CPUs")
        return done
    arguments = ["--scenario", check, "--seconds", str(seconds), "--patience", str(PATIENCE_S)]
    # `env`, so that options of the caller's environment do not change what a report does.
    options = "TSAN_OPTIONS=halt_on_error=1 exitcode=66 atexit_sleep_ms=0"
    return native_build.run(["env", options, program, *arguments], DEADLINE_S)


def substitute(tree: Path, mutant: Mutant) -> None:
    text = (native_build.ROOT / mutant.file).read_text()
    assert text.count(mutant.find) == 1, (
        f"{mutant.name}: {mutant.file} has {text.count(mutant.find)} places like\n{mutant.find}\n"
        "Bring the table up to date with the code"
    )
    (tree / mutant.file).write_text(text.replace(mutant.find, mutant.replace))


def test_the_checks_pass_without_a_mutant(tree):
    for check in sorted({mutant.check for mutant in MUTANTS}):
        if check == "litmus" and len(os.sched_getaffinity(0)) < 2:
            continue
        done = run_check(check, seconds=0.5)
        assert done.returncode == 0, f"{check}: {done.stdout}"


def one_a_check() -> list:
    """The gate shows of every check that it sees; the other bugs that it must find are `full`, and
    one in a header that all sources include, since it compiles everything anew."""
    seen: set[str] = set()
    parameters = []
    for mutant in MUTANTS:
        spared = mutant.check in seen or mutant.file == "csrc/runtime/operation.h"
        marks = [pytest.mark.full] if spared else []
        parameters.append(pytest.param(mutant, id=mutant.name, marks=marks))
        seen.add(mutant.check)
    return parameters


@pytest.mark.parametrize("mutant", one_a_check())
def test_a_mutant_is_caught(tree, mutant):
    native_build.sync()  # takes the last mutant back
    substitute(tree, mutant)
    done = run_check(mutant.check)
    assert done.returncode != 0, (
        f"SURVIVED: {mutant.name} ({mutant.breaks}) passes {mutant.check}:\n{done.stdout[-2000:]}"
    )
    assert any(sign in done.stdout for sign in mutant.signs), (
        f"{mutant.check} failed, but not for what {mutant.name} breaks ({mutant.breaks}):\n"
        f"{done.stdout[-3000:]}"
    )
