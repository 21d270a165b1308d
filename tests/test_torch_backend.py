"""torch.distributed over pycoll: the calls of scripts; Gloo's results where Gloo is right."""

from __future__ import annotations

import datetime
import random
import time

import pytest
import torch
import torch.distributed as dist

from pool import torch_ranks

REDUCIBLE = ["float32", "float64", "float16", "bfloat16", "int32", "int64"]
MOVABLE = [*REDUCIBLE, "uint8", "int8", "int16", "bool", "complex64", "complex128"]
MOVABLE += ["float8_e4m3fn", "uint16"]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]


def values(rank: int, shape, dtype: str) -> torch.Tensor:
    """Small integers, different at every position and rank."""
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randint(0, 5, tuple(shape), generator=generator)
    return (whole + rank).to(getattr(torch, dtype))


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# ---- Against Gloo ----


def battery(rank, w):
    """Bytes of everything that Gloo does right, too."""
    out = {}
    for dtype in REDUCIBLE:
        for op in OPS:
            integer_average = op == "AVG" and "int" in dtype
            for n in (1, 7, 1000):
                tensor = values(rank, (n,), dtype)
                if not integer_average:  # Gloo refuses it
                    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
                    out[f"all_reduce {dtype} {op} {n}"] = as_bytes(tensor)
    for dtype in [*REDUCIBLE, "uint8", "int8", "bool", "complex64"]:
        tensor = values(rank, (3, 5), dtype)
        outputs = [torch.empty_like(tensor) for _ in range(w)]
        dist.all_gather(outputs, tensor)
        out[f"all_gather {dtype}"] = b"".join(map(as_bytes, outputs))
        for root in range(w):
            one = values(rank, (11,), dtype)
            dist.broadcast(one, root)
            out[f"broadcast {dtype} {root}"] = as_bytes(one)
    inputs = [values(rank + 10 * r, (6,), "float64") for r in range(w)]
    output = torch.empty(6, dtype=torch.float64)
    dist.reduce_scatter(output, inputs)
    out["reduce_scatter"] = as_bytes(output)
    dist.barrier()
    return out


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_same_bytes_as_gloo(world_size):
    ours = torch_ranks(world_size, battery)
    theirs = torch_ranks(world_size, battery, backend="gloo")
    for mine, gloo in zip(ours, theirs, strict=True):
        assert mine.value.keys() == gloo.value.keys()
        for name, data in gloo.value.items():
            assert mine.value[name] == data, name


# ---- Tensors of every kind ----


