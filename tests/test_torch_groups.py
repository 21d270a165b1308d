"""torch.distributed over pycoll: groups, objects, profiler, timeouts, ends."""

from __future__ import annotations

import datetime
import gc
import os
import random
import threading
import time

import pytest
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


def opposite_orders(rank, w):
    """Even ranks issue A then B on two groups, odd ranks B then A, waiting in either order."""
    first, second = dist.new_group(), dist.new_group()
    order = [first, second] if rank % 2 == 0 else [second, first]
    for n in (1, 5000, 300_000):
        tensors = {
            g: torch.arange(float(n)) * (rank + 1) + i for i, g in enumerate((first, second))
        }
        works = [dist.all_reduce(tensors[g], group=g, async_op=True) for g in order]
        for work in works if n == 1 else reversed(works):
            work.wait()
        for i, g in enumerate((first, second)):
            expected = torch.arange(float(n)) * (w * (w + 1) // 2) + i * w
            assert torch.equal(tensors[g], expected)

    # The same with blocking calls, each group in a thread of its own, started in that order.
    done = {}

    def use(group, name):
        for i in range(30):
            tensor = torch.full((700,), float(rank + i))
            dist.all_reduce(tensor, group=group)
            assert (tensor == sum(r + i for r in range(w))).all()
        done[name] = True

    threads = [threading.Thread(target=use, args=(group, i)) for i, group in enumerate(order)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    return sorted(done)


def test_groups_do_not_wait_for_each_other():
    assert [r.value for r in torch_ranks(3, opposite_orders, timeout=60)] == [[0, 1]] * 3


def several_threads(rank, w):
    """Threads of one rank share a group: calls are serialised. All calls are alike, so it does not
    matter which of them meet."""
    errors = []

    def use(seed):
        rng = random.Random(100 * rank + seed)
        try:
            for _ in range(40):
                tensor = torch.arange(300.0) * (rank + 1)
                work = dist.all_reduce(tensor, async_op=rng.random() < 0.5)
                if work is not None:
                    work.wait()
                assert torch.equal(tensor, torch.arange(300.0) * (w * (w + 1) // 2))
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_several_threads_use_one_group():
    assert [r.value for r in torch_ranks(3, several_threads, timeout=60)] == [[]] * 3


def step_of(kind, group, members, rank, i):
    """Starts one collective; a work (or None), a tensor, and what it must become."""
    place, n = members.index(rank), 50 + 37 * (i % 5)
    base = torch.arange(float(n)) + i
    if kind == "all_reduce":
        tensor = base + 100 * rank
        expected = base * len(members) + 100 * sum(members)
        return dist.all_reduce(tensor, group=group, async_op=True), tensor, expected
    if kind == "broadcast":
        source = members[i % len(members)]
        tensor = base + 100 * rank
        return (
            dist.broadcast(tensor, source, group=group, async_op=True),
            tensor,
            base + 100 * source,
        )
    if kind == "all_gather":
        tensor = torch.zeros(len(members), n)
        work = dist.all_gather_into_tensor(tensor, base + 100 * rank, group=group, async_op=True)
        return work, tensor, torch.stack([base + 100 * m for m in members])
    if kind == "reduce":
        target = members[i % len(members)]
        tensor = base + 100 * rank
        expected = base * len(members) + 100 * sum(members) if rank == target else tensor.clone()
        return dist.reduce(tensor, target, group=group, async_op=True), tensor, expected
    tensor = torch.zeros(len(members), 3)
    source = torch.arange(3.0) + 10 * torch.arange(float(len(members)))[:, None] + 100 * rank
    expected = torch.stack([torch.arange(3.0) + 10 * place + 100 * m for m in members])
    work = dist.all_to_all_single(tensor, source, group=group, async_op=True)
    return work, tensor, expected


def interleaved(rank, w, seed):
    """Ten groups of overlapping ranks; each rank mixes them in an order of its own."""
    shared = random.Random(seed)
    memberships = [sorted(shared.sample(range(w), shared.randint(1, w))) for _ in range(10)]
    groups = [dist.new_group(members) for members in memberships]
    kinds = ["all_reduce", "broadcast", "all_gather", "reduce", "all_to_all"]
    scripts = [[shared.choice(kinds) for _ in range(25)] for _ in groups]
    mine = [g for g, members in enumerate(memberships) if rank in members]
    rng = random.Random(1000 * seed + rank)
    pending, positions = [], dict.fromkeys(mine, 0)
    while positions:
        g = rng.choice(sorted(positions))
        i = positions[g]
        pending.append((g, i, *step_of(scripts[g][i], groups[g], memberships[g], rank, i)))
        positions[g] += 1
        if positions[g] == len(scripts[g]):
            del positions[g]
    # Waiting earlier could block on a call that another rank has not come to, for want of this one.
    rng.shuffle(pending)
    for g, i, work, tensor, expected in pending:
        work.wait()
        assert torch.equal(tensor, expected), (g, i, scripts[g][i])
    order = mine.copy()
    rng.shuffle(order)  # destroyed in an order of its own, too
    for g in order:
        dist.destroy_process_group(groups[g])
    one = torch.ones(3)
    dist.all_reduce(one)
    return one.tolist()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ten_groups_of_overlapping_ranks_in_random_orders(seed):
    results = torch_ranks(4, interleaved, seed, timeout=90)
    assert [result.value for result in results] == [[4, 4, 4]] * 4


def nested(rank, w):
    """Groups inside groups, all alive at once, used from the inside out and back."""
    lists = [[0, 1, 2, 3], [0, 1], [2, 3], [1, 2, 3], [1, 3], [3]]
    groups = [dist.new_group(members) for members in lists]
    order = list(reversed(range(len(lists))))
    for i in [*order, *reversed(order)]:
        if rank not in lists[i]:
            continue
        tensor = torch.full((10,), float(rank))
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=groups[i])
        assert tensor[0] == sum(lists[i]) / len(lists[i])
    return "done"


def test_groups_inside_groups():
    assert [r.value for r in torch_ranks(4, nested)] == ["done"] * 4


def different_orders_of_ending(rank, w):
    groups = [dist.new_group() for _ in range(8)]
    tensors = [torch.full((100,), float(rank + i)) for i in range(8)]
    works = [
        dist.all_reduce(t, group=g, async_op=True) for g, t in zip(groups, tensors, strict=True)
    ]
    for work in works:
        work.wait()
    order = list(range(8))
    random.Random(rank).shuffle(order)
    for i in order[:5]:
        dist.destroy_process_group(groups[i])
    dist.barrier()
    left = set(order[5:])
    alive = [None] * w
    dist.all_gather_object(alive, left)
    for i in sorted(set.intersection(*alive)):
        dist.all_reduce(tensors[i], group=groups[i])
        assert (tensors[i] == w * sum(r + i for r in range(w))).all()
    return "done"


def test_groups_may_be_destroyed_in_any_order():
    assert [r.value for r in torch_ranks(2, different_orders_of_ending)] == ["done"] * 2


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


def held():
    """Descriptors and mappings of shared memory that this process has."""
    gc.collect()
    with open("/proc/self/maps") as file:
        mapped = sum("memfd:pycoll" in line for line in file)
    return len(os.listdir("/proc/self/fd")), mapped


def five_groups():
    groups = [dist.new_group() for _ in range(5)]
    for group in groups:
        dist.all_reduce(torch.ones(3), group=group)
    for group in groups:
        dist.destroy_process_group(group)
    groups.clear()
    del group
    dist.barrier()


def freed(rank, w):
    five_groups()  # what the process keeps once for all groups is there from then on
    before = held()
    five_groups()
    deadline = time.monotonic() + 5
    # A peer may be a moment behind, here and at the first count, which may be too high for it.
    while any(n > m for n, m in zip(held(), before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return before, held()


def test_destroying_groups_frees_their_descriptors_and_memory():
    for result in torch_ranks(2, freed):
        before, after = result.value
        assert after[0] <= before[0]
        assert after[1] <= before[1]
