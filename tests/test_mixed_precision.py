"""pycoll.cast_, unscale_ and clip_by_norm_: arrays and tensors, against torch and NumPy."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pycoll
from pycoll import _host_arrays

torch = pytest.importorskip("torch")

SHAPES = [(3, 5, 7), (), (0, 3), (4097,), (33, 129)]
DTYPES = ["float32", "float16", "bfloat16", "float64"]


def gradients(dtype: str = "float32", seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(getattr(torch, dtype)) for s in SHAPES]


def copies(tensors: list[Any]) -> list[Any]:
    return [t.clone() for t in tensors]


def bits(tensor: Any) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def torch_unscale(tensors: list[Any], inv_scale: float) -> bool:
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, torch.tensor(inv_scale))
    return found.item() == 1


class Lender:
    """An object of another library."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


# ---- Against torch ----


@pytest.mark.parametrize("scale", [65536.0, 1.0, 3.0, 2.0**120])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unscale_has_the_bits_of_torch(dtype, scale):
    inv_scale = torch.tensor(scale, dtype=torch.float64).reciprocal().float().item()
    ours, theirs = gradients(dtype), gradients(dtype)
    found = pycoll.unscale_(ours, inv_scale)
    for tensor in theirs:  # it takes a list of one dtype
        assert not torch_unscale([tensor], inv_scale)
    assert [bits(t) for t in ours] == [bits(t) for t in theirs]
    assert not found.found_inf


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_found_as_by_torch(dtype, bad):
    ours = gradients(dtype)
    ours[3][1000] = bad
    theirs = copies(ours)
    assert pycoll.unscale_(ours, 0.25).found_inf
    assert torch_unscale([theirs[3]], 0.25)
    assert not torch_unscale([t for t in theirs if t is not theirs[3]], 0.25)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(ours, theirs, strict=True)
    )
    assert math.isnan(ours[3][1000]) == math.isnan(bad)


def test_values_that_become_infinite_count_too():
    ours, theirs = torch.full((5,), 3e38), torch.full((5,), 3e38)
    assert pycoll.unscale_(ours, 2.0).found_inf
    assert not torch_unscale([theirs], 2.0)
    assert bits(ours) == bits(theirs)


def test_norms_of_numpy_and_torch():
    for dtype in DTYPES:
        tensors = gradients(dtype)
        found = pycoll.unscale_(tensors, 1 / 3)
        exact = math.fsum(x * x for t in tensors for x in t.double().reshape(-1).tolist())
        assert found.sum_of_squares == pytest.approx(exact, rel=1e-15)
        assert found.norm == math.sqrt(found.sum_of_squares)
    total = torch.nn.utils.get_total_norm([t.double() for t in tensors])
    assert found.norm == pytest.approx(total.item(), rel=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_is_torchs_rule(dtype):
    ours = gradients(dtype)
    theirs = [torch.nn.Parameter(t.clone()) for t in ours]
    for parameter in theirs:
        parameter.grad = parameter.detach().clone()
    found = pycoll.unscale_(ours, 1.0)
    factor = pycoll.clip_by_norm_(ours, found.norm, 1.5)
    assert factor == 1.5 / (found.norm + 1e-6)
    torch.nn.utils.clip_grad_norm_(theirs, 1.5)
    # torch's factor has the dtype of the gradients.
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 3e-7, "float64": 1e-14}[dtype]
    for tensor, parameter in zip(ours, theirs, strict=True):
        torch.testing.assert_close(tensor, parameter.grad, rtol=tolerance, atol=1e-7)
    if dtype in ("float32", "float64"):
        assert pycoll.unscale_(ours, 1.0).norm == pytest.approx(1.5, rel=1e-6)


def test_what_is_within_the_limit_is_left_alone():
    x = np.array([0x7F800001, 0x3F800000], np.uint32)  # a signaling NaN would become quiet
    tensors = [x.view(np.float32)]
    assert pycoll.clip_by_norm_(tensors, 0.5, 1.0) == 1.0
    assert pycoll.clip_by_norm_(tensors, 0.0, math.inf) == 1.0
    assert x.tolist() == [0x7F800001, 0x3F800000]
    assert pycoll.clip_by_norm_(tensors, math.inf, 1.0) == 0.0
    assert math.isnan(pycoll.clip_by_norm_(tensors, math.nan, 1.0))
    assert np.isnan(tensors[0]).all()


