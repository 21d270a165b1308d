"""torch.distributed over pycoll: every collective, in every form that torch has of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from pool import torch_ranks

MOVABLE = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
]
MOVABLE += ["uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128"]
MOVABLE += [
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "complex32",
]


def values(rank: int, shape, dtype: str = "float32", salt: int = 0) -> torch.Tensor:
    """Small integers, different at every position and rank."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    whole = torch.randint(0, 5, tuple(shape), generator=generator)
    return (whole + rank).to(torch.float32).to(getattr(torch, dtype))


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check(tensor, expected):
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def finish(work, asynchronous):
    assert (work is not None) == asynchronous
    if work is not None:
        work.wait()


# ---- Rooted ones and all_to_all, where Gloo serves as a control ----


def rooted(rank, w, dtypes):
    for root in range(w):
        for dtype in dtypes:
            parts = [values(r, (3, 4), dtype, root) for r in range(w)]
            for asynchronous in (False, True):
                mine = parts[rank].clone()
                outputs = [torch.zeros_like(mine) for _ in range(w)] if rank == root else None
                dist_finish(dist.gather(mine, outputs, dst=root, async_op=asynchronous))
                if rank == root:
                    for output, part in zip(outputs, parts, strict=True):
                        assert as_bytes(output) == as_bytes(part), ("gather", dtype)
                assert as_bytes(mine) == as_bytes(parts[rank])

                taken = torch.zeros_like(mine)
                inputs = [p.clone() for p in parts] if rank == root else None
                dist_finish(dist.scatter(taken, inputs, src=root, async_op=asynchronous))
                assert as_bytes(taken) == as_bytes(parts[rank]), ("scatter", dtype)
                if rank == root:
                    assert [as_bytes(p) for p in inputs] == [as_bytes(p) for p in parts]
        for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PRODUCT):
            for n in (0, 1, 5, 1009):
                parts = torch.stack([values(r, (n,), "float64", n) for r in range(w)])
                expected = {
                    "SUM": parts.sum(0),
                    "MAX": parts.amax(0),
                    "PRODUCT": parts.prod(0),
                }
                mine = parts[rank].clone()
                dist.reduce(mine, root, op=op)
                if rank == root:
                    check(mine, expected[str(op).rsplit(".", 1)[-1]])
    return "done"


def dist_finish(work):
    if work is not None:
        work.wait()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_rooted_collectives(world_size):
    results = torch_ranks(world_size, rooted, MOVABLE, timeout=60)
    assert [result.value for result in results] == ["done"] * world_size


def test_the_same_tests_pass_on_gloo():
    results = torch_ranks(3, rooted, ["float32", "int64", "uint8"], backend="gloo", timeout=60)
    assert [result.value for result in results] == ["done"] * 3


