"""Programs run in plain Python, one step at a time, in a random order: the checker's oracle.

It is written from the rules at the top of csrc/program/program.h and knows nothing of proofs: it
has memory, FIFOs and announcements, and reads whatever lies there. A value is what was done to
get it, as nested tuples, so two values are equal only if they were computed alike.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

from pycoll._core import Program, Ref, Step

Value = Any
GARBAGE = ("garbage",)


def terms(value: Value) -> Iterator[tuple[int, int]]:
    """The (rank, chunk) contributions in a value, left to right."""
    if value[0] == "input":
        yield value[1:]
    else:
        for part in value[1:]:
            yield from terms(part)


class Machine:
    """All ranks of a collective. `run` gives "stuck", "wrong" or "right"."""

    def __init__(self, programs: list[Program], depth: int, rounds: int, seed: int) -> None:
        self.programs = programs
        self.depth, self.rounds = depth, rounds
        self.random = random.Random(seed)
        self.memory: dict[tuple[object, ...], Value] = {}
        self.fifos: dict[tuple[int, int, int], deque[Value]] = {}
        self.lanes = {
            (p.rank, i): [0, 0, lane.steps] for p in programs for i, lane in enumerate(p.lanes)
        }
        self.announced = dict.fromkeys(self.lanes, 0)
        self.passed = dict.fromkeys(self.lanes, 0)

    def run(self) -> str:
        while ready := [lane for lane, (r, _, s) in self.lanes.items() if s and r < self.rounds]:
            self.random.shuffle(ready)
            if not any(self.advance(lane) for lane in ready):
                return "stuck"
        return "right" if self.is_right() else "wrong"

    def advance(self, lane: tuple[int, int]) -> bool:
        """Executes a random number of steps. False: not even one could be."""
        moved = False
        for _ in range(self.random.randrange(1, 6)):
            round_, index, steps = self.lanes[lane]
            if round_ == self.rounds or not self.execute(lane, round_, steps[index]):
                break
            moved = True
            if index + 1 == len(steps):
                self.lanes[lane] = [round_ + 1, 0, steps]
            else:
                self.lanes[lane][1] += 1
        return moved

    def execute(self, lane: tuple[int, int], round_: int, step: Step) -> bool:
        if step.kind == "barrier":
            return self.barrier(lane, step)
        rank = lane[0]
        receives, sends = step.kind.startswith("recv"), step.kind.endswith("send")
        incoming = self.fifos.setdefault((step.from_rank, rank, step.channel), deque())
        outgoing = self.fifos.setdefault((rank, step.to_rank, step.channel), deque())
        if (receives and not incoming) or (sends and len(outgoing) == self.depth):
            return False
        received = incoming.popleft() if receives else GARBAGE
        reduces = "reduce" in step.kind
        if step.kind == "reduce_from":
            result = self.reduce_from(lane, round_, step)
        elif step.kind == "copy_from":
            peer = (step.from_rank, lane[1])
            result = self.load(peer, round_, Ref("window", step.remote_chunk))
        elif receives and not reduces:
            result = received
        else:
            result = self.load(lane, round_, step.src)
            if reduces:
                pair = (received, result) if step.received_first else (result, received)
                result = ("+", *pair)
        if step.kind not in ("send", "recv_reduce_send"):
            result = self.store(lane, round_, step, result)
        if sends:
            outgoing.append(result)
        return True

    def barrier(self, lane: tuple[int, int], step: Step) -> bool:
        self.announced[lane] = number = self.passed[lane] + 1
        group = self.programs[lane[0]].groups[step.group]
        if any(self.announced.get((member, lane[1]), 0) < number for member in group):
            return False
        self.passed[lane] = number
        return True

    def reduce_from(self, lane: tuple[int, int], round_: int, step: Step) -> Value:
        total: Value = None
        for member in self.programs[lane[0]].groups[step.group]:
            ref = step.src if member == lane[0] else Ref("window", step.remote_chunk)
            term = self.load((member, lane[1]), round_, ref)
            total = term if total is None else ("+", total, term)
        return total

    def address(self, lane: tuple[int, int], round_: int, ref: Ref) -> tuple[object, ...]:
        if ref.space == "acc":
            return (*lane, "acc", ref.chunk)
        if ref.space == "window":
            return (*lane, "window", round_ % 2, ref.chunk)
        program = self.programs[lane[0]]
        chunk = ref.chunk
        if ref.space == "input":  # in place: it lies in the output, or beside it
            if program.collective == "all_gather":
                chunk = program.rank
            elif program.collective == "reduce_scatter":
                chunk = 0 if chunk == program.rank else -1 - chunk
        return (lane[0], "user", round_, chunk)

    def load(self, lane: tuple[int, int], round_: int, ref: Ref) -> Value:
        default = ("input", lane[0], ref.chunk) if ref.space == "input" else GARBAGE
        return self.memory.get(self.address(lane, round_, ref), default)

    def store(self, lane: tuple[int, int], round_: int, step: Step, value: Value) -> Value:
        partial = step.src.space == "acc" if step.kind == "copy" else "reduce" in step.kind
        if step.dst.space != "acc" and partial:
            value = ("finished", value)
        self.memory[self.address(lane, round_, step.dst)] = value
        return value

    def is_right(self) -> bool:
        if any(self.fifos.values()):
            return False
        return all(
            self.output_is_right(chunk, round_)
            for chunk in range(self.programs[0].output_chunks)
            for round_ in range(self.rounds)
        )

    def output_is_right(self, chunk: int, round_: int) -> bool:
        first = self.programs[0]
        values = [self.memory.get((p.rank, "user", round_, chunk), GARBAGE) for p in self.programs]
        if first.collective == "all_gather":
            return all(value == ("input", chunk, 0) for value in values)
        if first.collective == "broadcast":
            return all(value == ("input", first.root, chunk) for value in values)
        if first.collective == "all_reduce" and any(value != values[0] for value in values):
            return False
        for rank, value in enumerate(values):
            wanted = rank if first.collective == "reduce_scatter" else chunk
            if value[0] != "finished" or GARBAGE in value or "finished" in str(value[1]):
                return False
            if sorted(terms(value[1])) != [(r, wanted) for r in range(first.world_size)]:
                return False
        return True
