"""Public bug reports, kind E: point to point."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

from helpers_cases import (
    TRANSPORTS,
    Guarded,
    all_words,
    error_of,
    leaves_nothing,
    numbered,
    on_own_group,
    run_case,
    same,
    still_works,
)

over_each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


def payload(source: int, number: int, n: int = 20) -> torch.Tensor:
    return torch.arange(float(n)) + 1000 * source + 10_000 * number


# ---- E1 ----


def e1_to_itself(rank, w):
    one = torch.zeros(3)
    calls = {
        "send": lambda: dist.send(one, rank),
        "isend": lambda: dist.isend(one, rank),
        "recv": lambda: dist.recv(one, rank),
        "irecv": lambda: dist.irecv(one, rank),
        "batch send": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, one, rank)]),
        "batch recv": lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, one, rank)]),
    }
    with leaves_nothing():
        for name, call in calls.items():
            text = error_of(call, ValueError)
            assert "same as the rank" in text, (name, text)
    still_works(rank, w)
    if w > 1:
        sent = dist.isend(payload(rank, 1), (rank + 1) % w)
        taken = torch.zeros(20)
        dist.recv(taken, (rank - 1) % w)
        sent.wait()
        same(taken, payload((rank - 1) % w, 1))
    return "done"


@over_each_transport
@pytest.mark.parametrize("world_size", [1, 2])
def test_e1_no_message_to_oneself(transport, world_size):
    """E1: a ValueError, alone and in a batch; the group goes on."""
    run_case(world_size, e1_to_itself, transport=transport)


# ---- E2 ----


def e2_tags(rank, w, orders=100):
    ones, twos = torch.zeros(5), torch.zeros(5)
    if rank == 0:
        works = [dist.isend(torch.ones(5), 1, tag=1), dist.isend(torch.full((5,), 2.0), 1, tag=2)]
        for work in works:
            work.wait()
    elif rank == 1:
        dist.recv(twos, 0, tag=2)
        dist.recv(ones, 0, tag=1)
        same(ones, torch.ones(5), "tag 1")
        same(twos, torch.full((5,), 2.0), "tag 2")
    for seed in range(orders):
        rng = random.Random(seed)
        messages = [(tag, i) for tag in (0, 3, 9, 1_000_000) for i in range(3)]
        sends, receives = messages.copy(), messages.copy()
        rng.shuffle(sends)
        rng.shuffle(receives)
        order = {tag: [i for t, i in sends if t == tag] for tag, _ in messages}
        works, got = [], []
        if rank == 0:
            works = [dist.isend(payload(tag % 7, i), 1, tag=tag) for tag, i in sends]
        elif rank == 1:
            for tag, _ in receives:
                tensor = torch.zeros(20)
                works.append(dist.irecv(tensor, 0, tag=tag))
                number = order[tag][sum(t == tag for t, _ in got)]
                got.append((tag, (tensor, payload(tag % 7, number))))
        rng.shuffle(works)
        for work in works:
            work.wait()
        for tag, (tensor, expected) in got:
            same(tensor, expected, (seed, tag))
    return "done"


def e2_blocking_sends(rank, w):
    """Received in the other order: small messages do not wait for their receive."""
    if rank == 0:
        dist.send(payload(0, 1), 1, tag=1)
        dist.send(payload(0, 2), 1, tag=2)
    elif rank == 1:
        for tag in (2, 1):
            tensor = torch.zeros(20)
            dist.recv(tensor, 0, tag=tag)
            same(tensor, payload(0, tag), tag)
    return "done"


@over_each_transport
def test_e2_matched_by_tag_and_in_order_within_a_tag(transport):
    """E2: 100 random orders of tags; blocking sends in the other order."""
    run_case(2, e2_tags, transport=transport)
    run_case(2, e2_blocking_sends, transport=transport)


def test_e2_control_on_gloo():
    """E2: Gloo matches tags of isend."""
    run_case(2, e2_tags, 20, backend="gloo")


# ---- E3 ----


def e3_length(number: int) -> int:
    """Every third is too large to be sent before it is asked for."""
    return 100_000 if number % 3 == 0 else 20


def e3_any_source(rank, w):
    rng = random.Random(rank)
    if rank != 0:
        works = []
        for i in range(10):
            time.sleep(rng.uniform(0, 0.004))
            works.append(dist.isend(payload(rank, i, e3_length(i)), 0, tag=e3_length(i)))
        for work in works:
            work.wait()
        return "done"
    for length in (20, 100_000):
        seen: dict[int, int] = {}
        numbers = [i for i in range(10) if e3_length(i) == length]
        for _ in range(len(numbers) * (w - 1)):
            tensor = torch.zeros(length)
            source = dist.recv(tensor, None, tag=length)
            place = seen[source] = seen.get(source, -1) + 1
            same(tensor, payload(source, numbers[place], length), (source, place))
        assert seen == dict.fromkeys(range(1, w), len(numbers) - 1)
    return "done"


def e3_small(rank, w):
    rng = random.Random(rank)
    if rank != 0:
        for i in range(10):
            time.sleep(rng.uniform(0, 0.004))
            dist.send(payload(rank, i), 0)
        return "done"
    seen: dict[int, int] = {}
    for _ in range(10 * (w - 1)):
        tensor = torch.zeros(20)
        source = dist.recv(tensor)
        seen[source] = seen.get(source, -1) + 1
        same(tensor, payload(source, seen[source]), source)
    assert seen == dict.fromkeys(range(1, w), 9)
    return "done"


@over_each_transport
def test_e3_from_any_source(transport):
    """E3: the source that is returned sent the payload; its order is kept; nothing is lost."""
    run_case(4, e3_small, transport=transport)
    run_case(4, e3_any_source, transport=transport)


def test_e3_control_on_gloo():
    """E3: the small ones on Gloo."""
    run_case(4, e3_small, backend="gloo")


# ---- E4 ----

LARGE = 2 << 20  # float32: 8 MiB


def e4_both_send_first(rank, w):
    def call(group):
        start = time.monotonic()
        mine = payload(rank, 0, LARGE)
        text = error_of(lambda: dist.send(mine, 1 - rank, group, tag=7))
        return time.monotonic() - start, text

    result = on_own_group(rank, w, 1.5, call)
    for number in range(3):  # small ones are kept until they are asked for
        dist.send(payload(rank, number, 1000), 1 - rank, tag=number)
    for number in range(3):
        taken = torch.zeros(1000)
        dist.recv(taken, 1 - rank, tag=number)
        same(taken, payload(1 - rank, number, 1000))
    return result


def e4_ring_in_a_batch(rank, w, n=LARGE):
    for number in range(3):
        mine, taken = payload(rank, number, n), torch.zeros(n)
        operations = [
            dist.P2POp(dist.isend, mine, (rank + 1) % w),
            dist.P2POp(dist.irecv, taken, (rank - 1) % w),
        ]
        for work in dist.batch_isend_irecv(operations if rank % 2 else operations[::-1]):
            work.wait()
        same(taken, payload((rank - 1) % w, number, n), number)
        same(mine, payload(rank, number, n), number)
    return "done"


@over_each_transport
def test_e4_both_send_first(transport):
    """E4 [choice]: small messages are buffered; large ones time out and say with whom."""
    for result in run_case(2, e4_both_send_first, transport=transport):
        took, text = result.value
        assert 1.2 < took < 6, took
        # The second of the two to notice is told by the first.
        all_words(text, "timed out", "send to rank", "tag 7", "2097152", "float32", "receive")
        assert "send to rank 0" in text or "send to rank 1" in text


@over_each_transport
@pytest.mark.parametrize("world_size", [2, 5])
def test_e4_a_batch_in_a_ring(transport, world_size):
    """E4: batch_isend_irecv in any order; with two ranks, previous and next are the same."""
    run_case(world_size, e4_ring_in_a_batch, transport=transport)


def test_e4_control_on_gloo():
    """E4: the batch works there."""
    run_case(5, e4_ring_in_a_batch, 1000, backend="gloo")


# ---- E8 ----


def e8_dropped_handles(rank, w):
    for count in (3, 50, 200):
        kept = []
        if rank == 0:
            for i in range(count):
                tensor = payload(0, i, 300)
                work = dist.isend(tensor, 1, tag=i)
                del tensor
                noise = [torch.full((300,), -5.0) for _ in range(4)]
                if i % 3 == 0:
                    kept.append(work)
                del work, noise
        elif rank == 1:
            tensors = [torch.zeros(300) for _ in range(count)]
            works = [(i, dist.irecv(t, 0, tag=i)) for i, t in enumerate(tensors)]
            random.Random(count).shuffle(works)
            for _, work in works:
                work.wait()
            for i, tensor in enumerate(tensors):
                same(tensor, payload(0, i, 300), (count, i))
        for work in kept:
            work.wait()
        dist.barrier()
    return "done"


@over_each_transport
def test_e8_dropped_handles_and_tensors(transport):
    """E8: up to 200 messages whose works and tensors nobody keeps."""
    run_case(2, e8_dropped_handles, transport=transport)


# ---- E9 ----

SIZES = [
    ("receive is larger", 4, torch.float32, 6, torch.float32),
    ("receive is smaller", 6, torch.float32, 4, torch.float32),
    ("another dtype", 4, torch.float32, 4, torch.int32),
    ("another dtype, same bytes", 4, torch.float32, 8, torch.bfloat16),
    ("large", 300_000, torch.float32, 300_001, torch.float32),
    ("large, another dtype", 300_000, torch.float32, 300_000, torch.int32),
    ("empty", 0, torch.float32, 1, torch.float32),
]


def e9_sizes(rank, w):
    texts = {}
    with leaves_nothing():
        for name, sent, dtype, taken, other in SIZES:
            if rank == 0:
                tensor = numbered(0, (sent,), dtype)
                if sent * dtype.itemsize > 100_000:  # waits for its receive, so it is told
                    texts[name] = error_of(lambda tensor=tensor: dist.send(tensor, 1, tag=3))
                else:
                    dist.send(tensor, 1, tag=3)
            elif rank == 1:
                target = Guarded(numbered(7, (taken,), other))
                texts[name] = error_of(lambda target=target: dist.recv(target.tensor, 0, tag=3))
                target.check(numbered(7, (taken,), other), name)
            # The next message of that tag is not disturbed.
            if rank == 0:
                dist.send(payload(0, 1), 1, tag=3)
            elif rank == 1:
                fine = torch.zeros(20)
                dist.recv(fine, 0, tag=3)
                same(fine, payload(0, 1), name)
        still_works(rank, w)
    return texts


@over_each_transport
def test_e9_receives_of_another_size_or_dtype(transport):
    """E9 [choice]: an error that has both; nothing is written; the group goes on."""
    sender, receiver = (result.value for result in run_case(2, e9_sizes, transport=transport))
    for name, sent, dtype, taken, other in SIZES:
        texts = [receiver[name], *([sender[name]] if name in sender else [])]
        for text in texts:
            names = [str(one).removeprefix("torch.") for one in (dtype, other)]
            all_words(text, f"{sent} x {names[0]}", f"{taken} x {names[1]}", "tag 3", "rank")
    assert len(sender) == 2


# Right for any number of ranks from 2 on, with these arguments: run over mixed transports, too.
ANY_WORLD = [
    (e1_to_itself, ()),
    (e2_tags, ()),
    (e2_blocking_sends, ()),
    (e3_small, ()),
    (e3_any_source, ()),
    (e4_ring_in_a_batch, ()),
    (e8_dropped_handles, ()),
    (e9_sizes, ()),
]
