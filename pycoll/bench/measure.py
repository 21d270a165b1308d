"""The ranks' side of a benchmark: several contenders timed in turn, in the same processes.

A contender is one process group: a torch.distributed backend, for pycoll with the built-in
selection or one forced algorithm. Each *round* times one batch of calls of every contender, in an
order that is shuffled anew. So whatever else the machine does meanwhile hits all contenders alike,
and the ratio of two of them means something where the figures themselves do not.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycoll.bench.calls import Caller
from pycoll.bench.collectives import COLLECTIVES
from pycoll.bench.limit import Limit
from pycoll.bench.memory import Buffer, Operands, count_wrong, refill, write_pattern
from pycoll.bench.plan import Plan, Row, Sample
from pycoll.bench.problem import Problem


class Turn:
    """One contender at one size: what is called, on what, and what came of it.

    Arguments are prepared before anything is timed; a cold run takes the next ones for each call.
    """

    def __init__(self, caller: Caller | Limit, problem: Problem, offered: list[Operands]) -> None:
        self.caller = caller
        self.operands = caller.operands(problem, offered)
        self.call = caller.call(problem)
        prepared = [caller.arguments(problem, operands) for operands in self.operands]
        self._arguments = (
            itertools.cycle(prepared) if len(prepared) > 1 else itertools.repeat(prepared[0])
        )
        self._inputs = itertools.cycle([operands.input for operands in self.operands])
        self.sample = Sample(caller.name, iterations=0)

    def calls(self, count: int) -> None:
        call = self.call
        for arguments in itertools.islice(self._arguments, count):
            call(*arguments)

    def batch(self, count: int) -> list[float]:
        """Seconds a call (one value), from two clock readings around `count` calls."""
        start = time.perf_counter()
        self.calls(count)
        return [(time.perf_counter() - start) / count]

    def stamped_batch(self, count: int) -> list[float]:
        """Seconds of each of `count` calls."""
        call, clock = self.call, time.perf_counter
        stamps = [clock()]
        for arguments in itertools.islice(self._arguments, count):
            call(*arguments)
            stamps.append(clock())
        return [after - before for before, after in itertools.pairwise(stamps)]

    def rewriting_batch(self, count: int, meet: Callable[[], Any]) -> tuple[list[float], float]:
        """Seconds of each of `count` calls, each on an input that was just written, and CPU seconds
        of all of them. `meet` lets the ranks begin together."""
        call, clock = self.call, time.perf_counter
        seconds, cpu = [], 0.0
        turns = zip(self._inputs, self._arguments, strict=False)
        for given, arguments in itertools.islice(turns, count):
            given.fill_(1)
            meet()
            used, start = time.process_time(), clock()
            call(*arguments)
            seconds.append(clock() - start)
            cpu += time.process_time() - used
        return seconds, cpu


class Runner:
    """A plan at work in one rank of an initialised default group, which is no contender."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.problems = [Problem.of(plan, size, rank, ranks) for size in plan.sizes]
        self.buffer = Buffer(self.problems, plan.memory, plan.cold)
        self.callers = [self._caller(contender) for contender in plan.contenders]
        # Gloo's barrier lets ranks go some 100 us apart, which is longer than what --rewrite times.
        self._meeting = (
            dist.new_group(backend="pycoll", timeout=timedelta(seconds=plan.timeout))
            if plan.rewrite
            else None
        )
        self._shuffle = random.Random(plan.seed)  # the same seed on every rank: the same order

    def _caller(self, contender: Any) -> Caller | Limit:
        if contender.backend == "limit":
            return Limit(self.buffer.bytes, shareable=self.plan.memory == "shareable")
        return Caller(contender, self.plan)

    def rows(self) -> Iterator[Row]:
        for problem in self.problems:
            yield self._row(problem)

    def _row(self, problem: Problem) -> Row:
        plan = self.plan
        offered = self.buffer.operands(problem)
        turns = [Turn(caller, problem, offered) for caller in self.callers]
        for turn in turns:
            if plan.check and turn.caller.checked and problem.collective != "barrier":
                turn.sample.wrong = wrong_after_a_call(problem, turn)
            for operands in turn.operands:
                refill(operands.input)
        seconds = [self._calibrate(turn) for turn in turns]
        for turn, estimate in zip(turns, seconds, strict=True):
            turn.sample.iterations = plan.iterations or max(1, round(plan.batch_seconds / estimate))
        round_seconds = sum(
            turn.sample.iterations * s for turn, s in zip(turns, seconds, strict=True)
        )
        rounds = int(plan.size_seconds / round_seconds)
        self._rounds(turns, min(plan.rounds, max(plan.fewest_rounds, rounds)))
        return Row(
            problem.bytes, problem.count if problem.bytes else 0, [turn.sample for turn in turns]
        )

    def _rounds(self, turns: list[Turn], rounds: int) -> None:
        # Where every batch is one call, rounds have timed single calls already.
        many = max(turn.sample.iterations for turn in turns) > 1 and not self.plan.rewrite
        kinds = [self._plain] * rounds + [self._stamped] * (self.plan.stamped_rounds if many else 0)
        if self.plan.rewrite:
            kinds = [self._rewriting] * rounds
        self._shuffle.shuffle(kinds)
        order = list(turns)
        gc.collect()
        gc.disable()
        try:
            for kind in kinds:
                self._shuffle.shuffle(order)
                for turn in order:
                    kind(turn)
        finally:
            gc.enable()
        for turn in turns:
            self._combine(turn.sample)

    def _plain(self, turn: Turn) -> None:
        sample = turn.sample
        self._start_together(turn)
        used = time.process_time()
        [seconds] = turn.batch(sample.iterations)
        sample.cpu.append((time.process_time() - used) / sample.iterations * 1e6)
        sample.rounds.append(seconds * 1e6)

    def _stamped(self, turn: Turn) -> None:
        self._start_together(turn)
        turn.sample.calls += [s * 1e6 for s in turn.stamped_batch(turn.sample.iterations)]

    def _rewriting(self, turn: Turn) -> None:
        sample = turn.sample
        self._start_together(turn)
        seconds, cpu = turn.rewriting_batch(
            sample.iterations, lambda: dist.barrier(group=self._meeting)
        )
        sample.rounds.append(sum(seconds) / len(seconds) * 1e6)
        sample.calls += [s * 1e6 for s in seconds]
        sample.cpu.append(cpu / len(seconds) * 1e6)

    def _start_together(self, turn: Turn) -> None:
        """Ranks leave the barrier some 100 us apart; a batch of several calls can afford one more
        call that brings them together and the contender's memory into the caches."""
        dist.barrier()
        if turn.sample.iterations > 1:
            turn.calls(1)

    def _combine(self, sample: Sample) -> None:
        """Over the ranks: the slowest one's times, everybody's CPU time."""
        own = sample.rounds
        sample.rounds = over_ranks(own, dist.ReduceOp.MAX)
        alone = sample.iterations == 1 and not self.plan.rewrite
        sample.calls = (sample.rounds if alone else []) + over_ranks(
            sample.calls, dist.ReduceOp.MAX
        )
        sample.cpu = over_ranks(sample.cpu, dist.ReduceOp.SUM)

    def _calibrate(self, turn: Turn) -> float:
        """Seconds a call as all ranks agree, after the warm-up (cut short where calls are slow)."""
        plan = self.plan
        dist.barrier()
        cold = slowest(turn.batch(1))
        turn.calls(min(plan.warmup - 1, int(plan.batch_seconds / cold)))
        enough = plan.batch_seconds / 5
        count = 1
        while True:
            seconds = slowest(turn.batch(count))
            if count * seconds >= enough:
                return seconds
            count = max(count + 1, min(10 * count, int(enough / seconds) + 1))


