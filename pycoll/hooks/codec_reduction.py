"""Gradients as codes: the codecs of pycoll.codecs."""

from __future__ import annotations

import warnings

import torch

from pycoll._arguments import flag
from pycoll.codecs import Codec, Ternary
from pycoll.direct import all_reduce
from pycoll.hooks.plan import Layout, Unit
from pycoll.hooks.reduction import Call, Group, check

__all__ = ["CodecReduction", "feedback_of"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Codes whose errors are as large as the values: right in the mean, but no contraction, which error
# feedback needs. Residuals grow to five gaussian gradients (those of Sign stay below one), and the
# sum of what is that large loses the gradient when it is coded again.
_NO_CONTRACTIONS = (Ternary,)


def feedback_of(
    compressor: object, error_feedback: bool | None, two_way: bool | None
) -> tuple[bool, bool]:
    """Whether to keep residuals, and those of sums too; None is what suits the compressor."""
    for name, value in (("error_feedback", error_feedback), ("two_way", two_way)):
        if value is not None:
            flag(f"CompressionState: {name}", value, "True, False or None")
    contracts = not isinstance(compressor, _NO_CONTRACTIONS)
    if error_feedback is None:
        error_feedback = bool(two_way) or contracts
    if two_way is None:
        two_way = error_feedback and not contracts
    check(error_feedback or not two_way, "two_way needs error_feedback=True")
    if error_feedback and not two_way and not contracts:
        warnings.warn(
            f"CompressionState: {compressor!r} with error feedback on one way only trains badly: "
            "its errors are as large as the values; leave error_feedback and two_way at their "
            "defaults",
            stacklevel=3,
        )
    return bool(error_feedback), bool(two_way)


class CodecReduction:
    """An all_reduce over codes a unit: each rank's values are encoded, and their mean again.

    `two_way`: the rank that encodes a part of the mean keeps what the code lacks of it, in a vector
    as long as the unit's, of which each rank uses its own part.
    """

    first_step = 0
    whole_step = False

    def __init__(self, codec: Codec, two_way: bool, group: Group) -> None:
        self.block = getattr(codec, "block", 1)
        self._codec = codec
        self._two_way = two_way
        self._group = group

    def takes(self, layout: Layout) -> bool:
        return layout.dtype in _DTYPES

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
