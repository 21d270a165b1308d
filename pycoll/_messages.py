"""Messages between two ranks of a communicator."""

from __future__ import annotations

from typing import Any, Literal, overload

from pycoll import _core
from pycoll._arrays import Array, Dense, check_array
from pycoll._calls import Message, Work
from pycoll._codec_calls import CodecPart
from pycoll._device_arrays import seen
from pycoll._device_calls import DevicePart, on_device
from pycoll.codecs import Codec


class Messages:
    """What `pycoll.Communicator` is for messages."""

    _core: _core.CommunicatorCore
    _codecs: CodecPart
    _devices: DevicePart

    def send(
        self,
        array: Array,
        destination: int,
        tag: int = 0,
        *,
        timeout: float | None = None,
        codec: str | Codec | None = None,
        step: int | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Sends `array` to a rank, which receives it with the same tag, dtype and size.

        Returns when `array` may be changed again: for small messages at once while there is room
        for them, for large ones when the receiver has taken it. Messages with one source,
        destination and tag are received in the order of their sends. Raises InvalidArgumentError
        for a destination that is the same as the rank.

        `codec`: its values travel as codes, as in collectives, but that the group's `Options` do
        not speak for messages; the receiver gives the same one. `step`: as there; None: the number
        of the message among those that this rank has sent over codecs.
        """
        array = seen(array)
        check_array("send", "array", array, writable=False)
        result = self._message(
            Message(False, array, destination, tag, timeout, codec, step), stream, async_op
        )
        return result if isinstance(result, Work) else None

    @overload
    def recv(
        self,
        array: Array,
        source: int | None = None,
        tag: int = 0,
        *,
        timeout: float | None = None,
        codec: str | Codec | None = None,
        stream: Any = None,
        async_op: Literal[False] = False,
    ) -> int: ...
    @overload
    def recv(
        self,
        array: Array,
        source: int | None = None,
        tag: int = 0,
        *,
        timeout: float | None = None,
        codec: str | Codec | None = None,
        stream: Any = None,
        async_op: Literal[True],
    ) -> Work: ...
    def recv(
        self,
        array: Array,
        source: int | None = None,
        tag: int = 0,
        *,
        timeout: float | None = None,
        codec: str | Codec | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> int | Work:
        """Receives the oldest message with this tag from `source`, or from any rank, into `array`.

        Returns the rank that sent it (`Work.source` when asynchronous). Raises MismatchError, and
        leaves `array` as it was, when the message has another dtype, number of elements or codec.
        `codec`: that of the send.
        """
        array = seen(array)
        check_array("recv", "array", array, writable=True)
        return self._message(Message(True, array, source, tag, timeout, codec), stream, async_op)

    def _message(self, message: Message, stream: Any, async_op: bool) -> int | Work:
        array = message.array
        if on_device("recv" if message.receives else "send", [array], stream):
            if self._codecs.choice_for(message) is not None:
                raise _core.UnsupportedError(
                    "messages of arrays on GPUs have no codecs, by `codec` or by a region: "
                    "encode() them before, or send them with codec='none'"
                )
            return self._devices.run_message(message, stream, async_op)
        dense = Dense([], [array]) if message.receives else Dense([array], [])
        core_message = _core.Message(
            receives=message.receives,
            array=(dense.inputs + dense.outputs)[0],
            dtype=array.dtype.name,
            peer=message.peer,
            tag=message.tag,
            timeout=message.timeout,
            on_result=dense.copy_back if dense.copies_back else None,
            codec=self._codecs.choice_for(message),
        )
        if async_op:
            return Work(self._core.submit_message(core_message))
        return self._core.run_message(core_message)