@pytest.mark.parametrize("source", DTYPES[:3])
@pytest.mark.parametrize("target", DTYPES[:3])
def test_casts_are_torchs(source, target):
    sources = gradients(source)
    targets = [torch.empty_like(t, dtype=getattr(torch, target)) for t in sources]
    assert not pycoll.cast_(targets, sources, 1 / 3)
    for ours, theirs in zip(targets, sources, strict=True):
        product = theirs.float() * torch.tensor(1 / 3, dtype=torch.float32)
        assert bits(ours) == bits(product.to(ours.dtype))


def test_a_cast_says_what_became_infinite():
    half = torch.empty(3, dtype=torch.float16)
    assert not pycoll.cast_(half, torch.tensor([1.0, 2.0, 65504.0]))
    assert pycoll.cast_(half, torch.tensor([1.0, 2.0, 65504.0]), scale=2)
    assert half.tolist() == [2.0, 4.0, math.inf]
    assert not pycoll.cast_(half, torch.tensor([1.0, 2.0, 1e6]), scale=2.0**-10)
    assert pycoll.cast_(half, torch.tensor([math.nan, 2.0, 3.0]), scale=0)


# ---- Arrays of all kinds ----


def test_arrays_and_tensors_on_one_list():
    n = 300
    x = np.random.default_rng(1).standard_normal(n, np.float32)
    room = np.zeros(4 * n + 1, np.uint8)
    misaligned = room[1:].view(np.float32)
    misaligned[:] = x
    arrays = [
        x.copy(),
        x.astype(np.float16),
        x.astype(ml_dtypes.bfloat16),
        x.astype(np.float64),
        torch.from_numpy(x.copy()),
        torch.from_numpy(x.copy()).bfloat16(),
        torch.nn.Parameter(torch.from_numpy(x.copy())),
        Lender(x.copy()),
        misaligned,
    ]
    found = pycoll.unscale_((a for a in arrays), 0.5)
    arrays[7] = arrays[7].array
    squares = 0.0
    for array in arrays:
        values = array.detach().double().numpy() if isinstance(array, torch.Tensor) else array
        values = values.astype(np.float64)
        assert np.allclose(values, x * 0.5, rtol=2**-8, atol=0)
        squares += float((values**2).sum())
    assert found.sum_of_squares == pytest.approx(squares, rel=1e-14)


def test_one_tensor_and_no_tensors():
    x = torch.arange(6.0).reshape(2, 3)
    assert pycoll.unscale_(x, 2) == (False, 220.0)
    assert pycoll.unscale_([], 2) == pycoll.Unscaled(False, 0.0)
    assert pycoll.clip_by_norm_([], 5, 1) < 1
    assert not pycoll.cast_([], [])
    assert not pycoll.cast_(x, x, 0.5)  # in place
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    half = x.half()
    assert not pycoll.cast_(half.view(torch.bfloat16), half)  # in place, of another type
    assert half.view(torch.bfloat16).tolist() == x.tolist()


def test_subclasses_of_tensors():
    class Mine(torch.Tensor):
        pass

    x = torch.arange(4.0).as_subclass(Mine)
    assert pycoll.unscale_([x], 2.0).sum_of_squares == 56.0
    assert x.tolist() == [0, 2, 4, 6]


def test_other_orders_of_dimensions():
    image = torch.arange(360.0).reshape(2, 3, 6, 10)
    last = image.clone(memory_format=torch.channels_last)
    transposed = torch.arange(12.0).reshape(3, 4).T
    fortran = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    found = pycoll.unscale_([last, transposed, fortran, image[:0].transpose(0, 1)], 2.0)
    assert torch.equal(last, image * 2)
    assert transposed.tolist() == (torch.arange(12.0).reshape(3, 4).T * 2).tolist()
    assert fortran.tolist() == (np.arange(12.0).reshape(3, 4) * 2).tolist()
    assert found.sum_of_squares == 4 * float((image**2).sum() + 2 * (torch.arange(12.0) ** 2).sum())
    with pytest.raises(pycoll.InvalidArgumentError, match="is not dense"):
        pycoll.cast_(transposed.clone(), transposed)


