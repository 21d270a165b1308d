"""Public bug reports, kind A: layouts, shapes and sizes."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from helpers_cases import (
    SMALL_SLICES,
    TRANSPORTS,
    Guarded,
    all_words,
    error_of,
    finish,
    numbered,
    on_own_group,
    run_case,
    same,
    still_works,
    total,
)

over_each_transport = pytest.mark.parametrize("transport", TRANSPORTS)

# ---- A1 ----

# How to cut a view out of a base of 4 x 6 elements.
VIEWS = {
    "column": lambda base: base[:, 0],
    "every second": lambda base: base.view(-1)[::2],
    "transposed": lambda base: base.t(),
    "offset": lambda base: base[1:, 2:5],
    "channels_last": lambda base: base.view(1, 3, 2, 4).permute(0, 3, 1, 2),
}


class View:
    """A view and the elements around it, which must stay as they are."""

    def __init__(self, name: str, values: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.base = torch.full((4, 6), 99).to(dtype)
        self.view = VIEWS[name](self.base)
        if values is not None:
            self.view.copy_(values)

    def check(self, expected: torch.Tensor, what: object) -> None:
        same(self.view, expected, what)
        self.view.fill_(99)
        assert (self.base == 99).all(), f"{what}: wrote between the elements"


def a1_strided(rank, w, dtypes=("float32", "int64", "bfloat16")):
    for name in VIEWS:
        for dtype in (getattr(torch, dtype) for dtype in dtypes):
            shape = VIEWS[name](torch.empty(4, 6)).shape
            for asynchronous in (False, True):
                parts = [numbered(r, shape, dtype) for r in range(w)]
                what = (name, dtype, asynchronous)
                mine = View(name, parts[rank], dtype)
                finish(dist.broadcast(mine.view, src=0, async_op=asynchronous))
                mine.check(parts[0], ("broadcast", *what))
                mine = View(name, parts[rank], dtype)
                finish(dist.reduce(mine.view, dst=0, async_op=asynchronous))
                mine.check(total(parts) if rank == 0 else parts[rank], ("reduce", *what))
                mine = View(name, parts[rank], dtype)
                finish(dist.all_reduce(mine.view, async_op=asynchronous))
                mine.check(total(parts), ("all_reduce", *what))
    return "done"


def a1_strided_lists(rank, w, dtypes=("float32", "int64", "bfloat16"), scatters=True):
    for name in VIEWS:
        for dtype in (getattr(torch, dtype) for dtype in dtypes):
            shape = VIEWS[name](torch.empty(4, 6)).shape
            parts = [numbered(r, shape, dtype) for r in range(w)]
            inputs = [View(name, part, dtype) for part in parts]
            taken = View(name, None, dtype)
            lists = [one.view for one in inputs]
            if scatters:
                dist.scatter(taken.view, lists if rank == w - 1 else None, src=w - 1)
                taken.check(parts[rank], ("scatter", name, dtype))
            outputs = [View(name, None, dtype) for _ in range(w)]
            dist.gather(lists[rank], [o.view for o in outputs] if rank == 0 else None, dst=0)
            for output, part in zip(outputs if rank == 0 else [], parts, strict=False):
                output.check(part, ("gather", name, dtype))
            outputs = [View(name, None, dtype) for _ in range(w)]
            dist.all_gather([o.view for o in outputs], lists[rank])
            for output, part in zip(outputs, parts, strict=True):
                output.check(part, ("all_gather", name, dtype))
            for one, part in zip(inputs, parts, strict=True):
                one.check(part, ("inputs", name, dtype))
    return "done"


@over_each_transport
def test_a1_strided_views_and_their_neighbours(transport):
    """A1: broadcast, reduce, all_reduce, scatter, gather of strided views."""
    run_case(3, a1_strided, transport=transport)
    run_case(3, a1_strided_lists, transport=transport)


def test_a1_control_on_gloo():
    """A1: Gloo is right in gather and all_gather of views; not in scatter."""
    run_case(3, a1_strided_lists, ("float32", "int64"), False, backend="gloo")


# ---- A3 ----


def a3_expanded_outputs(rank, w):
    base = torch.tensor([rank + 1.0, *[100.0 + i for i in range(1, 64)]])
    kept = base.clone()
    x, many = base[0:1].expand(1 << 20), base[0:1].expand(w * 8)
    eight, root = torch.arange(8.0), rank == 0
    overlapping = base.as_strided((4, 4), (2, 1))
    peer = (rank + 1) % w
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce async": lambda: dist.all_reduce(x, async_op=True),
        "overlapping rows": lambda: dist.all_reduce(overlapping),
        "all_gather": lambda: dist.all_gather([x] * w, torch.zeros(1 << 20)),
        "into_tensor": lambda: dist.all_gather_into_tensor(many, eight),
        "reduce_scatter": lambda: dist.reduce_scatter(many[:8], [eight] * w),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(many[:8], torch.ones(8 * w)),
        "all_to_all": lambda: dist.all_to_all([many[:8]] * w, [eight] * w),
        "all_to_all_single": lambda: dist.all_to_all_single(many, torch.zeros(8 * w)),
        "scatter": lambda: dist.scatter(many[:8], [eight] * w if root else None),
        "recv": lambda: dist.recv(x, peer),
        "irecv any": lambda: dist.irecv(x),
    }
    for name, call in calls.items():
        text = error_of(call)
        assert "expand" in text or "overlapping" in text, (name, text)
        same(base, kept, name)
    # Where only one rank's tensor is written, only that rank refuses; nothing was sent, so it may
    # call again with a tensor that can be written.
    one = torch.arange(8.0) + rank
    if rank == w - 1:
        all_words(error_of(lambda: dist.broadcast(many[:8], 0)), "broadcast", "expand")
    dist.broadcast(one, 0)
    same(one, torch.arange(8.0), "broadcast")
    if rank == w - 1:
        all_words(error_of(lambda: dist.reduce(many[:8], w - 1)), "reduce", "expand")
        all_words(error_of(lambda: dist.gather(one, [many[:8]] * w, w - 1)), "gather", "expand")
    dist.reduce(one, w - 1)
    # As inputs they are fine.
    spread = torch.tensor(float(rank + 1)).expand(8)
    outputs = [torch.zeros(8) for _ in range(w)]
    dist.all_gather(outputs, spread)
    for r, output in enumerate(outputs):
        same(output, torch.full((8,), r + 1.0), "expanded input")
    same(base, kept)
    still_works(rank, w)
    return "done"


@over_each_transport
def test_a3_expanded_tensors_are_never_written(transport):
    """A3: an error before memory is touched; nothing behind the one element changes."""
    run_case(2, a3_expanded_outputs, transport=transport)


# ---- A4 ----


def a4_empty(rank, w, ops=("SUM", "AVG", "PRODUCT", "MIN", "MAX")):
    for shape in ((0,), (1, 0, 2), (0, 3)):

        def empty(shape=shape):
            return torch.empty(shape)

        for op in ops:
            dist.all_reduce(empty(), getattr(dist.ReduceOp, op))
        dist.broadcast(empty(), w - 1)
        dist.reduce(empty(), w - 1)
        outputs = [empty() for _ in range(w)]
        dist.all_gather(outputs, empty())
        assert all(output.shape == shape for output in outputs)
        stacked = torch.empty(w * shape[0], *shape[1:])
        dist.all_gather_into_tensor(stacked, empty())
        dist.reduce_scatter_tensor(empty(), stacked)
        dist.gather(empty(), [empty() for _ in range(w)] if rank == 0 else None, 0)
        dist.scatter(empty(), [empty() for _ in range(w)] if rank == 0 else None, 0)
        if shape[0] % w == 0:
            dist.all_to_all_single(empty(), empty())
        if w > 1:
            sent = dist.isend(empty(), (rank + 1) % w)
            taken = empty()
            dist.recv(taken, (rank - 1) % w)
            sent.wait()
            assert taken.shape == shape
        still_works(rank, w)
    for op in ("BAND", "BOR", "BXOR"):
        dist.all_reduce(torch.empty(0, dtype=torch.int32), getattr(dist.ReduceOp, op))
    still_works(rank, w)
    return "done"


@over_each_transport
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a4_no_elements(transport, world_size):
    """A4: every call with zero elements returns, and the next one with some is right."""
    run_case(world_size, a4_empty, transport=transport)


def test_a4_control_on_gloo():
    """A4: Gloo returns, too."""
    run_case(3, a4_empty, backend="gloo")


# ---- A6 ----


def a6_empty_shard(rank, w):
    lengths = [(3 + 2 * r) * (r != 1) for r in range(w)]
    mine = numbered(rank, (lengths[rank],))
    sizes = [None] * w
    dist.all_gather_object(sizes, mine.numel())
    assert sizes == lengths
    padded = torch.nn.functional.pad(mine, (0, max(sizes) - mine.numel()), value=-1)
    outputs = [torch.zeros(max(sizes)) for _ in range(w)] if rank == 1 else None
    dist.gather(padded, outputs, dst=1)
    if rank == 1:
        for r, output in enumerate(outputs):
            same(output[: sizes[r]], numbered(r, (lengths[r],)), r)
            assert (output[sizes[r] :] == -1).all()
    return "done"


def a6_uneven_all_gather(rank, w):
    """Without padding: pycoll's all_gather takes lists of different lengths."""
    lengths = [(3 + 2 * r) * (r != 1) for r in range(w)]
    outputs = [torch.zeros(n) for n in lengths]
    dist.all_gather(outputs, numbered(rank, (lengths[rank],)))
    for r, output in enumerate(outputs):
        same(output, numbered(r, (lengths[r],)), r)
    return "done"


