"""Arguments that share memory, byte orders, and when a strided result is there.

What would compute wrong numbers is refused before memory is touched; what is exactly in place, or
shares an address range but no element, is right.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

import pycoll
from helpers_threads import ThreadRanks
from pool import torch_ranks
from reference import ALGORITHMS

W = 3
SIZES = [1, 5, 1000, 40_000]


@pytest.fixture(scope="module")
def three():
    group = ThreadRanks(W)
    yield group
    group.close()


def values(rank, n):
    return np.arange(n, dtype=float) * (rank + 1) + 1000 * rank


# ---- Refused ----


def gather_across_rows(c, n):
    memory = values(c.rank, (W + 1) * n)
    return memory, lambda **o: c.all_gather(
        memory[: W * n].reshape(W, n), memory[n // 2 :][:n], **o
    )


def gather_into_anothers_row(c, n):
    memory = values(c.rank, W * n)
    output = memory.reshape(W, n)
    return memory, lambda **o: c.all_gather(output, output[(c.rank + 1) % W], **o)


def gather_one_element_off(c, n):
    memory = values(c.rank, (W + 1) * n)
    begin = c.rank * n + 1
    return memory, lambda **o: c.all_gather(
        memory[: W * n].reshape(W, n), memory[begin : begin + n], **o
    )


def gather_from_behind(c, n):
    """The last element of the output is the first of the input."""
    memory = values(c.rank, (W + 1) * n)
    return memory, lambda **o: c.all_gather(
        memory[: W * n].reshape(W, n), memory[W * n - 1 : (W + 1) * n - 1], **o
    )


def scatter_across_blocks(c, n):
    memory = values(c.rank, W * n)
    return memory, lambda **o: c.reduce_scatter(memory[n // 2 + 1 :][:n], memory.reshape(W, n), **o)


def scatter_into_anothers_block(c, n):
    memory = values(c.rank, W * n)
    blocks = memory.reshape(W, n)
    return memory, lambda **o: c.reduce_scatter(blocks[(c.rank + 1) % W], blocks, **o)


def scatter_before(c, n):
    """The last element of the output is the first of the input."""
    memory = values(c.rank, (W + 1) * n)
    return memory, lambda **o: c.reduce_scatter(
        memory[:n], memory[n - 1 : (W + 1) * n - 1].reshape(W, n), **o
    )


REFUSED = [
    gather_across_rows,
    gather_into_anothers_row,
    gather_one_element_off,
    gather_from_behind,
    scatter_across_blocks,
    scatter_into_anothers_block,
    scatter_before,
]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_memory_that_is_shared_is_refused(three, case, asynchronous):
    collective = "all_gather" if "gather" in case.__name__ else "reduce_scatter"

    def attempt(communicator):
        for n in SIZES[1:]:
            for algorithm in ["auto", *ALGORITHMS[collective]]:
                memory, call = case(communicator, n)
                before = memory.copy()
                with pytest.raises(pycoll.InvalidArgumentError) as caught:
                    call(algorithm=algorithm, async_op=asynchronous)
                assert (memory == before).all(), "memory was touched"
                for word in (collective, "share memory"):
                    assert word in str(caught.value)
        array = np.ones(2)  # nobody was told, nothing was counted
        communicator.all_reduce(array)
        assert array.tolist() == [W, W]

    three.run(attempt)


# ---- In place, and side by side ----


@pytest.mark.parametrize("n", SIZES)
def test_exactly_in_place_is_right(three, n):
    def use(communicator):
        rank = communicator.rank
        parts = [values(r, n) for r in range(W)]
        for algorithm in ALGORITHMS["all_gather"]:
            output = np.full((W, n), -1.0)
            output[rank] = parts[rank]
            communicator.all_gather(output, output[rank], algorithm=algorithm)
            np.testing.assert_array_equal(output, parts)
        wide = [values(r, W * n).reshape(W, n) for r in range(W)]
        for algorithm in ALGORITHMS["reduce_scatter"]:
            blocks = wide[rank].copy()
            communicator.reduce_scatter(blocks[rank], blocks, algorithm=algorithm)
            expected = wide[rank].copy()
            expected[rank] = sum(wide)[rank]
            np.testing.assert_array_equal(blocks, expected)
        for algorithm in ALGORITHMS["all_reduce"]:
            array = parts[rank].copy()
            communicator.all_reduce(array, algorithm=algorithm)
            np.testing.assert_array_equal(array, sum(parts))

    three.run(use)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_neighbours_and_interleaved_views_are_right(three, n, asynchronous):
    def finish(work):
        assert (work is not None) == asynchronous
        if work:
            work.wait()

    def use(communicator):
        rank = communicator.rank
        parts = [values(r, n) for r in range(W)]
        # Input right before, and right behind, the output.
        for begin in (0, W * n):
            memory = np.full((W + 1) * n, -1.0)
            memory[begin : begin + n] = parts[rank]
            output = (memory[n:] if begin == 0 else memory[:-n]).reshape(W, n)
            finish(
                communicator.all_gather(output, memory[begin : begin + n], async_op=asynchronous)
            )
            np.testing.assert_array_equal(output, parts)
            np.testing.assert_array_equal(memory[begin : begin + n], parts[rank])
        # Columns: input and outputs lie between each other.
        columns = np.full((n, 2 * W + 2), -1.0)
        columns[:, 2 * W] = parts[rank]
        finish(
            communicator.all_gather(
                columns[:, : 2 * W : 2].T, columns[:, 2 * W], async_op=asynchronous
            )
        )
        np.testing.assert_array_equal(columns[:, : 2 * W : 2].T, parts)
        np.testing.assert_array_equal(columns[:, 2 * W], parts[rank])
        assert (columns[:, 1::2] == -1).all()
        wide = [values(r, W * n).reshape(W, n) for r in range(W)]
        pairs = np.full((W * n, 2), -1.0)
        pairs[:, 0] = wide[rank].reshape(-1)
        finish(
            communicator.reduce_scatter(
                pairs[:n, 1], pairs[:, 0].reshape(W, n), async_op=asynchronous
            )
        )
        np.testing.assert_array_equal(pairs[:n, 1], sum(wide)[rank])
        np.testing.assert_array_equal(pairs[:, 0], wide[rank].reshape(-1))
        assert (pairs[n:, 1] == -1).all()

    three.run(use)


# ---- torch ----


def torch_overlaps(rank, w):
    import torch
    import torch.distributed as dist

    def fresh():
        return torch.arange(60.0) + 100 * rank

    def refused(name, memory, call):
        before = memory.clone()
        for asynchronous in (False, True):
            try:
                call(async_op=asynchronous)
            except RuntimeError as error:
                assert "share memory" in str(error), (name, str(error))
            else:
                wrong.append(name)
            if not torch.equal(memory, before):
                wrong.append(name + ": memory was touched")
                memory.copy_(before)

    wrong = []
    m = fresh()
    grid = m.view(6, 10)
    one = torch.full((6,), rank + 1.0)
    refused("same", m, lambda **o: dist.all_gather([m[:6], m[:6], m[6:12]], one, **o))
    refused("overlap", m, lambda **o: dist.all_gather([m[:6], m[4:10], m[20:26]], one, **o))
    refused("nested order", m, lambda **o: dist.all_gather([m[20:26], m[:6], m[5:11]], one, **o))
    refused("input", m, lambda **o: dist.all_gather([m[:6], m[6:12], m[12:18]], m[3:9], **o))
    refused("columns", m, lambda **o: dist.all_gather([grid[:, i] for i in (2, 3, 2)], one, **o))
    two = torch.zeros(6, 2)
    refused(
        "column pairs",
        m,
        lambda **o: dist.all_gather([grid[:, i : i + 2] for i in (0, 1, 4)], two, **o),
    )
    refused("stacked", m, lambda **o: dist.all_gather_into_tensor(m[:18], m[4:10], **o))
    refused("scatter", m, lambda **o: dist.reduce_scatter_tensor(m[4:10], m[:18], **o))
    refused(
        "scatter list", m, lambda **o: dist.reduce_scatter(m[4:10], [m[:6], m[6:12], m[12:18]], **o)
    )

    # In place, side by side, twice the same input.
    parts = [torch.full((6,), r + 1.0) for r in range(w)]
    m = fresh()
    m[6 * rank :][:6] = one
    dist.all_gather_into_tensor(m[:18], m[6 * rank :][:6])
    assert torch.equal(m[:18], torch.cat(parts))
    outputs = [m.view(-1, 6)[i] for i in (7, 3, 5)]
    outputs[rank].copy_(one)
    dist.all_gather(outputs, outputs[rank])
    assert torch.equal(torch.stack(outputs), torch.stack(parts))
    m = fresh()
    grid = m.view(6, 10)
    dist.all_gather([grid[:, i] for i in (1, 8, 4)], one)
    assert torch.equal(grid[:, [1, 8, 4]], torch.stack(parts, 1))
    untouched = [0, 2, 3, 5, 6, 7, 9]
    assert torch.equal(grid[:, untouched], fresh().view(6, 10)[:, untouched])
    same = torch.full((6,), rank + 1.0)
    output = torch.zeros(6)
    dist.reduce_scatter(output, [same, same, same])
    assert (output == 6).all()
    m = fresh()
    total = sum(torch.arange(60.0) + 100 * r for r in range(w))
    dist.reduce_scatter_tensor(m[6 * rank :][:6], m[:18])
    assert torch.equal(m[6 * rank :][:6], total[6 * rank :][:6])
    return wrong


def test_torch_tensors_that_share_memory():
    for result in torch_ranks(3, torch_overlaps):
        assert not result.value, result.value


# ---- Byte order ----

LITTLE = np.dtype("<f4").isnative
SWAPPED = ["f4", "f8", "f2", "i2", "i4", "i8", "u4", "c8"]


@pytest.mark.parametrize("dtype", SWAPPED)
def test_a_foreign_byte_order_is_refused(three, dtype):
    foreign = np.dtype(dtype).newbyteorder("S")

    def attempt(communicator):
        def make(*shape):
            return np.ones(shape, foreign)

        calls = {
            "all_reduce": lambda: communicator.all_reduce(make(3)),
            "strided all_reduce": lambda: communicator.all_reduce(make(3, 4)[:, ::2]),
            "broadcast": lambda: communicator.broadcast(make(3)),
            "all_gather": lambda: communicator.all_gather(make(W, 3), make(3)),
            "all_gather output": lambda: communicator.all_gather(
                make(W, 3), np.ones(3, np.dtype(dtype))
            ),
            "reduce_scatter": lambda: communicator.reduce_scatter(make(3), make(W, 3)),
            "async": lambda: communicator.all_reduce(make(3), async_op=True),
        }
        for name, call in calls.items():
            with pytest.raises(pycoll.InvalidArgumentError) as caught:
                call()
            assert foreign.str in str(caught.value) or "order" in str(caught.value), name
        # What has no byte order, or is spelled out as the native one, is taken.
        for same in (np.dtype("f4").newbyteorder("="), np.dtype("<f4" if LITTLE else ">f4")):
            array = np.ones(3, same)
            communicator.all_reduce(array)
            assert (array == W).all()
        array = np.ones(3, np.dtype("u1").newbyteorder("S"))
        communicator.all_reduce(array)
        assert (array == W).all()

    three.run(attempt)


# ---- When a strided result is there ----


@pytest.mark.parametrize("look", ["completed", "dropped"])
def test_a_strided_result_is_there_without_wait(three, look):
    def use(communicator):
        for i in range(50):
            memory = np.full((6, 8), communicator.rank + float(i))
            view = memory[:, ::2].T
            outputs = np.full((2 * W, 4, 3), -1.0)
            part = np.full((3, 4), float(communicator.rank)).T
            works = [
                communicator.all_reduce(view, async_op=True),
                communicator.all_gather(outputs[::2], part, async_op=True),
            ]
            if look == "completed":
                while not all(work.is_completed() for work in works):
                    time.sleep(0.001)
            else:
                del works
                communicator.barrier()
            assert (view == W * i + 3).all()
            assert (memory[:, 1::2] == communicator.rank + i).all()
            assert (outputs[::2] == np.arange(float(W))[:, None, None]).all()
            assert (outputs[1::2] == -1).all()

    three.run(use)
