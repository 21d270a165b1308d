"""Codecs: floats as fewer bytes, and back.

A codec turns a vector of float32, float16 or bfloat16 values into a code of some bits a value:

    codec     bits a value               relative error of gaussian values
    fp16      16                         0.0002
    bf16      16                         0.0017
    fp8_e4m3  8 + 32 / block             0.026
    fp8_e5m2  8 + 32 / block             0.052
    int8      8 + 32 / block             0.007 (stochastic: 0.010)
    uint8     8 + 64 / block             0.006
    int4      4 + 32 / block             0.13  (stochastic: 0.18)
    uint4     4 + 64 / block             0.11
    sign      1 + 32 / block             0.60
    ternary   2 + 32 / block             1.0 (unbiased, but for what is clipped)

Whatever the codec: the same codes on every machine; a block whose largest magnitude is below 1e-30
decodes as zeros; a block with a NaN or an infinity decodes as NaN, so that a loss scaler sees it;
finite values stay finite (but for bf16 within half a step of the largest float32).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from pycoll import _core, _device_codecs
from pycoll._arguments import flag, whole
from pycoll._device_codecs import DeviceVector, on_gpu
from pycoll._host_arrays import HostArrays, is_tensor, size_of

__all__ = [
    "EXACT",
    "Bf16",
    "Codec",
    "Fp8E4M3",
    "Fp8E5M2",
    "Fp16",
    "Int4",
    "Int8",
    "Sign",
    "Ternary",
    "UInt4",
    "UInt8",
    "codec_of",
    "decode",
    "encode",
]

EXACT = "none"  # as a codec: none, whatever the region and the group say

_VALUES = HostArrays("codecs", ("float32", "float16", "bfloat16"))
_CODES = HostArrays("codecs", ("uint8",))


@dataclass(frozen=True)
class Codec:
    """What all codecs have. Raises `InvalidArgumentError` (a ValueError) for what cannot be."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name in _SETTINGS:
                what, value = f"codec {self.kind}: {field.name}", getattr(self, field.name)
                object.__setattr__(self, field.name, _SETTINGS[field.name](what, value))
        self._native()

    def _native(self) -> _core.Codec:
        return _core.Codec(
            kind=self.kind,
            block=getattr(self, "block", 256),
            stochastic=getattr(self, "stochastic", False),
        )

    def _choice(self, step: int | None) -> _core.CodecChoice:
        _check_step(step)
        return _core.CodecChoice(self._native(), getattr(self, "seed", 0), step)

    def _fields(self, step: int | None = None) -> tuple[str, int, bool, int, int | None]:
        """As the torch module takes it."""
        _check_step(step)
        stochastic: bool = getattr(self, "stochastic", False)
        return (self.kind, getattr(self, "block", 256), stochastic, getattr(self, "seed", 0), step)

    def code_bytes(self, count: int) -> int:
        """Bytes of the code of `count` values."""
        return self._native().code_bytes(count)


# The settings that codecs have: what is taken, by name.
_SETTINGS: dict[str, Callable[[str, Any], Any]] = {
    # Which of these it may be is for the core to say.
    "block": lambda what, value: whole(
        what, value, "a power of two from 32 to 4096", below=1 << 31
    ),
    "stochastic": flag,
    "seed": lambda what, value: whole(what, value, "a number of 64 bits", below=1 << 64),
}


def _check_step(step: int | None) -> None:
    if step is not None:
        whole("step", step, "a number of 32 bits", below=1 << 32)


@dataclass(frozen=True)
class Fp16(Codec):
    """IEEE 754 binary16, times a power of two where values would overflow; one for the whole
    vector, 1 where no finite magnitude is 65520 or more. Infinities and NaN stay what they are."""

    kind: ClassVar[str] = "fp16"


@dataclass(frozen=True)
class Bf16(Codec):
    """The upper half of a float32, to nearest even. Infinities and NaN stay what they are."""

    kind: ClassVar[str] = "bf16"


@dataclass(frozen=True)
class _Blocks(Codec):
    """`block`: values that share a scale; a power of two from 32 to 4096."""

    block: int = 256


@dataclass(frozen=True)
class _Integers(_Blocks):
    """`stochastic`: round up with the probability of the fraction, so that the mean is right, by
    numbers that `seed` and the step, rank and place of a value fix; else to nearest, ties to even.
    """

    stochastic: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Int8(_Integers):
    """-127 to 127 times the block's largest magnitude / 127."""

    kind: ClassVar[str] = "int8"


@dataclass(frozen=True)
class Int4(_Integers):
    """-7 to 7 times the block's largest magnitude / 7."""

    kind: ClassVar[str] = "int4"