@over_each_transport
def test_a6_gather_with_an_empty_shard(transport):
    """A6: sizes first, then a padded gather; order by rank, one entry empty."""
    run_case(3, a6_empty_shard, transport=transport)
    run_case(3, a6_uneven_all_gather, transport=transport)


def test_a6_control_on_gloo():
    """A6: Gloo does it, too."""
    run_case(3, a6_empty_shard, backend="gloo")


# ---- A7, A8 ----


def groups_of(w, sizes, algorithm):
    """Groups of the first ranks; the environment is read when a group is made."""
    os.environ["PYCOLL_ALGO"] = "" if algorithm == "auto" else f"all_reduce={algorithm}"
    return {size: dist.new_group(range(size)) for size in sizes if size <= w}


def a7_few_elements(rank, w, algorithm):
    sizes = range(1, w + 1)
    for size, group in groups_of(w, sizes, algorithm).items():
        if rank >= size:
            continue
        for n in sorted({1, 2, size - 1, size, size + 1, 2 * size - 1, 1009}):
            for dtype in (torch.float32, torch.int64):
                parts = [numbered(r, (n,), dtype) for r in range(size)]
                mine = Guarded(parts[rank])
                dist.all_reduce(mine.tensor, group=group)
                mine.check(total(parts), (algorithm, size, n, dtype))
    dist.barrier()
    return "done"