def check(tensor, expected):
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def kinds_of_tensors(rank, w):
    for dtype in MOVABLE:
        parts = [values(r, (2, 3), "float32").to(getattr(torch, dtype)) for r in range(w)]
        for asynchronous in (False, True):
            one = parts[rank].clone()
            work = dist.broadcast(one, w - 1, async_op=asynchronous)
            assert (work is not None) == asynchronous
            if work:
                assert work.wait()
            assert as_bytes(one) == as_bytes(parts[w - 1]), dtype
            stacked = torch.empty((w, 2, 3), dtype=parts[0].dtype)
            work = dist.all_gather_into_tensor(stacked, parts[rank], async_op=asynchronous)
            if work:
                work.wait()
            assert as_bytes(stacked) == b"".join(map(as_bytes, parts)), dtype

    # The two layouts, and a scalar.
    flat = torch.empty(w * 2, 3)
    mine = values(rank, (2, 3), "float32")
    dist.all_gather_into_tensor(flat, mine)
    check(flat, torch.cat([values(r, (2, 3), "float32") for r in range(w)]))
    row = torch.empty(w)
    dist.all_gather_into_tensor(row, torch.tensor(float(rank)))
    check(row, torch.arange(float(w)))
    chunk = torch.empty(2, 3)
    source = torch.stack([values(rank + 7 * r, (2, 3), "float32") for r in range(w)])
    before = source.clone()
    expected = sum(values(s + 7 * rank, (2, 3), "float32") for s in range(w))
    for layout in (source, source.reshape(w * 2, 3)):
        dist.reduce_scatter_tensor(chunk, layout)
        check(chunk, expected)
    dist.reduce_scatter_tensor(chunk, source, op=dist.ReduceOp.AVG)
    check(chunk, expected / w)
    check(source, before)

    # No dimension, no elements, a gradient, inference mode.
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.shape == ()
    check(scalar, torch.tensor(w * (w - 1) / 2))
    gathered = [torch.tensor(0.0) for _ in range(w)]
    dist.all_gather(gathered, torch.tensor(float(rank)))
    check(torch.stack(gathered), torch.arange(float(w)))
    for shape in ((0,), (1, 0, 2), (0, 3)):
        empty = torch.empty(shape)
        dist.all_reduce(empty)
        dist.broadcast(empty, 0)
        dist.all_gather([torch.empty(shape) for _ in range(w)], empty)
        dist.all_gather_into_tensor(torch.empty(w * shape[0], *shape[1:]), empty)
        dist.reduce_scatter_tensor(empty, torch.empty(w * shape[0], *shape[1:]))
    leaf = torch.full((5,), float(rank + 1), requires_grad=True)
    dist.all_reduce(leaf)
    strided_leaf = torch.full((5, 2), float(rank + 1), requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(strided_leaf[:, 0])
    check(leaf.detach(), torch.full((5,), w * (w + 1) / 2))
    check(strided_leaf.detach()[:, 0], torch.full((5,), w * (w + 1) / 2))
    with torch.inference_mode():
        inference = torch.full((4, 2), float(rank + 1))
        dist.all_reduce(inference)
        dist.all_reduce(inference[:, 1])
        work = dist.all_reduce(inference[:, 1], async_op=True)
        work.wait()
    total = w * (w + 1) / 2
    check(inference.clone(), torch.tensor([[total, total * w * w]] * 4))
    return "done"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tensors_of_every_kind(world_size):
    results = torch_ranks(world_size, kinds_of_tensors)
    assert [result.value for result in results] == ["done"] * world_size


def strided(rank, w):
    def base():
        return torch.arange(24.0).reshape(4, 6) + 100 * rank

    views = {
        "column": lambda t: t[:, 1],
        "every_second": lambda t: t.view(-1)[::2],
        "transposed": lambda t: t.t(),
        "offset": lambda t: t[1:, 2:5],
        "channels_last": lambda t: t.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "permuted": lambda t: t.view(2, 3, 4).permute(2, 0, 1),
    }
    for name, view in views.items():
        for asynchronous in (False, True):
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                whole = base().to(dtype)
                part = view(whole)
                expected = sum((view((base() - 100 * rank + 100 * r)).double()) for r in range(w))
                untouched = whole.clone()
                marker = view(untouched)
                marker.fill_(-1)  # no-op on the clone for channels_last, which owns its memory
                work = dist.all_reduce(part, async_op=asynchronous)
                if work:
                    work.wait()
                if dtype != torch.bfloat16:
                    check(part.double(), expected)
                part.fill_(-1)
                assert torch.equal(whole, untouched) or name == "channels_last", name
                sent = view(base().to(dtype))
                dist.broadcast(sent, w - 1)
                check(sent, view((base() - 100 * rank + 100 * (w - 1)).to(dtype)))
    outputs = [torch.zeros(3, 4).t() for _ in range(w)]
    dist.all_gather(outputs, base()[:, ::2])
    for r, output in enumerate(outputs):
        check(output, (base() - 100 * rank + 100 * r)[:, ::2])
    return "done"


def test_views_leave_their_neighbours_alone():
    assert [r.value for r in torch_ranks(3, strided)] == ["done"] * 3


# ---- Works and futures ----


def works(rank, w):
    tensor = torch.full((1000,), rank + 1.0)
    total = w * (w + 1) / 2
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() is True
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0].data_ptr() == tensor.data_ptr()
    assert work.get_future().value()[0].data_ptr() == tensor.data_ptr()
    assert work.get_future().wait()[0][0] == total

    late = torch.full((10,), rank + 1.0)
    chained = dist.all_reduce(late, async_op=True).get_future().then(lambda f: f.value()[0] / w)
    check(chained.wait(), torch.full((10,), total / w))
    bad = dist.all_reduce(late, async_op=True).get_future().then(lambda f: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        bad.wait()

    return "done"


def test_works_and_futures():
    assert [r.value for r in torch_ranks(3, works)] == ["done"] * 3


def waiting_callbacks(rank, w):
    """A callback that itself waits for a collective, three levels deep."""

    def deeper(level, tensor):
        def again(future):
            if level == 0:
                return future.value()[0]
            return deeper(level - 1, future.value()[0])

        return dist.all_reduce(tensor, async_op=True).get_future().then(again).wait()

    check(deeper(3, torch.ones(5)), torch.full((5,), float(w**4)))
    return "done"


def test_a_callback_may_wait_for_a_collective():
    results = torch_ranks(3, waiting_callbacks)
    assert [r.value for r in results] == ["done"] * 3


def patience(rank, w):
    tensor = torch.full((8,), rank + 1.0)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["looked"])
    work = dist.all_reduce(tensor, async_op=True)
    waited = None
    text = ""
    if rank == 0:
        assert not work.is_completed()
        start = time.monotonic()
        try:
            work.wait(datetime.timedelta(milliseconds=200))
        except RuntimeError as error:
            waited, text = time.monotonic() - start, str(error)
        assert not work.is_completed()
        store.set("looked", "")
    work.wait()
    dist.all_reduce(tensor)
    return tensor[0].item(), waited, text


