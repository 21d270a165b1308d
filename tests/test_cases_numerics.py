"""Public bug reports, kind C: rounding, overflow, determinism."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from helpers_cases import TRANSPORTS, as_bytes, finish, run_case, same

over_each_transport = pytest.mark.parametrize("transport", TRANSPORTS)

ALGORITHMS = ["auto", "ring", "tree", "recursive_doubling", "halving_doubling"]


def groups_with(algorithms, sizes):
    """Groups of the first ranks; the environment is read when a group is made."""
    groups = []
    for algorithm in algorithms:
        os.environ["PYCOLL_ALGO"] = "" if algorithm == "auto" else f"all_reduce={algorithm}"
        groups += [(algorithm, size, dist.new_group(range(size))) for size in sizes]
    return groups


# ---- C2 ----


def neighbours(value: torch.Tensor) -> torch.Tensor:
    """The distance to the next number of the dtype."""
    bits = value.abs().view(torch.int16)
    return ((bits + 1).view(value.dtype).double() - bits.view(value.dtype).double()).abs()


def c2_bfloat16_sum(rank, w):
    for algorithm, size, group in groups_with(ALGORITHMS, [w]):
        first = torch.full((512,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
        dist.all_reduce(first, group=group)
        same(first, torch.full((512,), 262.0, dtype=torch.bfloat16), algorithm)
        turns = torch.where(torch.arange(512) % size == rank, 256.0, 1.0).bfloat16()
        dist.all_reduce(turns, group=group)
        same(turns, torch.full((512,), 262.0, dtype=torch.bfloat16), algorithm)
        generator = [torch.Generator().manual_seed(r) for r in range(w)]
        for dtype in (torch.bfloat16, torch.float16):
            parts = [(torch.randn(5000, generator=g) * 10).to(dtype) for g in generator]
            reference = torch.stack([part.double() for part in parts]).sum(0)
            one = parts[rank].clone()
            dist.all_reduce(one, group=group)
            off = (one.double() - reference).abs() / neighbours(reference.to(dtype))
            # Half a unit from the one rounding at the end; float32 adds next to nothing, but a
            # sum near 0 of large terms.
            slack = 7 * 2.0**-24 * torch.stack([p.double().abs() for p in parts]).sum(0)
            assert (off <= 0.5 + slack / neighbours(reference.to(dtype))).all(), algorithm
    return "done"


@over_each_transport
def test_c2_bfloat16_is_summed_in_float32(transport):
    """C2: 256 and six ones are 262, in whatever order they travel."""
    run_case(7, c2_bfloat16_sum, transport=transport)


# ---- C3 ----


def c3_float16_overflow(rank, w):
    for algorithm, _, group in groups_with(ALGORITHMS, [w]):
        for asynchronous in (False, True):
            one = torch.full((9,), 40000.0, dtype=torch.float16)
            finish(dist.all_reduce(one, group=group, async_op=asynchronous))
            assert torch.isinf(one).all(), algorithm
            one = torch.full((9,), 40000.0, dtype=torch.float16)
            finish(dist.all_reduce(one, ReduceOp.AVG, group=group, async_op=asynchronous))
            same(one, torch.full((9,), 40000.0, dtype=torch.float16), algorithm)
    one = torch.zeros(9, dtype=torch.float16)
    whole = torch.full((w, 9), 40000.0, dtype=torch.float16)
    dist.reduce_scatter_tensor(one, whole, ReduceOp.AVG)
    same(one, whole[0], "reduce_scatter")
    one = torch.full((9,), 40000.0, dtype=torch.float16)
    dist.reduce(one, 0, ReduceOp.AVG)
    same(one, whole[0], "reduce")
    return "done"


def c3_ddp_hook(rank, w):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    module = torch.nn.Linear(1, 1, bias=False)
    parallel = torch.nn.parallel.DistributedDataParallel(module)
    parallel.register_comm_hook(None, fp16_compress_hook)
    parallel(torch.tensor([[40000.0]])).sum().backward()
    assert module.weight.grad.item() == 40000.0
    return "done"


@over_each_transport
def test_c3_float16_sum_overflows_and_average_does_not(transport):
    """C3: SUM of 40000 is inf, AVG is 40000."""
    run_case(3, c3_float16_overflow, transport=transport)


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.full)])
def test_c3_float16_hook_of_ddp(transport):
    """C3: torch's hook gives 40000. (The first DDP of a process costs seconds of imports.)"""
    run_case(3, c3_ddp_hook, transport=transport)


@pytest.mark.full
def test_c3_control_on_gloo():
    """C3: the hook divides first, so it is right on Gloo."""
    run_case(3, c3_ddp_hook, backend="gloo")


# ---- C4, C6 ----

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TYPES = [*FLOATS, torch.complex64, torch.int8, torch.int64, torch.uint8, torch.bool]


def random_values(seed, n, dtype):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(n, 2, generator=generator).view(torch.complex64).reshape(-1)
    scale = 10.0 ** torch.randint(-3, 4, (n,), generator=generator).float()
    values = torch.randn(n, generator=generator) * scale
    if not dtype.is_floating_point:
        values = values * 10
    return values.clamp(-100, 100).to(dtype)


