"""Groups of processes on simulated GPUs, through the interface that csrc/torch uses.

The program is tests/sim/groups.cpp. It forks a rank a process; each opens the library of the
simulator, which is what libpycoll_cuda.so is on a machine with GPUs, and compares all memory that
its calls may write with a reference of the CPU. How many devices there are decides how ranks meet:

    1 for all        they share it: no kernel waits, streams wait for words ("shared_device")
    fewer than ranks the same
    one a rank       kernels that wait for their peers' kernels ("peers")
    apart            devices that do not reach each other: pinned memory, CPU transport ("staged")
    several hosts    one of the first three inside of each, TCP between them ("hosts")

Ranks in other mount namespaces are on other hosts to pycoll, and still reached over loopback.
PYCOLL_WINDOW_BYTES and PYCOLL_SLOT_BYTES make staging areas so small that most calls take many
rounds, and that most calls are large enough to be summed inside of hosts first. With a sanitizer
the core is built with it too; ThreadSanitizer sees what ranks do to each other's memory where they
are threads of one process.
"""

from __future__ import annotations

import functools

import pytest

import mounts
import native_build
from helpers_groups import DEADLINE_S, HOSTS, PLACES, SMALL, build
from helpers_groups import run as run_program

ALIVE = ["collectives", "messages", "graphs", "places", "premul", "two_groups", "refused"]
ENDED = ["killed", "abort"]
# About an all_reduce that goes between hosts, and for them.
ALIVE_ON_HOSTS = ["sums", "bits"]
ENDED_ON_HOSTS = ["killed_amid", "late"]
# Where these run; the others run everywhere.
ONLY = {
    "codecs": ["shared-2", "shared-3", "mixed-4", "peers-3", "apart-3"],
    "mismatch": ["shared-2", "mixed-4"],
    "absent": ["shared-2", "shared-3", "peers-3"],
    "failed_gpu": ["shared-2", "shared-3", "mixed-4", "peers-3", "apart-3"],
    "failed_open": ["shared-2", "shared-3", "peers-3"],
    "captures": ["shared-2", "peers-2"],
    "buried": ["shared-2"],
}

# The first test of a build compiles it.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + DEADLINE_S)


@functools.cache
def program(sanitizer: str = ""):
    if reason := native_build.why_no_simulator(sanitizer):
        pytest.skip(reason)
    native_build.sync()
    return build(sanitizer)


def can_run(place: str, suite: str) -> bool:
    if suite in ONLY:
        return place in ONLY[suite]
    return PLACES[place].ranks > 1 or suite not in ENDED


SUITES = [*ALIVE, *ENDED, *ONLY]
CASES = [(place, suite) for place in PLACES for suite in SUITES if can_run(place, suite)]
LONG = ["collectives", "messages", "graphs", "places"]
# More ranks, or fewer, of kinds that the gate has.
MORE = ["shared-2", "shared-4", "peers-4"]
# Long, and made of what other places have.
LONGEST = [("mixed-4", "codecs")]


def marked(cases: list[tuple[str, str]]) -> list:
    """All of them in full; in the gate each kind of place once."""
    return [
        pytest.param(*case, marks=[pytest.mark.full] * (case[0] in MORE or case in LONGEST))
        for case in cases
    ]


def run(suite: str, place: str, cases: int, seed: int, *, sanitizer: str = "", **rest) -> None:
    if place in HOSTS and mounts.why_not():
        pytest.skip(mounts.why_not())
    done = run_program(program(sanitizer), suite, place, cases, seed, **rest)
    # ThreadSanitizer may have had to say that it cannot open memory as a file.
    assert done.returncode == 0 and done.stdout.endswith(f"ok {suite}\n"), done.stdout[:8000]


def test_the_table_has_every_suite():
    listed = native_build.run([program(), "--list"], DEADLINE_S).stdout
    suites = {*SUITES, *ALIVE_ON_HOSTS, *ENDED_ON_HOSTS}
    assert {line.split()[0] for line in listed.splitlines()} == suites


@pytest.mark.parametrize(("place", "suite"), marked(CASES))
def test_groups(place, suite):
    run(suite, place, 8, 0)


@pytest.mark.parametrize(
    ("place", "suite"),
    marked([case for case in CASES if case[0] != "shared-1" and case[1] in [*LONG, "premul"]]),
)
def test_many_rounds(place, suite):
    run(suite, place, 8, 1, **SMALL)


