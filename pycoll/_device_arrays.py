"""Arrays on GPUs, of whatever library: what __cuda_array_interface__ says of them.

The protocol: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html (version 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycoll import _core

# How libraries call the handle of a stream: CuPy, torch, torch of any device.
_HANDLES = ("ptr", "cuda_stream", "native_handle")
# CUDA's own number for it (cudaStreamLegacy), and the protocol's.
LEGACY_STREAM = 1


@dataclass(frozen=True)
class _NamedType:
    """A type that NumPy has no code for: bfloat16 and its kin travel as raw bytes ("V2")."""

    name: str
    itemsize: int
    isnative: bool = True

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class _Flags:
    writeable: bool
    c_contiguous: bool = True


class DeviceArray:
    """What collectives ask of an array; the attributes are those of a numpy.ndarray.

    Args:
        array: whose memory it is.
        interface: its ``__cuda_array_interface__``.

    Raises InvalidArgumentError when it is not contiguous (C order), has a mask, or has a type that
    pycoll does not know.
    """

    def __init__(self, array: Any, interface: Mapping[str, Any]) -> None:
        self.owner = array
        self.shape: tuple[int, ...] = tuple(interface["shape"])
        self.dtype = _dtype_of(array, interface["typestr"])
        self.address, read_only = interface["data"]
        self.flags = _Flags(not read_only)
        self.stream = _protocol_stream(interface.get("stream"))
        if interface.get("mask") is not None:
            raise _core.InvalidArgumentError("an array on a GPU has a mask, which is not supported")
        strides = interface.get("strides")
        if strides is not None and not _is_dense(self.shape, strides, self.dtype.itemsize):
            raise _core.InvalidArgumentError(
                f"an array on a GPU with shape {self.shape} and strides {tuple(strides)} is not "
                "contiguous in C order; make a copy that is: cupy.ascontiguousarray(array), "
                "tensor.contiguous()"
            )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * int(self.dtype.itemsize)

    def rows(self) -> list[DeviceArray]:
        """What indexing the first dimension gives."""
        return [self._row(i) for i in range(self.shape[0])]

    def _row(self, i: int) -> DeviceArray:
        row = object.__new__(DeviceArray)
        row.__dict__.update(self.__dict__)
        row.shape = self.shape[1:]
        if row.size:
            row.address = self.address + i * row.size * self.dtype.itemsize
        return row

    @property
    def span(self) -> tuple[int, int]:
        """Address and number of elements."""
        return (self.address or 0) if self.size else 0, self.size


def seen(value: Any) -> Any:
    """Arrays on GPUs as DeviceArray, also those in a list; everything else as it is."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, (list, tuple)):
        return [seen(one) for one in value]
    interface = getattr(value, "__cuda_array_interface__", None)
    return value if interface is None else DeviceArray(value, interface)


def stream_handle(stream: Any) -> int:
    """The cudaStream_t of a stream: an int, or a stream of CuPy, torch or cuda.core."""
    if isinstance(stream, int):
        return stream or LEGACY_STREAM
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1]) or LEGACY_STREAM
    for name in _HANDLES:
        if hasattr(stream, name):
            return int(getattr(stream, name)) or LEGACY_STREAM
    raise _core.InvalidArgumentError(
        f"stream is a {type(stream).__name__}; it must be a stream of CuPy, torch or cuda.core, or "
        "the cudaStream_t as an int"
    )


def _protocol_stream(stream: Any) -> int | None:
    if stream is None:
        return None
    if not isinstance(stream, int) or stream == 0:
        raise _core.InvalidArgumentError(
            f"an array on a GPU has stream {stream!r} in its __cuda_array_interface__; the "
            "protocol has None, 1 (legacy default stream), 2 (per-thread) or a handle"
        )
    return stream


def _dtype_of(array: Any, typestr: str) -> Any:
    dtype = np.dtype(typestr)
    if dtype.kind != "V":
        return dtype
    name = str(getattr(array, "dtype", "")).removeprefix("torch.")
    if name not in _core.dtypes():
        raise _core.InvalidArgumentError(
            f"an array on a GPU has elements of type {name or typestr}, which pycoll does not know"
        )
    return _NamedType(name, dtype.itemsize)


def _is_dense(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    expected = itemsize
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n == 0:
            return True
        if n > 1 and stride != expected:
            return math.prod(shape) == 0
        expected *= n
    return True
