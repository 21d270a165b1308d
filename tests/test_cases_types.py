"""Public bug reports, kind B: dtypes and reduce operations."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from helpers_cases import (
    TRANSPORTS,
    Guarded,
    all_words,
    error_of,
    finish,
    leaves_nothing,
    numbered,
    run_case,
    same,
    still_works,
    total,
)

over_each_transport = pytest.mark.parametrize("transport", TRANSPORTS)

ASKED = ["float16", "bfloat16", "float32", "float64"]
ASKED += ["int8", "uint8", "int16", "int32", "int64", "bool"]
OTHERS = ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"]
MOVED_ONLY = ["float8_e4m3fnuz", "float8_e5m2fnuz", "complex32"]
GLOO = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"]

# ---- B1 ----


def b1_moves(rank, w, dtypes):
    for name in dtypes:
        dtype = getattr(torch, name)
        parts = [numbered(r, (3, 5), dtype) for r in range(w)]
        none = torch.zeros((3, 5), dtype=torch.float32).to(dtype)
        root = w - 1
        one = Guarded(parts[rank])
        dist.broadcast(one.tensor, root)
        one.check(parts[root], ("broadcast", name))
        outputs = [Guarded(none) for _ in range(w)]
        dist.all_gather([o.tensor for o in outputs], parts[rank])
        for output, part in zip(outputs, parts, strict=True):
            output.check(part, ("all_gather", name))
        stacked = Guarded(torch.stack([none] * w))
        dist.all_gather_into_tensor(stacked.tensor.view(3 * w, 5), parts[rank])
        stacked.check(torch.stack(parts), ("all_gather_into_tensor", name))
        outputs = [Guarded(none) for _ in range(w)]
        dist.gather(parts[rank], [o.tensor for o in outputs] if rank == root else None, root)
        for output, part in zip(outputs, parts, strict=True):
            output.check(part if rank == root else none, ("gather", name))
        one = Guarded(none)
        dist.scatter(one.tensor, parts if rank == root else None, root)
        one.check(parts[rank], ("scatter", name))
        wholes = [numbered(r, (w * 2, 3), dtype, salt=1) for r in range(w)]
        one = Guarded(torch.zeros_like(wholes[0]))
        dist.all_to_all_single(one.tensor, wholes[rank])
        pieces = [whole[2 * rank : 2 * rank + 2] for whole in wholes]
        one.check(torch.cat(pieces), ("all_to_all_single", name))
        one = Guarded(none)
        sent = dist.isend(parts[rank], (rank + 1) % w, tag=4)
        dist.recv(one.tensor, (rank - 1) % w, tag=4)
        sent.wait()
        one.check(parts[(rank - 1) % w], ("recv", name))
        for r in range(w):
            same(parts[r], numbered(r, (3, 5), dtype), ("inputs", name))
    return "done"


def b1_sums(rank, w, dtypes, scatters=True):
    for name in dtypes:
        dtype = getattr(torch, name)
        wholes = [numbered(r, (w, 15), dtype) for r in range(w)]
        parts = [whole[0].clone() for whole in wholes]
        one = Guarded(parts[rank])
        dist.all_reduce(one.tensor)
        one.check(total(parts), ("all_reduce", name))
        one = Guarded(parts[rank])
        dist.reduce(one.tensor, w - 1)
        if rank == w - 1:
            one.check(total(parts), ("reduce", name))
        if not scatters:
            continue
        one = Guarded(torch.zeros_like(parts[0]))
        dist.reduce_scatter_tensor(one.tensor, wholes[rank].reshape(-1))
        one.check(total(wholes)[rank], ("reduce_scatter_tensor", name))
        one = Guarded(torch.zeros_like(parts[0]))
        dist.reduce_scatter(one.tensor, list(wholes[rank]))
        one.check(total(wholes)[rank], ("reduce_scatter", name))
    return "done"


def b1_refusals(rank, w, dtypes):
    for name in dtypes:
        one = numbered(rank, (4,), torch.float32).to(getattr(torch, name))
        texts = [
            error_of(lambda one=one: dist.group.WORLD.allreduce([one]).wait()),
            error_of(lambda one=one: dist.group.WORLD.reduce([one]).wait()),
        ]
        for text in texts:
            assert "reduce" in text.lower(), text
            assert str(getattr(torch, name)).split(".")[1] in text.lower() or any(
                word in text for word in ("Float8", "ComplexHalf")
            ), text
        still_works(rank, w)
    return "done"


@over_each_transport
def test_b1_every_dtype_in_every_collective(transport):
    """B1: all collectives x all dtypes; those that cannot be reduced are errors that say so."""
    run_case(3, b1_moves, [*ASKED, *OTHERS, *MOVED_ONLY], transport=transport)
    run_case(3, b1_sums, [*ASKED, *OTHERS], transport=transport)
    run_case(3, b1_refusals, MOVED_ONLY, transport=transport)


def test_b1_control_on_gloo():
    """B1: Gloo has these."""
    run_case(3, b1_moves, GLOO, backend="gloo")
    run_case(3, b1_sums, GLOO, False, backend="gloo")


# ---- B2, B3 ----


def b2_complex(rank, w):
    for dtype in (torch.complex64, torch.complex128):
        mine = torch.tensor([1 + 2j], dtype=dtype) * (rank + 1)
        dist.all_reduce(mine)
        same(mine, torch.tensor([1 + 2j], dtype=dtype) * (w * (w + 1) // 2), "all_reduce")
        parts = [numbered(r, (7,), dtype) * w for r in range(w)]
        one = parts[rank].clone()
        dist.all_reduce(one, ReduceOp.AVG)
        same(one, total(parts) / w, "AVG")
        base = torch.full((7, 2), 9, dtype=dtype)
        base[:, 0] = parts[rank]
        dist.all_reduce(base[:, 0])
        same(base[:, 0], total(parts), "strided")
        assert (base[:, 1] == 9).all()
        dist.broadcast(base[:, 0], 1)
        outputs = [torch.zeros(7, dtype=dtype) for _ in range(w)]
        dist.all_gather(outputs, parts[rank])
        for output, part in zip(outputs, parts, strict=True):
            same(output, part, "all_gather")
        wholes = [numbered(r, (w, 7), dtype) for r in range(w)]
        one = torch.zeros(7, dtype=dtype)
        dist.reduce_scatter_tensor(one, wholes[rank])
        same(one, total(wholes)[rank], "reduce_scatter")
    return "done"


def b2_conjugates(rank, w):
    """torch.distributed itself refuses conj() views. (A call on the process group goes through
    torch's dispatcher, which hands backends a copy of such a view; pycoll's own object gets it.)"""
    parts = [numbered(r, (7,), torch.complex64) for r in range(w)]
    text = error_of(lambda: dist.all_reduce(parts[rank].conj()))
    assert "resolve_conj" in text, text
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    memory = parts[rank].clone()
    lazy = memory.conj()
    assert lazy.is_conj()
    finish(backend.allreduce([lazy]))
    same(lazy.resolve_conj(), total(parts).conj().resolve_conj(), "all_reduce of conj()")
    same(memory, total(parts), "the memory below conj()")
    outputs = [torch.zeros(7, dtype=torch.complex64) for _ in range(w)]
    finish(backend.allgather([outputs], [parts[rank].conj()]))
    for output, part in zip(outputs, parts, strict=True):
        same(output, part.conj().resolve_conj(), "all_gather of conj()")
    still_works(rank, w)
    return "done"


def b2_ddp(rank, w):
    torch.manual_seed(5)
    module = torch.nn.Linear(2, 2, dtype=torch.cfloat)
    single = torch.nn.Linear(2, 2, dtype=torch.cfloat)
    single.load_state_dict(module.state_dict())
    parallel = torch.nn.parallel.DistributedDataParallel(module)
    inputs = [torch.randn(3, 2, dtype=torch.cfloat) for _ in range(w)]
    parallel(inputs[rank]).abs().sum().backward()
    (sum(single(x).abs().sum() for x in inputs) / w).backward()
    gradients = [p.grad for p in module.parameters()]
    for mine, reference in zip(gradients, single.parameters(), strict=True):
        torch.testing.assert_close(mine, reference.grad)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    everyone = [torch.zeros_like(flat) for _ in range(w)]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(one, flat) for one in everyone)
    return "done"


@over_each_transport
def test_b2_complex_numbers(transport):
    """B2: SUM, AVG and moves of complex tensors, strided and conjugated."""
    run_case(3, b2_complex, transport=transport)
    run_case(3, b2_conjugates, transport=transport)


# The first DDP of a process costs seconds of imports.
with_ddp = pytest.mark.parametrize(
    "transport", ["shm", pytest.param("tcp", marks=pytest.mark.full)]
)


@with_ddp
def test_b2_ddp_of_complex_weights(transport):
    """B2: gradients equal one process's, with the same bits on all ranks."""
    run_case(3, b2_ddp, transport=transport)


