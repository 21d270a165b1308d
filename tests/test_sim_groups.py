"""Groups of processes on simulated GPUs, through the interface that csrc/torch uses.

The program is tests/sim/groups.cpp. It forks a rank a process; each opens the library of the
simulator, which is what libpycoll_cuda.so is on a machine with GPUs, and compares all memory that
its calls may write with a reference of the CPU. How many devices there are decides how ranks meet:

    1 for all        they share it: no kernel waits, streams wait for words ("shared_device")
    fewer than ranks the same
    one a rank       kernels that wait for their peers' kernels ("peers")
    apart            devices that do not reach each other: pinned memory, CPU transport ("staged")

PYCOLL_WINDOW_BYTES and PYCOLL_SLOT_BYTES make staging areas so small that most calls take many
rounds.
"""

from __future__ import annotations

import functools

import pytest

import native_build

DEADLINE_S = 240
# Devices, ranks, and whether devices are apart.
PLACES = {
    "shared-1": (1, 1, False),
    "shared-2": (1, 2, False),
    "shared-3": (1, 3, False),
    "shared-4": (1, 4, False),
    "mixed-4": (2, 4, False),
    "peers-2": (8, 2, False),
    "peers-3": (8, 3, False),
    "peers-4": (8, 4, False),
    "apart-3": (8, 3, True),
}
ALIVE = ["collectives", "messages", "graphs", "places", "premul", "two_groups", "refused"]
ENDED = ["killed", "abort"]
# Captures are refused there; and two groups may not use one communicator in different orders.
NOT_APART = ["graphs", "two_groups"]
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


def can_run(place: str, suite: str) -> bool:
    _, ranks, apart = PLACES[place]
    return not (apart and suite in NOT_APART) and (ranks > 1 or suite not in ENDED)


CASES = [(place, suite) for place in PLACES for suite in [*ALIVE, *ENDED] if can_run(place, suite)]
LONG = ["collectives", "messages", "graphs", "places"]


def run(suite: str, place: str, cases: int, seed: int, **environment: str) -> None:
    devices, ranks, apart = PLACES[place]
    settings = {"PYCOLL_SIM_DEVICES": str(devices), "PYCOLL_SIM_TIMEOUT_S": "60", **environment}
    if seed:
        settings["PYCOLL_SIM_SEED"] = str(seed)
    assignments = [f"{name}={value}" for name, value in settings.items()]
    command = ["env", *assignments, program(), suite, str(ranks), str(cases), str(seed)]
    done = native_build.run([*command, "apart"] if apart else command, DEADLINE_S)
    assert done.returncode == 0 and done.stdout == f"ok {suite}\n", done.stdout[:8000]


def test_the_table_has_every_suite():
    listed = native_build.run([program(), "--list"], DEADLINE_S).stdout
    assert {line.split()[0] for line in listed.splitlines()} == {*ALIVE, *ENDED}


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


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize(
    ("place", "suite"), [case for case in CASES if case[1] in [*LONG, "two_groups"]]
)
def test_many_schedules(place, suite, seed):
    run(suite, place, 60, seed, **(SMALL if seed % 2 else {}))
