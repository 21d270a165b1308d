"""Ranks that run ahead of each other, post in any order and use many groups at once."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from helpers_cases import TRANSPORTS, leaves_nothing, numbered, rss_bytes, run_case, same, total

over_each_transport = pytest.mark.parametrize("transport", TRANSPORTS)
MIB = 1 << 20

# ---- A root that is ahead ----


def tiny(number: int, rank: int = 0) -> torch.Tensor:
    return torch.tensor([number, 3 * number + 1, number % 7 + 100 * rank], dtype=torch.int64)


def ahead(rank, w, count, asynchronous):
    """Rank 0 broadcasts; the last rank sleeps first, and now and then. Every 50th call is a reduce
    to another root. Returns when each call of this rank was through, and the memory it took."""
    rng = random.Random(rank)
    nap = 0.5 if rank == w - 1 else 0
    dist.barrier()
    before = rss_bytes()
    started = time.monotonic()
    time.sleep(nap)
    through, pending = [time.monotonic()], []
    for number in range(count):
        if rank == w - 1 and number % 1000 == 999:
            time.sleep(rng.uniform(0, 0.02))
        reduces = number % 50 == 49
        root = 1 + number // 50 % (w - 1) if reduces else 0
        one = tiny(number, rank) if reduces or rank == 0 else torch.zeros(3, dtype=torch.int64)
        expected = total([tiny(number, r) for r in range(w)]) if reduces else tiny(number)
        if reduces:
            expected = expected if rank == root else tiny(number, rank)
            work = dist.reduce(one, root, async_op=asynchronous)
        else:
            work = dist.broadcast(one, 0, async_op=asynchronous)
        if asynchronous:
            pending.append((work, one, expected))
        else:
            assert torch.equal(one, expected), (number, one, expected)
            through.append(time.monotonic())
    for work, one, expected in pending:
        work.wait()
        assert torch.equal(one, expected), (one, expected)
    return through, rss_bytes() - before, time.monotonic() - started


@over_each_transport
@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.full)])
def test_a_root_does_not_run_away_from_a_sleeping_leaf(transport, count):
    results = run_case(3, ahead, count, False, transport=transport, timeout=120)
    woke = results[2].value[0][0]
    for result in results[:2]:
        through, memory, _ = result.value
        done = sum(moment < woke for moment in through) - 1
        # A broadcast may be over for its root before the leaf has come, but only as many as there
        # are places for messages.
        assert done < 100, done
        assert memory < 16 * MIB, memory


@over_each_transport
@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.full)])
def test_a_root_that_queues_broadcasts_for_a_sleeping_leaf(transport, count):
    for result in run_case(3, ahead, count, True, transport=transport, timeout=120):
        _, memory, took = result.value
        # What the caller holds itself: works, tensors, expectations; some 3 KiB a call.
        assert memory < 16 * MIB + count * 6000, memory
        assert took < 60


# ---- Messages posted in any order ----


def message_plan(seed: int, w: int, count: int):
    """(source, target, tag, number of elements, position within its tag) by order of the sends."""
    rng = random.Random(seed)
    plan, positions = [], {}
    for _ in range(count):
        source = rng.randrange(w)
        target = rng.choice([r for r in range(w) if r != source])
        tag = rng.choice([0, 1, 2, 40_000])
        position = positions[source, target, tag] = positions.get((source, target, tag), -1) + 1
        # By tag and position, so that the receiver knows: on both sides of a slot, and empty.
        size = random.Random(f"{seed} {source} {target} {tag} {position}").choice(
            [0, 1, 17, 1000, 16_384, 40_000]
        )
        plan.append((source, target, tag, size, position))
    return plan


def content(source, target, tag, size, position):
    start = 1000 * source + 100 * target + tag % 10 + 10_000 * position
    return torch.arange(float(size)) + start


def posting_orders(rank, w, seeds, count):
    for seed in seeds:
        plan = message_plan(seed, w, count)
        mine = [m for m in plan if rank in m[:2]]
        rng = random.Random(1000 * seed + rank)
        # Any order of posting; what is sent with one tag to one rank keeps its order, and so does
        # what is received.
        order = mine.copy()
        rng.shuffle(order)
        queues: dict = {}
        for message in mine:
            queues.setdefault(message[:3], []).append(message)
        works, received = [], []
        for message in order:
            source, target, _, _, _ = message = queues[message[:3]].pop(0)
            if rng.random() < 0.1:
                time.sleep(0.001)
            if source == rank:
                works.append(dist.isend(content(*message), target, tag=message[2]))
            else:
                tensor = torch.full((message[3],), -1.0)
                received.append((message, tensor))
                works.append(dist.irecv(tensor, source, tag=message[2]))
        rng.shuffle(works)
        for work in works:
            work.wait()
        for message, tensor in received:
            same(tensor, content(*message), (seed, message))
    return "done"


@over_each_transport
@pytest.mark.parametrize("world_size", [2, 4])
def test_messages_posted_in_any_order(transport, world_size):
    run_case(world_size, posting_orders, range(5), 150, transport=transport)


@pytest.mark.full
@over_each_transport
def test_messages_posted_in_any_order_at_length(transport):
    run_case(4, posting_orders, range(100, 160), 300, transport=transport, timeout=250)


def test_messages_posted_in_any_order_on_gloo():
    run_case(2, posting_orders, range(3), 60, backend="gloo")


# ---- 500 operations, waited for at random ----


def every_kind(rank, w, count):
    rng, pending = random.Random(17), []
    for i in range(count):
        n = rng.choice([0, 1, 17, 257, 5000])
        root = rng.randrange(w)
        pending.append(start("world", None, rank, list(range(w)), Step(i, n, root, rng)))
    random.Random(rank).shuffle(pending)
    for work, outputs, expected in pending:
        work.wait()
        for output, one in zip(outputs, expected, strict=True):
            same(output, one)
    return "done"


@over_each_transport
def test_500_operations_waited_for_in_random_order(transport):
    run_case(3, every_kind, 500, transport=transport)


# ---- Many groups ----

KINDS = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
]
DTYPES = [torch.float32, torch.int64, torch.bfloat16, torch.uint8]


class Step:
    """One collective of a group: the same on all its ranks."""

    def __init__(self, number, n, root, rng, kinds=tuple(KINDS)) -> None:
        self.number, self.n, self.root = number, n, root
        self.kind = rng.choice(kinds)
        self.dtype = rng.choice(DTYPES)
        self.op = rng.choice(["SUM", "MAX"])


def start(name, group, rank, members, step, asynchronous=True):
    """Starts it: (work, outputs, what they must be). The oracle computes the data of all ranks."""
    w, place, n, root = len(members), members.index(rank), step.n, step.root
    salt = step.number + sum(map(ord, name))
    wholes = [numbered(r, (w, n), step.dtype, salt) for r in members]
    parts = [whole[0].clone() for whole in wholes]
    op = getattr(ReduceOp, step.op)

    def reduced(tensors):
        return total(tensors) if step.op == "SUM" else torch.stack(tensors).amax(0)

    options = {"group": group, "async_op": asynchronous}
    mine, is_root, owner = parts[place].clone(), place == root, members[root]
    blanks = [torch.zeros_like(mine) for _ in range(w)]
    if step.kind == "all_reduce":
        return dist.all_reduce(mine, op, **options), [mine], [reduced(parts)]
    if step.kind == "reduce":
        expected = reduced(parts) if is_root else parts[place]
        return dist.reduce(mine, owner, op, **options), [mine], [expected]
    if step.kind == "broadcast":
        return dist.broadcast(mine, owner, **options), [mine], [parts[root]]
    if step.kind == "all_gather":
        return dist.all_gather(blanks, mine, **options), blanks, parts
    if step.kind == "gather":
        work = dist.gather(mine, blanks if is_root else None, owner, **options)
        return work, blanks if is_root else [mine], parts if is_root else [parts[place]]
    if step.kind == "scatter":
        inputs = list(wholes[root]) if is_root else None
        expected = [wholes[root][place].clone()]
        return dist.scatter(blanks[0], inputs, owner, **options), blanks[:1], expected
    if step.kind == "reduce_scatter":
        work = dist.reduce_scatter(blanks[0], list(wholes[place]), op, **options)
        return work, blanks[:1], [reduced(wholes)[place].clone()]
    if step.kind == "all_to_all":
        output = torch.zeros_like(wholes[0])
        work = dist.all_to_all_single(output, wholes[place].clone(), **options)
        return work, [output], [torch.stack([whole[place] for whole in wholes])]
    return dist.barrier(group, async_op=asynchronous), [], []


def group_plan(seed, w, count, length, kinds):
    """The members of each group (overlapping, of all sizes) and its steps."""
    rng = random.Random(seed)
    plan = []
    for g in range(count):
        members = sorted(rng.sample(range(w), w if g == 0 else rng.randint(1, w)))
        steps = []
        for number in range(length):
            n = rng.choice([0, 1, 5, 64, 257, 3000])
            steps.append(Step(number, n, rng.randrange(len(members)), rng, kinds))
        plan.append((f"group{g}", members, steps))
    return plan


def ten_groups(rank, w, seeds, length, kinds=tuple(KINDS)):
    for seed in seeds:
        plan = group_plan(seed, w, 10, length, kinds)
        groups = [dist.new_group(members) for _, members, _ in plan]
        mine = [
            (name, group, members, list(steps))
            for (name, members, steps), group in zip(plan, groups, strict=True)
            if rank in members
        ]
        # Each rank merges the groups' sequences in its own way. One rank waits at once: all others
        # start everything before they wait, so that cannot be in vain.
        rng = random.Random(1000 * seed + rank)
        patient = seed % w == rank
        pending = []
        while any(steps for *_, steps in mine):
            name, group, members, steps = rng.choice([one for one in mine if one[3]])
            for _ in range(min(len(steps), rng.choice([1, 1, 2, 5]))):
                step = steps.pop(0)
                waits = patient and rng.random() < 0.3
                work, outputs, expected = start(name, group, rank, members, step, not waits)
                pending.append((work, outputs, expected, (seed, name, step.number, step.kind)))
            if rng.random() < 0.05:
                time.sleep(0.001)
        rng.shuffle(pending)
        for work, outputs, expected, what in pending:
            if work is not None:
                work.wait()
            for output, one in zip(outputs, expected, strict=True):
                same(output, one, what)
        dist.barrier()
        order = list(range(10))
        rng.shuffle(order)  # destroyed in any order
        for g in order:
            if rank in plan[g][1]:
                dist.destroy_process_group(groups[g])
    return "done"


def ten_groups_leave_nothing(rank, w, seeds, length):
    dist.barrier(async_op=True).wait()  # the world's own thread
    with leaves_nothing():
        ten_groups(rank, w, seeds, length)
    return "done"


@over_each_transport
def test_ten_overlapping_groups_in_any_order(transport):
    run_case(5, ten_groups_leave_nothing, [1], 40, transport=transport, timeout=90)


@pytest.mark.full
@over_each_transport
def test_ten_overlapping_groups_in_any_order_at_length(transport):
    run_case(5, ten_groups_leave_nothing, range(2, 8), 120, transport=transport, timeout=280)


def test_ten_overlapping_groups_on_gloo():
    kinds = [kind for kind in KINDS if kind not in ("reduce", "reduce_scatter")]
    run_case(4, ten_groups, [1], 10, kinds, backend="gloo")


# Right for any number of ranks from 2 on, with these arguments: run over mixed transports, too.
ANY_WORLD = [
    (posting_orders, (range(5), 150)),
    (every_kind, (500,)),
    (ten_groups, ([1], 40)),
]
