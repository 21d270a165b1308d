"""pycoll.encode and pycoll.decode: arrays and tensors, codecs by name and as objects."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import codec_reference as reference
import pycoll
from codec_reference import BITS, Kind

torch = pytest.importorskip("torch")

OBJECTS = {
    "fp16": pycoll.Fp16(),
    "bf16": pycoll.Bf16(),
    "fp8_e4m3": pycoll.Fp8E4M3(block=64),
    "fp8_e5m2": pycoll.Fp8E5M2(block=64),
    "int8": pycoll.Int8(block=64, stochastic=True, seed=5),
    "int4": pycoll.Int4(block=64, stochastic=True, seed=5),
    "uint8": pycoll.UInt8(block=64),
    "uint4": pycoll.UInt4(block=64),
    "sign": pycoll.Sign(block=64),
    "ternary": pycoll.Ternary(block=64, seed=5),
}


def gaussian(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape, np.float32)


@pytest.mark.parametrize("name", BITS)
def test_names_stand_for_defaults(name):
    x = gaussian(700)
    u = reference.uniform(700) if name == "ternary" else None
    code = pycoll.encode(x, name)
    assert code.dtype == np.uint8
    assert code.tobytes() == reference.encode(Kind(name), x, u)
    assert len(code) == pycoll.codec_of(name).code_bytes(700)
    value = pycoll.decode(code, name, 700)
    assert value.tobytes() == reference.decode(Kind(name), [code.tobytes()], 700).tobytes()


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_have_settings(name):
    x, codec = gaussian(700), OBJECTS[name]
    random = getattr(codec, "stochastic", False) or name == "ternary"
    u = reference.uniform(700, seed=5, step=2, rank=1, first=64) if random else None
    code = pycoll.encode(x, codec, step=2, rank=1, first=64)
    assert code.tobytes() == reference.encode(Kind(name, 64), x, u)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_and_arrays_have_the_same_codes(dtype):
    tensor = torch.from_numpy(gaussian(3, 5, 7)).to(getattr(torch, dtype))
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    array = tensor.float().numpy().astype(kind)
    code = pycoll.encode(tensor, "int8")
    assert isinstance(code, torch.Tensor)
    assert code.numpy().tobytes() == pycoll.encode(array, "int8").tobytes()
    from_tensor = pycoll.decode(code, "int8", tensor.shape, tensor.dtype)
    from_array = pycoll.decode(code.numpy(), "int8", (3, 5, 7), dtype)
    assert from_tensor.shape == tensor.shape
    assert from_tensor.dtype == tensor.dtype
    assert from_array.shape == (3, 5, 7)
    assert from_array.dtype == kind
    assert from_tensor.view(torch.uint8).numpy().tobytes() == from_array.tobytes()


def test_other_libraries_by_dlpack():
    class Other:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    x = gaussian(100)
    assert pycoll.encode(Other(x), "int4").tobytes() == pycoll.encode(x, "int4").tobytes()


def test_a_tensor_that_needs_gradients_and_scalars():
    x = torch.ones((), requires_grad=True)
    assert pycoll.decode(pycoll.encode(x, "int8"), "int8", ()).item() == 1
    assert pycoll.encode(np.zeros((0, 3), np.float32), "int8").size == 0
    assert pycoll.decode(np.zeros(0, np.uint8), "sign", (0, 3)).shape == (0, 3)


def test_what_is_refused():
    x = gaussian(8, 8)
    for bad, text in (
        ("int3", "'int3' is no codec; there are: fp16, bf16"),
        (8, "8 is no codec"),
        (pycoll.Int8, r"a class of them: pycoll\.Int8\(\) makes one"),
        (pycoll.TopK(0.5), r"CompressionState\(None, pycoll\.TopK\("),
        ("auto", r"Options\(codec=\.\.\.\)"),
    ):
        with pytest.raises(pycoll.InvalidArgumentError, match=text):
            pycoll.encode(x, bad)
    for values, text in (
        (x.T, "is not dense"),
        (torch.from_numpy(x).T, "is not dense"),
        (x.astype(np.float64), "has dtype float64, not float32, float16 or bfloat16"),
        (torch.ones(3, dtype=torch.int32), r"has dtype torch\.int32, not float32"),
        ([1.0, 2.0], "is a list, not an array or a tensor"),
    ):
        with pytest.raises(pycoll.InvalidArgumentError, match=text):
            pycoll.encode(values, "int8")
    with pytest.raises(pycoll.UnsupportedError, match="is on meta"):
        pycoll.encode(torch.ones(3, device="meta"), "int8")
    with pytest.raises(pycoll.InvalidArgumentError, match="a code has 80 bytes"):
        pycoll.decode(pycoll.encode(x, "int8"), "int8", 65)
    with pytest.raises(pycoll.InvalidArgumentError, match=r"bytes.*Int4.*\(64,\): give the codec"):
        pycoll.decode(pycoll.encode(x, "int8"), "int4", 64)
    for shape in (-1, (8, -8), None, 64.0, "64"):
        with pytest.raises(pycoll.InvalidArgumentError, match=f"shape is a length.*{shape!r}"):
            pycoll.decode(pycoll.encode(x, "int8"), "int8", shape)
    with pytest.raises(pycoll.InvalidArgumentError, match="has dtype float32, not uint8"):
        pycoll.decode(x, "int8", 64)
    with pytest.raises(pycoll.InvalidArgumentError, match="power of two from 32 to 4096"):
        pycoll.Int8(block=100)
    with pytest.raises(pycoll.InvalidArgumentError, match="step is a number of 32 bits, not -1"):
        pycoll.encode(x, "int8", step=-1)


def test_codecs_are_values():
    assert pycoll.Int8() == pycoll.codec_of("int8")
    assert pycoll.Int8(block=64) != pycoll.Int8()
    assert len({pycoll.Int8(), pycoll.Int8(), pycoll.Int4()}) == 2
    assert repr(pycoll.Int4(block=64)) == "Int4(block=64, stochastic=False, seed=0)"
