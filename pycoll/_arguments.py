"""Numbers and switches that callers give: made plain, or refused with what is allowed.

Python takes True for 1 and "yes" for true. Where a number or a switch is meant, that is a mistake
which shows late, or only on other ranks: so each function here takes nothing but what its name
says, NumPy's scalars of that kind included, and returns Python's own.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import numpy as np

from pycoll import _core

__all__ = ["flag", "number", "refuse", "whole"]


def refuse(what: str, allowed: str, value: Any) -> _core.InvalidArgumentError:
    """To be raised: ``what`` names the argument, and whose it is where that does not show."""
    return _core.InvalidArgumentError(f"{what} is {allowed}, not {value!r}")


def flag(what: str, value: Any, allowed: str = "True or False") -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise refuse(what, allowed, value)


def whole(what: str, value: Any, allowed: str, *, least: int = 0, below: int | None = None) -> int:
    """A whole number in [least, below)."""
    if not isinstance(value, bool | np.bool_):
        try:
            found = operator.index(value)
        except TypeError:
            raise refuse(what, allowed, value) from None
        if least <= found and (below is None or found < below):
            return found
    raise refuse(what, allowed, value)


def number(what: str, value: Any, allowed: str, *, above: float | None = None) -> float:
    """A finite number from 0 on, or above `above`."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if math.isfinite(found) and (found >= 0 if above is None else found > above):
            return found
    raise refuse(what, allowed, value)