@over_each_transport
@pytest.mark.parametrize("algorithm", ["ring", "tree", "auto"])
def test_a7_fewer_elements_than_ranks(transport, algorithm):
    """A7: groups of 1 to 7 ranks, lengths around the number of ranks."""
    run_case(7, a7_few_elements, algorithm, transport=transport)


def tails(size: int, unit: int = 64) -> list[int]:
    """Every remainder, and both sides of a message and of a message a rank."""
    lengths = [q * size + rest for q in (0, 5, unit) for rest in range(size)]
    for edge in (unit, unit * size, 2 * unit * size, 1024):
        lengths += [edge - 1, edge, edge + 1]
    return sorted(set(lengths))


def a8_tails(rank, w, algorithm="auto"):
    for size, group in groups_of(w, (3, 5, 7), algorithm).items():
        if rank >= size:
            continue
        for n in tails(size):
            parts = [numbered(r, (n,)) for r in range(size)]
            what = (algorithm, size, n)
            mine = Guarded(parts[rank])
            dist.all_reduce(mine.tensor, group=group)
            mine.check(total(parts), ("all_reduce", *what))
            if algorithm != "auto":
                continue
            mine = Guarded(parts[rank])
            dist.broadcast(mine.tensor, n % size, group=group)
            mine.check(parts[n % size], ("broadcast", *what))
            mine = Guarded(parts[rank])
            dist.reduce(mine.tensor, n % size, group=group)
            mine.check(total(parts) if rank == n % size else parts[rank], ("reduce", *what))
            source = Guarded(numbered(rank, (size, n)))
            mine = Guarded(torch.zeros(n))
            dist.reduce_scatter_tensor(mine.tensor, source.tensor, group=group)
            wholes = [numbered(r, (size, n)) for r in range(size)]
            mine.check(total(wholes)[rank], ("reduce_scatter", *what))
            source.check(wholes[rank], ("reduce_scatter input", *what))
            gathered = Guarded(torch.zeros(size, n))
            dist.all_gather_into_tensor(gathered.tensor, parts[rank], group=group)
            gathered.check(torch.stack(parts), ("all_gather", *what))
            swapped = Guarded(torch.zeros(size, n))
            dist.all_to_all_single(swapped.tensor, source.tensor, group=group)
            swapped.check(torch.stack([whole[rank] for whole in wholes]), ("all_to_all", *what))
    dist.barrier()
    return "done"


@over_each_transport
@pytest.mark.parametrize("algorithm", ["auto", "ring", "tree"])
def test_a8_tails(transport, algorithm):
    """A8: lengths that no cut divides, with messages of 64 elements; guards intact."""
    run_case(7, a8_tails, algorithm, transport=transport, env=SMALL_SLICES)


# ---- A10, A11, A12 ----


