"""Arrays in the memory that peers map."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pycoll import _core
from reference import Array


def shareable(array: Array, offset: int = 0) -> Array:
    """A copy of `array`, `offset` bytes behind the beginning of a block of its own."""
    memory = _core.allocate_shareable(offset + max(1, array.nbytes))
    assert memory is not None, _core.process_arena_problem()
    copy: Array = np.ndarray(array.shape, array.dtype, memory.data, offset)
    copy[...] = array
    return copy


def shareable_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    memory = _core.allocate_shareable(max(1, math.prod(shape) * np.dtype(dtype).itemsize))
    assert memory is not None, _core.process_arena_problem()
    return np.ndarray(shape, dtype, memory.data)
