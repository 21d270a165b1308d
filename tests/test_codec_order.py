"""Compressed calls among others: on the same memory, and when a group or a peer ends."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import codec_reference as reference
import pycoll
from codec_model import all_reduced, through, values_of
from codec_reference import Kind
from helpers_threads import ThreadRanks, ends_by_itself
from pool import communicator_ranks, torch_ranks

torch = pytest.importorskip("torch")
dist = torch.distributed

N = 300_001  # long enough for a call to be under way when the next one comes
INT8 = Kind("int8")


# ---- On the same memory ----

ORDERS = [
    ("int8", None, "int8"),
    (None, "int8", None),
    ("int8", "int4", "fp16", "int8"),
    (None, "int8", "int4", None, None, "int8"),
]


def in_order(names, world_size):
    """The vectors of the ranks after sums one after the other."""
    vectors = [values_of(r, N) for r in range(world_size)]
    for name in names:
        if name is None:
            total = vectors[0] + vectors[1]
            for x in vectors[2:]:
                total = total + x
        else:
            total = all_reduced(Kind(name), vectors)
        vectors = [total.copy() for _ in vectors]
    return vectors[0]


@pytest.mark.parametrize("names", ORDERS)
def test_calls_on_one_array_run_in_their_order(names):
    group = ThreadRanks(2)

    def use(communicator):
        x = values_of(communicator.rank, N)
        time.sleep(0.05 * communicator.rank)
        works = [communicator.all_reduce(x, codec=name, async_op=True) for name in names]
        assert all(work.wait(60) for work in works)
        return x

    expected = in_order(names, 2)
    for _ in range(3):
        for x in group.run(use):
            assert x.tobytes() == expected.tobytes()
    group.close()


def test_a_synchronous_call_comes_after_those_under_way():
    """One that takes the short way, too."""
    group = ThreadRanks(2)

    def use(communicator):
        x = values_of(communicator.rank, N)
        communicator.all_reduce(np.ones(N, np.float32))  # this kind of call is known now
        work = communicator.all_reduce(x, codec="int8", async_op=True)
        communicator.all_reduce(x)
        assert work.is_completed()
        return x

    expected = in_order(("int8", None), 2)
    for _ in range(5):
        for x in group.run(use):
            assert x.tobytes() == expected.tobytes()
    group.close()


def test_parts_of_one_array():
    """What is read by several may be read at once; what is written waits."""
    group, n = ThreadRanks(2), 100_000

    def use(communicator):
        rank = communicator.rank
        memory = values_of(rank, 3 * n)
        gathered = [np.zeros((2, n), np.float32) for _ in range(2)]
        middle = memory[n : 2 * n]
        works = [
            communicator.all_gather(gathered[0], middle, codec="int8", async_op=True),
            communicator.all_gather(gathered[1], middle, async_op=True),
            communicator.all_reduce(memory[n - 5 : n + 5 + n], codec="int8", async_op=True),
            communicator.all_reduce(memory[: n - 5], async_op=True),
            communicator.all_reduce(memory, codec="int4", async_op=True),
        ]
        assert all(work.wait(60) for work in works)
        return memory, gathered

    whole = [values_of(r, 3 * n) for r in range(2)]
    summed = whole[0].copy()
    mine = [whole[r][n - 5 : 2 * n + 5] for r in range(2)]
    expected = [whole[0].copy(), whole[1].copy()]
    for r in range(2):
        expected[r][n - 5 : 2 * n + 5] = all_reduced(INT8, mine)
        expected[r][: n - 5] = whole[0][: n - 5] + whole[1][: n - 5]
    summed = all_reduced(Kind("int4"), expected)
    for memory, gathered in group.run(use):
        assert memory.tobytes() == summed.tobytes()
        for r in range(2):
            block = whole[r][n : 2 * n]
            code = through(INT8, block, r, 0, 0)
            assert gathered[0][r].tobytes() == reference.decode(INT8, [code], n).tobytes()
            assert gathered[1][r].tobytes() == block.tobytes()
    group.close()


def torch_calls_on_one_tensor(rank, world_size):
    x = torch.from_numpy(values_of(rank, N))
    dist.all_reduce(torch.ones(N))
    work = pycoll.all_reduce(x, codec="int8", async_op=True)
    dist.all_reduce(x)  # the short way
    assert work.is_completed()
    works = [
        pycoll.all_reduce(x, codec="int8", async_op=True),
        dist.all_reduce(x, async_op=True),
        pycoll.all_reduce(x, codec="int4", async_op=True),
    ]
    pycoll.all_reduce(x)
    assert all(work.is_completed() for work in works)
    return x.numpy()


def test_torch_calls_on_one_tensor_run_in_their_order():
    expected = in_order(("int8", None, "int8", None, "int4", None), 2)
    for result in torch_ranks(2, torch_calls_on_one_tensor, timeout=120):
        assert result.value.tobytes() == expected.tobytes()


# ---- Ends ----


def test_a_group_that_dies_by_itself_ends_what_nobody_waits_for():
    """The failing call is one without a codec, and nobody looks at the compressed one."""
    group = ThreadRanks(2)

    def use(communicator):
        x, y = values_of(communicator.rank, N), values_of(communicator.rank, N, seed=1)
        communicator.all_reduce(x, codec="int8")
        if communicator.rank == 1:
            time.sleep(1.5)
            with pytest.raises(pycoll.Error):
                communicator.all_reduce(x, codec="int8")
                communicator.all_reduce(x, codec="int8")
            return None
        work = communicator.all_reduce(x, codec="int8", async_op=True)
        with pytest.raises(pycoll.Error, match="Timed out"):
            communicator.all_reduce(y, timeout=0.3)
        return ends_by_itself(work)

    # Long before the time of the compressed call is over.
    assert group.run(use)[0] < 5
    group.close()


def killed_in_a_call(communicator):
    x = values_of(communicator.rank, N)
    communicator.all_reduce(x, codec="int8")
    if communicator.rank == 1:
        communicator.all_reduce(x, codec="int8", async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(pycoll.Error) as caught:
        for _ in range(1000):
            communicator.all_reduce(x, codec="int8")
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_peer_is_named(transport):
    env = {"PYCOLL_TRANSPORT": transport}
    results = communicator_ranks(3, killed_in_a_call, env=env, check=False, timeout=60)
    for rank in (0, 2):
        text, seconds = results[rank].value
        assert "rank 1" in text
        assert seconds < 20


# ---- Error feedback ----


def fed_back(communicator, names, n, steps):
    residual, sums = np.zeros(n, np.float32), []
    for step in range(steps):
        x = values_of(communicator.rank, n, seed=step)
        communicator.all_reduce(x, "avg", codec=names[step % len(names)], residual=residual)
        sums.append(x)
    return sums, residual


def model_of(kind, vectors, residuals):
    """One all_reduce with residuals, in place: the mean."""
    given = [x + e for x, e in zip(vectors, residuals, strict=True)]
    result = all_reduced(kind, given, "avg")
    from codec_model import pieces

    for _, begin, end in pieces(kind, len(result), len(vectors)):
        for rank, a in enumerate(given):
            code = through(kind, a[begin:end], rank, begin, 0)
            decoded = reference.decode(kind, [code], end - begin)
            residuals[rank][begin:end] = a[begin:end] - decoded
    return result


@pytest.mark.parametrize("names", [["int8"], ["int4"], ["sign"], ["fp16"], ["uint4", "int8"]])
@pytest.mark.parametrize("world_size", [2, 3])
def test_residuals(names, world_size):
    group, n, steps = ThreadRanks(world_size), 40_009, 4
    residuals = [np.zeros(n, np.float32) for _ in range(world_size)]
    expected = []
    for step in range(steps):
        vectors = [values_of(r, n, seed=step) for r in range(world_size)]
        expected.append(model_of(Kind(names[step % len(names)]), vectors, residuals))
    for rank, (sums, residual) in enumerate(group.run(fed_back, names, n, steps)):
        for got, want in zip(sums, expected, strict=True):
            assert got.tobytes() == want.tobytes()
        assert residual.tobytes() == residuals[rank].tobytes()
    group.close()


def torch_feedback(rank, world_size):
    n, steps = 20_000, 30
    residual, of_sum = torch.zeros(n), torch.zeros(n)
    given, got = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step in range(steps):
        x = torch.from_numpy(values_of(rank, n, seed=step))
        given += x
        work = pycoll.all_reduce(
            x, "avg", codec="int4", residual=residual, sum_residual=of_sum, async_op=True
        )
        assert work.wait()
        got += x
    lost = [torch.zeros(n) for _ in range(world_size)]
    dist.all_gather(lost, residual)
    dist.all_reduce(given, dist.ReduceOp.AVG)
    mine = of_sum.clone()
    dist.all_reduce(of_sum)  # each rank's own part; zeros elsewhere
    lacks = torch.stack(lost).double().mean(0) + of_sum.double()
    missing = (got + lacks - given).abs().max().item()
    wrong = [
        {"residual": torch.zeros(n - 1)},
        {"residual": torch.zeros(n, dtype=torch.float64)},
        {"residual": torch.zeros(2 * n)[::2]},
        {"residual": x},
        {"residual": residual, "sum_residual": residual},
    ]
    for arguments in wrong:
        with pytest.raises((ValueError, RuntimeError), match="residual"):
            pycoll.all_reduce(x, codec="int4", **arguments)
    with pytest.raises(ValueError, match="residual"):
        pycoll.all_reduce(x, residual=residual)
    own = mine.abs().gt(0).double().mean().item()
    return missing, own, float(got.abs().max())


def test_what_was_sent_and_what_is_left_is_what_was_given():
    """Telescoping, by residuals of values and of sums, with two quantisations at 4 bits."""
    for result in torch_ranks(2, torch_feedback, timeout=60):
        missing, own, largest = result.value
        assert missing < 1e-4 * largest
        assert 0.3 < own < 0.55  # its half of the sums


def test_residuals_of_exempt_calls_stay():
    group = ThreadRanks(2)

    def use(communicator):
        x, e = values_of(communicator.rank, 100), np.full(100, 0.5, np.float32)
        communicator.all_reduce(x, codec="int8", residual=e)  # too small
        assert (e == 0.5).all()
        return x

    for x in group.run(use):
        assert x.tobytes() == (values_of(0, 100) + values_of(1, 100)).tobytes()
    group.close()


# ---- Shapes ----


def test_uneven_all_to_all():
    world, kind = 3, INT8
    lengths = [[0, 5000, 1], [70_000, 17, 0], [3, 0, 300_000]]  # [from][to]
    group = ThreadRanks(world)

    def use(communicator):
        rank = communicator.rank
        inputs = [values_of(rank, lengths[rank][to], seed=to) for to in range(world)]
        outputs = [np.full(lengths[peer][rank], 7, np.float32) for peer in range(world)]
        communicator.all_to_all(outputs, inputs, codec="int8")
        return outputs

    for rank, outputs in enumerate(group.run(use)):
        for peer in range(world):
            n = lengths[peer][rank]
            code = through(kind, values_of(peer, n, seed=rank), peer, 0, 0)
            assert outputs[peer].tobytes() == reference.decode(kind, [code], n).tobytes()
    group.close()


@pytest.mark.parametrize("world_size", [3, 5])
def test_any_number_of_values(world_size):
    """None, fewer than ranks, and no multiple of anything (deepspeedai/DeepSpeed#353)."""
    group = ThreadRanks(world_size, pycoll.Options(min_bytes=0))

    def use(communicator, n, name):
        x = values_of(communicator.rank, n)
        communicator.all_reduce(x, codec=name)
        return x

    for name in ("int8", "int4", "sign"):
        for n in (0, 1, 2, 4, 7, 8, 9, 255, 257, 1001):
            expected = all_reduced(Kind(name), [values_of(r, n) for r in range(world_size)])
            for x in group.run(use, n, name):
                assert x.tobytes() == expected.tobytes(), (name, n)
    group.close()


def test_a_broadcast_of_several_pieces():
    group, n = ThreadRanks(3), (1 << 20) + 12_345

    def use(communicator):
        x = values_of(communicator.rank, n)
        communicator.broadcast(x, 2, codec="int4")
        return x

    for x in group.run(use):
        blocks = Kind("int4")
        sent = values_of(2, n)
        piece = 1 << 17  # a whole number of blocks: cuts do not show
        expected = np.concatenate(
            [
                reference.decode(blocks, [through(blocks, part, 2, 0, 0)], len(part))
                for part in (sent[at : at + piece] for at in range(0, n, piece))
            ]
        )
        assert x.tobytes() == expected.tobytes()
    group.close()


def test_a_root_in_memory_that_cannot_be_written_is_refused():
    group = ThreadRanks(2)

    def use(communicator):
        x = values_of(communicator.rank, N)
        x.flags.writeable = False
        with pytest.raises(pycoll.InvalidArgumentError, match="read-only|writ"):
            communicator.broadcast(x, 0, codec="int8")

    group.run(use)
    group.close()


# ---- Stochastic rounding ----


@pytest.mark.parametrize("codec", [pycoll.Int4(stochastic=True, seed=5), pycoll.Ternary(seed=9)])
def test_the_same_step_gives_the_same_bits_again(codec):
    group, n = ThreadRanks(3), 50_000

    def use(communicator, step):
        x = values_of(communicator.rank, n)
        communicator.all_reduce(x, codec=codec, step=step)
        return x

    first = group.run(use, 7)
    other = group.run(use, 8)
    for again in (group.run(use, 7), ThreadRanks(3).run(use, 7)):
        for x, y, z in zip(first, again, other, strict=True):
            assert x.tobytes() == first[0].tobytes() == y.tobytes()
            assert x.tobytes() != z.tobytes()
    # What each rank's own random numbers give, unlike one rounding for all.
    exact = sum(values_of(r, n) for r in range(3))
    assert abs(float((first[0] - exact).mean())) < 0.1
    group.close()