def splits(rank, w, seed):
    """rows[s][r]: what rank s sends rank r; zero, one and several rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, (w, w), generator=generator).tolist()


def all_to_alls(rank, w, lists=True):
    for dtype in ("float32", "int64", "bfloat16") if lists else ("float32", "int64"):
        for columns in ((), (3,), (2, 2)):
            source = values(rank, (2 * w, *columns), dtype)
            before = source.clone()
            output = torch.zeros_like(source)
            dist.all_to_all_single(output, source)
            parts = [values(s, (2 * w, *columns), dtype)[2 * rank : 2 * rank + 2] for s in range(w)]
            check(output, torch.cat(parts))
            check(source, before)
            for seed in range(3):
                rows = splits(rank, w, seed)
                sent = [sum(rows[s]) for s in range(w)]
                sources = [values(s, (sent[s], *columns), dtype, seed) for s in range(w)]
                taken = [rows[s][rank] for s in range(w)]
                output = torch.zeros((sum(taken), *columns), dtype=sources[0].dtype)
                work = dist.all_to_all_single(
                    output, sources[rank], taken, rows[rank], async_op=seed == 1
                )
                dist_finish(work)
                pieces = [sources[s].split(rows[s])[rank] for s in range(w)]
                check(output, torch.cat(pieces))
                if not lists:
                    continue
                outputs = [torch.zeros_like(piece) for piece in pieces]
                dist.all_to_all(outputs, [p.clone() for p in sources[rank].split(rows[rank])])
                for one, piece in zip(outputs, pieces, strict=True):
                    check(one, piece)
    return "done"


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_to_all(world_size):
    results = torch_ranks(world_size, all_to_alls, timeout=60)
    assert [result.value for result in results] == ["done"] * world_size


def test_all_to_all_single_on_gloo():
    assert [r.value for r in torch_ranks(3, all_to_alls, False, backend="gloo")] == ["done"] * 3


# ---- Different lengths ----


def uneven(rank, w):
    lengths = [(3 * r + 2) % 7 * 50 for r in range(w)]  # one of them may be 0
    for dtype in ("float32", "bfloat16", "uint16"):
        for asynchronous in (False, True):
            parts = [values(r, (lengths[r], 2), dtype) for r in range(w)]
            outputs = [torch.zeros_like(part) for part in parts]
            finish(
                dist.all_gather(outputs, parts[rank], async_op=asynchronous),
                asynchronous,
            )
            for output, part in zip(outputs, parts, strict=True):
                assert as_bytes(output) == as_bytes(part)
            if dtype == "uint16":
                continue
            everyone = [
                [values(s, (n, 2), dtype, r) for r, n in enumerate(lengths)] for s in range(w)
            ]
            output = torch.zeros_like(parts[rank])
            finish(
                dist.reduce_scatter(output, everyone[rank], async_op=asynchronous),
                asynchronous,
            )
            check(
                output,
                sum(everyone[s][rank].double() for s in range(w)).to(output.dtype),
            )
    return "done"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_all_gather_and_reduce_scatter_of_different_lengths(world_size):
    results = torch_ranks(world_size, uneven, timeout=60)
    assert [result.value for result in results] == ["done"] * world_size


# ---- The ways to stack ----


def stacked(rank, w):
    for shape in ((2, 4), (4,), (1,), (0, 3), ()):
        mine = values(rank, shape)
        parts = torch.stack([values(r, shape) for r in range(w)])
        layouts = [(w, *shape), (parts.numel(),)]
        if shape:
            layouts.append((w * shape[0], *shape[1:]))
        for layout in layouts:
            output = torch.full(layout, -1.0)
            dist.all_gather_into_tensor(output, mine)
            check(output, parts.reshape(layout))
    for wrong in (torch.zeros(w + 1, 2), torch.zeros(w, 2, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match=r"expected|must be the same"):
            dist.all_gather_into_tensor(wrong, torch.zeros(2))
    for output, source in (
        (torch.tensor(0.0), torch.zeros(w)),
        (torch.tensor(0.0), torch.tensor(0.0)),
    ):
        with pytest.raises(RuntimeError, match="dim"):
            dist.reduce_scatter_tensor(output, source)
    dist.barrier()  # the group lives
    return "done"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_gather_into_stacked_flat_and_concatenated(world_size):
    assert [r.value for r in torch_ranks(world_size, stacked)] == ["done"] * world_size


# ---- Reduce operations ----


def reductions(rank, w):
    group = dist.group.WORLD
    for dtype, factor in (
        ("float32", 0.5),
        ("float64", 3.0),
        ("bfloat16", 2.0),
        ("float16", 0.25),
    ):
        for given in (factor, torch.tensor([factor])):
            op = dist._make_nccl_premul_sum(given)
            parts = [values(r, (2 * w, 3), dtype) for r in range(w)]
            expected = sum(part.double() * factor for part in parts).to(parts[0].dtype)
            mine = parts[rank].clone()
            dist.all_reduce(mine, op=op)
            check(mine, expected)
            output = torch.zeros(2, 3, dtype=mine.dtype)
            dist.reduce_scatter_tensor(output, parts[rank], op=op)
            check(output, expected[2 * rank : 2 * rank + 2])
    for dtype in ("int8", "int32", "int64"):  # toward zero
        mine = torch.tensor([1, -2, 7 * rank, -7 * rank, 5]).to(getattr(torch, dtype))
        total = torch.stack([torch.tensor([1, -2, 7 * r, -7 * r, 5]) for r in range(w)]).sum(0)
        dist.all_reduce(mine, op=ReduceOp.AVG)
        check(mine.long(), torch.div(total, w, rounding_mode="trunc"))
    flag = torch.tensor([True, rank == 0, False])
    dist.all_reduce(flag)
    assert flag.view(torch.uint8).tolist() == [1, 1, 0]
    whole = torch.tensor([1 << rank, 3], dtype=torch.int32)
    dist.all_reduce(whole, op=ReduceOp.BOR)
    assert whole.tolist() == [(1 << w) - 1, 3]
    for dtype in ("complex64", "complex128"):
        mine = torch.tensor([1 + 2j, 3 - 1j], dtype=getattr(torch, dtype)) * (rank + 1)
        expected = torch.tensor([1 + 2j, 3 - 1j], dtype=mine.dtype) * (w * (w + 1) // 2)
        for start in (dist.all_reduce, lambda t: group.allreduce([t]).wait()):
            tensor = mine.clone()
            start(tensor)
            check(tensor, expected)
    refused = {}
    for name, tensor, op in (
        ("complex", torch.ones(3, dtype=torch.complex64), ReduceOp.MAX),
        ("complex", torch.ones(3, dtype=torch.complex64), ReduceOp.BAND),
        ("complex", torch.ones(3, dtype=torch.complex128), ReduceOp.PRODUCT),
        ("non-integral", torch.ones(3), ReduceOp.BAND),
        ("non-integral", torch.ones(3, dtype=torch.bfloat16), ReduceOp.BXOR),
        ("float8_e4m3fnuz", torch.ones(3).to(torch.float8_e4m3fnuz), ReduceOp.SUM),
    ):
        options = dist.AllreduceOptions()
        options.reduceOp = op
        coalesced = dist.AllreduceCoalescedOptions()
        coalesced.reduceOp = op
        for start in (
            lambda t=tensor, o=options: group.allreduce([t], o),
            lambda t=tensor, o=coalesced: group.allreduce_coalesced([t], o),
        ):
            with pytest.raises(RuntimeError, match=name) as raised:
                start()
            refused[name, str(op)] = str(raised.value)
    dist.barrier()
    return {key: text for key, text in refused.items() if key[0] != "float8_e4m3fnuz"}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduce_operations(world_size):
    for result in torch_ranks(world_size, reductions, timeout=60):
        for (_, op), text in result.value.items():
            assert op.rsplit(".", 1)[-1].lower() in text.lower()


# ---- What is not written ----


def untouched(rank, w):
    for dtype in ("float32", "bfloat16", "int64"):
        for root in range(w):
            base = torch.full((8 * w + 4,), 77).to(getattr(torch, dtype))
            mine = base[2:-2]
            mine.copy_(values(rank, mine.shape, dtype))
            before = base.clone()
            dist.reduce(mine, root)
            if rank != root:
                assert as_bytes(base) == as_bytes(before), "reduce wrote on a rank that is not dst"
            else:
                assert (base[:2] == 77).all()
                assert (base[-2:] == 77).all()
        outputs = [torch.zeros(8 * w).to(mine.dtype) for _ in range(w)]
        mine.copy_(values(rank, mine.shape, dtype))
        before = base.clone()
        dist.all_gather(outputs, mine)
        dist.reduce_scatter_tensor(torch.zeros(8).to(mine.dtype), mine)
        dist.all_to_all_single(torch.zeros_like(mine), mine)
        dist.all_to_all(list(torch.zeros_like(mine).chunk(w)), list(mine.chunk(w)))
        dist.gather(mine, outputs if rank == 0 else None)
        assert as_bytes(base) == as_bytes(before)
    return "done"


@pytest.mark.parametrize("world_size", [2, 3])
def test_inputs_and_other_ranks_tensors_stay_as_they_are(world_size):
    assert [r.value for r in torch_ranks(world_size, untouched)] == ["done"] * world_size


# ---- Profiler ----


def profiled(rank, w):
    one = torch.ones(w, 2)
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(one)
        dist.reduce(one, 0)
        dist.all_gather([torch.ones(w, 2) for _ in range(w)], one)
        dist.all_gather_into_tensor(torch.ones(w * w, 2), one)
        dist.reduce_scatter_tensor(torch.ones(1, 2), one)
        dist.gather(one, [torch.ones(w, 2) for _ in range(w)] if rank == 0 else None)
        dist.scatter(one, [torch.ones(w, 2) for _ in range(w)] if rank == 0 else None)
        dist.all_to_all_single(torch.ones(w, 2), one)
        (dist.send if rank == 0 else dist.recv)(one, 1 - rank)
        dist.barrier()
    events = [e for e in profile.function_events if e.name.startswith("pycoll:")]
    assert all(event.is_async for event in events)
    return [(event.name, event.input_shapes) for event in events]


def test_the_profiler_shows_titles_and_shapes():
    for rank, result in enumerate(torch_ranks(2, profiled)):
        shape = [2, 2]
        scattered = [shape, shape] if rank == 0 else []
        assert sorted(result.value) == sorted(
            [
                ("pycoll:all_reduce", [shape]),
                ("pycoll:reduce", [shape]),
                ("pycoll:all_gather", [shape]),
                ("pycoll:all_gather_into_tensor", [shape]),
                ("pycoll:reduce_scatter_tensor", [shape]),
                ("pycoll:gather", [shape]),
                ("pycoll:scatter", scattered),
                ("pycoll:all_to_all", [shape]),
                ("pycoll:send" if rank == 0 else "pycoll:recv", [shape]),
                ("pycoll:barrier", []),
            ]
        )
