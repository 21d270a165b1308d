"""What mixed-precision training does to gradients and weights, in one pass over their memory.

* `cast_` casts, multiplies and looks for infinities and NaN;
* `unscale_` multiplies gradients, looks for infinities and NaN, and sums squares for the norm;
* `clip_by_norm_` multiplies gradients so that their norm is within a limit.

Each takes a whole list of tensors and goes through it once. Results have the same bits on every
machine: products are IEEE products, every NaN that is written is the quiet one without payload, and
sums are added up in an order of their own (csrc/kernels/fused.h), whatever the machine's vectors.

Tensors are NumPy arrays, torch tensors, and what has `__dlpack__`; on the CPU, of any shape, dense
(in C order for `cast_`). torch's autograd is told that they changed, but does not follow what is
done to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from pycoll import _core
from pycoll._host_arrays import HostArrays, is_array, mark_as_changed

__all__ = ["Unscaled", "cast_", "clip_by_norm_", "unscale_"]

_CAST = HostArrays("casts", ("float32", "float16", "bfloat16"))
_IN_PLACE = HostArrays(
    "mixed-precision kernels", ("float32", "float16", "bfloat16", "float64"), any_order=True
)

# Against a division by a norm of 0, as in torch.nn.utils.clip_grad_norm_.
_LEAST_NORM = 1e-6


class Unscaled(NamedTuple):
    """What `unscale_` saw.

    found_inf: some value is infinite or NaN.
    sum_of_squares: of all values as they are now, in float64; over ranks that hold different
        gradients these can be added. Infinite where it is beyond float64.
    """

    found_inf: bool
    sum_of_squares: float

    @property
    def norm(self) -> float:
        """The L2 norm of all values together."""
        return math.sqrt(self.sum_of_squares)


def cast_(dst: Any, src: Any, scale: float = 1.0) -> bool:
    """Writes `src * scale` to `dst`, of another dtype or the same one.

    The product is one of float32 and is rounded once, to nearest, ties to even. What is too large
    for the dtype of `dst` becomes infinite.

    Args:
        dst, src: float32, float16 or bfloat16; as many elements in both. Or two lists of these, of
            one length. `dst` may be `src`.
        scale: rounded to float32.

    Returns:
        Whether any result is infinite or NaN: what was so before is so after.

    Raises:
        InvalidArgumentError: other arrays and dtypes, other numbers of elements, a `dst` that has
            memory in common with another tensor. Nothing is written then.
        UnsupportedError: tensors that are not on the CPU.
    """
    targets = _Tensors("cast_: dst", dst, _CAST, writable=True)
    sources = _Tensors("cast_: src", src, _CAST, writable=False)
    scale = _number("cast_: scale", scale)
    found = _core.cast(targets=targets.spans, sources=sources.spans, scale=scale)
    targets.mark_as_changed()
    return found


def unscale_(tensors: Any, inv_scale: float) -> Unscaled:
    """Multiplies all gradients by `inv_scale`, in place, and looks at the results.

    With float32 it is torch's `_amp_foreach_non_finite_check_and_unscale_`, but that values count
    which become infinite by the multiplication (`inv_scale` above 1), and that NaN has no payload.

    Args:
        tensors: float32, float16, bfloat16 or float64; one or a list, of mixed dtypes. Those on
            one list have no memory in common.
        inv_scale: 1 / the loss scale, rounded to float32 except for float64 tensors. Products of
            16-bit floats are rounded once.

    Raises:
        InvalidArgumentError: other arrays and dtypes, or memory in common. Nothing is written then.
        UnsupportedError: tensors that are not on the CPU.
    """
    those = _Tensors("unscale_: tensors", tensors, _IN_PLACE, writable=True)
    found = _core.unscale(tensors=those.spans, factor=_number("unscale_: inv_scale", inv_scale))
    those.mark_as_changed()
    return Unscaled(*found)


def clip_by_norm_(tensors: Any, norm: float, max_norm: float) -> float:
    """Multiplies all gradients by `min(1, max_norm / (norm + 1e-6))`, in place.

    The rule of `torch.nn.utils.clip_grad_norm_`, computed in float64; a factor of 1 leaves memory
    alone. As there, an infinite norm makes finite values 0 and a NaN makes them NaN: look at
    `found_inf` first.

    Args:
        tensors: as `unscale_` takes them.
        norm: the L2 norm of the gradients, `unscale_(...).norm` if one rank has all of them.
        max_norm: the limit, 0 or more.

    Returns:
        The factor.

    Raises:
        InvalidArgumentError: as in `unscale_`, or a negative norm or limit.
    """
    those = _Tensors("clip_by_norm_: tensors", tensors, _IN_PLACE, writable=True)
    norm, limit = _number("clip_by_norm_: norm", norm), _number("clip_by_norm_: max_norm", max_norm)
    if norm < 0 or not limit >= 0:
        raise _core.InvalidArgumentError(
            f"clip_by_norm_: norm is {norm}, max_norm is {limit}; neither may be negative"
        )
    factor = limit / (norm + _LEAST_NORM)
    if factor >= 1:
        return 1.0
    _core.multiply(tensors=those.spans, factor=factor)
    those.mark_as_changed()
    return factor


class _Tensors:
    """One tensor or a list of them, held for a call."""

    def __init__(self, name: str, tensors: Any, kind: HostArrays, *, writable: bool) -> None:
        if is_array(tensors):
            tensors = [tensors]
        elif not isinstance(tensors, Iterable):
            raise _core.InvalidArgumentError(
                f"{name} is a {type(tensors).__name__}, not an array, a tensor or a list of them"
            )
        self._tensors = list(tensors)
        self.spans, self._owners = kind.spans_of(name, self._tensors, writable=writable)

    def mark_as_changed(self) -> None:
        mark_as_changed(self._tensors)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _core.InvalidArgumentError(f"{name} is {value!r}, not a number") from None