@pytest.mark.parametrize(
    ("place", "suite"),
    [
        *[(place, suite) for place in ("shared-2", "shared-4") for suite in [*LONG, "killed"]],
        ("shared-2", "codecs"),
    ],
)
def test_no_kernel_waits_for_a_process_that_shares_its_device(place, suite, tmp_path):
    """The program fails when the executor has counted a spin for another process."""
    sliced = {"PYCOLL_SIM_TIME_SLICE": "1", "PYCOLL_SIM_SLICE_FILE": str(tmp_path / "slices")}
    run(suite, place, 8, 0, **sliced)


@pytest.mark.parametrize(
    ("place", "suite"),
    [
        *[("hosts-shared", suite) for suite in [*ALIVE_ON_HOSTS, *LONG, "premul"]],
        *[("hosts-peers", suite) for suite in [*ALIVE_ON_HOSTS, "graphs", "codecs"]],
        ("hosts-shared", "codecs"),
        ("hosts-uneven", "codecs"),
        ("hosts-uneven", "sums"),
        ("hosts-three", "sums"),
    ],
)
def test_several_hosts(place, suite):
    run(suite, place, 12, 1, **SMALL)


@pytest.mark.parametrize("suite", ["collectives", "two_groups", "refused"])
def test_several_hosts_and_small_calls(suite):
    run(suite, "hosts-shared", 6, 0)


@pytest.mark.parametrize(
    ("place", "suite"),
    [
        *[("hosts-shared", suite) for suite in [*ENDED, *ENDED_ON_HOSTS]],
        ("hosts-peers", "killed_amid"),
        ("hosts-peers", "late"),
    ],
)
def test_several_hosts_of_which_one_fails(place, suite):
    run(suite, place, 1, 1, **SMALL)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2, 22))
@pytest.mark.parametrize("place", ["hosts-shared", "hosts-peers"])
def test_a_rank_dies_at_many_moments(place, seed):
    run("killed_amid", place, 1, seed, **SMALL)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2, 8))
@pytest.mark.parametrize("suite", [*ALIVE_ON_HOSTS, *LONG, "premul", "codecs"])
@pytest.mark.parametrize("place", HOSTS)
def test_several_hosts_and_many_schedules(place, suite, seed):
    run(suite, place, 40, seed, **(SMALL if seed % 2 else {}))


@pytest.mark.parametrize("resident", [1, 17, 20])
@pytest.mark.parametrize("place", ["peers-2", "peers-3"])
def test_devices_with_room_for_few_blocks(place, resident):
    """Fewer than 20 (18 of 2 ranks) are too few for kernels that wait for their peers': all goes
    through host memory there."""
    for suite in ("collectives", "messages"):
        run(suite, place, 6, 0, PYCOLL_SIM_RESIDENT=str(resident))


@pytest.mark.parametrize("resident", [1, 20])
@pytest.mark.parametrize("place", ["shared-2", "peers-2", "mixed-4"])
def test_ranks_of_one_process(place, resident):
    for suite in LONG:
        cases = 1 if place == "peers-2" else 4  # their kernels have many threads
        run(suite, place, cases, 3, threads=True, PYCOLL_SIM_RESIDENT=str(resident))


# Few: ThreadSanitizer is slow with as many threads as kernels between devices have.
SANITIZED = [("shared-3", suite) for suite in [*LONG, "premul", "killed", "abort"]]
SANITIZED += [("peers-2", "collectives"), ("peers-2", "killed"), ("apart-3", "collectives")]
SANITIZED += [("shared-3", "codecs"), ("apart-3", "codecs")]


@pytest.mark.parametrize(("place", "suite"), SANITIZED)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_groups_under_sanitizers(sanitizer, place, suite):
    run(suite, place, 4, 1, sanitizer=sanitizer, **SMALL)


@pytest.mark.parametrize("suite", [*LONG, "premul", "two_groups", "codecs"])
def test_ranks_that_share_a_device_race_for_nothing(suite):
    for seed in (0, 1):
        run(suite, "shared-2", 12, seed, sanitizer="thread", threads=True, **SMALL)


@pytest.mark.sweep
@pytest.mark.parametrize(("sanitizer", "seeds"), [("address", 20), ("thread", 50)])
@pytest.mark.parametrize("suite", [*LONG, "premul", "two_groups"])
@pytest.mark.parametrize("place", ["shared-2", "shared-3"])
def test_many_schedules_under_sanitizers(sanitizer, seeds, place, suite):
    for seed in range(2, 2 + seeds):
        run(suite, place, 12, seed, sanitizer=sanitizer, threads=sanitizer == "thread", **SMALL)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize(
    ("place", "suite"), [case for case in CASES if case[1] in [*LONG, "two_groups", "codecs"]]
)
def test_many_schedules(place, suite, seed):
    run(suite, place, 60, seed, **(SMALL if seed % 2 else {}))
