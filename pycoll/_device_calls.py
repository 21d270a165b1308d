"""Calls of a communicator on arrays of GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pycoll import _core, _native
from pycoll._arrays import Array
from pycoll._calls import Call, Message, Work
from pycoll._device_arrays import LEGACY_STREAM, DeviceArray, stream_handle

if TYPE_CHECKING:
    from pycoll.codecs import Codec

# Given the stream, those whose work comes before, and whether somebody will wait.
Start = Callable[[int, Sequence[int], bool], "_core.DeviceWork | None"]


class DevicePart:
    """Calls of a communicator whose arrays are on a GPU."""

    def __init__(self, core: _core.CommunicatorCore, timeout: float) -> None:
        self._core = core
        self._timeout = timeout
        self._calls: _core.DeviceCalls | None = None

    def run(
        self,
        call: Call,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        codec: Codec | None,
        stream: Any,
        async_op: bool,
    ) -> Work | None:
        arrays: list[Any] = [*inputs, *outputs]
        core_call = _core.DeviceCall(
            collective=call.collective,
            inputs=[array.span for array in inputs],
            outputs=[array.span for array in outputs],
            dtype=arrays[0].dtype.name,
            op=call.op,
            factor=call.factor,
            root=call.root,
            algorithm=call.algorithm,
            timeout=self._timeout if call.timeout is None else call.timeout,
        )
        calls = self._opened(call.collective)
        start: Start = functools.partial(calls.run, core_call)
        if codec is not None:
            residuals: tuple[Any, Any] = call.residuals
            residual, sum_residual = (None if r is None else r.span for r in residuals)
            choice = codec._choice(call.step)
            start = functools.partial(calls.run_codec, core_call, choice, residual, sum_residual)
            arrays += [array for array in residuals if array is not None]
        return self._queue(start, arrays, stream, async_op)

    def run_message(self, message: Message, stream: Any, async_op: bool) -> int | Work:
        array: Any = message.array
        operation = "recv" if message.receives else "send"
        if message.peer is None:
            raise _core.UnsupportedError(
                f"{operation}: an array on a GPU needs the rank that it is received from (source=)"
            )
        core_message = _core.DeviceMessage(
            receives=message.receives,
            array=array.span,
            dtype=array.dtype.name,
            peer=message.peer,
            tag=message.tag,
            timeout=self._timeout if message.timeout is None else message.timeout,
        )
        start = functools.partial(self._opened(operation).run, core_message)
        work = self._queue(start, [array], stream, async_op)
        return message.peer if work is None else work

    def _queue(
        self,
        start: Start,
        arrays: Sequence[DeviceArray],
        stream: Any,
        async_op: bool,
    ) -> Work | None:
        exported = [array.stream for array in arrays if array.stream is not None]
        if stream is not None:
            on = stream_handle(stream)
        else:
            on = exported[0] if exported else LEGACY_STREAM
        after = sorted({other for other in exported if other != on})
        work = start(on, after, async_op)
        return None if work is None else Work(work, [array.owner for array in arrays])

    def _opened(self, operation: str) -> _core.DeviceCalls:
        if self._calls is None:
            library = _native.gpu_library()
            if library is None:
                raise _core.UnsupportedError(
                    f"{operation}: the arrays are on a GPU, and this pycoll was built without its "
                    f"CUDA part ({_native.GPU_LIBRARY}): where nvcc is, install it with "
                    "`PYCOLL_CUDA=1 pip install ...`, or give it NumPy arrays"
                )
            self._calls = self._core.devices(str(library))
        return self._calls


def on_device(operation: str, arrays: Sequence[Array | DeviceArray], stream: Any) -> bool:
    """Whether the call's arrays are on a GPU. Raises InvalidArgumentError when only some are, or
    when there is a stream and they are not.
    """
    places = {isinstance(array, DeviceArray) for array in arrays}
    if len(places) > 1:
        raise _core.InvalidArgumentError(
            f"{operation}: some arrays are on a GPU and some are NumPy arrays; all arrays of a "
            "call must be in one place (cupy.asarray(), cupy.asnumpy())"
        )
    if stream is not None and True not in places:
        raise _core.InvalidArgumentError(
            f"{operation}: a stream was given, but the arrays are not on a GPU"
        )
    return True in places
