"""Random mutations of Programs: what the checker says must be what a machine does.

Accepted means right in every schedule that is tried; "deadlock" means stuck in every one.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from program_machine import Machine
from pycoll import _core
from pycoll._core import Program, Ref, Step

ROWS = [
    (c, a.name) for c in _core.collectives() if c != "barrier" for a in _core.algorithms(c)
]  # a barrier moves no data that could be wrong
ROOTED = ("broadcast", "reduce", "gather", "scatter")
SCHEDULES = 4


def change_step(rng: random.Random, step: Step, world_size: int) -> None:
    peer = rng.randrange(world_size)
    chunk = rng.randrange(world_size)
    what = rng.choice(["src", "dst", "from", "to", "channel", "wire", "first", "remote", "kind"])
    if what == "src":
        step.src = Ref(rng.choice(["input", "acc", "output", "window"]), rng.choice([0, chunk]))
    elif what == "dst":
        step.dst = Ref(rng.choice(["acc", "output", "window"]), rng.choice([0, chunk]))
    elif what == "from":
        step.from_rank = peer
    elif what == "to":
        step.to_rank = peer
    elif what == "channel":
        step.channel = 1 - step.channel
    elif what == "wire":
        step.wire = "partial" if step.wire == "value" else "value"
    elif what == "first":
        step.received_first = not step.received_first
    elif what == "remote":
        step.remote_chunk = chunk
    else:
        kinds = ["send", "recv", "recv_send", "recv_reduce", "copy", "barrier", "copy_from"]
        step.kind = rng.choice(kinds)


def mutate(rng: random.Random, program: Program) -> None:
    lane = rng.randrange(len(program.lanes))
    steps = program.steps(lane)
    at = rng.randrange(len(steps))
    what = rng.choice(["drop", "twice", "swap", "move", "change", "change", "change", "group"])
    if what == "drop":
        del steps[at]
    elif what == "twice":
        steps.insert(at, steps[at])
    elif what == "swap" and len(steps) > 1:
        other = (at + 1) % len(steps)
        steps[at], steps[other] = steps[other], steps[at]
    elif what == "move":
        steps.insert(rng.randrange(len(steps)), steps.pop(at))
    elif what == "change":
        change_step(rng, steps[at], program.world_size)
    elif what == "group" and program.groups:
        gone = rng.randrange(program.world_size)
        if gone != program.rank:
            program.groups = [[r for r in program.groups[0] if r != gone]]
    program.set_steps(lane, steps)


def mutants(collective: str, algorithm: str, count: int) -> list[list[Program]]:
    rng = random.Random(f"{collective} {algorithm}")
    found = []
    while len(found) < count:
        world_size = rng.choice([2, 3, 3, 4])
        root = rng.randrange(world_size) if collective in ROOTED else 0
        programs = _core.build_programs(collective, algorithm, world_size, root)
        channels, acc = rng.choice([(1, 0), (2, 1)])
        for program in programs:
            program.channels = max(channels, program.channels)
            program.acc_chunks = max(acc, program.acc_chunks)
        # The same mutation on all ranks keeps more of them consistent.
        if rng.random() < 0.3:
            seed = rng.random()
            for program in programs:
                mutate(random.Random(seed), program)
        else:
            mutate(rng, programs[rng.randrange(len(programs))])
        if _core.check(programs, depth=1).kind != "invalid":
            found.append(programs)
    return found


@pytest.mark.parametrize(("collective", "algorithm"), ROWS)
def test_pristine_programs_run_right(collective: str, algorithm: str) -> None:
    for world_size in (2, 3, 4, 5, 8):
        programs = _core.build_programs(collective, algorithm, world_size)
        for seed in range(3):
            assert Machine(programs, depth=2, rounds=3, seed=seed).run() == "right"
            assert Machine(programs, depth=2, rounds=3, seed=seed, uneven=seed).run() == "right"


@pytest.mark.parametrize(("collective", "algorithm"), ROWS)
def test_mutants(collective: str, algorithm: str) -> None:
    seen: Counter[str] = Counter()
    for number, programs in enumerate(mutants(collective, algorithm, 150)):
        depth = 1 + number % 3
        result = _core.check(programs, depth=depth, rounds=3, draws=0)
        outcomes = {
            Machine(programs, depth=depth, rounds=3, seed=seed).run() for seed in range(SCHEDULES)
        }
        if result.ok and _core.check(programs, depth=depth, rounds=3, draws=4):
            # Then for blocks of any lengths.
            outcomes |= {
                Machine(programs, depth=depth, rounds=3, seed=seed, uneven=seed).run()
                for seed in range(SCHEDULES)
            }
        seen[result.kind] += 1
        where = (number, depth, result, outcomes)
        if result.ok:
            assert outcomes == {"right"}, where
        elif result.kind == "deadlock":
            assert outcomes == {"stuck"}, where
        elif result.kind in ("leftover", "wrong_result"):
            assert "right" not in outcomes, where
    # The sample has some of everything, or it shows nothing.
    assert seen["ok"] >= 5, seen
    assert len(seen) >= 3, seen
