"""What ranks do with GPU tensors over codecs, as helpers_gpu.py: against the same calls on CPU
tensors of the same group, byte for byte."""

from __future__ import annotations

import pytest
import torch

import pycoll
from codec_model import values_of
from helpers_gpu import DONE, same


def tensor_of(rank, n, dtype="float32", seed=0):
    return torch.from_numpy(values_of(rank, n, seed=seed)).to(getattr(torch, dtype))


def twice(device, tensor, call):
    """The call on a GPU tensor and on a CPU tensor: the same bytes."""
    here, cpu = tensor.to(device), tensor.clone()
    call(here)
    call(cpu)
    same(here, cpu)
    return cpu


def over_codecs(rank, w, device):
    for step, (n, name, op, dtype) in enumerate(
        [
            (10_000, "int8", "sum", "float32"),
            (100, "int4", "avg", "float32"),  # too small: exact
            (70_000, "int4", "avg", "bfloat16"),
            (9000, pycoll.Int8(stochastic=True, seed=2), "sum", "float16"),
        ]
    ):
        twice(
            device,
            tensor_of(rank, n, dtype),
            lambda t, op=op, name=name, step=step: pycoll.all_reduce(t, op, codec=name, step=step),
        )
    # Strided: dense copies travel. The number of the call is the step.
    wide = tensor_of(rank, 20_000)
    here, cpu = wide.to(device), wide.clone()
    for tensor in (here, cpu):
        work = pycoll.all_reduce(tensor[::2], codec="ternary", async_op=True)
        work.wait()
    same(here, cpu)
    residuals = [torch.full((9000,), 0.25), torch.full((9000,), -0.5)]
    on_device = [r.to(device) for r in residuals]
    x = tensor_of(rank, 9000)
    here = x.to(device)
    for tensor, (first, second) in ((here, on_device), (x, residuals)):
        pycoll.all_reduce(tensor, "avg", codec="uint4", residual=first, sum_residual=second)
    same(here, x)
    for ours, theirs in zip(on_device, residuals, strict=True):
        same(ours, theirs)
    with pytest.raises(pycoll.UnsupportedError, match="'auto' measures what pays for CPU"):
        pycoll.all_reduce(here, codec="auto")
    with pytest.raises(RuntimeError, match=r"a dense float32 tensor .* on "):
        pycoll.all_reduce(here, codec="int8", residual=residuals[0])
    return DONE


def replayed_over_codecs(rank, w, device, capture):
    """A captured call has its step, and other calls on the group among its replays."""
    n = 20_000
    codec = pycoll.Int4(stochastic=True, seed=4)
    source, total = torch.zeros(n, device=device), torch.zeros(n, device=device)
    pycoll.all_reduce(torch.ones(n, device=device), codec="int8")  # the group has met
    torch.accelerator.synchronize()

    def calls():
        total.copy_(source)
        pycoll.all_reduce(total, codec=codec, step=3)

    replay = capture(calls)
    # More scratch than the graph's.
    twice(device, tensor_of(rank, 5 * n), lambda t: pycoll.all_reduce(t, codec="fp16"))
    for seed in range(4):
        x = tensor_of(rank, n, seed=seed)
        source.copy_(x)
        replay()
        torch.accelerator.synchronize()
        twice(
            device, tensor_of(rank, 9000, seed=seed), lambda t: pycoll.all_reduce(t, codec="int8")
        )
        pycoll.all_reduce(x, codec=codec, step=3)
        same(total, x)
    return DONE
