"""One round of a soak: ranks that call at random, a fault in their midst, and what came of it."""

from __future__ import annotations

import contextlib
import os
import random
import time
from dataclasses import dataclass

import pycoll
from pool import RankResult, run_ranks
from soak.calls import Calls, WrongValue
from soak.faults import FAULTS, Fault, Moment, Oops

GROUP_TIMEOUT = 4.0
ROUND_TIMEOUT = 60.0
# After this an error must have come: the group's timeout, and what a busy machine adds.
LATEST = GROUP_TIMEOUT + 6.0


@dataclass(frozen=True)
class Round:
    """All of it follows from the seed."""

    seed: int
    world: int
    victim: int
    transport: str
    fault: int  # of FAULTS
    steps: int
    step: int  # with which the fault comes
    seconds: float

    @property
    def kind(self) -> Fault:
        return FAULTS[self.fault]


@dataclass
class Outcome:
    """Of one rank. `type`, `error`: of the group that the fault came to; empty when all ended well.
    `after`: what was wrong with the group that the survivors made then; empty: nothing.
    """

    done: int
    error: str = ""
    type: str = ""
    seconds: float = 0.0
    after: str = ""


def choose(seed: int, transports: list[str]) -> Round:
    """A round; neighbouring seeds have different faults."""
    rng = random.Random(seed)
    world = rng.choice([2, 2, 3, 3, 4, 5])
    steps = rng.choice([30, 60, 120])
    return Round(
        seed=seed,
        world=world,
        victim=rng.randrange(world),
        transport=rng.choice(transports),
        fault=seed % len(FAULTS),
        steps=steps,
        step=rng.randrange(steps),
        seconds=rng.uniform(0.0, 0.15),
    )


def play(what: Round) -> list[RankResult]:
    env = {
        "PYCOLL_TRANSPORT": what.transport,
        "PYCOLL_HEARTBEAT": "3",
        "PYCOLL_CONNECT_TIMEOUT": "8",
    }
    return run_ranks(what.world, rank_of, what, env=env, timeout=ROUND_TIMEOUT, check=False)


def rank_of(rank: int, world: int, directory: str, what: Round) -> Outcome:
    """What a rank does. An error that is none of pycoll's, and none of the fault's, is raised."""
    store = pycoll.FileStore(os.path.join(directory, "store"), timeout=20)
    moment = Moment(rank, world, what.victim, what.seconds, what.seed, directory + "/parts")
    outcome = Outcome(done=0)
    fault = what.kind
    group = pycoll.Communicator(store, rank, world, name="first", timeout=GROUP_TIMEOUT)
    calls = Calls(group, what.seed)
    if fault.arm is not None:
        fault.arm(moment)
    last = time.monotonic()
    try:
        for step in range(what.steps):
            if fault.during is not None and step == what.step and (fault.of_all or moment.mine):
                fault.during(group, moment)
            calls.step()
            outcome.done += 1
            last = time.monotonic()
    except (pycoll.Error, Oops, KeyboardInterrupt) as error:
        outcome.error, outcome.type = str(error), type(error).__name__
    outcome.seconds = time.monotonic() - last
    with contextlib.suppress(KeyboardInterrupt):
        if fault.arm is not None and moment.mine and not outcome.type:
            time.sleep(0.3)  # it may come late, but not amid what comes now
        group.close()
    del group, calls
    outcome.after = go_on(rank, what, store)
    return outcome


def go_on(rank: int, what: Round, store: pycoll.FileStore) -> str:
    """The survivors make a group of their own and use it."""
    alive = [r for r in range(what.world) if r != what.victim or what.kind.fate != "killed"]
    try:
        with pycoll.Communicator(
            store, alive.index(rank), len(alive), name="afterwards", timeout=20
        ) as group:
            calls = Calls(group, what.seed + 1)
            for _ in range(3):
                calls.step()
    except KeyboardInterrupt:
        return go_on(rank, what, store)
    except (pycoll.Error, WrongValue) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def complaints(what: Round, results: list[RankResult]) -> list[str]:
    """All that was not as it must be; empty: the round was survived."""
    found = []
    fault = what.kind
    for result in results:
        is_victim = result.rank == what.victim
        who = f"rank {result.rank}{' (the victim)' if is_victim else ''}"
        if is_victim and fault.fate == "killed":
            continue
        if result.failed or result.value is None:
            found.append(f"{who}: {result.report()}")
            continue
        outcome: Outcome = result.value
        if outcome.after:
            found.append(f"{who}: afterwards {outcome.after}")
        if fault.harmless and outcome.type:
            found.append(f"{who}: {outcome.type}: {outcome.error}")
        if not outcome.type:
            if outcome.done != what.steps:
                found.append(f"{who}: ended after {outcome.done} calls without an error")
            continue
        if not is_victim and f"rank {what.victim}" not in outcome.error:
            found.append(f"{who}: no word of rank {what.victim}: {outcome.error}")
        if outcome.seconds > LATEST:
            found.append(f"{who}: the error came after {outcome.seconds:.1f} s")
    return found
