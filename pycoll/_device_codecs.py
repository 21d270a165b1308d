"""Codecs of arrays and tensors on GPUs."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from pycoll import _core, _native
from pycoll._device_arrays import LEGACY_STREAM, seen, stream_handle
from pycoll._host_arrays import is_tensor


@dataclass(frozen=True)
class DeviceVector:
    """Dense memory on a GPU. `owner` is whose it is, `stream` what its library says that it is
    ready behind, if anything."""

    owner: Any
    address: int
    count: int
    dtype: str
    shape: tuple[int, ...]
    stream: int | None
    writable: bool = True


def on_gpu(name: str, values: Any) -> DeviceVector | None:
    """The memory of a tensor or of what has ``__cuda_array_interface__``; None for what is not on
    a GPU. Raises InvalidArgumentError when it is not dense."""
    if is_tensor(values):
        if values.device.type == "cpu":
            return None
        device = _codecs(name, str(values.device)).device
        if values.device.type != device:
            raise _core.UnsupportedError(
                f"{name} is on {values.device}, not on the CPU or {device}"
            )
        return _of_tensor(name, values)
    array = seen(values)
    if array is values or isinstance(array, list):
        return None
    address, count = array.span
    return DeviceVector(
        array.owner,
        address,
        count,
        array.dtype.name,
        array.shape,
        array.stream,
        array.flags.writeable,
    )


def encode(
    codec: _core.Codec,
    values: DeviceVector,
    key: _core.RandomKey,
    out: DeviceVector | None,
    stream: Any,
) -> Any:
    """The code, in `out` or, of a tensor, in a new one."""
    code = _output("encode", values, out, (codec.code_bytes(values.count),), "uint8")
    on, after = _streams(stream, values, code)
    _codecs("encode: values", "a GPU").encode(
        codec=codec,
        values=values.address,
        count=values.count,
        dtype=values.dtype,
        code=code.address,
        key=key,
        stream=on,
        after=after,
    )
    return code.owner


def decode(
    codec: _core.Codec,
    code: DeviceVector,
    shape: tuple[int, ...],
    dtype: str,
    out: DeviceVector | None,
    stream: Any,
) -> Any:
    """The values, in `out` or, of a tensor, in a new one."""
    needed = codec.code_bytes(math.prod(shape))
    if code.count != needed:
        raise _core.InvalidArgumentError(f"a code has {code.count} bytes, {needed} are needed")
    values = _output("decode", code, out, shape, dtype)
    on, after = _streams(stream, code, values)
    _codecs("decode: code", "a GPU").decode(
        codec=codec,
        code=code.address,
        values=values.address,
        count=values.count,
        dtype=dtype,
        stream=on,
        after=after,
    )
    return values.owner


def _of_tensor(name: str, tensor: Any) -> DeviceVector:
    import torch

    if not tensor.is_contiguous():
        raise _core.InvalidArgumentError(
            f"{name} with shape {tuple(tensor.shape)} and strides {tensor.stride()} is not dense; "
            "make a copy with .contiguous()"
        )
    current = torch.get_device_module(tensor.device).current_stream(tensor.device)
    return DeviceVector(
        tensor,
        tensor.data_ptr(),
        tensor.numel(),
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        stream_handle(current),
    )


def _output(
    operation: str, like: DeviceVector, out: DeviceVector | None, shape: tuple[int, ...], dtype: str
) -> DeviceVector:
    if out is None and is_tensor(like.owner):
        import torch

        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=like.owner.device)
        return _of_tensor(operation, tensor)
    wanted = f"of shape {shape} and dtype {dtype}"
    if out is None:
        raise _core.InvalidArgumentError(
            f"{operation}: an array on a GPU needs an array for the result, out=, {wanted}; only "
            "tensors of torch get a new one"
        )
    if not out.writable:
        raise _core.InvalidArgumentError(f"{operation}: out is read-only")
    if (out.shape, out.dtype) != (shape, dtype):
        raise _core.InvalidArgumentError(
            f"{operation}: out has shape {out.shape} and dtype {out.dtype}; the result is {wanted}"
        )
    return out


def _streams(stream: Any, source: DeviceVector, target: DeviceVector) -> tuple[int, list[int]]:
    """That of the call, and those whose work it comes after."""
    if stream is not None and (is_tensor(source.owner) or is_tensor(target.owner)):
        # torch would give their memory to others as soon as its own streams allow it.
        raise _core.InvalidArgumentError(
            "a stream was given, but a tensor's code goes on torch's current stream; make that "
            "the current one (with torch.cuda.stream(...))"
        )
    exported = [one.stream for one in (source, target) if one.stream is not None]
    on = stream_handle(stream) if stream is not None else (exported or [LEGACY_STREAM])[0]
    return on, sorted({other for other in exported if other != on})


@functools.cache
def _opened(library: str) -> _core.DeviceCodecs:
    return _core.DeviceCodecs(library)


def _codecs(name: str, where: str) -> _core.DeviceCodecs:
    library = _native.gpu_library()
    if library is None:
        raise _core.UnsupportedError(
            f"{name} is on {where}, and this pycoll was built without its CUDA part "
            f"({_native.GPU_LIBRARY}): where nvcc is, install it with `PYCOLL_CUDA=1 pip install "
            "...`, or give it a copy on the CPU"
        )
    return _opened(str(library))
