"""Collectives and messages of NumPy arrays and of arrays on GPUs, without torch."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, SupportsFloat, SupportsIndex

from pycoll import _core
from pycoll._arrays import (
    Array,
    Blocks,
    Dense,
    blocks_of,
    check_array,
    check_block,
    check_stacked,
)
from pycoll._calls import Call, Work
from pycoll._codec_calls import CodecPart
from pycoll._device_arrays import seen
from pycoll._device_calls import DevicePart, on_device
from pycoll._generation import key_prefix
from pycoll._messages import Messages
from pycoll._regions import open_regions
from pycoll._store_adapter import adapt_store
from pycoll.auto import Auto, Choice
from pycoll.codecs import Codec
from pycoll.flight.dump import dump_on_signal
from pycoll.options import Options

__all__ = ["Communicator", "Work"]


class Communicator(Messages):
    """A group of `world_size` ranks that call the same collectives in the same order.

    Args:
        store: where the ranks find each other: `pycoll.FileStore`, any torch.distributed Store, or
            an object with ``set(key, bytes)`` and ``get(key, timeout=seconds) -> bytes``.
        rank: this process's number, 0 to world_size - 1.
        world_size: how many ranks there are. All must join before this returns.
        name: tells groups that share a store apart; the same on every rank of the group.
        timeout: seconds after which an operation that does not finish raises `TimeoutError`. They
            count from when it is its turn: operations of a group run one after the other.
        options: `pycoll.Options`, or a dict of PYCOLL_* variables for this group alone:
            ``{"PYCOLL_ALGO": "all_reduce=ring"}``.

    Arrays are NumPy arrays of any shape and strides (also negative ones, no elements, no
    dimensions) of bool, int8 to int64, uint8 to uint64, float16/32/64, complex64/128 and, of the
    ml_dtypes package, bfloat16, float8_e4m3fn and float8_e5m2. What is only read is never changed.

    Or they are on a GPU (`pycoll doctor` says whether this build serves them): whatever has
    ``__cuda_array_interface__``, like arrays of CuPy and Numba and CUDA tensors of torch,
    contiguous, all of a call on one GPU. See "Arrays on GPUs" in docs/semantics.md: such a call is
    put on `stream` (of CuPy, torch or cuda.core, or a cudaStream_t as an int; by default that which
    the arrays export, else the legacy default stream) and does not block the host.

    Reduce operations are sum, avg, product, min, max, band, bor, bxor, and premul_sum, which
    multiplies this rank's input by `factor` before the sum. 8 and 16-bit floating-point sums
    accumulate in float32 and are rounded once; integers wrap, and their avg is truncated toward
    zero; the sum of bools is "any". Complex numbers have sum, avg and premul_sum; bitwise
    operations are for integers and bool. The result has the same bits on every rank.

    A rank may call a group from several threads; calls then run in the order in which they come,
    which must be the same on every rank. Messages (`send`, `recv`) have no place in that order.

    Every method raises `InvalidArgumentError` (a ValueError) before memory is touched when an
    argument is wrong, `UnsupportedError` for an operation that a dtype does not have;
    `MismatchError` when ranks called different things, `PeerError` when a rank died or left,
    `TimeoutError`, or `AbortedError`. After one of the latter four the group cannot be used any
    more (a message that does not fit its receive is the exception: only the two fail).

    Everywhere, `algorithm` forces an algorithm (`pycoll explain` lists them; `auto` takes what
    `algorithm_for` names), `timeout` is in seconds and replaces the group's, and with `async_op`
    the call returns a `Work` at once: arrays must not be touched until its wait() has returned.

    `codec` (a name or an object of `pycoll.codecs`) lets float32, float16 and bfloat16 values
    travel as codes; "none" lets them travel as they are; None takes what the region says
    (`pycoll.codec`), else the group's `Options`. Every rank, the owner of a value
    too, ends with what the codes decode to: the same bits. An all_reduce quantises twice (each
    rank's values; the sum, which is made in float32), everything else once. Exempt, and exact:
    other dtypes, operations other than sum and avg, vectors below `Options.min_bytes`, groups of
    one, calls that force an algorithm. "auto", or a `pycoll.Auto`, in all_reduce and
    reduce_scatter of arrays in host memory: the first such call, also an asynchronous one, measures
    what pays on this group's network, which takes some all_reduces of 4 MiB. `step`: what the
    random numbers of stochastic rounding depend on beside the codec's seed; None: the number of the
    call.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        name: str = "world",
        timeout: float = 1800.0,
        options: Options | Mapping[str, str] | None = None,
    ) -> None:
        for what, number in (("rank", rank), ("world_size", world_size)):
            if not isinstance(number, SupportsIndex):
                raise _core.InvalidArgumentError(f"{what} is a whole number, not {number!r}")
        if not isinstance(timeout, SupportsFloat):
            raise _core.InvalidArgumentError(f"timeout is a number of seconds, not {timeout!r}")
        if not 0 <= rank < world_size:
            raise _core.InvalidArgumentError(
                f"rank {rank} is not between 0 and world_size - 1 = {world_size - 1}"
            )
        settings = Options.of(options)
        variables, table = settings.resolve()
        dump_on_signal(variables)
        self.rank = rank
        self.world_size = world_size
        self._core = _core.CommunicatorCore(
            store=adapt_store(store),
            rank=rank,
            world_size=world_size,
            prefix=f"pycoll/{key_prefix(store)}{name}",
            timeout=timeout,
            variables=variables,
            table=table,
            agreed=settings.agreed(),
        )
        self._devices = DevicePart(self._core, timeout)
        self._codecs = CodecPart(self._core, world_size, settings)
        # Also at exit, before the interpreter ends threads that still carry operations.
        weakref.finalize(self, self._core.close)

    @property
    def transport(self) -> str:
        """Name of the transport in use."""
        return self._core.transport()

    def algorithm_for(self, collective: str, nbytes: int) -> str:
        """The algorithm that a call with a vector of `nbytes` in ordinary memory uses."""
        return self._core.algorithm_for(collective, nbytes)

    def statistics(self) -> dict[str, int]:
        """How many collectives of this group began with and without staging copies.

        `zero_copy_calls` worked on the ranks' arrays where they lie, `staged_calls` through buffers
        of the transport; `zero_copy_bytes` and `staged_bytes` are the bytes of the larger of a
        call's input and output on this rank, summed.
        """
        return self._core.statistics()

    def codec_choice(
        self, codec: str | Auto | None = None, dtype: str = "float32"
    ) -> Choice | None:
        """What this group has chosen for ``codec="auto"`` calls of a dtype, and why (`Choice.why`).

        None before the first one. `codec`: "auto" or a `pycoll.Auto`; None: that of the `Options`.
        """
        return self._codecs.choice(codec, dtype)

    def choose_codec(self, codec: str | Auto | None = None, dtype: str = "float32") -> Choice:
        """Measures what pays, now, for `codec` and a dtype (as `codec_choice`); every rank calls.

        The first such call of an "auto" all_reduce does so by itself, and no later one does.
        """
        return self._codecs.choose(codec, dtype)

    def all_reduce(
        self,
        array: Array,
        op: str = "sum",
        *,
        factor: float = 1.0,
        algorithm: str = "auto",
        timeout: float | None = None,
        codec: str | Codec | Auto | None = None,
        step: int | None = None,
        residual: Array | None = None,
        sum_residual: Array | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Replaces `array` on every rank by the reduction over all ranks.

        Shape and dtype must be the same on all ranks. `residual`, `sum_residual`: error feedback of
        the codec, float32 arrays of as many elements, as of `pycoll.all_reduce`.
        """
        # In one expression: it is a tenth of the time of a small call.
        if (
            codec is None
            and residual is None
            and sum_residual is None
            and timeout is None
            and stream is None
            and factor == 1.0
            and algorithm == "auto"
            and not async_op
            and self._codecs.exact_by_default
            and not open_regions.count
            and self._core.all_reduce_at_once(array, op)
        ):
            return None
        array = seen(array)
        check_array("all_reduce", "array", array, writable=True)
        call = Call("all_reduce", op, factor, 0, algorithm, timeout, codec, step)
        residuals = (seen(residual), seen(sum_residual))
        call.residuals = self._codecs.residuals_of(call, array, *residuals)
        return self._run(call, [array], [array], stream, async_op)

    def all_gather(
        self,
        output: Blocks,
        input: Array,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        codec: str | Codec | Auto | None = None,
        step: int | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Puts rank r's `input` into ``output[r]`` on every rank.

        `output` is an array of shape ``(world_size, *input.shape)`` or a list of one array a rank,
        which may have different lengths, the same list of lengths on every rank; all of the dtype
        of `input`. A rank whose input does not fit its place raises InvalidArgumentError with both
        shapes, and ends the group, since the others count on it.
        """
        output, input = seen(output), seen(input)
        check_array("all_gather", "input", input, writable=False)
        check_stacked("all_gather", "output", output, "input", input, self.world_size)
        outputs = blocks_of(
            "all_gather", "output", output, self.world_size, input.dtype, writable=True
        )
        self._check_slot("all_gather", "input", input, "output", outputs[self.rank])
        call = Call("all_gather", "none", 1.0, 0, algorithm, timeout, codec, step)
        return self._run(call, [input], outputs, stream, async_op)

    def reduce_scatter(
        self,
        output: Array,
        input: Blocks,
        op: str = "sum",
        *,
        factor: float = 1.0,
        algorithm: str = "auto",
        timeout: float | None = None,
        codec: str | Codec | Auto | None = None,
        step: int | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduces ``input[r]`` over all ranks into rank r's `output`.

        `input` is an array of shape ``(world_size, *output.shape)`` or a list of one array a rank,
        which may have different lengths, the same list of lengths on every rank; all of the dtype
        of `output`. A rank whose output does not fit raises InvalidArgumentError with both shapes,
        and ends the group.
        """
        output, input = seen(output), seen(input)
        check_array("reduce_scatter", "output", output, writable=True)
        check_stacked("reduce_scatter", "input", input, "output", output, self.world_size)
        inputs = blocks_of(
            "reduce_scatter", "input", input, self.world_size, output.dtype, writable=False
        )
        self._check_slot("reduce_scatter", "output", output, "input", inputs[self.rank])
        call = Call("reduce_scatter", op, factor, 0, algorithm, timeout, codec, step)
        return self._run(call, inputs, [output], stream, async_op)

    def broadcast(
        self,
        array: Array,
        root: int = 0,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        codec: str | Codec | Auto | None = None,
        step: int | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Replaces `array` on every rank by the root's.

        Shape and dtype must be the same on all ranks.
        """
        array = seen(array)
        check_array("broadcast", "array", array, writable=True)
        call = Call("broadcast", "none", 1.0, root, algorithm, timeout, codec, step)
        return self._run(call, [array], [array], stream, async_op)

    def reduce(
        self,
        array: Array,
        root: int = 0,
        op: str = "sum",
        *,
        out: Array | None = None,
        factor: float = 1.0,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Puts the reduction of `array` over all ranks into the root's `out`.

        Without `out`, which only the root may give, the root's `array` is replaced. No other
        rank's array is changed. Shape and dtype must be the same on all ranks, and those of `out`.
        """
        is_root = self._is_root("reduce", root, "out", out)
        array, out = seen(array), seen(out)
        check_array("reduce", "array", array, writable=is_root and out is None)
        outputs = [array if out is None else out] if is_root else []
        if out is not None:
            check_array("reduce", "out", out, writable=True)
            check_block("reduce", "out", out, "array", array)
        return self._run(
            Call("reduce", op, factor, root, algorithm, timeout), [array], outputs, stream, async_op
        )

    def gather(
        self,
        output: Blocks | None,
        input: Array,
        root: int = 0,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Puts rank r's `input` into the root's ``output[r]``.

        `output` is None on the other ranks; on the root an array of shape ``(world_size,
        *input.shape)`` or a list of world_size arrays like `input`. Shape and dtype of `input` must
        be the same on all ranks.
        """
        is_root = self._is_root("gather", root, "output", output)
        output, input = seen(output), seen(input)
        check_array("gather", "input", input, writable=False)
        outputs: list[Array] = []
        if is_root:
            check_stacked("gather", "output", output, "input", input, self.world_size)
            outputs = blocks_of(
                "gather", "output", output, self.world_size, input.dtype, writable=True
            )
            for slot in outputs:
                self._check_slot("gather", "input", input, "output", slot)
        call = Call("gather", "none", 1.0, root, algorithm, timeout)
        return self._run(call, [input], outputs, stream, async_op)

    def scatter(
        self,
        output: Array,
        input: Blocks | None,
        root: int = 0,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Puts the root's ``input[r]`` into rank r's `output`.

        `input` is None on the other ranks; on the root an array of shape ``(world_size,
        *output.shape)`` or a list of world_size arrays like `output`. Shape and dtype of `output`
        must be the same on all ranks.
        """
        is_root = self._is_root("scatter", root, "input", input)
        output, input = seen(output), seen(input)
        check_array("scatter", "output", output, writable=True)
        inputs: list[Array] = []
        if is_root:
            check_stacked("scatter", "input", input, "output", output, self.world_size)
            inputs = blocks_of(
                "scatter", "input", input, self.world_size, output.dtype, writable=False
            )
            for slot in inputs:
                self._check_slot("scatter", "output", output, "input", slot)
        call = Call("scatter", "none", 1.0, root, algorithm, timeout)
        return self._run(call, inputs, [output], stream, async_op)

    def all_to_all(
        self,
        output: Blocks,
        input: Blocks,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        codec: str | Codec | Auto | None = None,
        step: int | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Puts rank s's ``input[r]`` into rank r's ``output[s]``.

        Both are arrays whose first dimension is world_size, or lists of world_size arrays of any
        lengths: what s sends r must be as long as r expects it, else both raise MismatchError.
        `output` and `input` share no memory.
        """
        output, input = seen(output), seen(input)
        first: Any = input[0] if isinstance(input, (list, tuple)) and input else input
        check_array("all_to_all", "input", first, writable=False)
        dtype = first.dtype
        inputs = blocks_of("all_to_all", "input", input, self.world_size, dtype, writable=False)
        outputs = blocks_of("all_to_all", "output", output, self.world_size, dtype, writable=True)
        self._check_slot(
            "all_to_all", "input for itself", inputs[self.rank], "output", outputs[self.rank]
        )
        call = Call("all_to_all", "none", 1.0, 0, algorithm, timeout, codec, step)
        return self._run(call, inputs, outputs, stream, async_op)

    def barrier(
        self, *, algorithm: str = "auto", timeout: float | None = None, async_op: bool = False
    ) -> Work | None:
        """Returns when every rank has called it."""
        return self._run(
            Call("barrier", "none", 1.0, 0, algorithm, timeout), [], [], None, async_op
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

    def _is_root(self, operation: str, root: int, name: str, only_at_root: Any) -> bool:
        if not 0 <= root < self.world_size:
            raise _core.InvalidArgumentError(
                f"{operation}: root {root} is not a rank of this group of {self.world_size}"
            )
        if self.rank != root and only_at_root is not None:
            raise _core.InvalidArgumentError(
                f"{operation}: only the root, rank {root}, gives `{name}`; this is rank {self.rank}"
            )
        return self.rank == root

    def _check_slot(self, operation: str, name: str, mine: Array, blocks: str, slot: Array) -> None:
        """The other ranks would wait for data that never comes: they are told why."""
        if mine.size == slot.size:
            return
        text = (
            f"{operation}: rank {self.rank}'s {name} has shape {mine.shape}, its place in {blocks} "
            f"has shape {slot.shape}; they must have the same number of elements"
        )
        self._core.abort(text)
        raise _core.InvalidArgumentError(text)

    def _run(
        self,
        call: Call,
        inputs: list[Array],
        outputs: list[Array],
        stream: Any,
        async_op: bool,
    ) -> Work | None:
        if on_device(call.collective, [*inputs, *outputs], stream):
            codec = self._codecs.codec_for(call, inputs, outputs, on_gpu=True)
            return self._devices.run(call, inputs, outputs, codec, stream, async_op)
        dense = Dense(inputs, outputs)
        arrays = inputs or outputs
        core_call = _core.Call(
            collective=call.collective,
            inputs=dense.inputs,
            outputs=dense.outputs,
            dtype=arrays[0].dtype.name if arrays else "uint8",
            op=call.op,
            factor=call.factor,
            root=call.root,
            algorithm=call.algorithm,
            timeout=call.timeout,
            on_result=dense.copy_back if dense.copies_back else None,
        )
        codec = self._codecs.codec_for(call, inputs, outputs)
        if codec is not None:
            work = Work(self._codecs.start(call, core_call, codec))
            if async_op:
                return work
            work.wait()
            return None
        if async_op:
            return Work(self._core.submit(core_call))
        self._core.run(core_call)
        return None
