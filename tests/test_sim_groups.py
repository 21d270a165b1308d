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
rounds, and that most calls are large enough to be summed inside of hosts first.
"""

from __future__ import annotations

import functools

import pytest

import mounts
import native_build

DEADLINE_S = 240
# Devices a host, ranks, and where they are: "apart", or a letter a rank, its host.
PLACES = {
    "shared-1": (1, 1, ""),
    "shared-2": (1, 2, ""),
    "shared-3": (1, 3, ""),
    "shared-4": (1, 4, ""),
    "mixed-4": (2, 4, ""),
    "peers-2": (8, 2, ""),
    "peers-3": (8, 3, ""),
    "peers-4": (8, 4, ""),
    "apart-3": (8, 3, "apart"),
}
HOSTS = {
    "hosts-shared": (1, 4, "aabb"),
    "hosts-peers": (8, 4, "abab"),
    "hosts-uneven": (1, 4, "aaba"),
    "hosts-three": (8, 3, "abc"),
}
ALIVE = ["collectives", "messages", "graphs", "places", "premul", "two_groups", "refused"]
ENDED = ["killed", "abort"]
# About an all_reduce that goes between hosts, and for them.
ALIVE_ON_HOSTS = ["sums", "bits"]
ENDED_ON_HOSTS = ["killed_amid", "late"]
SMALL = {"PYCOLL_WINDOW_BYTES": "4096", "PYCOLL_SLOT_BYTES": "1024"}

# The first test of a build compiles it.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + DEADLINE_S)


@functools.cache
def program():
    reason = native_build.why_no_cuda_headers()
    if reason:
        pytest.skip(reason)
    native_build.sync()
    return native_build.build("", "groups", project="sim") / "groups"


CASES = [
    (place, suite)
    for place, (_, ranks, _) in PLACES.items()
    for suite in [*ALIVE, *ENDED]
    if ranks > 1 or suite not in ENDED
]
LONG = ["collectives", "messages", "graphs", "places"]


def run(suite: str, place: str, cases: int, seed: int, **environment: str) -> None:
    devices, ranks, where = (PLACES | HOSTS)[place]
    if place in HOSTS and mounts.why_not():
        pytest.skip(mounts.why_not())
    settings = {"PYCOLL_SIM_DEVICES": str(devices), "PYCOLL_SIM_TIMEOUT_S": "60", **environment}
    if seed:
        settings["PYCOLL_SIM_SEED"] = str(seed)
    assignments = [f"{name}={value}" for name, value in settings.items()]
    command = ["env", *assignments, program(), suite, str(ranks), str(cases), str(seed), where]
    done = native_build.run(command, DEADLINE_S)
    assert done.returncode == 0 and done.stdout == f"ok {suite}\n", done.stdout[:8000]


def test_the_table_has_every_suite():
    listed = native_build.run([program(), "--list"], DEADLINE_S).stdout
    suites = {*ALIVE, *ENDED, *ALIVE_ON_HOSTS, *ENDED_ON_HOSTS}
    assert {line.split()[0] for line in listed.splitlines()} == suites


@pytest.mark.parametrize(("place", "suite"), CASES)
def test_groups(place, suite):
    run(suite, place, 12, 0)


@pytest.mark.parametrize(
    ("place", "suite"),
    [
        case
        for case in CASES
        if case[0] not in ("shared-1", "peers-4") and case[1] in [*LONG, "premul"]
    ],
)
def test_many_rounds(place, suite):
    run(suite, place, 12, 1, **SMALL)


@pytest.mark.parametrize("suite", [*LONG, "killed"])
@pytest.mark.parametrize("place", ["shared-2", "shared-4"])
def test_no_kernel_waits_for_a_process_that_shares_its_device(place, suite, tmp_path):
    """The program fails when the executor has counted a spin for another process."""
    sliced = {"PYCOLL_SIM_TIME_SLICE": "1", "PYCOLL_SIM_SLICE_FILE": str(tmp_path / "slices")}
    run(suite, place, 8, 0, **sliced)


@pytest.mark.parametrize(
    ("place", "suite"),
    [
        *[("hosts-shared", suite) for suite in [*ALIVE_ON_HOSTS, *LONG, "premul"]],
        *[("hosts-peers", suite) for suite in [*ALIVE_ON_HOSTS, "graphs"]],
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


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 22))
@pytest.mark.parametrize("place", ["hosts-shared", "hosts-peers"])
def test_a_rank_dies_at_many_moments(place, seed):
    run("killed_amid", place, 1, seed, **SMALL)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 8))
@pytest.mark.parametrize("suite", [*ALIVE_ON_HOSTS, *LONG, "premul"])
@pytest.mark.parametrize("place", HOSTS)
def test_several_hosts_and_many_schedules(place, suite, seed):
    run(suite, place, 40, seed, **(SMALL if seed % 2 else {}))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize(
    ("place", "suite"), [case for case in CASES if case[1] in [*LONG, "two_groups"]]
)
def test_many_schedules(place, suite, seed):
    run(suite, place, 60, seed, **(SMALL if seed % 2 else {}))