def test_a_limited_wait_does_not_end_the_operation():
    results = torch_ranks(3, patience)
    assert [result.value[0] for result in results] == [18.0] * 3
    _, waited, text = results[0].value
    assert waited > 0.19
    assert "0.2" in text
    assert "all_reduce #1" in text


def in_flight(rank, w):
    rng = random.Random(5)
    pending = []
    for i in range(300):
        tensor = torch.full((257,), float(rank + i))
        if i % 3 == 2:
            expected = float(i % w + i)
            work = dist.broadcast(tensor, i % w, async_op=True)
        else:
            expected = float(sum(r + i for r in range(w)))
            work = dist.all_reduce(tensor, async_op=True)
        pending.append((work, tensor, expected))
    rng.shuffle(pending)
    for work, tensor, expected in pending:
        work.wait()
        assert (tensor == expected).all()
    # Nobody keeps the works or the tensors: the memory must outlive the operation.
    kept = []
    for i in range(300):
        dist.all_reduce(torch.ones(4096), async_op=True)
        if i % 50 == 0:
            kept.append((torch.ones(4096), i))
            kept[-1] = (kept[-1][0], dist.all_reduce(kept[-1][0], async_op=True))
        noise = [torch.empty(4096) for _ in range(3)]
        del noise
    for tensor, work in kept:
        work.wait()
        assert (tensor == w).all()
    return "done"


def test_many_works_in_flight_and_dropped():
    env = {"MALLOC_PERTURB_": "165"}
    results = torch_ranks(3, in_flight, timeout=60, env=env)
    assert [r.value for r in results] == ["done"] * 3


def failing_future(rank, w):
    tensor = torch.ones(4 + (rank == 1))
    future = dist.all_reduce(tensor, async_op=True).get_future()
    try:
        future.wait()
    except RuntimeError as error:
        return str(error)
    return None


def test_a_future_carries_the_error():
    for result in torch_ranks(2, failing_future):
        assert "sizes differ" in result.value
