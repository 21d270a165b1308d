"""pycoll.encode and pycoll.decode on GPUs, which are simulated: arrays, and tensors of torch.

What csrc/kernels/cuda/codec.cuh computes is checked by tests/sim/device_codec.cpp against the CPU's
codecs; here against the reference in NumPy, through all layers.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import codec_reference as reference
import native_build
import pool
import pycoll
import simgpu
import simulated_arrays
from codec_reference import BITS, Kind
from pycoll import _native
from simulated_arrays import Gpu

TIMEOUT_S = 120
ENV = {"PYCOLL_SIM_DEVICES": "2", "PYCOLL_SIM_TIMEOUT_S": "60"}
RANDOM = ["int8", "int4", "uint8", "uint4", "ternary"]
SIZES = [0, 1, 31, 256, 257, 3001]

# The first test compiles the simulator.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + TIMEOUT_S)


def alone(function, directory, *args):
    """`function(gpu, ...)` in a process of its own, whose pycoll serves simulated GPUs."""
    pool.alone(_with_gpu, function, str(directory), args, env=ENV, timeout=TIMEOUT_S)


def _with_gpu(function, directory, args):
    function(Gpu(directory, 0), *args)


def values_of(n, seed=0):
    """Gaussian, with blocks of zeros, and one that is not finite."""
    x = np.random.default_rng(seed).standard_normal(n, np.float32)
    x[600:900] = 0
    x[1000:1001] = np.inf
    return x


def object_of(name, block=256):
    if name in ("fp16", "bf16"):
        return pycoll.codec_of(name)
    settings = {"block": block}
    if name in RANDOM:
        settings["seed"] = 5
    if name in RANDOM and name != "ternary":
        settings["stochastic"] = True
    return type(pycoll.codec_of(name))(**settings)


# ---- Arrays. ----


@pytest.mark.parametrize("name", BITS)
def test_codes_and_values_are_those_of_the_reference(name):
    alone(codes_and_values, simulated_arrays.require(), name)


def codes_and_values(gpu, name):
    for block in (32, 256, 4096) if name not in ("fp16", "bf16") else (256,):
        kind, codec = Kind(name, block), object_of(name, block)
        for n in SIZES:
            x = values_of(n)
            u = reference.uniform(n, seed=5, step=2, rank=1, first=64) if name in RANDOM else None
            expected = reference.encode(kind, x, u)
            code = gpu.empty((codec.code_bytes(n),), np.uint8)
            key = {"step": 2, "rank": 1, "first": 64}
            assert pycoll.encode(gpu.array(x), codec, out=code, **key) is code
            assert code.get().tobytes() == expected
            out = gpu.empty((n,))
            assert pycoll.decode(code, codec, n, out=out) is out
            with np.errstate(all="ignore"):
                assert out.get().tobytes() == reference.decode(kind, [expected], n).tobytes()


def test_types_of_arrays():
    alone(types_of_arrays, simulated_arrays.require())


def types_of_arrays(gpu):
    x = values_of(777).astype(np.float16)
    expected = pycoll.encode(x, "int8")
    code = gpu.empty(expected.shape, np.uint8)
    pycoll.encode(gpu.array(x), "int8", out=code)
    assert code.get().tobytes() == expected.tobytes()
    out = gpu.empty((7, 111), np.float16)
    pycoll.decode(code, "int8", (7, 111), "float16", out=out)
    assert out.get().tobytes() == pycoll.decode(expected, "int8", 777, "float16").tobytes()


def test_calls_are_ordered_on_streams():
    alone(ordered_on_streams, simulated_arrays.require())


def ordered_on_streams(gpu):
    ours, theirs = gpu.stream(), gpu.stream()
    x = gpu.array(values_of(500), stream=theirs)
    code = gpu.empty((pycoll.codec_of("int8").code_bytes(500),), np.uint8)
    x.fill(0x40, theirs)  # 3.0039..., a while later
    pycoll.encode(x, "int8", out=code, stream=ours)
    filled = np.full(500, np.uint32(0x40404040)).view(np.float32)
    assert code.get(ours).tobytes() == pycoll.encode(filled, "int8").tobytes()


def test_what_is_refused():
    alone(refused, simulated_arrays.require())


def refused(gpu):
    x = gpu.array(values_of(64))
    code = gpu.empty((pycoll.codec_of("int8").code_bytes(64),), np.uint8)
    on_cpu = np.zeros(80, np.uint8)
    for call, text in (
        (lambda: pycoll.encode(x, "int8"), r"out=, of shape \(80,\) and dtype uint8"),
        (lambda: pycoll.encode(x, "int8", out=x), r"out has shape \(64,\) and dtype float32"),
        (lambda: pycoll.encode(x, "int8", out=on_cpu), "out is not on a GPU"),
        (lambda: pycoll.encode(values_of(64), "int8", out=code), "out is on a GPU"),
        (lambda: pycoll.encode(values_of(64), "int8", stream=1), "a stream was given"),
        (lambda: pycoll.encode(code, "int8", out=code), "has dtype uint8, not float32"),
        (lambda: pycoll.decode(code, "int8", 65, out=x), "a code has 80 bytes, 96 are needed"),
        (lambda: pycoll.decode(x, "int8", 64, out=x), "has dtype float32, not uint8"),
        (lambda: pycoll.decode(code, "int8", 64, out=code), "out has shape"),
    ):
        with pytest.raises(pycoll.InvalidArgumentError, match=text):
            call()
    wide = gpu.empty((96,), np.uint8)
    shifted = wide.but(data=(wide.pointer + 8, False), shape=(80,))
    with pytest.raises(pycoll.InvalidArgumentError, match="not aligned to 16 bytes"):
        pycoll.encode(x, "int8", out=shifted)
    read_only = code.but(data=(code.pointer, True))
    with pytest.raises(pycoll.InvalidArgumentError, match="read-only"):
        pycoll.encode(x, "int8", out=read_only)
    gpu.call("cudaSetDevice", 1)
    elsewhere = gpu.empty((80,), np.uint8)
    with pytest.raises(pycoll.InvalidArgumentError, match="they must be on one"):
        pycoll.encode(x, "int8", out=elsewhere)
    _native.gpu_library = lambda: None
    with pytest.raises(pycoll.UnsupportedError, match=r"PYCOLL_CUDA=1 pip install"):
        pycoll.encode(x, "int8", out=code)


# ---- Tensors. ----


def test_tensors():
    pytest.importorskip("torch")
    simgpu.alone(every_type_of_tensor, env=ENV, timeout=TIMEOUT_S)


def every_type_of_tensor():
    import torch

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for name in BITS:
            codec = object_of(name)
            x = torch.from_numpy(values_of(1500)).to(dtype).reshape(3, 500)
            code = pycoll.encode(x.to("simgpu"), codec, step=4)
            assert code.device.type == "simgpu"
            assert code.dtype == torch.uint8
            expected = pycoll.encode(x, codec, step=4)
            assert torch.equal(code.cpu(), expected), (name, dtype)
            value = pycoll.decode(code, codec, x.shape, dtype)
            assert value.device == code.device
            assert value.shape == x.shape
            found, wanted = value.cpu(), pycoll.decode(expected, codec, x.shape, dtype)
            assert found.dtype == dtype
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), (name, dtype)
    out = torch.empty(3, 500, device="simgpu")
    code = pycoll.encode(torch.ones(3, 500, device="simgpu"), "int8")
    assert pycoll.decode(code, "int8", (3, 500), out=out) is out
    assert (out.cpu() == 1).all()
    with pytest.raises(pycoll.InvalidArgumentError, match="torch's current stream"):
        pycoll.encode(out, "int8", stream=1)


def test_tensors_on_the_current_stream():
    pytest.importorskip("torch")
    simgpu.alone(on_the_current_stream, env=ENV, timeout=TIMEOUT_S)


def on_the_current_stream():
    import torch

    expected = pycoll.encode(torch.full((5000,), 7.0), "uint8")
    for _ in range(5):
        stream = torch.Stream(device="simgpu")
        with stream:
            x = torch.zeros(5000, device="simgpu")
            x.fill_(7)
            code = pycoll.encode(x, "uint8")
            value = pycoll.decode(code, "uint8", 5000)
        stream.synchronize()
        assert torch.equal(code.cpu(), expected)
        assert (value.cpu() == 7).all()


# ---- The CPU, where results have a place. ----


def test_results_in_place_on_the_cpu():
    x = values_of(300)
    code = np.empty(pycoll.codec_of("int4").code_bytes(300), np.uint8)
    assert pycoll.encode(x, "int4", out=code) is code
    assert code.tobytes() == pycoll.encode(x, "int4").tobytes()
    values = np.empty((3, 100), ml_dtypes.bfloat16)
    assert pycoll.decode(code, "int4", (3, 100), "bfloat16", out=values) is values
    expected = pycoll.decode(code, "int4", (3, 100), "bfloat16")
    assert values.tobytes() == expected.tobytes()
    for out, text in (
        (np.empty(7, np.uint8), "out has 7 bytes"),
        (x, "has dtype float32, not uint8"),
    ):
        with pytest.raises(pycoll.InvalidArgumentError, match=text):
            pycoll.encode(x, "int4", out=out)
    code.flags.writeable = False
    with pytest.raises(pycoll.InvalidArgumentError, match="out is read-only"):
        pycoll.encode(x, "int4", out=code)