@dataclass(frozen=True)
class UInt8(_Integers):
    """256 equal steps from the block's least to its greatest value."""

    kind: ClassVar[str] = "uint8"


@dataclass(frozen=True)
class UInt4(_Integers):
    """16 equal steps from the block's least to its greatest value."""

    kind: ClassVar[str] = "uint4"


@dataclass(frozen=True)
class Fp8E4M3(_Blocks):
    """OCP E4M3 (no infinity) times the block's largest magnitude / 448."""

    kind: ClassVar[str] = "fp8_e4m3"


@dataclass(frozen=True)
class Fp8E5M2(_Blocks):
    """OCP E5M2 times the block's largest magnitude / 57344."""

    kind: ClassVar[str] = "fp8_e5m2"


@dataclass(frozen=True)
class Sign(_Blocks):
    """Plus or minus the block's mean magnitude (signSGD with the L1 scale, Karimireddy et al.,
    ICML 2019): to be used with error feedback."""

    kind: ClassVar[str] = "sign"


@dataclass(frozen=True)
class Ternary(_Blocks):
    """-s, 0 or s by chance, s the block's largest magnitude, clipped at 2.5 root mean squares
    (TernGrad, Wen et al., NeurIPS 2017). `seed` as of Int8."""

    kind: ClassVar[str] = "ternary"
    seed: int = 0


_CODECS: dict[str, type[Codec]] = {
    cls.kind: cls for cls in (Fp16, Bf16, Fp8E4M3, Fp8E5M2, Int8, Int4, UInt8, UInt4, Sign, Ternary)
}


def codec_of(codec: str | Codec) -> Codec:
    """The codec of a name, with its defaults, or the codec itself."""
    if isinstance(codec, Codec):
        return codec
    if not isinstance(codec, str) or codec not in _CODECS:
        raise _core.InvalidArgumentError(
            f"{codec!r} is no codec{_hint_for(codec)}; there are: {', '.join(_CODECS)}, and "
            "objects such as pycoll.Int8(block=64)"
        )
    return _CODECS[codec]()


def canonical(codec: Codec) -> Codec:
    """What ranks compare: one codec for all that give the same codes. Where nothing is drawn by
    chance, the seed does not count; nor does a class of the caller's own."""
    settings = {field.name: getattr(codec, field.name) for field in fields(_CODECS[codec.kind])}
    if "stochastic" in settings and not settings["stochastic"]:
        settings["seed"] = 0
    return _CODECS[codec.kind](**settings)


def _hint_for(wrong: Any) -> str:
    if isinstance(wrong, type) and issubclass(wrong, Codec):
        return f" but a class of them: pycoll.{wrong.__name__}() makes one"
    if hasattr(wrong, "_reduction"):  # PowerSGD, TopK, RandomK
        what = wrong.__name__ if isinstance(wrong, type) else type(wrong).__name__
        return f" but a way to send gradients: pycoll.CompressionState(None, pycoll.{what}(...))"
    if isinstance(wrong, str) and wrong == "auto":
        return " that may be named here: it is for Options(codec=...) and for a call's codec="
    if callable(wrong) and not isinstance(wrong, type):
        return " (a decorator needs one: @pycoll.codec('int8'))"
    return ""


