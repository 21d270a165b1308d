"""torch.distributed over pycoll: send and recv in every form."""

from __future__ import annotations

import datetime
import random
import time

import pytest
import torch
import torch.distributed as dist

from pool import torch_ranks

DTYPES = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int64",
    "uint8",
    "uint16",
]
DTYPES += ["bool", "complex64", "float8_e4m3fn", "float8_e5m2"]


def payload(source: int, number: int, n: int) -> torch.Tensor:
    return torch.arange(float(n)) + 1000 * source + 100_000 * number


def check(tensor, expected):
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def pairs(rank, w):
    """Blocking and not; sizes on both sides of a slot, and much larger ones."""
    for n in (0, 1, 7, 1000, 8192, 8193, 100_000, 1_500_000):
        for source in range(w):
            target = (source + 1) % w
            if rank == source:
                mine = payload(source, 1, n)
                dist.send(mine, target)
                check(mine, payload(source, 1, n))
            if rank == target:
                base = torch.full((n + 8,), -1.0)
                work = dist.irecv(base[4:-4], source)
                assert work.wait()
                check(base[4:-4], payload(source, 1, n))
                assert (base[:4] == -1).all()
                assert (base[-4:] == -1).all()
                assert work._source_rank() == source
    for dtype in DTYPES:
        mine = (torch.arange(50) % 5 + rank).to(torch.float32).to(getattr(torch, dtype))
        theirs = torch.zeros(50).to(mine.dtype)
        work = dist.isend(mine, (rank + 1) % w)
        dist.recv(theirs, (rank - 1) % w)
        work.wait()
        expected = (torch.arange(50) % 5 + (rank - 1) % w).to(torch.float32).to(mine.dtype)
        assert torch.equal(theirs.view(torch.uint8), expected.view(torch.uint8)), dtype
    return "done"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend", ["pycoll", "gloo"])
def test_pairs(world_size, backend):
    if backend == "gloo":
        results = torch_ranks(world_size, pairs_gloo, backend=backend)
    else:
        results = torch_ranks(world_size, pairs)
    assert [r.value for r in results] == ["done"] * world_size


def pairs_gloo(rank, w):
    DTYPES[:] = ["float32", "float64", "int8", "int64", "uint8"]
    return pairs(rank, w)


def tags(rank, w):
    """100 random orders of tags; within a tag the order of sends."""
    for seed in range(100):
        rng = random.Random(seed)
        numbers = [(tag, i) for tag in (0, 1, 5, 70_000) for i in range(3)]
        sends = numbers.copy()
        rng.shuffle(sends)
        receives = numbers.copy()
        rng.shuffle(receives)
        # The i-th message of a tag is the i-th that was sent with it.
        order = {tag: [i for t, i in sends if t == tag] for tag in (0, 1, 5, 70_000)}
        if rank == 0:
            works = [dist.isend(payload(tag % 9, i, 5), 1, tag=tag) for tag, i in sends]
        else:
            posted: dict[int, int] = {}
            works, tensors = [], []
            for tag, _ in receives:
                place = posted[tag] = posted.get(tag, -1) + 1
                tensor = torch.zeros(5)
                works.append(dist.irecv(tensor, 0, tag=tag))
                tensors.append((tensor, payload(tag % 9, order[tag][place], 5)))
        rng.shuffle(works)
        for work in works:
            work.wait()
        if rank == 1:
            for tensor, expected in tensors:
                check(tensor, expected)
    return "done"


def test_tags_are_matched_whatever_the_order():
    assert [r.value for r in torch_ranks(2, tags, timeout=60)] == ["done"] * 2


def any_source(rank, w):
    rng = random.Random(rank)
    if rank != 0:
        for i in range(10):
            time.sleep(rng.uniform(0, 0.004))
            dist.send(payload(rank, i, 20), 0)
        return "done"
    seen: dict[int, int] = {}
    for _ in range(10 * (w - 1)):
        tensor = torch.zeros(20)
        source = dist.recv(tensor)
        number = seen[source] = seen.get(source, -1) + 1
        check(tensor, payload(source, number, 20))
    assert seen == dict.fromkeys(range(1, w), 9)
    return "done"


def test_from_any_source():
    assert [r.value for r in torch_ranks(4, any_source)] == ["done"] * 4


def both_first(rank, w):
    """Every rank sends before it receives; then a ring in one batch, large and small."""
    for n in (10, 2_000_000):
        mine, theirs = payload(rank, 2, n), torch.zeros(n)
        peer = (rank + 1) % w
        source = (rank - 1) % w
        operations = [
            dist.P2POp(dist.isend, mine, peer),
            dist.P2POp(dist.irecv, theirs, source),
        ]
        works = dist.batch_isend_irecv(operations)
        assert len(works) == 2
        for work in works:
            work.wait()
        check(theirs, payload(source, 2, n))
    small, theirs = payload(rank, 3, 100), torch.zeros(100)
    dist.send(small, (rank + 1) % w)
    dist.recv(theirs, (rank - 1) % w)
    check(theirs, payload((rank - 1) % w, 3, 100))
    return "done"


