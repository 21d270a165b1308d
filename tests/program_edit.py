"""Changing Programs, to break them on purpose."""

from __future__ import annotations

from collections.abc import Callable

from pycoll import _core
from pycoll._core import Program, Step


def build(collective: str, algorithm: str, world_size: int) -> list[Program]:
    return _core.build_programs(collective, algorithm, world_size)


def edit(program: Program, change: Callable[[list[Step]], object], lane: int = 0) -> None:
    """Applies `change` to the list of steps of a lane."""
    steps = program.steps(lane)
    change(steps)
    program.set_steps(lane, steps)


def message_step(kind: str, **attributes: object) -> Step:
    step = Step(kind)  # type: ignore[arg-type]
    for name, value in attributes.items():
        setattr(step, name, value)
    return step
