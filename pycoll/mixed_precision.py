"""What mixed-precision training does to gradients and weights, in one pass over their memory.

* `cast_` casts, multiplies and looks for infinities and NaN;
* `unscale_` multiplies gradients, looks for infinities and NaN, and sums squares for the norm;
* `clip_by_norm_` multiplies gradients so that their norm is within a limit.

Each takes a whole list of tensors and goes through it once. Results have the same bits on every
machine: products are IEEE products, every NaN that is written is the quiet one without payload, and
sums are added up in an order of their own (csrc/kernels/fused.h), whatever the machine's vectors.

Tensors are NumPy arrays, torch tensors, and what has `__dlpack__`; of any shape, dense (in C order
for `cast_`); on the CPU, or, torch's, all of a call on one GPU. There calls are queued on torch's
current stream, do not wait for it, and leave what they find in tensors on that GPU: the same bits
as on the CPU. They cannot be captured into CUDA graphs. torch's autograd is told that tensors
changed, but does not follow what is done to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from pycoll import _core
from pycoll._device_fused import DeviceFused, gpu_of
from pycoll._host_arrays import HostArrays, is_array, is_tensor, mark_as_changed

if TYPE_CHECKING:
    import torch

__all__ = ["Unscaled", "cast_", "clip_by_norm_", "unscale_"]

_CAST = HostArrays("casts", ("float32", "float16", "bfloat16"))
_IN_PLACE = HostArrays(
    "mixed-precision kernels", ("float32", "float16", "bfloat16", "float64"), any_order=True
)

# Against a division by a norm of 0, as in torch.nn.utils.clip_grad_norm_.
_LEAST_NORM = 1e-6


class Unscaled(NamedTuple):
    """What `unscale_` saw; of tensors on a GPU in tensors there, of one element.

    found_inf: some value is infinite or NaN; on a GPU a float32, 1 or 0, as torch.amp has it.
    sum_of_squares: of all values as they are now, in float64; over ranks that hold different
        gradients these can be added. Infinite where it is beyond float64.
    """

    found_inf: bool | torch.Tensor
    sum_of_squares: float | torch.Tensor

    @property
    def norm(self) -> float | torch.Tensor:
        """The L2 norm of all values together."""
        if _is_on_gpu(self.sum_of_squares):
            return self.sum_of_squares.sqrt()
        return math.sqrt(self.sum_of_squares)


def cast_(dst: Any, src: Any, scale: float = 1.0) -> bool | torch.Tensor:
    """Writes `src * scale` to `dst`, of another dtype or the same one.

    The product is one of float32 and is rounded once, to nearest, ties to even. What is too large
    for the dtype of `dst` becomes infinite.

    Args:
        dst, src: float32, float16 or bfloat16; as many elements in both. Or two lists of these, of
            one length. `dst` may be `src`.
        scale: rounded to float32.

    Returns:
        Whether any result is infinite or NaN: what was so before is so after. On a GPU a float32
        tensor of one element, 1 or 0.

    Raises:
        InvalidArgumentError: other arrays and dtypes, other numbers of elements, a `dst` that has
            memory in common with another tensor. Nothing is written then.
        UnsupportedError: tensors on devices that pycoll does not serve, or not all on one.
    """
    targets, sources = _list_of("cast_: dst", dst), _list_of("cast_: src", src)
    scale = _number("cast_: scale", scale)
    found: bool | torch.Tensor
    if (gpu := gpu_of(targets)) is not None:
        on_gpu = DeviceFused("cast_: dst", gpu)
        written = on_gpu.spans("cast_: dst", targets, _CAST)
        found = on_gpu.cast(written, on_gpu.spans("cast_: src", sources, _CAST), scale)
    else:
        written, _held = _CAST.spans_of("cast_: dst", targets, writable=True)
        read, _also_held = _CAST.spans_of("cast_: src", sources, writable=False)
        found = _core.cast(targets=written, sources=read, scale=scale)
    mark_as_changed(targets)
    return found


def unscale_(tensors: Any, inv_scale: float | torch.Tensor) -> Unscaled:
    """Multiplies all gradients by `inv_scale`, in place, and looks at the results.

    With float32 it is torch's `_amp_foreach_non_finite_check_and_unscale_`, but that values count
    which become infinite by the multiplication (`inv_scale` above 1), and that NaN has no payload.

    Args:
        tensors: float32, float16, bfloat16 or float64; one or a list, of mixed dtypes. Those on
            one list have no memory in common.
        inv_scale: 1 / the loss scale, rounded to float32 except for float64 tensors. Products of
            16-bit floats are rounded once. A float32 tensor of one element, on the GPU of the
            tensors, is read there.

    Raises:
        InvalidArgumentError: other arrays and dtypes, or memory in common. Nothing is written then.
        UnsupportedError: as of `cast_`.
    """
    name, those = "unscale_: tensors", _list_of("unscale_: tensors", tensors)
    if (gpu := gpu_of(those)) is not None:
        on_gpu, factor = DeviceFused(name, gpu), inv_scale
        if _is_on_gpu(factor):
            on_gpu.check_number("unscale_: inv_scale", factor, "float32")
        else:
            factor = _number("unscale_: inv_scale", factor)
        seen = Unscaled(*on_gpu.unscale(on_gpu.spans(name, those, _IN_PLACE), factor))
    else:
        spans, _held = _IN_PLACE.spans_of(name, those, writable=True)
        factor = _number("unscale_: inv_scale", inv_scale)
        seen = Unscaled(*_core.unscale(tensors=spans, factor=factor))
    mark_as_changed(those)
    return seen


def clip_by_norm_(tensors: Any, norm: float | Unscaled, max_norm: float) -> float | None:
    """Multiplies all gradients by `min(1, max_norm / (norm + 1e-6))`, in place.

    The rule of `torch.nn.utils.clip_grad_norm_`, computed in float64; a factor of 1 leaves memory
    alone. As there, an infinite norm makes finite values 0 and a NaN makes them NaN: look at
    `found_inf` first.

    Args:
        tensors: as `unscale_` takes them.
        norm: the L2 norm of the gradients, or what `unscale_` returned if one rank has all of them
            (or the sums of squares of all ranks were added up in it: a tensor on a GPU may be
            all_reduced there).
        max_norm: the limit, 0 or more.

    Returns:
        The factor; None where `norm` is on a GPU, which is not waited for.

    Raises:
        InvalidArgumentError: as in `unscale_`, or a negative norm or limit.
    """
    name, those = "clip_by_norm_: tensors", _list_of("clip_by_norm_: tensors", tensors)
    limit, gpu = _number("clip_by_norm_: max_norm", max_norm), gpu_of(those)
    on_gpu = None if gpu is None else DeviceFused(name, gpu)
    if on_gpu is None:
        spans, _held = _IN_PLACE.spans_of(name, those, writable=True)
    else:
        spans = on_gpu.spans(name, those, _IN_PLACE)
    if isinstance(norm, Unscaled) and on_gpu is not None and _is_on_gpu(norm.sum_of_squares):
        _check_limits(0.0, limit)
        on_gpu.clip(spans, norm.sum_of_squares, limit)
        mark_as_changed(those)
        return None
    if _is_on_gpu(norm):
        raise _core.InvalidArgumentError(
            "clip_by_norm_: norm is on a GPU, which would be waited for: give it what unscale_ "
            "returned, or norm.item()"
        )
    length = _number("clip_by_norm_: norm", norm.norm if isinstance(norm, Unscaled) else norm)
    _check_limits(length, limit)
    factor = limit / (length + _LEAST_NORM)
    if factor >= 1:
        return 1.0
    if on_gpu is None:
        _core.multiply(tensors=spans, factor=factor)
    else:
        on_gpu.multiply(spans, factor)
    mark_as_changed(those)
    return factor


def _is_on_gpu(number: Any) -> TypeGuard[torch.Tensor]:
    return is_tensor(number) and not number.is_cpu


def _check_limits(norm: float, limit: float) -> None:
    if norm < 0 or not limit >= 0:
        raise _core.InvalidArgumentError(
            f"clip_by_norm_: norm is {norm}, max_norm is {limit}; neither may be negative"
        )


def _list_of(name: str, tensors: Any) -> list[Any]:
    """Of one tensor or several."""
    if is_array(tensors):
        return [tensors]
    if not isinstance(tensors, Iterable):
        raise _core.InvalidArgumentError(
            f"{name} is a {type(tensors).__name__}, not an array, a tensor or a list of them"
        )
    return list(tensors)


def _number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, str | bool):
            return float(value)
        raise TypeError
    except (TypeError, ValueError):
        raise _core.InvalidArgumentError(f"{name} is {value!r}, not a number") from None