@pytest.mark.parametrize("world_size", [2, 5])
def test_sending_before_receiving(world_size):
    assert [r.value for r in torch_ranks(world_size, both_first)] == ["done"] * world_size


def dropped(rank, w):
    for count in (3, 200):
        for i in range(count):
            if rank == 0:
                dist.isend(payload(0, i, 300), 1, tag=i)  # neither work nor tensor is kept
        if rank == 1:
            tensors = [torch.zeros(300) for _ in range(count)]
            works = [dist.irecv(t, 0, tag=i) for i, t in reversed(list(enumerate(tensors)))]
            for work in works:
                work.wait()
            for i, tensor in enumerate(tensors):
                check(tensor, payload(0, i, 300))
        dist.barrier()
    return "done"


def test_dropped_handles_and_tensors():
    env = {"MALLOC_PERTURB_": "165"}
    assert [r.value for r in torch_ranks(2, dropped, env=env)] == ["done"] * 2


def mismatched(rank, w):
    """Buffers that are too large or too small, and another dtype: errors, no byte outside."""
    texts = []
    for n, m, dtype in (
        (4, 6, torch.float32),
        (6, 4, torch.float32),
        (4, 4, torch.int32),
    ):
        if rank == 0:
            try:
                dist.send(torch.ones(n), 1)
            except RuntimeError as error:
                texts.append(str(error))
        else:
            base = torch.full((m + 8,), -1).to(dtype)
            with pytest.raises(RuntimeError) as raised:
                dist.recv(base[4:-4], 0)
            texts.append(str(raised.value))
            assert (base == -1).all()
    fine = torch.full((3,), float(rank))
    if rank == 0:
        dist.send(fine, 1)
    else:
        dist.recv(fine, 0)
        assert (fine == 0).all()
    dist.barrier()
    return texts


def test_messages_that_do_not_fit_are_errors_and_the_group_lives():
    _, receiver = torch_ranks(2, mismatched)
    for text, words in zip(
        receiver.value, (("4", "6"), ("6", "4"), ("float32", "int32")), strict=True
    ):
        for word in (*words, "recv"):
            assert word in text


def works(rank, w):
    tensor = payload(rank, 0, 6)
    if rank == 0:
        store = dist.distributed_c10d._get_default_store()
        work = dist.irecv(tensor, None, tag=2)
        assert not work.is_completed()
        with pytest.raises(RuntimeError, match="not done"):
            work._source_rank()
        with pytest.raises(RuntimeError, match="Timed out"):
            work.wait(datetime.timedelta(milliseconds=100))
        store.set("waiting", "")
        assert work.wait()
        assert work.is_success()
        assert work._source_rank() == 1
        assert work.get_future().value()[0].data_ptr() == tensor.data_ptr()
        check(tensor, payload(1, 0, 6))
    else:
        dist.distributed_c10d._get_default_store().wait(["waiting"])
        work = dist.isend(tensor, 0, tag=2)
        work.wait()
        with pytest.raises(RuntimeError, match="source_rank"):
            work._source_rank()
    return "done"


def test_works_of_messages():
    assert [r.value for r in torch_ranks(2, works)] == ["done"] * 2


def patience(rank, w):
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.6))
    if rank == 1:
        time.sleep(1.5)
        return None
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as raised:
        dist.recv(torch.ones(3), 1, group=group, tag=4)
    return time.monotonic() - start, str(raised.value)


def test_the_timeout_of_a_message_is_the_groups():
    took, text = torch_ranks(2, patience)[0].value
    assert 0.5 < took < 1.3
    for word in ("Timed out", "recv", "rank 1", "tag 4"):
        assert word in text


def beside_collectives(rank, w):
    """A receive that nobody answers yet does not hold up collectives, nor the other way round."""
    late, sums = torch.zeros(1000), []
    waiting = dist.irecv(late, (rank + 1) % w, tag=9)
    for i in range(20):
        one = torch.full((500,), float(rank + i))
        dist.all_reduce(one)
        sums.append(one[0].item())
    assert not waiting.is_completed()
    dist.barrier()
    stuck = dist.barrier(async_op=True) if rank == 0 else None
    dist.send(payload(rank, 5, 1000), (rank - 1) % w, tag=9)
    waiting.wait()
    check(late, payload((rank + 1) % w, 5, 1000))
    if stuck is None:
        dist.barrier()
    else:
        stuck.wait()
    return sums


def test_messages_and_collectives_do_not_wait_for_each_other():
    for result in torch_ranks(3, beside_collectives):
        assert result.value == [3.0 * i + 3 for i in range(20)]