@pytest.mark.full
def test_b2_control_on_gloo():
    """B2: DDP of complex weights works on Gloo."""
    run_case(3, b2_ddp, backend="gloo")


def b3_refused(rank, w):
    tensor = numbered(rank, (4,), torch.complex64)
    kept = tensor.clone()
    world = dist.group.WORLD

    def direct(op):
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return lambda: world.allreduce([tensor], options).wait()

    def reduced(op):
        options = dist.ReduceOptions()
        options.reduceOp = op
        return lambda: world.reduce([tensor], options).wait()

    def coalesced(op):
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = op
        return lambda: world.allreduce_coalesced([tensor, tensor.clone()], options).wait()

    def scattered(op):
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        whole = numbered(rank, (w, 4), torch.complex64)
        return lambda: world._reduce_scatter_base(torch.zeros_like(tensor), whole, options).wait()

    with leaves_nothing():
        for name in ("MAX", "MIN", "PRODUCT", "BAND"):
            op = getattr(ReduceOp, name)
            through_dist = [lambda op=op: dist.all_reduce(tensor, op)]
            for call in [*through_dist, *(f(op) for f in (direct, reduced, coalesced, scattered))]:
                all_words(error_of(call), "complex", name)
                same(tensor, kept)
    still_works(rank, w)
    return "done"


