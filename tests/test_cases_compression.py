"""Public bug reports, kinds C and M, where they are about compressed collectives.

What belongs to one hook, test_hooks*.py have at length: M2 (buckets are cut anew after the first
step: `follow_codecs`), M5 (other calls between the hooks' own: `among_other_calls`), M7 (one bad
value: `one_bad_bucket`), M10 (resumed runs: test_hooks_state.py).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycoll
from codec_model import all_reduced
from codec_reference import Kind
from helpers_cases import run_case, same
from helpers_hooks import Given, Run, gradients_of, ranks_of

CODECS = ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "uint8", "uint4", "sign"]


def everywhere(tensor: torch.Tensor, what: str) -> None:
    """C4: the same bytes on all ranks."""
    mine = tensor.reshape(-1).contiguous().view(torch.uint8)
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, mine)
    for theirs in all_ranks:
        same(theirs, mine, what)


def c3_averages_do_not_overflow(rank, w):
    for dtype in (torch.float16, torch.float32):
        value = torch.full((9000,), 40000.0, dtype=dtype)
        pycoll.all_reduce(value, "avg", codec="fp16")
        same(value, torch.full((9000,), 40000.0, dtype=dtype), dtype)
    # A finite float32 sum stays what it is, beyond float16's range too; what the tensor's own type
    # cannot hold is inf, as it is without a codec.
    total = torch.full((9000,), 40000.0)
    pycoll.all_reduce(total, codec="fp16")
    same(total, torch.full((9000,), w * 40000.0), "float32")
    total = torch.full((9000,), 40000.0, dtype=torch.float16)
    pycoll.all_reduce(total, codec="bf16")
    assert torch.isinf(total).all()


def c4_bits_are_the_same_everywhere(rank, w):
    for count in (5001, 100_000):
        for codec in CODECS:
            for dtype in (torch.float32, torch.bfloat16):
                generator = torch.Generator().manual_seed(count + rank)
                x = torch.randn(count, generator=generator).to(dtype)
                pycoll.all_reduce(x, "avg", codec=codec)
                everywhere(x, (codec, dtype, count))


def c7_special_values(rank, w):
    x = torch.full((9000,), 1e-40)
    x[:256] = torch.inf if rank == 0 else -torch.inf
    x[256:512] = -0.0
    pycoll.all_reduce(x, codec="bf16")
    assert torch.isnan(x[:256]).all()
    same(x[256:512], torch.full((256,), -0.0), "zeros with a sign")
    # bfloat16 has float32's exponents, and multiples of 2**-133: each code is right to half of it.
    assert (x[512:].double() - w * 1e-40).abs().max() <= (w + 1) * 2.0**-134
    for codec in ("int8", "int4"):  # a block without a value of 1e-30 is zeros
        x = torch.full((9000,), 1e-40)
        pycoll.all_reduce(x, codec=codec)
        same(x, torch.zeros(9000), codec)


def m5_what_is_no_gradient_is_exact(rank, w):
    group = dist.new_group(pg_options=pycoll.Options(codec="sign"))
    counts = torch.arange(9000) * (2**40 + rank)
    dist.all_reduce(counts, group=group)
    same(counts, torch.arange(9000) * (w * 2**40 + w * (w - 1) // 2), "int64")
    stats = torch.tensor([1.0 + rank, 0.25])
    dist.all_reduce(stats, group=group)
    same(stats, torch.tensor([w + w * (w - 1) / 2, w / 4]), "small")
    largest = torch.arange(9000.0) + rank
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    same(largest, torch.arange(9000.0) + w - 1, "MAX")
    flags = torch.arange(90_000) % w == rank
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    assert flags.all()


def m8_no_length_is_special(rank, w):
    group = dist.new_group(pg_options=pycoll.Options(min_bytes=0))
    for name in ("sign", "int4", "uint4"):
        for count in (1, 7, 8, 9, 1001):
            inputs = [np.linspace(-1, 1 + r, count, dtype=np.float32) for r in range(w)]
            x = torch.from_numpy(inputs[rank].copy())
            pycoll.all_reduce(x, "avg", group, codec=name)
            wanted = all_reduced(Kind(name), inputs, "avg")
            same(x, torch.from_numpy(wanted), (name, count))
            everywhere(x, (name, count))


@pytest.mark.parametrize(
    "case",
    [c3_averages_do_not_overflow, c4_bits_are_the_same_everywhere, c7_special_values],
)
def test_numerics(case):
    run_case(3, case)


def test_m5_what_is_no_gradient_is_exact():
    run_case(3, m5_what_is_no_gradient_is_exact)


@pytest.mark.parametrize("world_size", [3, 5])
def test_m8_no_length_is_special(world_size):
    run_case(world_size, m8_no_length_is_special)


def m1_dtypes_and_overflow(rank, w):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        module = Given({"large": (100, 70), "tiny": (100, 70)}, dtype)
        ddp = DistributedDataParallel(module)
        state = pycoll.CompressionState(None, "fp16", error_feedback=False)
        ddp.register_comm_hook(state, pycoll.compress_hook)
        gradients = {
            "large": torch.full((100, 70), 40000.0, dtype=dtype),
            "tiny": torch.full((100, 70), 1e-9, dtype=dtype),
        }
        ddp(gradients).backward()
        assert module.large.grad.dtype == dtype
        same(module.large.grad, torch.full((100, 70), 40000, dtype=dtype), dtype)
        # float64 is exempt, so it is exact; float16 has nothing between 0 and 6e-8.
        kept = 1e-9 if dtype is torch.float64 else 0.0
        same(module.tiny.grad, torch.full((100, 70), kept, dtype=dtype), dtype)


def m12_scalars_and_biases(rank, w):
    for codec in CODECS:
        module = Given({"weight": (100, 70), "bias": (70,), "temperature": ()})
        ddp = DistributedDataParallel(module)
        ddp.register_comm_hook(pycoll.CompressionState(None, codec), pycoll.compress_hook)
        for step in range(3):  # the buckets are cut anew after the first
            module.zero_grad()
            gradients = {
                "weight": torch.full((100, 70), 1.0 + step),
                "bias": torch.arange(70.0) + rank,
                "temperature": torch.tensor(3.0 * rank),
            }
            ddp(gradients).backward()
            same(module.bias.grad, torch.arange(70.0) + (w - 1) / 2, codec)
            same(module.temperature.grad, torch.tensor(3.0 * (w - 1) / 2), codec)
            # A constant block is what every codec has exactly, or to its last bit.
            wanted = torch.full((100, 70), 1.0 + step)
            assert torch.allclose(module.weight.grad, wanted, rtol=0.01, atol=0), (codec, step)


def m3_from_any_step(rank, w):
    """Also from the first one, after which DDP cuts its buckets anew."""
    for first in (0, 1, 2):
        power = pycoll.PowerSGD(rank=1, start_step=first, min_compression_rate=0)
        run = Run(power, error_feedback=False)
        for step in range(4):
            found = run.step(gradients_of(rank, step))
            given = [gradients_of(peer, step)["a"] for peer in range(w)]
            exact = torch.allclose(found["a"], sum(given) / w, rtol=1e-5, atol=1e-6)
            assert exact == (step < first), (first, step)
            for name, gradient in found.items():
                assert gradient.isfinite().all(), (first, step, name)
                everywhere(gradient, (first, step, name))


def m_in_turn(rank, w):
    m1_dtypes_and_overflow(rank, w)
    m3_from_any_step(rank, w)
    m12_scalars_and_biases(rank, w)


def test_m1_m3_m12_hooks():
    """M1, M3, M12. One group of processes: the first DDP of a process costs seconds of imports."""
    ranks_of(3, m_in_turn)