def test_autograd_knows_that_a_tensor_changed():
    x = torch.arange(4.0)
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * x).sum()
    pycoll.unscale_([x], 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        y = torch.arange(4.0)
        assert pycoll.unscale_([y], 2.0).norm == math.sqrt(56)


def test_subnormals_are_kept_whatever_the_mode_of_the_thread():
    x = torch.full((5000,), 1e-39)
    torch.set_flush_denormal(True)
    try:
        assert pycoll.unscale_([x], 0.5).sum_of_squares > 0
        doubled = torch.zeros(5000)
        pycoll.cast_(doubled, x, 2.0)
    finally:
        torch.set_flush_denormal(False)
    assert bits(doubled) == bits(torch.full((5000,), 1e-39))


def test_what_is_refused():
    x = np.ones((8, 8), np.float32)
    read_only = x.copy()
    read_only.flags.writeable = False
    for bad, text in (
        (x[:, :7], r"tensors\[1\] with shape \(8, 7\) .* is not dense"),
        (x[::-1], "is not dense"),
        (torch.from_numpy(x)[::2], "is not dense"),
        (torch.ones(1).expand(5), "is not dense"),
        (torch.ones(3, dtype=torch.int32), r"dtype torch\.int32, not float32, .* or float64"),
        (x.astype(">f4"), "has dtype >f4"),
        (None, "is a NoneType, not an array .*leave out gradients that are None"),
        (torch.eye(3).to_sparse(), r"is sparse .*\.to_dense\(\)"),
        ([1.0], "is a list, not an array or a tensor"),
        (read_only, r"tensors\[1\] is read-only"),
    ):
        good = torch.ones(4)
        with pytest.raises(pycoll.InvalidArgumentError, match=text):
            pycoll.unscale_([good, bad], 0.5)
        assert good.tolist() == [1, 1, 1, 1]
    with pytest.raises(pycoll.UnsupportedError, match="is on meta"):
        pycoll.unscale_(torch.ones(3, device="meta"), 0.5)
    with pytest.raises(pycoll.InvalidArgumentError, match="tensors is a int, not an array"):
        pycoll.unscale_(5, 0.5)
    with pytest.raises(pycoll.InvalidArgumentError, match="inv_scale is 'much', not a number"):
        pycoll.unscale_(x, "much")
    with pytest.raises(pycoll.InvalidArgumentError, match="norm is '2', not a number"):
        pycoll.clip_by_norm_(x, "2", 1.0)
    for norm, limit in ((-1.0, 1.0), (1.0, -1.0), (1.0, math.nan)):
        with pytest.raises(pycoll.InvalidArgumentError, match="neither may be negative"):
            pycoll.clip_by_norm_(x, norm, limit)


def test_memory_in_common_is_refused():
    x = torch.arange(100.0)
    common = "have memory in common"
    for tensors in ([x, x], [x[:50], x[60:], x[49:60]], [x, x.numpy()[7:8]]):
        with pytest.raises(pycoll.InvalidArgumentError, match=common):
            pycoll.unscale_(tensors, 0.5)
        with pytest.raises(pycoll.InvalidArgumentError, match=common):
            pycoll.clip_by_norm_(tensors, 2.0, 1.0)
    half = torch.zeros(100, dtype=torch.float16)
    for dst, src in (
        ([x[:50], x[50:]], [x[50:], x[:50]]),
        ([half[:50]], [half[1:51]]),
        ([half, half], [x, x]),
        ([x.view(torch.float16)[:100]], [x]),  # narrowing in place
        ([x[:50]], [x[25:75]]),
        ([half, x], [x, x]),  # written while it is to be read
    ):
        with pytest.raises(pycoll.InvalidArgumentError, match=common):
            pycoll.cast_(dst, src)
    assert x.tolist() == list(range(100))
    assert pycoll.unscale_([x[50:], x[:0], x[:50]], 1.0).sum_of_squares == 328350.0
    assert not pycoll.cast_([half, torch.zeros(100)], [x, x])  # read twice


def test_lists_that_do_not_fit():
    x = torch.ones(4)
    with pytest.raises(pycoll.InvalidArgumentError, match="a dst has 3 elements, its src has 4"):
        pycoll.cast_(torch.zeros(3), x)
    with pytest.raises(pycoll.InvalidArgumentError, match="dst has 1 tensors, src has 2"):
        pycoll.cast_([torch.zeros(4)], [x, x])
    with pytest.raises(pycoll.InvalidArgumentError, match="dtype torch.float64, not float32"):
        pycoll.cast_(torch.zeros(4).double(), x)


def test_without_a_native_module_for_this_torch(monkeypatch):
    """Python looks at each tensor: the same results, and autograd is told."""
    monkeypatch.setattr(_host_arrays, "_loaded", lambda: None)
    test_arrays_and_tensors_on_one_list()
    test_other_orders_of_dimensions()
    test_autograd_knows_that_a_tensor_changed()
    test_memory_in_common_is_refused()
