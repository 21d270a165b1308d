"""Which calls of a communicator are compressed, and how they are run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pycoll import _core
from pycoll._arrays import Array, check_array
from pycoll._calls import Call, Message
from pycoll._device_arrays import DeviceArray
from pycoll._regions import codec_of_call, here
from pycoll.advisor import ITEM_BYTES, Bytes
from pycoll.auto import Auto, Choice, Chooser, asked_for, auto_only
from pycoll.codecs import Codec
from pycoll.options import Options


class CoreTrial:
    """A communicator as pycoll/auto.py measures it."""

    def __init__(self, core: _core.CommunicatorCore, world_size: int) -> None:
        self.world_size = world_size
        self._core = core

    def shares_memory(self) -> bool:
        # On no rank of a group of several hosts, or of one that is forced onto the network.
        return self._core.transport() == "shm"

    def all_reduce(self, values: Bytes, dtype: str, codec: Codec | None) -> None:
        call = self._call("all_reduce", [values], [values], dtype, "avg")
        if codec is None:
            self._core.run(call)
        else:
            self._core.submit_codec(call, codec._choice(0), None, None).wait()

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        own = np.array(numbers, np.float64)
        rows = [np.empty_like(own) for _ in range(self.world_size)]
        self._core.run(self._call("all_gather", [own], rows, "float64", "none"))
        return [row.tolist() for row in rows]

    def _call(
        self, collective: str, inputs: list[Array], outputs: list[Array], dtype: str, op: str
    ) -> _core.Call:
        return _core.Call(
            collective=collective,
            inputs=inputs,
            outputs=outputs,
            dtype=dtype,
            op=op,
            factor=1.0,
            root=0,
            algorithm="auto",
            timeout=None,
            on_result=None,
        )


class CodecPart:
    """The compressed calls of one communicator. `default`: the codec of calls that name none."""

    def __init__(self, core: _core.CommunicatorCore, world_size: int, options: Options) -> None:
        self._core = core
        self.default = asked_for(options.codec)
        self._min_bytes = options.least_bytes
        trial = CoreTrial(core, world_size)
        self._chooser = Chooser(trial)
        # Calls that name no codec are exact, whatever they are.
        self.exact_by_default = self.default is None
        if isinstance(self.default, Auto) and (world_size == 1 or trial.shares_memory()):
            self.exact_by_default = True
            self._chooser.choice(self.default, "float32")  # none, and asks nobody

    def codec_for(
        self, call: Call, inputs: Sequence[Array], outputs: Sequence[Array], *, on_gpu: bool = False
    ) -> Codec | None:
        """The codec of a call; None where it is exempt. The same on every rank. Collective where
        the group has to choose one first, which it does for arrays in host memory alone."""
        # A group's codec is for gradients: what is broadcast and gathered is mostly parameters.
        reduces = call.collective in ("all_reduce", "reduce_scatter")
        codec = codec_of_call(call.codec, self.default if reduces else None)
        if isinstance(codec, Auto) and not reduces:
            raise _core.InvalidArgumentError(
                f"{call.collective}: a codec is chosen for all_reduce and reduce_scatter; name one "
                "here, such as 'int8'"
            )
        if isinstance(codec, Auto) and on_gpu:
            if call.codec is None:
                return None
            raise _core.UnsupportedError(
                f"{call.collective} of arrays on a GPU: 'auto' measures what pays for arrays in "
                "host memory; name a codec, such as 'int8'"
            )
        arrays = [*inputs, *outputs]
        if codec is None or not arrays or call.algorithm != "auto":
            return None
        if not self._core.compresses(call.collective, arrays[0].dtype.name, call.op):
            return None
        # Ranks know no more than their own lengths of an all_to_all: they could not agree.
        size = max(sum(a.nbytes for a in inputs), sum(a.nbytes for a in outputs))
        small = size < self._min_bytes and call.collective != "all_to_all"
        if small:
            return None
        if isinstance(codec, Codec):
            return codec
        return self._chooser.choice(codec, arrays[0].dtype.name).codec_for(size)

    def choice_for(self, message: Message) -> _core.CodecChoice | None:
        """How a message travels; None: as it is. The same on both ranks if they are the same."""
        codec = codec_of_call(message.codec, None)
        if isinstance(codec, Auto):
            raise _core.InvalidArgumentError(
                "a codec is chosen for all_reduce and reduce_scatter; a message needs the name of "
                "one, such as 'int8'"
            )
        array = message.array
        if codec is None or array.dtype.name not in ITEM_BYTES or array.nbytes < self._min_bytes:
            return None
        return codec._choice(message.step)

    def choice(self, codec: str | Auto | None, dtype: str) -> Choice | None:
        return self._chooser.known(self._auto(codec), dtype)

    def choose(self, codec: str | Auto | None, dtype: str) -> Choice:
        auto = self._auto(codec)
        if dtype not in ITEM_BYTES:
            raise _core.InvalidArgumentError(f"codecs take {', '.join(ITEM_BYTES)}, not {dtype!r}")
        return self._chooser.again(auto, dtype)

    def _auto(self, codec: str | Auto | None) -> Auto:
        if codec is None:
            return self.default if isinstance(self.default, Auto) else Auto()
        return auto_only(codec)

    def residuals_of(
        self, call: Call, array: Array, *residuals: Array | None
    ) -> tuple[Array | None, Array | None]:
        """Checked: the core takes them as they are."""
        for name, residual in zip(("residual", "sum_residual"), residuals, strict=True):
            if residual is None:
                continue
            if call.codec is None and self.default is None and here() is None:
                raise _core.InvalidArgumentError(f"{call.collective}: {name} without a codec")
            check_array(call.collective, name, residual, writable=True)
            if isinstance(residual, DeviceArray) != isinstance(array, DeviceArray):
                raise _core.InvalidArgumentError(
                    f"{call.collective}: {name} must be where the array is, on a GPU or not"
                )
            dense = residual.dtype == np.float32 and residual.flags.c_contiguous
            if not dense or residual.size != array.size:
                raise _core.InvalidArgumentError(
                    f"{call.collective}: {name} has shape {residual.shape} and dtype "
                    f"{residual.dtype}{'' if residual.flags.c_contiguous else ', strided'}; a "
                    f"dense float32 array of {array.size} elements is needed"
                )
        return residuals[0], residuals[1]

    def start(self, call: Call, core_call: _core.Call, codec: Codec) -> _core.WorkCore:
        return self._core.submit_codec(core_call, codec._choice(call.step), *call.residuals)
