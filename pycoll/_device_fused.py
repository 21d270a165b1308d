"""The kernels of pycoll/mixed_precision.py on tensors of GPUs, on torch's current stream."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from pycoll import _core, _native
from pycoll._device_arrays import stream_handle
from pycoll._host_arrays import HostArrays, is_tensor

if TYPE_CHECKING:
    import torch

    from pycoll._core import Spans


def gpu_of(values: list[Any]) -> torch.device | None:
    """Where a list of tensors is; None: its first is on the CPU, or there is none."""
    if not values or not is_tensor(values[0]) or values[0].is_cpu:
        return None
    device: torch.device = values[0].device
    return device


class DeviceFused:
    """Calls on one GPU. Nothing waits for it: what a call finds stays there, in new tensors.

    Raises UnsupportedError when this pycoll does not serve the device.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        library = _native.gpu_library()
        if library is None:
            raise _core.UnsupportedError(
                f"{name} is on {device}, and this pycoll was built without its CUDA part "
                f"({_native.GPU_LIBRARY}): where nvcc is, install it with `PYCOLL_CUDA=1 pip "
                "install ...`, or give it copies on the CPU"
            )
        self._library = _opened(str(library))
        if device.type != self._library.device:
            raise _core.UnsupportedError(
                f"{name} is on {device}, not on the CPU or {self._library.device}"
            )
        self._device = device

    def spans(self, name: str, values: list[Any], kind: HostArrays) -> Spans:
        return kind.spans_on(self._device, name, values)

    def cast(self, targets: Spans, sources: Spans, scale: float) -> torch.Tensor:
        found, room = self._number("float32"), self._room(targets)
        self._library.cast(
            targets=targets,
            sources=sources,
            scale=scale,
            stream=self._stream(),
            room=room.data_ptr(),
            found_inf=found.data_ptr(),
        )
        return found

    def unscale(
        self, tensors: Spans, factor: float | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`factor`: a number, or one float32 of this device."""
        found, total, room = self._number("float32"), self._number("float64"), self._room(tensors)
        number = factor if isinstance(factor, float) else None
        self._library.unscale(
            tensors=tensors,
            factor=1.0 if number is None else number,
            factor_at=0 if isinstance(factor, float) else factor.data_ptr(),
            sum_of_squares=total.data_ptr(),
            stream=self._stream(),
            room=room.data_ptr(),
            found_inf=found.data_ptr(),
        )
        return found, total

    def multiply(self, tensors: Spans, factor: float) -> None:
        room = self._room(tensors)
        self._library.multiply(
            tensors=tensors, factor=factor, stream=self._stream(), room=room.data_ptr()
        )

    def clip(self, tensors: Spans, sum_of_squares: torch.Tensor, max_norm: float) -> None:
        self.check_number("clip_by_norm_: sum_of_squares", sum_of_squares, "float64")
        room = self._room(tensors)
        self._library.clip(
            tensors=tensors,
            sum_of_squares=sum_of_squares.data_ptr(),
            max_norm=max_norm,
            stream=self._stream(),
            room=room.data_ptr(),
        )

    def check_number(self, name: str, tensor: torch.Tensor, dtype: str) -> None:
        found = str(tensor.dtype).removeprefix("torch.")
        if (tensor.device, tensor.numel(), found) != (self._device, 1, dtype):
            raise _core.InvalidArgumentError(
                f"{name} has {tensor.numel()} elements of {found} on {tensor.device}; one of "
                f"{dtype} on {self._device} is needed, where the tensors are"
            )

    def _number(self, dtype: str) -> torch.Tensor:
        import torch

        return torch.zeros((), dtype=getattr(torch, dtype), device=self._device)

    def _room(self, tensors: Spans) -> torch.Tensor:
        # Torch gives its memory to others behind the call, on the same stream.
        import torch

        needed = max(_core.fused_room(tensors), 16)
        return torch.empty(needed, dtype=torch.uint8, device=self._device)

    def _stream(self) -> int:
        import torch

        return stream_handle(torch.get_device_module(self._device).current_stream(self._device))


@functools.cache
def _opened(library: str) -> _core.DeviceFused:
    return _core.DeviceFused(library)
