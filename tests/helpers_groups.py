"""Runs the program tests/sim/groups.cpp: groups of ranks on simulated GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import native_build

DEADLINE_S = 240


class Place(NamedTuple):
    devices: int  # of a host
    ranks: int
    where: str = ""  # "apart": devices do not reach each other; or a letter a rank, its host


PLACES = {
    "shared-1": Place(1, 1),
    "shared-2": Place(1, 2),
    "shared-3": Place(1, 3),
    "shared-4": Place(1, 4),
    "mixed-4": Place(2, 4),
    "peers-2": Place(8, 2),
    "peers-3": Place(8, 3),
    "peers-4": Place(8, 4),
    "apart-3": Place(8, 3, "apart"),
}
HOSTS = {
    "hosts-shared": Place(1, 4, "aabb"),
    "hosts-peers": Place(8, 4, "abab"),
    "hosts-uneven": Place(1, 4, "aaba"),
    "hosts-three": Place(8, 3, "abc"),
}
# Staging areas so small that most calls take many rounds.
SMALL = {"PYCOLL_WINDOW_BYTES": "4096", "PYCOLL_SLOT_BYTES": "1024"}
OPTIONS = {
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66 atexit_sleep_ms=0 "
    f"suppressions={native_build.ROOT / 'tests/sim/tsan_suppressions.txt'}",
    "ASAN_OPTIONS": "exitcode=67 detect_leaks=1 detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def build(sanitizer: str) -> Path:
    return native_build.build(sanitizer, "groups", project="sim") / "groups"


def run(
    program: Path,
    suite: str,
    place: str,
    cases: int,
    seed: int,
    *,
    threads: bool = False,
    **environment: str,
):
    """`threads`: ranks are threads of one process, on one host."""
    devices, ranks, where = (PLACES | HOSTS)[place]
    settings = {"PYCOLL_SIM_DEVICES": str(devices), "PYCOLL_SIM_TIMEOUT_S": "60", **environment}
    if seed:
        settings["PYCOLL_SIM_SEED"] = str(seed)
    assignments = [f"{name}={value}" for name, value in {**settings, **OPTIONS}.items()]
    command = ["env", *assignments, program, suite, str(ranks), str(cases), str(seed)]
    return native_build.run([*command, "threads" if threads else where], DEADLINE_S)
