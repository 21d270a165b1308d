"""Arrays and tensors of any library in the memory of the CPU: where they lie, and of what type.

NumPy arrays, torch tensors, and what has `__dlpack__`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pycoll import _core

if TYPE_CHECKING:
    import torch

    from pycoll._core import Spans

_NUMBERS = {name: number for number, name in enumerate(_core.dtypes())}
_SIZES = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def is_tensor(values: Any) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    return torch is not None and isinstance(values, torch.Tensor)


def mark_as_changed(values: list[Any]) -> None:
    """Lets autograd complain where an old value of a tensor was to be used in a backward pass."""
    native = _tensors()
    if native is not None:
        native.mark_as_changed(values)
    elif changed := [t for t in values if is_tensor(t) and not t.is_inference()]:
        from torch.autograd.graph import increment_version

        increment_version(changed)


def is_array(values: Any) -> bool:
    return isinstance(values, np.ndarray) or hasattr(values, "__dlpack__")


def size_of(dtype: str) -> int:
    """Bytes an element."""
    return _SIZES[dtype]


@dataclass(frozen=True)
class HostArrays:
    """What somebody takes: dense arrays of some dtypes.

    Args:
        taker: who that is, in the plural, for errors.
        dtypes: by the names that torch and NumPy share.
        any_order: of dimensions: transposed arrays and channels_last tensors too, which fill their
            memory but are not in C order.
    """

    taker: str
    dtypes: tuple[str, ...]
    any_order: bool = False

    def dtype_name(self, name: str, dtype: Any) -> str:
        """The name of a dtype that is given by name or as a library has it."""
        try:
            text = _name_of(dtype)
        except TypeError:  # unhashable
            text = ""
        if text not in self.dtypes:
            *most, last = self.dtypes
            known = f"{', '.join(most)} or {last}" if most else last
            raise _core.InvalidArgumentError(f"{name} has dtype {dtype}, not {known}")
        return text

    def bytes_of(self, name: str, values: Any) -> tuple[str, npt.NDArray[np.uint8]]:
        """The dtype's name, and the memory as bytes."""
        if is_tensor(values):
            return self._dtype_of_tensor(name, values), _bytes_of_tensor(values)
        array = _array_of(name, values)
        return self._dtype_of_array(name, array), array.reshape(-1).view(np.uint8)

    def spans_of(self, name: str, values: list[Any], *, writable: bool) -> tuple[Spans, list[Any]]:
        """The memory of each, and objects that keep it alive beside `values`."""
        spans = np.empty((len(values), 3), np.uint64)
        native = _tensors()
        # A list may have thousands of small tensors: what most of them are takes no Python.
        others: Sequence[int] = range(len(values))
        if native is not None:
            others = native.fill_spans(values, spans, self.dtypes, _cpu())
        owners = []
        for place in others:
            spans[place], owner = self._span_of(f"{name}[{place}]", values[place], writable)
            owners.append(owner)
        return spans, owners

    def spans_on(self, device: torch.device, name: str, values: list[Any]) -> Spans:
        """The memory of each, of plain tensors on a GPU."""
        import torch

        from pycoll import _native

        spans = np.empty((len(values), 3), np.uint64)
        for place in _native.load().fill_spans(values, spans, self.dtypes, device):
            one, what = values[place], f"{name}[{place}]"
            if not is_tensor(one) or one.device != device:
                where = one.device if is_tensor(one) else f"a {type(one).__name__}"
                raise _core.InvalidArgumentError(
                    f"{what} is {where}; all tensors of a call are on one device, here {device}"
                )
            # Of others the memory may not hold the values.
            plain = type(one) in (torch.Tensor, torch.nn.Parameter)
            if not plain or one.layout is not torch.strided or one.is_neg():
                raise _core.InvalidArgumentError(
                    f"{what} is a {type(one).__name__} whose values do not lie in its memory as "
                    "they are; make a copy that is a plain tensor"
                )
            dtype = self._dtype_of_dense(what, one)
            spans[place] = (one.data_ptr(), one.numel(), _NUMBERS[dtype])
        return spans

    def _span_of(self, name: str, value: Any, writable: bool) -> tuple[tuple[int, int, int], Any]:
        if is_tensor(value):
            # Of other classes the pointer may be that of something else: NumPy asks them properly.
            dtype, array = self._dtype_of_tensor(name, value), _bytes_of_tensor(value)
        else:
            array = _array_of(name, value)
            dtype = self._dtype_of_array(name, array)
        if writable and not array.flags.writeable:
            raise _core.InvalidArgumentError(f"{name} is read-only")
        address = array.__array_interface__["data"][0]
        return (address, array.nbytes // size_of(dtype), _NUMBERS[dtype]), array

    def _dtype_of_array(self, name: str, array: npt.NDArray[Any]) -> str:
        dtype = self.dtype_name(name, array.dtype)
        strides = [stride // array.itemsize for stride in array.strides]
        if not array.flags.c_contiguous and not self._fills_memory(array.shape, strides):
            raise _core.InvalidArgumentError(
                f"{name} with shape {array.shape} and strides {array.strides} is not dense; make "
                "a copy with numpy.ascontiguousarray"
            )
        return dtype

    def _dtype_of_tensor(self, name: str, tensor: Any) -> str:
        if tensor.device.type != "cpu":
            raise _core.UnsupportedError(
                f"{name} is on {tensor.device}; {self.taker} take it there where all tensors of "
                "the call are on that device"
            )
        return self._dtype_of_dense(name, tensor)

    def _dtype_of_dense(self, name: str, tensor: Any) -> str:
        dtype = self.dtype_name(name, tensor.dtype)
        if str(tensor.layout) != "torch.strided":
            raise _core.InvalidArgumentError(
                f"{name} is sparse ({tensor.layout}); make a dense copy with .to_dense()"
            )
        if not tensor.is_contiguous() and not self._fills_memory(tensor.shape, tensor.stride()):
            raise _core.InvalidArgumentError(
                f"{name} with shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
                "dense; make a copy with .contiguous()"
            )
        return dtype

    def _fills_memory(self, shape: Sequence[int], strides: Sequence[int]) -> bool:
        dimensions = sorted((st, n) for st, n in zip(strides, shape, strict=True) if n != 1)
        expected = 1
        for stride, n in dimensions:
            if stride != expected:
                return False
            expected *= n
        return self.any_order


@functools.cache
def _cpu() -> torch.device:
    import torch

    return torch.device("cpu")


def _tensors() -> ModuleType | None:
    """The native module that reads lists of tensors; None: there are no tensors, or no module."""
    return _loaded() if "torch" in sys.modules else None


@functools.cache
def _loaded() -> ModuleType | None:
    from pycoll import _native

    try:
        return _native.load()
    except ImportError:  # Python looks at each tensor then
        return None


@functools.lru_cache(maxsize=64)
def _name_of(dtype: Any) -> str:
    # A type as NumPy takes it, such as np.float32 and ml_dtypes.bfloat16, has its name there.
    text = str(getattr(dtype, "__name__", dtype))
    return text.removeprefix("torch.")


def _array_of(name: str, values: Any) -> npt.NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    if not hasattr(values, "__dlpack__"):
        hint = "; leave out gradients that are None" if values is None else ""
        raise _core.InvalidArgumentError(
            f"{name} is a {type(values).__name__}, not an array or a tensor{hint}"
        )
    return np.from_dlpack(values)


def _bytes_of_tensor(tensor: Any) -> npt.NDArray[np.uint8]:
    import torch

    values = tensor.detach().as_strided((tensor.numel(),), (1,))  # dense, in whatever order
    memory: npt.NDArray[np.uint8] = values.view(torch.uint8).numpy()
    return memory
