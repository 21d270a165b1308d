"""Collectives over codecs on NumPy arrays, byte for byte against a model of one process."""

from __future__ import annotations

import time

import numpy as np
import pytest

import codec_reference as reference
import pycoll
from codec_model import all_reduced, through, to_dtype, to_f32, values_of
from codec_reference import BITS, Kind
from helpers_threads import ThreadRanks

WORLDS = [2, 3, 5]
TRANSPORTS = ["shm", "tcp"]


# ---- all_reduce ----


def reduce_here(communicator, n, dtype, op, options):
    x = values_of(communicator.rank, n, dtype)
    communicator.all_reduce(x, op, **options)
    return x


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", BITS)
def test_all_reduce(groups, name, world_size, transport):
    group = groups(world_size, PYCOLL_TRANSPORT=transport)
    step = group.run(lambda c: count_of(c))[0]
    for n in (4099, 5000, 100_003):
        got = group.run(reduce_here, n, "float32", "sum", {"codec": name})
        expected = all_reduced(Kind(name), [values_of(r, n) for r in range(world_size)], step=step)
        step += 1
        for rank in range(world_size):
            assert got[rank].tobytes() == expected.tobytes(), (n, rank)
    group.run(lambda c: set_count(c, step))


COUNTS = {}


def count_of(communicator):
    """Compressed calls so far: the step of the random numbers."""
    return COUNTS.get(id(communicator), 0)


def set_count(communicator, count):
    COUNTS[id(communicator)] = count


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("name", ["int8", "int4", "fp16"])
def test_all_reduce_of_halves_sums_in_float32(groups, name, op, dtype):
    group = groups(3)
    kind, n = Kind(name), 9001
    got = group.run(reduce_here, n, dtype, op, {"codec": name})
    inputs = [to_f32(values_of(r, n, dtype)) for r in range(3)]
    expected = to_dtype(all_reduced(kind, inputs, op), dtype)
    for rank in range(3):
        assert got[rank].tobytes() == expected.tobytes()


def test_vectors_of_several_pieces(groups):
    group, n = groups(2), (1 << 20) + 77
    got = group.run(reduce_here, n, "float32", "avg", {"codec": pycoll.Int4(block=64)})
    expected = all_reduced(Kind("int4", 64), [values_of(r, n) for r in range(2)], "avg")
    assert got[0].tobytes() == got[1].tobytes() == expected.tobytes()


def test_calls_under_way_side_by_side():
    """Asynchronous calls with different codecs among exact ones: each gets its own result."""
    group, n = ThreadRanks(3), 70_001
    names = ["int8", None, "int4", "fp16", None, "uint4"]

    def use(communicator):
        arrays = [values_of(communicator.rank, n, seed=k) for k in range(len(names))]
        works = [
            communicator.all_reduce(array, codec=name, async_op=True)
            for array, name in zip(arrays, names, strict=True)
        ]
        for work in reversed(works):
            assert work.wait(30)
            assert work.is_completed()
        return arrays

    got = group.run(use)
    for k, name in enumerate(names):
        inputs = [values_of(r, n, seed=k) for r in range(3)]
        expected = all_reduced(Kind(name), inputs) if name else (inputs[0] + inputs[1]) + inputs[2]
        for rank in range(3):
            assert got[rank][k].tobytes() == expected.tobytes(), (name, rank)
    group.close()


def test_every_collective_under_way_side_by_side():
    """A rank that calls later than its peers finds the same order in both lanes."""
    group, n, kind = ThreadRanks(2), 40_000, Kind("int8")

    def use(communicator):
        reduced = [values_of(communicator.rank, n, seed=k) for k in range(3)]
        gathered = np.zeros((2, n), np.float32)
        mine, sent = (values_of(communicator.rank, n, seed=k) for k in (3, 4))
        works = [communicator.all_reduce(reduced[0], codec="int8", async_op=True)]
        time.sleep(0.1 * communicator.rank)
        works.append(communicator.all_gather(gathered, mine, codec="int8", async_op=True))
        works.append(communicator.all_reduce(reduced[1], codec="int8", async_op=True))
        time.sleep(0.1 * (1 - communicator.rank))
        works.append(communicator.broadcast(sent, 1, codec="int8", async_op=True))
        works.append(communicator.all_reduce(reduced[2], codec="int8", async_op=True))
        assert all(work.wait(20) for work in works)
        return reduced, gathered, sent

    for _ in range(3):
        got = group.run(use)
        for reduced, gathered, sent in got:
            for k in range(3):
                inputs = [values_of(r, n, seed=k) for r in range(2)]
                assert reduced[k].tobytes() == all_reduced(kind, inputs).tobytes()
            codes = [through(kind, values_of(r, n, seed=3), r, 0, 0) for r in range(2)]
            for r in range(2):
                assert gathered[r].tobytes() == reference.decode(kind, [codes[r]], n).tobytes()
            code = through(kind, values_of(1, n, seed=4), 1, 0, 0)
            assert sent.tobytes() == reference.decode(kind, [code], n).tobytes()
    group.close()