@over_each_transport
def test_b3_no_order_and_no_product_of_complex_numbers(transport):
    """B3: through dist, on the group, coalesced; on every rank, and nothing is written."""
    run_case(2, b3_refused, transport=transport)


# ---- B5 ----

AVERAGED = [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.int32, torch.int8]


def average(parts):
    """In fp64 and rounded once; of integers: towards zero."""
    if parts[0].is_floating_point():
        return (sum(part.double() for part in parts) / len(parts)).to(parts[0].dtype)
    whole = sum(part.long() for part in parts)
    return torch.div(whole, len(parts), rounding_mode="trunc").to(parts[0].dtype)


def b5_average(rank, w, dtypes=AVERAGED, subgroups=True, forms=True):
    groups = [(None, list(range(w)))]
    if subgroups:
        pair, rest = [0, w - 1], list(range(1, w))
        groups += [(dist.new_group(pair), pair), (dist.new_group(rest), rest)]
    for group, members in groups:
        if rank not in members:
            continue
        size, place = len(members), members.index(rank)
        for dtype in dtypes:
            # Signed, and no multiple of the number of ranks.
            wholes = [numbered(r, (size, 7), dtype) * 2 - 9 for r in members]
            parts = [whole[0].clone() for whole in wholes]
            what = (dtype, members)
            one = parts[place].clone()
            dist.all_reduce(one, ReduceOp.AVG, group=group)
            same(one, average(parts), ("all_reduce", *what))
            one = parts[place].clone()
            dist.reduce(one, members[-1], ReduceOp.AVG, group=group)
            same(one, average(parts) if rank == members[-1] else parts[place], ("reduce", *what))
            if not forms:
                continue
            one = torch.zeros(7).to(dtype)
            dist.reduce_scatter_tensor(one, wholes[place], ReduceOp.AVG, group=group)
            same(one, average(wholes)[place], ("reduce_scatter_tensor", *what))
            one = torch.zeros(7).to(dtype)
            dist.reduce_scatter(one, list(wholes[place]), ReduceOp.AVG, group=group)
            same(one, average(wholes)[place], ("reduce_scatter", *what))
            both = [parts[place].clone(), wholes[place].clone()]
            options = dist.AllreduceCoalescedOptions()
            options.reduceOp = ReduceOp.AVG
            finish((group or dist.group.WORLD).allreduce_coalesced(both, options))
            same(both[0], average(parts), ("coalesced", *what))
            same(both[1], average(wholes), ("coalesced", *what))
    parts = [torch.tensor([1, -2]) * (r + 1) for r in range(w)]
    one = parts[rank].clone()
    dist.all_reduce(one, ReduceOp.AVG)
    same(one, average(parts), "int64")
    one = torch.tensor([1, -2]) * (rank == 0)
    dist.all_reduce(one, ReduceOp.AVG)
    same(one, torch.zeros(2, dtype=torch.int64), "int64, towards zero")
    return "done"


@over_each_transport
def test_b5_average_divides_by_the_size_of_the_group(transport):
    """B5 [choice]: all forms agree; integers are divided towards zero."""
    run_case(3, b5_average, transport=transport)


def b5_on_gloo(rank, w):
    for dtype in (torch.float32, torch.float64):
        parts = [numbered(r, (7,), dtype) for r in range(w)]
        one = parts[rank].clone()
        dist.all_reduce(one, ReduceOp.AVG)
        torch.testing.assert_close(one, average(parts))
    return error_of(lambda: dist.all_reduce(torch.tensor([1, -2]), ReduceOp.AVG))


