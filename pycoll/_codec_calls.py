"""Which calls of a communicator are compressed, and how they are run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pycoll import _core
from pycoll._arrays import Array, check_array
from pycoll._calls import Call
from pycoll.codecs import Codec, codec_of
from pycoll.options import Options


class CodecPart:
    """The compressed calls of one communicator. `default`: the codec of calls that name none."""

    def __init__(self, core: _core.CommunicatorCore, options: Options) -> None:
        self._core = core
        self.default = None if options.codec is None else codec_of(options.codec)
        self._min_bytes = options.least_bytes

    def codec_for(
        self, call: Call, inputs: Sequence[Array], outputs: Sequence[Array]
    ) -> Codec | None:
        """The codec of a call; None where it is exempt. The same on every rank."""
        # A group's codec is for gradients: what is broadcast and gathered is mostly parameters.
        reduces = call.collective in ("all_reduce", "reduce_scatter")
        given = call.codec or (self.default if reduces else None)
        codec = None if given is None else codec_of(given)
        arrays = [*inputs, *outputs]
        if codec is None or not arrays or call.algorithm != "auto":
            return None
        if not self._core.compresses(call.collective, arrays[0].dtype.name, call.op):
            return None
        # Ranks know no more than their own lengths of an all_to_all: they could not agree.
        size = max(sum(a.nbytes for a in inputs), sum(a.nbytes for a in outputs))
        small = size < self._min_bytes and call.collective != "all_to_all"
        return None if small else codec

    def residuals_of(
        self, call: Call, array: Array, *residuals: Array | None
    ) -> tuple[Array | None, Array | None]:
        """Checked: the core takes them as they are."""
        for name, residual in zip(("residual", "sum_residual"), residuals, strict=True):
            if residual is None:
                continue
            if call.codec is None and self.default is None:
                raise _core.InvalidArgumentError(f"{call.collective}: {name} without a codec")
            check_array(call.collective, name, residual, writable=True)
            dense = residual.dtype == np.float32 and residual.flags.c_contiguous
            if not dense or residual.size != array.size:
                raise _core.InvalidArgumentError(
                    f"{call.collective}: {name} has shape {residual.shape}, dtype "
                    f"{residual.dtype} and strides {residual.strides}; a dense float32 array of "
                    f"{array.size} elements is needed"
                )
        return residuals[0], residuals[1]

    def start(self, call: Call, core_call: _core.Call, codec: Codec) -> _core.WorkCore:
        return self._core.submit_codec(core_call, codec._choice(call.step), *call.residuals)