def encode(
    values: Any,
    codec: str | Codec,
    *,
    step: int = 0,
    rank: int = 0,
    first: int = 0,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """The code of an array or tensor; on a GPU the same bytes as on the CPU.

    Args:
        values: NumPy array or torch tensor, or what has `__dlpack__` on the CPU or
            `__cuda_array_interface__`; any shape, dense; float32, float16 or bfloat16.
        step, rank, first: what the random numbers of stochastic rounding depend on beside the
            codec's seed: `first` is the index of the first value in some longer vector.
        out: what is written and returned, instead of something new: uint8, of
            `codec.code_bytes(count)`, where `values` are. On a GPU arrays that are no tensors of
            torch need it, and it is aligned to 16 bytes.
        stream: as of Communicator, for arrays on a GPU; for tensors it is torch's current one. The
            call is queued there and does not wait.

    Returns:
        A uint8 vector of `codec.code_bytes(count)`, a tensor if `values` is one. The code does not
        hold the codec, the shape or the dtype.

    Raises:
        InvalidArgumentError: for other arrays and dtypes.
        UnsupportedError: `values` are on a GPU that this pycoll was not built for.
    """
    codec = codec_of(codec)
    key = _core.RandomKey(
        seed=getattr(codec, "seed", 0),
        step=whole("encode: step", step, "a number of 32 bits", below=1 << 32),
        rank=whole("encode: rank", rank, "a number of 32 bits", below=1 << 32),
        first=whole("encode: first", first, "a number of 64 bits", below=1 << 64),
    )
    if (on_device := on_gpu("encode: values", values)) is not None:
        _VALUES.dtype_name("encode: values", on_device.dtype)
        target = _on_same_device("encode", out)
        return _device_codecs.encode(codec._native(), on_device, key, target, stream)
    _check_no_stream("encode", stream)
    dtype, source = _VALUES.bytes_of("encode: values", values)
    needed = codec.code_bytes(source.size // size_of(dtype))
    code = np.empty(needed, np.uint8) if out is None else _writable("encode", out, "uint8", needed)
    _core.encode(codec=codec._native(), values=source, dtype=dtype, code=code, key=key)
    if out is not None:
        return out
    if not is_tensor(values):
        return code
    import torch

    return torch.from_numpy(code)


def decode(
    code: Any,
    codec: str | Codec,
    shape: int | Sequence[int],
    dtype: Any = "float32",
    *,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """The values of a code that `encode` made with the same codec.

    Args:
        code: where `encode` can have made it.
        shape: of the values.
        dtype: float32, float16 or bfloat16, by name or as the library of `code` has it.
        out: what is written and returned, instead of something new: of that shape and dtype, where
            `code` is. Needed, and `stream`, as of `encode`.

    Returns:
        A new array; a tensor if `code` is one.

    Raises:
        InvalidArgumentError: the code has not the bytes of that shape, or an unknown dtype.
        UnsupportedError: as of `encode`.
    """
    codec, shape = codec_of(codec), _shape_of(shape)
    name = _VALUES.dtype_name("decode: the result", dtype)
    if (on_device := on_gpu("decode: code", code)) is not None:
        _CODES.dtype_name("decode: code", on_device.dtype)
        target = _on_same_device("decode", out)
        return _device_codecs.decode(codec._native(), on_device, shape, name, target, stream)
    _check_no_stream("decode", stream)
    _, source = _CODES.bytes_of("decode: code", code)
    expected = codec.code_bytes(math.prod(shape))
    if source.size != expected:
        raise _core.InvalidArgumentError(
            f"decode: a code has {source.size} bytes, {expected} are needed for {codec!r} and the "
            f"shape {shape}: give the codec and the shape that it was made with"
        )
    needed = math.prod(shape) * size_of(name)
    values = np.empty(needed, np.uint8) if out is None else _writable("decode", out, name, needed)
    _core.decode(codec=codec._native(), codes=[source], values=values, dtype=name)
    if out is not None:
        return out
    if is_tensor(code):
        import torch

        return torch.from_numpy(values).view(getattr(torch, name)).reshape(shape)
    return values.view(_numpy_dtype(name)).reshape(shape)


def _shape_of(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        lengths = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        lengths = tuple(map(operator.index, lengths))
    except TypeError:
        lengths = (-1,)
    if any(length < 0 for length in lengths):
        raise _core.InvalidArgumentError(
            f"decode: shape is a length or several, from 0 on, not {shape!r}"
        )
    return lengths


def _on_same_device(operation: str, out: Any) -> DeviceVector | None:
    if out is None:
        return None
    target = on_gpu(f"{operation}: out", out)
    if target is None:
        raise _core.InvalidArgumentError(f"{operation}: out is not on a GPU, as the other array is")
    return target


def _check_no_stream(operation: str, stream: Any) -> None:
    if stream is not None:
        raise _core.InvalidArgumentError(
            f"{operation}: a stream was given, but the array is not on a GPU"
        )


def _writable(operation: str, out: Any, dtype: str, needed: int) -> np.ndarray[Any, Any]:
    """The bytes of an array on the CPU that are to be written."""
    name = f"{operation}: out"
    if on_gpu(name, out) is not None:
        raise _core.InvalidArgumentError(f"{name} is on a GPU, the other array is not")
    found, memory = (_CODES if dtype == "uint8" else _VALUES).bytes_of(name, out)
    if (found, memory.size) != (dtype, needed):
        raise _core.InvalidArgumentError(
            f"{name} has {memory.size} bytes of {found}; the result is {needed} bytes of {dtype}"
        )
    if not memory.flags.writeable:
        raise _core.InvalidArgumentError(f"{name} is read-only")
    return memory


def _numpy_dtype(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise _core.UnsupportedError(
            "bfloat16 arrays of NumPy need the package ml_dtypes"
        ) from error
    return np.dtype(ml_dtypes.bfloat16)