def wrong_after_a_call(problem: Problem, turn: Turn) -> int:
    """Elements, over all ranks, that one call on known values leaves wrong."""
    operands = turn.operands[0]
    write_pattern(problem, operands)
    # Not the first of the loop's arguments: a cold run may be anywhere in its cycle by now.
    dist.barrier()
    turn.call(*turn.caller.arguments(problem, operands))
    dist.barrier()
    total = torch.tensor([count_wrong(problem, operands)])
    dist.all_reduce(total)
    return int(total)


def over_ranks(values: list[float], op: Any) -> list[float]:
    """Each value combined over the ranks, all of which have as many."""
    if not values:
        return []
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=op)
    combined: list[float] = tensor.tolist()
    return combined


def slowest(values: list[float]) -> float:
    return over_ranks(values, dist.ReduceOp.MAX)[0]


def run(plan: Plan, report: Callable[[Row], None]) -> None:
    """All sizes in this rank; rank 0 reports a Row for each as it comes.

    Raises ValueError when the plan does not suit the number of ranks.
    """
    torch.set_num_threads(1)
    require_suitable(plan, dist.get_world_size())
    for row in Runner(plan).rows():
        if dist.get_rank() == 0:
            report(row)


def require_suitable(plan: Plan, ranks: int) -> None:
    if COLLECTIVES[plan.collective].rooted and not 0 <= plan.root < ranks:
        raise ValueError(f"--root {plan.root}: there are {ranks} ranks")
    if plan.collective == "sendrecv" and ranks < 2:
        raise ValueError("sendrecv needs two ranks at least")
    if any(contender.backend == "limit" for contender in plan.contenders) and ranks != 2:
        raise ValueError(f"--limit: the hand-written loop is for 2 ranks, not {ranks}")
