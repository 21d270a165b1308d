"""What collectives ask of arrays: checks, and dense memory for strided ones of NumPy.

Arrays on GPUs come as `DeviceArray`, which has what is used here of an ndarray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pycoll import _core
from pycoll._device_arrays import DeviceArray

Array = npt.NDArray[Any]
# One array whose first dimension counts ranks, or one array a rank.
Blocks = Array | Sequence[Array]

# np.shares_memory() may take exponential time; what it cannot settle in this many steps is refused.
_OVERLAP_WORK = 10_000
_ARRAYS = (np.ndarray, DeviceArray)


def check_array(operation: str, name: str, array: Any, *, writable: bool) -> None:
    """Raises InvalidArgumentError unless `array` is an array that can be read (or written)."""
    if not isinstance(array, _ARRAYS):
        raise _core.InvalidArgumentError(
            f"{operation}: {name} is a {type(array).__name__}, not a numpy.ndarray or an array on "
            "a GPU"
        )
    if not array.dtype.isnative:
        raise _core.InvalidArgumentError(
            f"{operation}: {name} has dtype {array.dtype.str}, which is not in this machine's byte "
            "order; convert it with array.astype(array.dtype.newbyteorder('='))"
        )
    if writable and not array.flags.writeable:
        raise _core.InvalidArgumentError(f"{operation}: {name} is read-only")
    if isinstance(array, DeviceArray):
        return  # dense
    if writable and _overlaps_itself(array):
        raise _core.InvalidArgumentError(
            f"{operation}: {name} with shape {array.shape} and strides {array.strides} has "
            "elements that share memory (an expanded or overlapping view); make a copy first"
        )


def check_same_dtype(operation: str, name: str, array: Any, other: str, dtype: Any) -> None:
    if array.dtype != dtype:
        raise _core.InvalidArgumentError(
            f"{operation}: {name} has dtype {array.dtype}, {other} has dtype {dtype}; all arrays "
            "of a call must have one dtype"
        )


def check_block(operation: str, name: str, array: Array, other: str, expected: Array) -> None:
    """Raises InvalidArgumentError unless the two have one shape and dtype."""
    if array.shape != expected.shape or array.dtype != expected.dtype:
        raise _core.InvalidArgumentError(
            f"{operation}: {name} has shape {array.shape} and dtype {array.dtype}, {other} has "
            f"shape {expected.shape} and dtype {expected.dtype}; they must be the same"
        )


def blocks_of(
    operation: str, name: str, blocks: Any, world_size: int, dtype: Any, *, writable: bool
) -> list[Array]:
    """One array a rank: the rows of an array, or the members of a list.

    The lengths of a list's members are not looked at. Raises InvalidArgumentError for a wrong
    number of them, another dtype, and outputs that share memory.
    """
    if isinstance(blocks, _ARRAYS):
        check_array(operation, name, blocks, writable=writable)
        check_same_dtype(operation, name, blocks, "the other array", dtype)
        if blocks.ndim == 0 or blocks.shape[0] != world_size:
            raise _core.InvalidArgumentError(
                f"{operation}: {name} has shape {blocks.shape}; its first dimension must be the "
                f"world size {world_size}"
            )
        return _rows_of(blocks)
    if not isinstance(blocks, (list, tuple)) or len(blocks) != world_size:
        what = (
            f"a list of {len(blocks)}"
            if isinstance(blocks, (list, tuple))
            else type(blocks).__name__
        )
        raise _core.InvalidArgumentError(
            f"{operation}: {name} is {what}; it must be an array whose first dimension is the "
            f"world size {world_size}, or a list of {world_size} arrays"
        )
    for i, block in enumerate(blocks):
        check_array(operation, f"{name}[{i}]", block, writable=writable)
        check_same_dtype(operation, f"{name}[{i}]", block, "another array", dtype)
    if writable:
        _check_disjoint(operation, name, blocks)
    return list(blocks)


def check_stacked(
    operation: str, name: str, blocks: Any, other: str, block: Array, world_size: int
) -> None:
    """For an array of all blocks: its shape is (world_size, *block.shape)."""
    expected = (world_size, *block.shape)
    if isinstance(blocks, _ARRAYS) and (blocks.shape != expected or blocks.dtype != block.dtype):
        raise _core.InvalidArgumentError(
            f"{operation}: {name} has shape {blocks.shape} and dtype {blocks.dtype}; with world "
            f"size {world_size} and {other} of shape {block.shape} and dtype {block.dtype} it must "
            f"have shape {expected} and that dtype"
        )


class Dense:
    """Dense memory for the arrays of one call: their own, or copies of strided ones.

    A strided output is copied back element by element, so that what lies between its elements is
    not touched. An array that is input and output stays one.
    """

    def __init__(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        known: dict[int, Array] = {}
        for array in [*inputs, *outputs]:
            if id(array) not in known:
                known[id(array)] = array if array.flags.c_contiguous else array.copy(order="C")
        self.inputs = [known[id(array)] for array in inputs]
        self.outputs = [known[id(array)] for array in outputs]
        self._strided = [(a, known[id(a)]) for a in outputs if not a.flags.c_contiguous]

    @property
    def copies_back(self) -> bool:
        return bool(self._strided)

    def copy_back(self) -> None:
        for destination, source in self._strided:
            np.copyto(destination, source)


def _rows_of(array: Any) -> list[Array]:
    if isinstance(array, DeviceArray):
        rows: list[Any] = array.rows()
        return rows
    return [array[i, ...] for i in range(array.shape[0])]


def _overlaps_itself(array: Array) -> bool:
    """True unless the strides show that no two elements share memory (a sufficient test)."""
    reach = 0
    dims = [(abs(st), n) for st, n in zip(array.strides, array.shape, strict=True) if n > 1]
    for stride, n in sorted(dims):
        if stride < reach + array.itemsize:
            return array.size > 0
        reach += stride * (n - 1)
    return False


def _check_disjoint(operation: str, name: str, outputs: Sequence[Array]) -> None:
    """Strided outputs travel as dense copies, so the core cannot see that they share memory."""
    if all(output.flags.c_contiguous for output in outputs):
        return
    if any(isinstance(output, DeviceArray) for output in outputs):
        return  # a mixture, which is refused for that
    for j, one in enumerate(outputs):
        for i, other in enumerate(outputs[:j]):
            if _may_share(one, other):
                raise _core.InvalidArgumentError(
                    f"{operation}: {name}[{i}] and {name}[{j}] share memory (overlapping views); "
                    "give each its own"
                )


def _may_share(a: Array, b: Array) -> bool:
    try:
        # The stubs know only the two limits that have names.
        return bool(np.shares_memory(a, b, max_work=_OVERLAP_WORK))  # type: ignore[arg-type]
    except Exception as error:  # np.exceptions.TooHardError, whose home depends on the version
        if type(error).__name__ != "TooHardError":
            raise
        return True
