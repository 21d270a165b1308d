"""Bugs put into the device kernels are found, each by the tool that is there for it.

A mutant that survives fails its test. device_mutants.py and group_mutants.py are the table.
"""

from __future__ import annotations

import pytest

import device_mutants
import group_mutants
import helpers_groups
import mounts
import native_build
from device_mutants import Mutant

MUTANTS = [*device_mutants.MUTANTS, *group_mutants.MUTANTS]
CASES = {"thread": 64, "address": 200, "": 200}
# As in test_sim_groups.py: two hosts, each with two ranks on its GPU.
ON_HOSTS = ["PYCOLL_SIM_DEVICES=1", "PYCOLL_WINDOW_BYTES=4096", "PYCOLL_SLOT_BYTES=1024"]
ON_HOSTS += ["PYCOLL_SIM_TIMEOUT_S=20"]
SEEDS = range(6)
OPTIONS = "TSAN_OPTIONS=halt_on_error=1 exitcode=66 atexit_sleep_ms=0"
DEADLINE_S = 120

# Each mutant is compiled; the first one of a build compiles everything.
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(native_build.BUILD_DEADLINE_S + DEADLINE_S * len(SEEDS)),
]


@pytest.fixture(scope="module")
def tree():
    """The copy of the sources, unchanged before and after."""
    reason = native_build.why_no_cuda_headers() or native_build.why_no_sanitizer("thread")
    if reason:
        pytest.skip(reason)
    native_build.sync()
    yield native_build.SOURCE
    native_build.sync()
    for build in CASES:  # nobody shall run the last mutant by mistake
        where = native_build.PLACE / "sim" / (build or "plain")
        for name in ("device_kernels", "groups", "libpycoll_simgpu.so"):
            (where / name).unlink(missing_ok=True)


def run_check(mutant: Mutant, seed: int):
    name = mutant.program
    program = native_build.build(mutant.build, name, project="sim") / name
    if name == "groups" and mutant.build == "thread":
        small = helpers_groups.SMALL
        return helpers_groups.run(
            program, mutant.check, "shared-2", 20, seed, threads=True, **small
        )
    if name == "groups":
        if mounts.why_not():
            pytest.skip(mounts.why_not())
        settings = [*ON_HOSTS, f"PYCOLL_SIM_SEED={seed + 1}"]
        command = ["env", *settings, program, mutant.check, "4", "20", str(seed + 1), "aabb"]
    else:
        command = ["env", OPTIONS, program, mutant.check, str(CASES[mutant.build]), str(seed)]
    return native_build.run(command, DEADLINE_S)


def substitute(tree, mutant: Mutant) -> None:
    text = (native_build.ROOT / mutant.file).read_text()
    assert text.count(mutant.find) == 1, (
        f"{mutant.name}: {mutant.file} has {text.count(mutant.find)} places like\n{mutant.find}\n"
        "Bring the table up to date with the code"
    )
    (tree / mutant.file).write_text(text.replace(mutant.find, mutant.replace))


def test_the_checks_pass_without_a_mutant(tree):
    for mutant in {(one.program, one.build, one.check): one for one in MUTANTS}.values():
        for seed in SEEDS:
            done = run_check(mutant, seed)
            assert done.returncode == 0, f"{mutant.build} {mutant.check}: {done.stdout[:3000]}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(tree, mutant):
    native_build.sync()  # takes the last mutant back
    substitute(tree, mutant)
    for seed in SEEDS:
        done = run_check(mutant, seed)
        if done.returncode != 0:
            break
    assert done.returncode != 0, (
        f"SURVIVED: {mutant.name} ({mutant.breaks}) passes {mutant.check}:\n{done.stdout[-2000:]}"
    )
    assert any(sign in done.stdout for sign in mutant.signs), (
        f"{mutant.check} failed, but not for what {mutant.name} breaks ({mutant.breaks}):\n"
        f"{done.stdout[-3000:]}"
    )
