"""A collective of one contender as a plain function of arguments that are prepared beforehand.

What a call costs in Python is part of what users pay, so nothing stands between the loop that is
timed and torch.distributed's own function except a `functools.partial`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

import pycoll  # registers the backend
from pycoll.bench.memory import Operands
from pycoll.bench.plan import Contender, Plan
from pycoll.bench.problem import Problem

Call = Callable[..., Any]
OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}
DIRECT_NAMES = {"prod": "product"}


class Caller:
    """A contender's process group in this rank."""

    def __init__(self, contender: Contender, plan: Plan) -> None:
        self.name = contender.name
        # torch's `fake` computes nothing: whatever it leaves is neither right nor wrong.
        self.checked = contender.backend != "fake"
        group = make_group(contender, plan)
        if contender.api == "direct":
            self._call = direct_call(plan)
            # By position: a keyword would send pycoll's call through torch.distributed.
            self._more: tuple[Any, ...] = (DIRECT_NAMES.get(plan.op, plan.op), group)
        else:
            self._call = through_dist(plan, group)
            self._more = ()

    def call(self, problem: Problem) -> Call:
        return self._call

    def arguments(self, problem: Problem, operands: Operands) -> tuple[Any, ...]:
        return ARGUMENTS[problem.collective](problem, operands) + self._more

    def operands(self, problem: Problem, offered: list[Operands]) -> list[Operands]:
        """What the calls work on; a contender with memory of its own says so here."""
        return offered


def make_group(contender: Contender, plan: Plan) -> Any:
    if contender.backend == "fake":
        # Importing it registers the backend.
        import torch.testing._internal.distributed.fake_pg  # noqa: F401
    with algorithm_forced(contender, plan.collective):
        return dist.new_group(backend=contender.backend, timeout=timedelta(seconds=plan.timeout))


@contextmanager
def algorithm_forced(contender: Contender, collective: str) -> Iterator[None]:
    """PYCOLL_ALGO for the group that is made inside: a group reads it once, when it is made."""
    before = os.environ.get("PYCOLL_ALGO")
    if contender.algorithm:
        os.environ["PYCOLL_ALGO"] = f"{collective}={contender.algorithm}"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYCOLL_ALGO", None)
        else:
            os.environ["PYCOLL_ALGO"] = before


def through_dist(plan: Plan, group: Any) -> Call:
    call = DIST[plan.collective](plan, group)
    return partial(wait_for, partial(call, async_op=True)) if plan.asynchronous else call


def wait_for(call: Call, *arguments: Any) -> None:
    call(*arguments).wait()


def direct_call(plan: Plan) -> Call:
    """pycoll's own function, without torch.distributed's layers."""
    function: Call | None = getattr(pycoll, plan.collective, None)
    if function is None:
        raise RuntimeError(f"this build of pycoll has no direct call pycoll.{plan.collective}")
    return function


def reducing(function: Call) -> Callable[[Plan, Any], Call]:
    return lambda plan, group: partial(function, op=OPERATIONS[plan.op], group=group)


def rooted(function: Call, keyword: str) -> Callable[[Plan, Any], Call]:
    return lambda plan, group: partial(function, group=group, **{keyword: plan.root})


def plain(function: Call) -> Callable[[Plan, Any], Call]:
    return lambda plan, group: partial(function, group=group)


def reduce_to_root(plan: Plan, group: Any) -> Call:
    return partial(dist.reduce, dst=plan.root, op=OPERATIONS[plan.op], group=group)


def send_and_receive(plan: Plan, group: Any) -> Call:
    """To the next rank and from the one before, at once, as nccl-tests does."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % ranks, (rank - 1) % ranks

    def call(given: Any, output: Any) -> None:
        sent = dist.isend(given, after, group=group)
        dist.recv(output, before, group=group)
        sent.wait()

    return call


# torch 2.13 renamed these two.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DIST: dict[str, Callable[[Plan, Any], Call]] = {
    "all_reduce": reducing(dist.all_reduce),
    "all_gather": plain(all_gather_single),
    "reduce_scatter": reducing(reduce_scatter_single),
    "broadcast": rooted(dist.broadcast, "src"),
    "reduce": reduce_to_root,
    "gather": rooted(dist.gather, "dst"),
    "scatter": rooted(dist.scatter, "src"),
    "all_to_all": plain(dist.all_to_all_single),
    "sendrecv": send_and_receive,
    "barrier": plain(dist.barrier),
}


def blocks(problem: Problem, vector: Any) -> list[Any] | None:
    """A root's vector as torch wants it: a list of one tensor a rank, None on the other ranks."""
    return list(vector.split(problem.count)) if problem.rank == problem.root else None


ARGUMENTS: dict[str, Callable[[Problem, Operands], tuple[Any, ...]]] = {
    "all_reduce": lambda _, o: (o.output,),
    "all_gather": lambda _, o: (o.output, o.input),
    "reduce_scatter": lambda _, o: (o.output, o.input),
    "broadcast": lambda _, o: (o.output,),
    "reduce": lambda _, o: (o.output,),
    "gather": lambda p, o: (o.input, blocks(p, o.output)),
    "scatter": lambda p, o: (o.output, blocks(p, o.input)),
    "all_to_all": lambda _, o: (o.output, o.input),
    "sendrecv": lambda _, o: (o.input, o.output),
    "barrier": lambda _, __: (),
}