# ---- The others ----


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", ["int8", "uint4", "bf16", "sign"])
def test_the_other_collectives(groups, name, transport):
    world, kind, n = 3, Kind(name), 6001
    group = groups(world, PYCOLL_TRANSPORT=transport)
    inputs = [values_of(r, n * world).reshape(world, n) for r in range(world)]

    def code(rank, block):
        return through(kind, inputs[rank][block], rank, 0, 0)

    def use(c):
        mine = inputs[c.rank]
        scattered, gathered = np.zeros(n, np.float32), np.zeros((world, n), np.float32)
        exchanged, sent = np.zeros_like(mine), mine[0].copy()
        c.reduce_scatter(scattered, mine, "avg", codec=name)
        c.all_gather(gathered, mine[0], codec=name)
        c.all_to_all(exchanged, mine, codec=name)
        c.broadcast(sent, 1, codec=name)
        return scattered, gathered, exchanged, sent

    got = group.run(use)
    for rank in range(world):
        scattered, gathered, exchanged, sent = got[rank]
        codes = [code(r, rank) for r in range(world)]
        assert scattered.tobytes() == reference.decode(kind, codes, n, world).tobytes()
        for peer in range(world):
            assert gathered[peer].tobytes() == reference.decode(kind, [code(peer, 0)], n).tobytes()
            expected = reference.decode(kind, [code(peer, rank)], n)
            assert exchanged[peer].tobytes() == expected.tobytes()
        assert sent.tobytes() == reference.decode(kind, [code(1, 0)], n).tobytes()


def test_blocks_of_different_lengths(groups):
    world, kind = 3, Kind("int8")
    group, lengths = groups(world), [70_000, 1, 5000]
    inputs = [[values_of(r, k, seed=j) for j, k in enumerate(lengths)] for r in range(world)]

    def use(c):
        out = np.zeros(lengths[c.rank], np.float32)
        c.reduce_scatter(out, inputs[c.rank], codec="int8")
        outs = [np.zeros(k, np.float32) for k in lengths]
        c.all_gather(outs, inputs[0][c.rank], codec="int8")
        return out, outs

    for rank, (out, outs) in enumerate(group.run(use)):
        codes = [through(kind, inputs[r][rank], r, 0, 0) for r in range(world)]
        assert out.tobytes() == reference.decode(kind, codes, lengths[rank]).tobytes()
        for j, k in enumerate(lengths):
            code = through(kind, inputs[0][j], j, 0, 0)
            assert outs[j].tobytes() == reference.decode(kind, [code], k).tobytes()


# ---- What is exempt ----

EXEMPT = {
    "int64": ("int64", "sum", 10_000),
    "bool": ("bool", "max", 30_000),
    "float64": ("float64", "sum", 10_000),
    "complex64": ("complex64", "sum", 10_000),
    "max": ("float32", "max", 10_000),
    "product": ("float32", "product", 10_000),
    "small": ("float32", "sum", 4095),
}


@pytest.mark.parametrize("name", EXEMPT)
def test_exempt_calls_are_exact(name):
    dtype, op, n = EXEMPT[name]
    group = ThreadRanks(2, pycoll.Options(codec="sign"))

    def use(communicator):
        x = (np.arange(n) % 7 + communicator.rank).astype(dtype)
        communicator.all_reduce(x, op)
        exact = (np.arange(n) % 7 + communicator.rank).astype(dtype)
        communicator.all_reduce(exact, op, algorithm="ring")
        return x, exact

    for got, exact in group.run(use):
        assert got.tobytes() == exact.tobytes()
    group.close()


def test_options_of_a_group():
    group = ThreadRanks(2, pycoll.Options(codec=pycoll.Int4(block=32), min_bytes=100))
    for n, kind in ((24, None), (25, Kind("int4", 32)), (5000, Kind("int4", 32))):
        got = group.run(reduce_here, n, "float32", "sum", {})
        inputs = [values_of(r, n) for r in range(2)]
        expected = all_reduced(kind, inputs) if kind else inputs[0] + inputs[1]
        assert got[0].tobytes() == got[1].tobytes() == expected.tobytes()
    # A call's own codec comes before the group's.
    got = group.run(reduce_here, 5000, "float32", "sum", {"codec": "int8"})
    expected = all_reduced(Kind("int8"), [values_of(r, 5000) for r in range(2)])
    assert got[0].tobytes() == expected.tobytes()
    group.close()
    for wrong in ({"codec": "int3"}, {"min_bytes": -1}, {"codec": 4}):
        with pytest.raises(ValueError, match=r"codec|min_bytes"):
            pycoll.Options(**wrong)


def test_a_group_of_one_is_exact():
    group, x = ThreadRanks(1), values_of(0, 10_000)
    assert group.run(reduce_here, 10_000, "float32", "sum", {"codec": "sign"})[0].tobytes() == (
        x.tobytes()
    )
    group.close()


# ---- Values that are not finite ----


@pytest.mark.parametrize("name", [name for name in BITS if name not in ("fp16", "bf16")])
def test_a_bad_value_spoils_its_block_on_every_rank(groups, name):
    group, n = groups(3), 30_000

    def use(communicator):
        x = values_of(communicator.rank, n)
        if communicator.rank == 1:
            x[12_345] = np.inf
        communicator.all_reduce(x, codec=name)
        return x

    for x in group.run(use):
        bad = np.isnan(x)
        block = 12_345 // 256 * 256
        assert bad[block : block + 256].all()
        assert bad.sum() == 256