def test_b5_control_on_gloo():
    """B5: floats are the same there; integers are refused."""
    run_case(3, b5_on_gloo, backend="gloo")


# ---- B6, B7, B9 ----

BITWISE = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def b6_bitwise(rank, w):
    for name, function in BITWISE.items():
        op = getattr(ReduceOp, name)
        for dtype in ("int8", "int16", "int32", "int64", "uint8", "bool"):
            parts = [numbered(r, (77,), getattr(torch, dtype), salt=r) for r in range(w)]
            expected = parts[0]
            for part in parts[1:]:
                expected = function(expected, part)
            one = parts[rank].clone()
            dist.all_reduce(one, op)
            same(one, expected, (name, dtype))
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            one = numbered(rank, (7,), getattr(torch, dtype))
            kept = one.clone()
            for call in (
                lambda one=one, op=op: dist.all_reduce(one, op),
                lambda one=one, op=op: dist.all_reduce(one, op, async_op=True),
                lambda one=one, op=op: dist.reduce(one, 0, op),
                lambda one=one, op=op: dist.reduce_scatter(one.clone(), [one] * w, op),
            ):
                all_words(error_of(call, RuntimeError), name, "non-integral")
            same(one, kept)
    still_works(rank, w)
    return "done"


def b7_overflow(rank, w):
    for dtype, value, expected in (
        (torch.int8, 100, 44),
        (torch.uint8, 200, 88),
        (torch.int16, 30_000, 24_464),
        (torch.int32, 2_000_000_000, 1_705_032_704),
    ):
        one = torch.full((33,), value, dtype=dtype)
        dist.all_reduce(one)
        same(one, torch.full((33,), expected, dtype=dtype), dtype)
    one = torch.full((33,), -1, dtype=torch.int8)
    dist.all_reduce(one, ReduceOp.PRODUCT)
    same(one, torch.full((33,), -1, dtype=torch.int8), "PRODUCT of -1")
    one = torch.full((5,), 2**62, dtype=torch.int64)
    dist.all_reduce(one)
    same(one, torch.full((5,), -(2**62), dtype=torch.int64), "int64")
    one = torch.full((5,), 7 + rank, dtype=torch.int8)
    dist.all_reduce(one, ReduceOp.PRODUCT)
    same(one, torch.full((5,), 7 * 8 * 9 - 512, dtype=torch.int8), "PRODUCT wraps")
    return "done"


def b9_others_keep_theirs(rank, w):
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for n in (8, 1000, 70_000):
            for root in (0, w - 1):
                for asynchronous in (False, True):
                    parts = [numbered(r, (n,), dtype) for r in range(w)]
                    one = Guarded(parts[rank])
                    finish(dist.reduce(one.tensor, root, async_op=asynchronous))
                    expected = total(parts) if rank == root else parts[rank]
                    one.check(expected, (dtype, n, root, asynchronous))
    one = torch.arange(8) + rank
    dist.reduce(one, 0)
    same(one, torch.arange(8) * w + w * (w - 1) // 2 if rank == 0 else torch.arange(8) + rank)
    return "done"


@over_each_transport
def test_b6_bitwise_operations(transport):
    """B6: exact on integers and bool; on floats an error that names the operation."""
    run_case(2, b6_bitwise, transport=transport)


@over_each_transport
def test_b7_integers_wrap(transport):
    """B7: two's complement; nothing saturates."""
    run_case(3, b7_overflow, transport=transport)


def test_b7_control_on_gloo():
    """B7: as on Gloo."""
    run_case(3, b7_on_gloo, backend="gloo")


def b7_on_gloo(rank, w):
    for dtype, value, expected in ((torch.int8, 100, 44), (torch.uint8, 200, 88)):
        one = torch.full((33,), value, dtype=dtype)
        dist.all_reduce(one)
        same(one, torch.full((33,), expected, dtype=dtype), dtype)


@over_each_transport
def test_b9_reduce_writes_at_the_root_only(transport):
    """B9 [choice, stronger than Gloo]: the other ranks' tensors keep every bit."""
    run_case(3, b9_others_keep_theirs, transport=transport)


# Right for any number of ranks from 2 on, with these arguments: run over mixed transports, too.
ANY_WORLD = [
    (b1_moves, ([*ASKED, *OTHERS, *MOVED_ONLY],)),
    (b1_sums, ([*ASKED, *OTHERS],)),
    (b1_refusals, (MOVED_ONLY,)),
    (b2_complex, ()),
    (b2_conjugates, ()),
    (b3_refused, ()),
    (b5_average, ()),
    (b6_bitwise, ()),
    (b9_others_keep_theirs, ()),
]
