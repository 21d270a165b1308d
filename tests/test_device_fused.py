"""pycoll.cast_, unscale_ and clip_by_norm_ on GPUs, which are simulated: the bytes of the CPU.

What csrc/kernels/cuda/fused.cuh computes is checked by tests/sim/device_fused.cpp; here through all
layers, on lists of tensors.
"""

from __future__ import annotations

import math

import pytest

import native_build
import pycoll
import simgpu
from pycoll import _native

torch = pytest.importorskip("torch")

TIMEOUT_S = 120
ENV = {"PYCOLL_SIM_DEVICES": "2", "PYCOLL_SIM_TIMEOUT_S": "60"}
SHAPES = [(3, 5, 7), (), (0, 3), (4097,), (33, 129)]
SMALL = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*SMALL, torch.float64)

# The first test compiles the simulator.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + TIMEOUT_S)


def on_gpu(function):
    simgpu.alone(function, env=ENV, timeout=TIMEOUT_S)


def gradients(dtypes=DTYPES, seed=0, spoilt=False):
    """Of several types in turn, one of them not aligned to 16 bytes; maybe with a NaN."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for i, shape in enumerate(SHAPES * len(dtypes)):
        whole = torch.randn(math.prod(shape) + 1, generator=generator).to(dtypes[i % len(dtypes)])
        tensors.append(whole[1:].reshape(shape) if i % 2 else whole[:-1].reshape(shape))
    if spoilt:
        tensors[3][1234] = math.nan
    return tensors


def there(tensors):
    """Copies on the GPU, with the alignment that the originals have."""
    moved = []
    for tensor in tensors:
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="simgpu")
        place = room[1:] if tensor.data_ptr() % 16 else room[:-1]
        moved.append(place.copy_(tensor.reshape(-1)).reshape(tensor.shape))
    return moved


def bits(tensor):
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(on_device, on_cpu):
    for i, (one, other) in enumerate(zip(on_device, on_cpu, strict=True)):
        assert bits(one) == bits(other), i


def test_the_bytes_of_the_cpu():
    on_gpu(bytes_of_the_cpu)


def bytes_of_the_cpu():
    for spoilt in (False, True):
        theirs = gradients(spoilt=spoilt)
        ours = there(theirs)
        versions = [tensor._version for tensor in ours]
        inv_scale = torch.tensor(3.0).reciprocal()
        expected = pycoll.unscale_(theirs, inv_scale.item())
        found = pycoll.unscale_(ours, inv_scale.to("simgpu") if spoilt else inv_scale.item())
        assert all(one._version > old for one, old in zip(ours, versions, strict=True))
        assert_same(ours, theirs)
        assert found.found_inf.device == ours[0].device
        assert found.found_inf.dtype == torch.float32
        assert found.found_inf.item() == float(expected.found_inf) == float(spoilt)
        total = torch.tensor(expected.sum_of_squares, dtype=torch.float64)
        assert bits(found.sum_of_squares) == bits(total)
        for limit in (math.inf, 1.5, 0.0):  # the first leaves memory alone
            pycoll.clip_by_norm_(theirs, expected, limit)
            assert pycoll.clip_by_norm_(ours, found, limit) is None
            assert_same(ours, theirs)
    theirs = gradients()
    ours = there(theirs)
    # Dense, in another order of dimensions.
    theirs[4], ours[4] = theirs[4].t(), ours[4].t()
    assert pycoll.clip_by_norm_(ours, 7.0, 2.0) == pycoll.clip_by_norm_(theirs, 7.0, 2.0)
    assert_same(ours, theirs)


def test_casts():
    on_gpu(casts)


def casts():
    for seed, scale in enumerate((1.0, 3.0, 2.0**120)):
        sources = gradients(SMALL, seed)
        targets = [torch.empty(t.shape, dtype=SMALL[i % 3 - 1]) for i, t in enumerate(sources)]
        ours = there(targets)
        expected = pycoll.cast_(targets, sources, scale)
        found = pycoll.cast_(ours, there(sources), scale)
        assert found.item() == float(expected) == float(scale > 3)
        assert_same(ours, targets)
    one = there([torch.ones(5)])[0]
    assert pycoll.cast_(one, one, 2.0).item() == 0
    assert one.cpu().tolist() == [2.0] * 5


def test_calls_are_on_the_current_stream():
    on_gpu(on_the_current_stream)


def on_the_current_stream():
    parameter = torch.nn.Parameter(torch.zeros(5000, device="simgpu"))
    for _ in range(3):
        stream = torch.Stream(device="simgpu")
        with stream:
            tensors = [torch.zeros(5000, device="simgpu"), parameter]
            for tensor in tensors:
                tensor.detach().fill_(3)
            found = pycoll.unscale_(tensors, 0.5)
            pycoll.clip_by_norm_(tensors, found, 75.0)
        stream.synchronize()
        assert found.sum_of_squares.cpu() == 22500
        factor = 75.0 / (150.0 + 1e-6)
        expected = torch.full((5000,), 1.5)
        pycoll.clip_by_norm_(expected, 75.0 / factor - 1e-6, 75.0)
        for tensor in tensors:
            assert bits(tensor.detach()) == bits(expected)


def test_what_is_refused():
    on_gpu(refused)


def refused():
    x, y = (torch.ones(8, device="simgpu") for _ in range(2))
    subclass = torch.ones(8, device="simgpu").as_subclass(type("Odd", (torch.Tensor,), {}))
    elsewhere, here = torch.ones(8, device="simgpu:1"), torch.ones(8)
    number = torch.ones((), device="simgpu")
    other = r"all tensors of a call are on one device, here simgpu:0"
    for call, text in (
        (lambda: pycoll.unscale_([x, here], 0.5), rf"tensors\[1\] is cpu; {other}"),
        (lambda: pycoll.unscale_([x, elsewhere], 0.5), rf"tensors\[1\] is simgpu:1; {other}"),
        (lambda: pycoll.cast_(x, here), rf"src\[0\] is cpu; {other}"),
        (lambda: pycoll.unscale_([x, x[4:]], 0.5), r"tensors\[0\] and .* memory in common"),
        (lambda: pycoll.cast_([x, y], [y, x]), "memory in common"),
        (lambda: pycoll.unscale_(x[::2], 0.5), "is not dense"),
        (lambda: pycoll.unscale_(subclass, 0.5), "is a Odd whose values do not lie"),
        (lambda: pycoll.unscale_(x.int(), 0.5), "has dtype torch.int32"),
        (lambda: pycoll.unscale_(x, number.double()), "1 elements of float64 on simgpu:0"),
        (lambda: pycoll.unscale_(x, x), "inv_scale has 8 elements"),
        (lambda: pycoll.clip_by_norm_(x, number, 1.0), r"or norm.item\(\)"),
        (lambda: pycoll.clip_by_norm_(x, pycoll.unscale_(y, 1), -1.0), "negative"),
    ):
        with pytest.raises(pycoll.InvalidArgumentError, match=text):
            call()
    assert (x.cpu() == 1).all()
    for call in (
        lambda: pycoll.unscale_([here, x], 0.5),
        lambda: pycoll.cast_(here, x),
        lambda: pycoll.unscale_(torch.ones(3, device="meta"), 0.5),
    ):
        with pytest.raises(pycoll.UnsupportedError, match="is on (simgpu|meta)"):
            call()
    _native.gpu_library = lambda: None
    with pytest.raises(pycoll.UnsupportedError, match=r"PYCOLL_CUDA=1 pip install"):
        pycoll.unscale_(x, 0.5)
