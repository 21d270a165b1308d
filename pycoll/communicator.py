"""Collectives on NumPy arrays, without torch."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from pycoll import _core
from pycoll._store_adapter import adapt_store

Array = npt.NDArray[Any]


class Work:
    """A collective that was started with ``async_op=True``."""

    def __init__(self, core: _core.WorkCore) -> None:
        self._core = core

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the result is in the output arrays.

        Returns False when `timeout` (seconds) passed first; the operation goes on. Raises what the
        synchronous call would raise.
        """
        return self._core.wait(timeout)

    def is_completed(self) -> bool:
        """True when wait() would return at once: the outputs hold the result, or it failed."""
        return self._core.done()


class Communicator:
    """A group of `world_size` ranks that call the same collectives in the same order.

    Args:
        store: where the ranks find each other: `pycoll.FileStore`, any torch.distributed Store, or
            an object with ``set(key, bytes)`` and ``get(key, timeout=seconds) -> bytes``.
        rank: this process's number, 0 to world_size - 1.
        world_size: how many ranks there are. All must join before this returns.
        name: tells groups that share a store apart; the same on every rank of the group.
        timeout: seconds after which an operation that does not finish raises `TimeoutError`. They
            count from when it is its turn: operations of a group run one after the other.
        options: PYCOLL_* variables for this group alone: ``{"PYCOLL_ALGO": "all_reduce=ring"}``.

    Arrays are NumPy arrays of any shape and strides: bool, integers, float16/32/64, bfloat16 (of
    the ml_dtypes package). Reductions exist for float16, bfloat16, float32, float64, int8, int16,
    int32, int64 and uint8; 16-bit floating-point sums accumulate in float32 and are rounded once,
    integers wrap. The result has the same bits on every rank.

    Every method raises `InvalidArgumentError` (a ValueError) before memory is touched when an
    argument is wrong; `MismatchError` when ranks called different things, `PeerError` when a rank
    died or left, `TimeoutError`, or `AbortedError`. After one of the latter four the group cannot
    be used any more.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        name: str = "world",
        timeout: float = 1800.0,
        options: dict[str, str] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise _core.InvalidArgumentError(
                f"rank {rank} is not between 0 and world_size - 1 = {world_size - 1}"
            )
        self.rank = rank
        self.world_size = world_size
        self._core = _core.CommunicatorCore(
            store=adapt_store(store),
            rank=rank,
            world_size=world_size,
            prefix=f"pycoll/{name}",
            timeout=timeout,
            options=options or {},
        )
        # Also at exit, before the interpreter ends threads that still carry operations.
        weakref.finalize(self, self._core.close)

    @property
    def transport(self) -> str:
        """Name of the transport in use."""
        return self._core.transport()

    def algorithm_for(self, collective: str, nbytes: int) -> str:
        """The algorithm that a call with a vector of `nbytes` uses."""
        return self._core.algorithm_for(collective, nbytes)

    def all_reduce(
        self,
        array: Array,
        op: str = "sum",
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Replaces `array` on every rank by the sum (avg, product, min, max) over all ranks.

        Shape and dtype must be the same on all ranks. `algorithm` forces one of ring, tree,
        recursive_doubling, one_shot, two_shot; `auto` takes what `algorithm_for` names.
        """
        _check_array("all_reduce", "array", array, writable=True)
        call = _Call("all_reduce", op=op, algorithm=algorithm, timeout=timeout)
        return self._run(call, array.size, [array], [array], async_op)

    def all_gather(
        self,
        output: Array,
        input: Array,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Puts rank r's `input` into ``output[r]`` on every rank.

        `output` has shape ``(world_size, *input.shape)`` and the dtype of `input`.
        """
        _check_array("all_gather", "input", input, writable=False)
        _check_array("all_gather", "output", output, writable=True)
        _check_blocks("all_gather", "output", output, "input", input, self.world_size)
        call = _Call("all_gather", algorithm=algorithm, timeout=timeout)
        return self._run(call, input.size, [input], _rows(output), async_op)

    def reduce_scatter(
        self,
        output: Array,
        input: Array,
        op: str = "sum",
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduces ``input[r]`` over all ranks into rank r's `output`.

        `input` has shape ``(world_size, *output.shape)`` and the dtype of `output`; it is not
        changed.
        """
        _check_array("reduce_scatter", "input", input, writable=False)
        _check_array("reduce_scatter", "output", output, writable=True)
        _check_blocks("reduce_scatter", "input", input, "output", output, self.world_size)
        call = _Call("reduce_scatter", op=op, algorithm=algorithm, timeout=timeout)
        return self._run(call, output.size, _rows(input), [output], async_op)

    def broadcast(
        self,
        array: Array,
        root: int = 0,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Replaces `array` on every rank by the root's.

        Shape and dtype must be the same on all ranks.
        """
        _check_array("broadcast", "array", array, writable=True)
        call = _Call("broadcast", root=root, algorithm=algorithm, timeout=timeout)
        return self._run(call, array.size, [array], [array], async_op)

    def barrier(
        self, *, algorithm: str = "auto", timeout: float | None = None, async_op: bool = False
    ) -> Work | None:
        """Returns when every rank has called it."""
        return self._run(
            _Call("barrier", algorithm=algorithm, timeout=timeout), 0, [], [], async_op
        )

    def abort(self, reason: str = "abort() was called") -> None:
        """Gives the group up, here and on all peers, and returns at once."""
        self._core.abort(reason)

    def close(self) -> None:
        """Leaves the group in good order. Idempotent; also done when the object is collected."""
        self._core.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    def _run(
        self,
        call: _Call,
        count: int,
        inputs: list[Array],
        outputs: list[Array],
        async_op: bool,
    ) -> Work | None:
        # Strided arrays travel as dense copies; results are copied back element by element, so that
        # what lies between the elements is not touched. In place stays in place.
        dense = {id(a): a if a.flags.c_contiguous else a.copy(order="C") for a in inputs + outputs}
        strided = [(a, dense[id(a)]) for a in outputs if not a.flags.c_contiguous]
        dtype = (inputs + outputs)[0].dtype.name if inputs or outputs else "uint8"
        core_call = _core.Call(
            collective=call.collective,
            inputs=[dense[id(a)] for a in inputs],
            outputs=[dense[id(a)] for a in outputs],
            dtype=dtype,
            op=call.op,
            count=count,
            root=call.root,
            algorithm=call.algorithm,
            timeout=call.timeout,
            on_result=functools.partial(_copy_back, strided) if strided else None,
        )
        if async_op:
            return Work(self._core.submit(core_call))
        self._core.run(core_call)
        return None


class _Call:
    """What a collective is told beside its arrays."""

    def __init__(
        self,
        collective: str,
        *,
        op: str = "none",
        root: int = 0,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> None:
        self.collective = collective
        self.op = op
        self.root = root
        self.algorithm = algorithm
        self.timeout = timeout


def _copy_back(pairs: Sequence[tuple[Array, Array]]) -> None:
    for destination, source in pairs:
        np.copyto(destination, source)


def _check_array(operation: str, name: str, array: Any, *, writable: bool) -> None:
    if not isinstance(array, np.ndarray):
        raise _core.InvalidArgumentError(
            f"{operation}: {name} is a {type(array).__name__}, not a numpy.ndarray"
        )
    if not array.dtype.isnative:
        raise _core.InvalidArgumentError(
            f"{operation}: {name} has dtype {array.dtype.str}, which is not in this machine's byte "
            "order; convert it with array.astype(array.dtype.newbyteorder('='))"
        )
    if writable and not array.flags.writeable:
        raise _core.InvalidArgumentError(f"{operation}: {name} is read-only")
    if writable and _overlaps_itself(array):
        raise _core.InvalidArgumentError(
            f"{operation}: {name} with shape {array.shape} and strides {array.strides} has "
            "elements that share memory (an expanded or overlapping view); make a copy first"
        )


def _overlaps_itself(array: Array) -> bool:
    """True unless the strides show that no two elements share memory (a sufficient test)."""
    reach = 0
    dims = [(abs(st), n) for st, n in zip(array.strides, array.shape, strict=True) if n > 1]
    for stride, n in sorted(dims):
        if stride < reach + array.itemsize:
            return array.size > 0
        reach += stride * (n - 1)
    return False


def _rows(array: Array) -> list[Array]:
    return [array[i, ...] for i in range(array.shape[0])]


def _check_blocks(
    operation: str, name: str, blocks: Array, other: str, block: Array, world_size: int
) -> None:
    expected = (world_size, *block.shape)
    if blocks.shape != expected or blocks.dtype != block.dtype:
        raise _core.InvalidArgumentError(
            f"{operation}: {name} has shape {blocks.shape} and dtype {blocks.dtype}; with world "
            f"size {world_size} and {other} of shape {block.shape} and dtype {block.dtype} it must "
            f"have shape {expected} and that dtype"
        )