def c4_equal_on_all_ranks(rank, w, lengths):
    for algorithm, size, group in groups_with(["auto", "ring", "tree"], [3, 5, 7]):
        if rank >= size:
            continue
        for n in lengths:
            for dtype in TYPES if n == lengths[0] else FLOATS:
                for op in (ReduceOp.SUM, ReduceOp.AVG):
                    one = random_values(rank, n, dtype)
                    dist.all_reduce(one, op, group=group)
                    outputs = [torch.zeros_like(one) for _ in range(size)]
                    dist.all_gather(outputs, one, group=group)
                    mine = as_bytes(one)
                    what = (algorithm, size, n, dtype, op)
                    assert all(as_bytes(output) == mine for output in outputs), what
    dist.barrier()
    return "done"


@over_each_transport
def test_c4_all_ranks_have_the_same_bits(transport):
    """C4: groups of 3, 5 and 7 ranks, three algorithms, all dtypes."""
    run_case(7, c4_equal_on_all_ranks, [1001, 30_011], transport=transport, timeout=90)


@pytest.mark.full
@over_each_transport
def test_c4_all_ranks_have_the_same_bits_of_long_vectors(transport):
    """C4: up to a million elements."""
    lengths = [1001, 100_003, 1_000_000]
    options = {"transport": transport, "timeout": 280, "group_timeout": 120}
    run_case(7, c4_equal_on_all_ranks, lengths, **options)


def c6_repeats(rank, w, repeats):
    rng = random.Random(rank)
    seen = set()
    groups = groups_with(["auto", "ring", "tree", "recursive_doubling"], [w])
    for algorithm, _, group in groups:
        results = set()
        for i in range(repeats):
            one = random_values(rank, 1009, torch.float32)
            half = random_values(rank, 333, torch.bfloat16)
            time.sleep(rng.uniform(0, 0.005))
            works = [dist.all_reduce(t, group=group, async_op=i % 2 == 1) for t in (one, half)]
            for work in works:
                finish(work)
            results.add(as_bytes(one) + as_bytes(half))
        assert len(results) == 1, f"{algorithm}: {len(results)} different results"
        seen |= results
    return len(seen)


@over_each_transport
def test_c6_the_same_bits_from_run_to_run(transport):
    """C6: 50 repeats with ranks that arrive at random times."""
    results = run_case(5, c6_repeats, 50, transport=transport)
    again = run_case(5, c6_repeats, 2, transport=transport)
    assert len({result.value for result in [*results, *again]}) == 1


# ---- C7 ----


def c7_special_values(rank, w, flush, algorithms=("auto", "ring", "tree"), kinds=(False, True)):
    """`flush`: the caller's thread flushes subnormal numbers to zero; reductions do not."""
    expected = {
        torch.float32: [torch.tensor(1e-40) * w, torch.tensor(1e-45) * w],
        torch.float16: [torch.tensor(6e-8, dtype=torch.float16).double() * w],
    }
    infinities = [float("inf"), float("-inf"), 1.0]
    for algorithm, _, group in groups_with(algorithms, [w]):
        for asynchronous in kinds:
            for dtype, sums in expected.items():
                values = [1e-40, 1e-45] if dtype == torch.float32 else [6e-8]
                one = torch.tensor(values, dtype=dtype).repeat(20)
                kept = one.clone()
                assert torch.set_flush_denormal(flush) or not flush
                finish(dist.all_reduce(one, group=group, async_op=asynchronous))
                largest = kept.clone()
                finish(dist.all_reduce(largest, ReduceOp.MAX, group=group, async_op=asynchronous))
                average = kept.clone()
                finish(dist.all_reduce(average, ReduceOp.AVG, group=group, async_op=asynchronous))
                torch.set_flush_denormal(False)
                same(one, torch.stack([s.to(dtype) for s in sums]).repeat(20), algorithm)
                same(largest, kept, (algorithm, "MAX"))
                same(average, kept, (algorithm, "AVG"))
            one = torch.full((40,), infinities[rank % 3])
            finish(dist.all_reduce(one, group=group, async_op=asynchronous))
            assert torch.isnan(one).all()
            one = torch.full((40,), -0.0)
            finish(dist.all_reduce(one, group=group, async_op=asynchronous))
            same(one, torch.full((40,), -0.0), (algorithm, "-0.0"))
            mixed = torch.where(torch.arange(40) % w == rank, 0.0, -0.0)
            finish(dist.all_reduce(mixed, group=group, async_op=asynchronous))
            same(mixed, torch.zeros(40), (algorithm, "0 and -0"))
    return "done"


@over_each_transport
@pytest.mark.parametrize("flush", [False, True])
def test_c7_subnormals_infinities_and_zeros(transport, flush):
    """C7: kept as they are, also when the caller's thread flushes subnormal numbers."""
    run_case(3, c7_special_values, flush, transport=transport)


def test_c7_control_on_gloo():
    """C7: Gloo keeps them without flushing."""
    run_case(3, c7_special_values_on_gloo, backend="gloo")


def c7_special_values_on_gloo(rank, w):
    one = torch.tensor([1e-40, 1e-45]).repeat(20)
    dist.all_reduce(one)
    same(one, torch.stack([torch.tensor(1e-40) * w, torch.tensor(1e-45) * w]).repeat(20))
    one = torch.full((40,), -0.0)
    dist.all_reduce(one)
    same(one, torch.full((40,), -0.0))


# Right for any number of ranks from 2 on, with these arguments: run over mixed transports, too.
ANY_WORLD = [
    (c3_float16_overflow, ()),
    (c6_repeats, (10,)),
    (c7_special_values, (False,)),
    (c7_special_values, (True,)),
]
