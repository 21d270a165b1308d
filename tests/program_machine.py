"""Programs run in plain Python, one step at a time, in a random order: the checker's oracle.

It is written from the rules at the top of csrc/program/program.h and knows nothing of proofs: it
has memory, FIFOs and announcements, and reads whatever lies there. A value is what was done to
get it, as nested tuples, so two values are equal only if they were computed alike.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
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


# ---- what the collectives promise --------------------------------------------------------------

# Of rank r's output chunk k in a world with this root: the (rank, input chunk) it is a copy of, or
# for a reduction the input chunk that is summed over all ranks (with rank None).
ORIGINS: dict[str, Callable[[int, int, int], tuple[int | None, int]]] = {
    "all_reduce": lambda r, k, root: (None, k),
    "reduce": lambda r, k, root: (None, k),
    "reduce_scatter": lambda r, k, root: (None, r),
    "broadcast": lambda r, k, root: (root, k),
    "all_gather": lambda r, k, root: (k, 0),
    "gather": lambda r, k, root: (k, 0),
    "scatter": lambda r, k, root: (root, r),
    "all_to_all": lambda r, k, root: (k, r),
}
ROOT_ONLY = ("reduce", "gather")  # have an output at the root only


def in_place(program: Program, chunk: int) -> int | None:
    """The output chunk that is the same memory as an input chunk."""
    root = program.rank == program.root
    if program.collective in ("all_reduce", "broadcast") or (
        program.collective == "reduce" and root
    ):
        return chunk
    if program.collective == "all_gather" or (program.collective == "gather" and root):
        return program.rank
    own = program.collective == "reduce_scatter" or (program.collective == "scatter" and root)
    return 0 if own and chunk == program.rank else None


class Lengths:
    """How many slices each block of an all_gather, reduce_scatter or all_to_all has."""

    def __init__(self, collective: str, world_size: int, rounds: int, seed: int | None) -> None:
        self.rounds = rounds
        self.collective = collective
        rng = random.Random(seed)
        uneven = seed is not None and collective in ("all_gather", "reduce_scatter", "all_to_all")
        self.blocks = {
            (a, b): rng.randint(0, rounds) if uneven else rounds
            for a in range(world_size)
            for b in range(world_size)
        }

    def of(self, program: Program, ref: Ref) -> int:
        rank, chunk = program.rank, ref.chunk
        if self.collective == "all_to_all":
            return self.blocks[(chunk, rank) if ref.space == "output" else (rank, chunk)]
        whole = {"all_gather": "input", "reduce_scatter": "output"}.get(self.collective)
        return self.blocks[0, rank if ref.space == whole else chunk] if whole else self.rounds

    def of_step(self, program: Program, step: Step) -> int:
        refs = [step.src] if reads(step) else []
        refs += [step.dst] if stores(step) else []
        for ref in refs:
            if ref.space in ("input", "output"):
                return self.of(program, ref)
        return self.of(program, refs[0]) if refs else self.rounds

    def of_rank(self, program: Program) -> int:
        inputs = [Ref("input", k) for k in range(program.input_chunks)]
        outputs = [Ref("output", k) for k in range(program.output_chunks)]
        return max(1, *(self.of(program, ref) for ref in inputs + outputs))


def reads(step: Step) -> bool:
    return step.kind in ("send", "copy") or "reduce" in step.kind


def stores(step: Step) -> bool:
    return step.kind not in ("send", "recv_send", "recv_reduce_send", "barrier")


# ---- the machine -------------------------------------------------------------------------------


class Machine:
    """All ranks of a collective. `run` gives "stuck", "wrong" or "right".

    `uneven`: the seed of the lengths of blocks, where they may differ; None: all are equal.
    """

    def __init__(
        self,
        programs: list[Program],
        depth: int,
        rounds: int,
        seed: int,
        uneven: int | None = None,
    ) -> None:
        self.programs = programs
        self.depth = depth
        self.lengths = Lengths(programs[0].collective, len(programs), rounds, uneven)
        self.rounds = [self.lengths.of_rank(program) for program in programs]
        self.random = random.Random(seed)
        self.memory: dict[tuple[object, ...], Value] = {}
        self.fifos: dict[tuple[int, int, int], deque[Value]] = {}
        self.lanes = {
            (p.rank, i): [0, 0, lane.steps] for p in programs for i, lane in enumerate(p.lanes)
        }
        self.announced = dict.fromkeys(self.lanes, 0)
        self.passed = dict.fromkeys(self.lanes, 0)

    def run(self) -> str:
        while ready := [
            lane for lane, (r, _, steps) in self.lanes.items() if steps and r < self.rounds[lane[0]]
        ]:
            self.random.shuffle(ready)
            if not any(self.advance(lane) for lane in ready):
                return "stuck"
        return "right" if self.is_right() else "wrong"

    def advance(self, lane: tuple[int, int]) -> bool:
        """Executes a random number of steps. False: not even one could be."""
        moved = False
        for _ in range(self.random.randrange(1, 6)):
            round_, index, steps = self.lanes[lane]
            if round_ == self.rounds[lane[0]] or not self.execute(lane, round_, steps[index]):
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
        if round_ > 0 and self.lengths.of_step(self.programs[rank], step) <= round_:
            return True  # nothing left of that chunk
        receives, sends = step.kind.startswith("recv"), step.kind.endswith("send")
        incoming = self.fifos.setdefault((step.from_rank, rank, step.channel), deque())
        outgoing = self.fifos.setdefault((rank, step.to_rank, step.channel), deque())
        if (receives and not incoming) or (sends and len(outgoing) == self.depth):
            return False
        received = incoming.popleft() if receives else GARBAGE
        reduces = "reduce" in step.kind
        if step.kind in ("reduce_from", "reduce_to"):
            result = self.reduce_from(lane, round_, step)
        elif step.kind == "copy_from":
            peer = (step.from_rank, lane[1])
            result = self.load(peer, round_, Ref(step.remote, step.remote_chunk))
        elif receives and not reduces:
            result = received
        else:
            result = self.load(lane, round_, step.src)
            if reduces:
                pair = (received, result) if step.received_first else (result, received)
                result = ("+", *pair)
        if step.kind == "reduce_to":
            group = self.programs[rank].groups[step.group]
            for member in group if step.to_rank < 0 else [step.to_rank]:
                self.store((member, lane[1]), round_, step, result)
        elif stores(step):
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
            ref = step.src if member == lane[0] else Ref(step.remote, step.remote_chunk)
            term = self.load((member, lane[1]), round_, ref)
            total = term if total is None else ("+", total, term)
        return total

    def address(self, lane: tuple[int, int], round_: int, ref: Ref) -> tuple[object, ...]:
        if ref.space == "acc":
            return (*lane, "acc", ref.chunk)
        if ref.space == "window":
            return (*lane, "window", round_ % 2, ref.chunk)
        chunk = ref.chunk
        if ref.space == "input":  # in place: it lies in the output, or beside it
            alias = in_place(self.programs[lane[0]], chunk)
            chunk = -1 - chunk if alias is None else alias
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
        first = self.programs[0]
        owners = [p for p in self.programs if p.collective not in ROOT_ONLY or p.rank == p.root]
        sums: dict[tuple[int, int], Value] = {}  # of each input chunk, wherever it was summed
        return all(
            self.output_is_right(program, chunk, round_, sums)
            for program in owners
            for chunk in range(first.output_chunks)
            for round_ in range(max(1, self.lengths.of(program, Ref("output", chunk))))
        )

    def output_is_right(
        self, program: Program, chunk: int, round_: int, sums: dict[tuple[int, int], Value]
    ) -> bool:
        value = self.memory.get((program.rank, "user", round_, chunk), GARBAGE)
        origin, wanted = ORIGINS[program.collective](program.rank, chunk, program.root)
        if origin is not None:
            return bool(value == ("input", origin, wanted))
        if value != sums.setdefault((wanted, round_), value):
            return False
        if value[0] != "finished" or GARBAGE in value or "finished" in str(value[1]):
            return False
        return sorted(terms(value[1])) == [(r, wanted) for r in range(program.world_size)]