def a10_layouts(rank, w):
    for shape in ((4,), (2, 4), (12,), ()):
        parts = [numbered(r, shape) for r in range(w)]
        layouts = [(w, *shape), (w * parts[0].numel(),)]
        layouts += [(w * shape[0], *shape[1:])] if shape else []
        for layout in layouts:
            output = Guarded(torch.zeros(layout))
            dist.all_gather_into_tensor(output.tensor, parts[rank])
            output.check(torch.stack(parts).reshape(layout), (shape, layout))
    for wrong in ((w, 5), (w + 1, 4), (4,)):
        output = Guarded(torch.zeros(wrong))
        text = error_of(
            lambda output=output: dist.all_gather_into_tensor(output.tensor, torch.ones(4))
        )
        all_words(text, 4 * w, output.tensor.numel(), "all_gather")
        output.check(torch.zeros(wrong))
    still_works(rank, w)
    return "done"


def a11_scalars(rank, w):
    def scalar(value=float(rank)):
        return torch.tensor(value)

    one = scalar()
    dist.all_reduce(one)
    same(one, torch.tensor(w * (w - 1) / 2), "all_reduce")
    one = scalar()
    dist.broadcast(one, w - 1)
    same(one, torch.tensor(w - 1.0), "broadcast")
    outputs = [torch.tensor(-1.0) for _ in range(w)]
    dist.all_gather(outputs, scalar())
    same(torch.stack(outputs), torch.arange(float(w)), "all_gather")
    outputs = [torch.tensor(-1.0) for _ in range(w)] if rank == 1 else None
    dist.gather(scalar(), outputs, dst=1)
    if rank == 1:
        same(torch.stack(outputs), torch.arange(float(w)), "gather")
        assert outputs[0].shape == ()
    taken = torch.tensor(-1.0)
    sent = dist.isend(scalar(), (rank + 1) % w)
    dist.recv(taken, (rank - 1) % w)
    sent.wait()
    same(taken, torch.tensor(float((rank - 1) % w)), "recv")
    for output, source in ((torch.tensor(0.0), torch.tensor(1.0)), (torch.ones(()), torch.ones(w))):
        text = error_of(lambda o=output, s=source: dist.reduce_scatter_tensor(o, s))
        assert "dim" in text or "size" in text, text
    still_works(rank, w)
    return "done"


def a12_uneven(rank, w):
    outputs = [Guarded(torch.zeros(r + 1)) for r in range(w)]
    dist.all_gather([o.tensor for o in outputs], numbered(rank, (rank + 1,)))
    for r, output in enumerate(outputs):
        output.check(numbered(r, (r + 1,)), r)
    return "done"


def a12_disagreeing(rank, w, what):
    """What every rank must be told, on a group that ends by it."""
    lengths = [2] * w
    if what == "lists" and rank == 0:
        lengths[1] = 5  # only this rank thinks so
    count = rank + 1 if what == "input" else 2
    outputs = [torch.zeros(n) for n in lengths]

    def call(group):
        return error_of(lambda: dist.all_gather(outputs, torch.ones(count), group=group))

    return on_own_group(rank, w, 20, call)


@over_each_transport
def test_a10_both_layouts_of_all_gather_into_tensor(transport):
    """A10: stacked, concatenated and flat outputs, a 0-d input; another length is an error."""
    run_case(3, a10_layouts, transport=transport)


@over_each_transport
def test_a11_tensors_without_dimensions(transport):
    """A11: 0-d stays 0-d; reduce_scatter of it is an error."""
    run_case(3, a11_scalars, transport=transport)


@over_each_transport
def test_a12_all_gather_of_different_shapes(transport):
    """A12 [choice]: different shapes are supported; a list that does not fit raises everywhere."""
    run_case(3, a12_uneven, transport=transport)
    for result in run_case(3, a12_disagreeing, "input", transport=transport):
        all_words(result.value, "all_gather", "[2]")
        assert "[1]" in result.value or "[3]" in result.value, result.value
    for result in run_case(3, a12_disagreeing, "lists", transport=transport):
        all_words(result.value, "all_gather")


def a12_on_gloo(rank, w):
    lists = [torch.zeros(r + 1) for r in range(w)]
    return error_of(lambda: dist.all_gather(lists, torch.ones(rank + 1)))


def test_a12_control_on_gloo():
    """A12: Gloo raises on all ranks."""
    assert all(result.value for result in run_case(3, a12_on_gloo, backend="gloo"))


# Right for any number of ranks from 2 on, with these arguments: run over mixed transports, too.
ANY_WORLD = [
    (a1_strided, ()),
    (a1_strided_lists, ()),
    (a3_expanded_outputs, ()),
    (a4_empty, ()),
    (a6_empty_shard, ()),
    (a6_uneven_all_gather, ()),
    (a10_layouts, ()),
    (a11_scalars, ()),
    (a12_uneven, ()),
]
