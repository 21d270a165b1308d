"""torch.distributed over pycoll: the calls of scripts; Gloo's results where Gloo is right."""

from __future__ import annotations

import datetime
import gc
import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from pool import run_ranks, torch_ranks

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
    if rank == 1:
        time.sleep(1.0)
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
    work.wait()
    dist.all_reduce(tensor)
    return tensor[0].item(), waited, text


def test_a_limited_wait_does_not_end_the_operation():
    results = torch_ranks(3, patience)
    assert [result.value[0] for result in results] == [18.0] * 3
    _, waited, text = results[0].value
    assert 0.19 < waited < 0.6
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


# ---- Groups ----


def groups(rank, w):
    assert dist.get_backend() == "pycoll"
    low = dist.new_group([0, 1])
    odd = dist.new_group([1, 3])
    reverse = dist.new_group([2, 0])
    seen = {}
    for name, group, members in (
        ("low", low, [0, 1]),
        ("odd", odd, [1, 3]),
        ("rev", reverse, [0, 2]),
    ):
        if rank not in members:
            continue
        tensor = torch.tensor([float(rank), 1.0])
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [float(sum(members)), 2.0], name
        average = torch.tensor([float(rank)])
        dist.all_reduce(average, op=dist.ReduceOp.AVG, group=group)
        assert average.item() == sum(members) / 2
        sent = torch.tensor([float(rank)])
        dist.broadcast(sent, src=members[1], group=group)
        assert sent.item() == members[1]
        objects = [None] * 2
        dist.all_gather_object(objects, {"rank": rank}, group=group)
        assert objects == [{"rank": r} for r in members]
        seen[name] = dist.get_rank(group)
    # Two groups, used in different orders by different ranks, asynchronously.
    first, second = dist.new_group(), dist.new_group()
    a, b = torch.ones(5000), torch.full((5000,), 2.0)
    order = [(first, a), (second, b)] if rank % 2 else [(second, b), (first, a)]
    pending = [dist.all_reduce(t, group=g, async_op=True) for g, t in order]
    for work in pending:
        work.wait()
    assert a[0] == w
    assert b[0] == 2 * w
    dist.destroy_process_group(first)
    dist.all_reduce(b, group=second)
    assert b[0] == 2 * w * w
    return seen


def test_subgroups_and_several_groups():
    results = torch_ranks(4, groups)
    expected = [{"low": 0, "rev": 0}, {"low": 1, "odd": 0}, {"rev": 1}, {"odd": 1}]
    assert [result.value for result in results] == expected


def init_again(rank, world_size, directory):
    counts = []
    store = dist.FileStore(os.path.join(directory, "store"), world_size)
    for i in range(5):
        shared = dist.PrefixStore(f"round{i // 2}", store)  # rounds share a prefix, too
        dist.init_process_group("pycoll", store=shared, rank=rank, world_size=world_size)
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        assert tensor[0] == world_size**2
        dist.destroy_process_group()
        gc.collect()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


def test_destroy_and_init_again():
    for result in run_ranks(3, init_again):
        assert result.value[-1] == result.value[0]


def objects(rank, w):
    gathered = [None] * w
    mine = {"rank": rank, "data": list(range(1000 * rank)), "tensor": torch.full((3,), rank)}
    dist.all_gather_object(gathered, mine)
    assert [g["rank"] for g in gathered] == list(range(w))
    assert all(len(g["data"]) == 1000 * r for r, g in enumerate(gathered))
    assert all((g["tensor"] == r).all() for r, g in enumerate(gathered))
    sent = [("from", rank), None, "x" * rank * 100_000]
    dist.broadcast_object_list(sent, src=2)
    assert sent == [("from", 2), None, "x" * 200_000]
    return "done"


def test_object_collectives():
    assert [r.value for r in torch_ranks(3, objects)] == ["done"] * 3


# ---- Around it ----


def unsupported(rank, w):
    one = torch.ones(2)
    several = [one.clone() for _ in range(w)]
    calls = {
        "gather": lambda: dist.gather(one, several if rank == 0 else None),
        "scatter": lambda: dist.scatter(
            one, [one.clone() for _ in range(w)] if rank == 0 else None
        ),
        "alltoall": lambda: dist.all_to_all(several, [one] * w),
        "send": lambda: dist.send(one, (rank + 1) % w),
        "recv": lambda: dist.recv(one, (rank + 1) % w),
        "reduce": lambda: dist.reduce(one, 0),
    }
    texts = {}
    for name, call in calls.items():
        try:
            call()
            texts[name] = ""
        except (RuntimeError, NotImplementedError) as error:
            texts[name] = str(error)
    dist.all_reduce(one)
    return texts, one.tolist()


def test_what_is_not_there_raises_with_its_name():
    for result in torch_ranks(2, unsupported):
        texts, after = result.value
        assert after == [2, 2]
        for name, text in texts.items():
            assert "pycoll" in text, (name, text)
            assert name in text.lower(), (name, text)


def profiled(rank, w):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        dist.broadcast(torch.ones(3), 0)
    return sorted({event.key for event in profile.key_averages() if "pycoll" in event.key})


def test_the_profiler_shows_the_collectives():
    for result in torch_ranks(2, profiled):
        assert "pycoll:all_reduce" in result.value
        assert "pycoll:broadcast" in result.value


def test_torch_distributed_debug_detail():
    script = (
        "import os, sys, torch, torch.distributed as dist, pycoll\n"
        "rank = int(sys.argv[1])\n"
        "store = dist.FileStore(sys.argv[2], 2)\n"
        "dist.init_process_group('pycoll', store=store, rank=rank, world_size=2)\n"
        "x = torch.ones(4); dist.all_reduce(x); dist.barrier()\n"
        "assert x[0] == 2, x\n"
        "dist.destroy_process_group()\n"
    )
    for result in run_ranks(1, run_script_twice, script, timeout=60):
        assert result.value == [0, 0]


def run_script_twice(rank, world_size, directory, script):
    # The level is read when torch is imported: these processes import it themselves.
    import subprocess
    import sys

    path = os.path.join(directory, "debug-store")
    env = {
        **os.environ,
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, str(r), path], env=env) for r in range(2)
    ]
    return [process.wait(50) for process in ranks]


def one_group_timeout(rank, w):
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.5))
    dist.barrier(group=group)
    if rank == 1:
        time.sleep(1.2)
        return None
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(3), group=group)
    except dist.DistBackendError as error:
        text = str(error)
    took = time.monotonic() - start
    return took, text


def test_the_timeout_of_a_group_is_its_own():
    took, text = torch_ranks(2, one_group_timeout)[0].value
    assert 0.45 < took < 1.0
    for word in ("Timed out", "0.5", "all_reduce #2", "rank 1", "barrier #1"):
        assert word in text


def freed(rank, w):
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))
    dist.all_reduce(torch.ones(3), group=group)
    before = len(os.listdir("/proc/self/fd"))
    dist.destroy_process_group(group)
    del group, backend
    gc.collect()
    with open("/proc/self/maps") as file:
        mapped = sum("memfd:pycoll" in line for line in file)
    return before - len(os.listdir("/proc/self/fd")), mapped


def test_destroying_a_group_frees_its_descriptors_and_memory():
    for result in torch_ranks(2, freed):
        closed, mapped = result.value
        assert closed >= 1
        assert mapped == 2  # the default group's two segments
