"""Gradients as codes: the codecs of pycoll.codecs."""

from __future__ import annotations

import torch

from pycoll.codecs import Codec
from pycoll.direct import all_reduce
from pycoll.hooks.plan import Layout, Unit
from pycoll.hooks.reduction import Call, Group

__all__ = ["CodecReduction"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class CodecReduction:
    """An all_reduce over codes a unit: each rank's values are encoded, and their mean again.

    `two_way`: the rank that encodes a part of the mean keeps what the code lacks of it, in a vector
    as long as the unit's, of which each rank uses its own part.
    """

    first_step = 0
    whole_step = False

    def __init__(self, codec: Codec, two_way: bool, group: Group) -> None:
        self._codec = codec
        self._two_way = two_way
        self._group = group

    def takes(self, layout: Layout) -> bool:
        return layout.dtype in _DTYPES and layout.device.type == "cpu"

    def memory_of(self, unit: Unit) -> dict[str, int]:
        return {self._key(unit): unit.count} if self._two_way else {}

    def launch(self, call: Call) -> None:
        lacking = call.open(self._key(call.unit), call.unit.count) if self._two_way else None
        call.work = all_reduce(
            call.values,
            "avg",
            self._group.handle,
            True,
            codec=self._codec,
            step=call.number,
            residual=call.residual,
            sum_residual=lacking,
        )

    def finish(self, calls: list[Call]) -> None:
        for call in calls:
            call.work.wait()

    def _key(self, unit: Unit) -> str:
        return f"sum/{unit.index}"
