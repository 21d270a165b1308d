"""all_reduce of sparse CPU tensors: the same bits on every rank, whatever indices each has."""

from __future__ import annotations

import datetime
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pool import torch_ranks

TRANSPORTS = ["shm", "tcp"]


def sparse_of(rank, dtype=torch.float32, shape=(50, 3), sparse_dims=1, entries=9):
    """Some indices are there twice, some on several ranks."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.stack(
        [torch.randint(shape[d], (entries,), generator=generator) for d in range(sparse_dims)]
    )
    values = torch.randint(-9, 10, (entries, *shape[sparse_dims:]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def bits(tensor):
    tensor = tensor.coalesce()
    values = tensor.values().contiguous().view(torch.uint8)
    return tensor.indices().tolist(), values.flatten().tolist()


CASES = [
    {},
    {"dtype": torch.float64, "shape": (40, 20), "sparse_dims": 2},
    {"dtype": torch.int64},
    {"dtype": torch.bfloat16},
    {"shape": (50,), "entries": 0},
]


def sums(rank, w):
    for case in CASES:
        mine = sparse_of(rank, **case)
        expected = sum(sparse_of(r, **case).to_dense().double() for r in range(w))
        dist.all_reduce(mine)
        assert mine.is_sparse
        assert torch.equal(mine.to_dense().double(), expected), case
    uneven = sparse_of(rank, entries=rank * 5)
    dist.all_reduce(uneven, op=dist.ReduceOp.AVG)
    expected = sum(sparse_of(r, entries=r * 5).to_dense() for r in range(w)) / w
    torch.testing.assert_close(uneven.to_dense(), expected)
    # Halves that a sum in bfloat16 would lose.
    fine = torch.sparse_coo_tensor([[3]], torch.tensor([256.0 if rank == 0 else 1.0]), (5,))
    fine = fine.to(torch.bfloat16)
    dist.all_reduce(fine)
    assert fine.to_dense()[3] == 256 + w - 1
    return [bits(mine), bits(uneven)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sums(transport, world_size):
    ranks = torch_ranks(world_size, sums, env={"PYCOLL_TRANSPORT": transport}, timeout=60)
    assert all(result.value == ranks[0].value for result in ranks)


def entries_of(rank, entries, width):
    """Sorted distinct indices, and values of other magnitudes on each rank."""
    rng = np.random.default_rng([rank, entries, width])
    indices = np.sort(rng.permutation(2 * entries)[:entries])
    values = rng.standard_normal((entries, width)) * 10.0 ** (3 * (rank % 3))
    return indices, values.astype(np.float32)


def ordered(rank, w):
    """float32 sums depend on their order, at sizes that a sort treats differently too."""
    for entries in (1, 4, 20, 200, 5000):
        for width in (1, 3):
            indices, values = entries_of(rank, entries, width)
            mine = torch.sparse_coo_tensor(indices[None], values, (2 * entries, width))
            dist.all_reduce(mine)
            assert mine.is_coalesced()
            expected = np.zeros((2 * entries, width), np.float32)
            for peer in range(w):
                indices, values = entries_of(peer, entries, width)
                expected[indices] += values
            assert np.array_equal(mine.to_dense().numpy(), expected), (entries, width)
    return "done"


def test_sums_are_in_the_order_of_ranks():
    ranks = torch_ranks(4, ordered, timeout=60)
    assert [result.value for result in ranks] == ["done"] * 4


def asynchronous(rank, w):
    """Several under way among other calls; the tensor may be dropped, and its future has it."""
    expected = sum(sparse_of(r).to_dense() for r in range(w))
    futures = []
    for _ in range(20):
        work = dist.all_reduce(sparse_of(rank), async_op=True)
        dense = torch.full((3,), float(rank))
        other = dist.all_reduce(dense, async_op=True)
        futures.append(work.get_future())
        other.wait()
        assert dense[0] == w * (w - 1) / 2
    for future in futures:
        (tensor,) = future.wait()
        assert torch.equal(tensor.to_dense(), expected)
    # It is what it was when the call was made.
    mine = sparse_of(rank)
    if rank == 1:
        time.sleep(0.3)
    work = dist.all_reduce(mine, async_op=True)
    work.wait()
    assert work.is_completed() and work.is_success()
    assert torch.equal(work.result()[0].to_dense(), expected)
    return "done"


def test_asynchronous_calls():
    assert [r.value for r in torch_ranks(3, asynchronous, timeout=60)] == ["done"] * 3


def differing(rank, w):
    texts = []
    for other in (
        {"shape": (51, 3)},
        {"dtype": torch.float64},
        {"shape": (50, 1), "sparse_dims": 2},
    ):
        group = dist.new_group()
        with pytest.raises(dist.DistBackendError, match="sparse tensor of shape") as caught:
            dist.all_reduce(sparse_of(rank, **(other if rank == 1 else {})), group=group)
        texts.append(str(caught.value))
    with pytest.raises(RuntimeError, match="sparse tensors have SUM and AVG, not max"):
        dist.all_reduce(sparse_of(rank), op=dist.ReduceOp.MAX)
    dist.all_reduce(torch.ones(3))
    return texts


def test_ranks_that_differ_are_named():
    for result in torch_ranks(3, differing, timeout=60):
        for text, words in zip(
            result.value, ("[51, 3]", "Double", "2 sparse dimensions"), strict=True
        ):
            assert words in text and "rank 1" in text, text


def one_is_late(rank, w):
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    dist.all_reduce(sparse_of(rank), group=group)
    if rank == 1:
        time.sleep(2.5)
        return ""
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="Timed out") as caught:
        dist.all_reduce(sparse_of(rank), group=group)
    assert time.monotonic() - start < 2
    return str(caught.value)


def test_a_late_rank_is_named():
    ranks = torch_ranks(3, one_is_late, timeout=60)
    assert "rank 1" in ranks[0].value and "rank 1" in ranks[2].value


def embeds(rank, w):
    torch.manual_seed(0)
    model = nn.EmbeddingBag(30, 4, sparse=True)
    ddp = DistributedDataParallel(model)
    alone = nn.EmbeddingBag(30, 4, sparse=True)
    alone.load_state_dict(model.state_dict())
    for step in range(3):
        words = [torch.tensor([[(7 * r + step) % 30, (3 * r + 1) % 30]]) for r in range(w)]
        ddp(words[rank]).sum().backward()
        sum(alone(one).sum() for one in words).backward()
        for one, scale in ((model, 0.1), (alone, 0.1 / w)):
            with torch.no_grad():
                one.weight.add_(one.weight.grad, alpha=-scale)
            one.weight.grad = None
    torch.testing.assert_close(model.weight, alone.weight)
    return model.weight.detach().numpy().tobytes()


def test_ddp_with_sparse_gradients():
    ranks = torch_ranks(2, embeds, timeout=120)
    assert ranks[0].value == ranks[1].value
