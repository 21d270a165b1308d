"""torch.distributed over pycoll: groups, objects, profiler, timeouts, ends."""

from __future__ import annotations

import datetime
import gc
import os
import time

import torch
import torch.distributed as dist

from pool import run_ranks, torch_ranks

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
