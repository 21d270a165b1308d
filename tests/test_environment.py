"""PYCOLL_* variables: the values that are taken, the messages for the others, the selector."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import pycoll
from helpers_threads import ThreadRanks
from pool import communicator_ranks, run_ranks
from pycoll import _core

# name, value, words of the message
WRONG_VALUES = [
    ("PYCOLL_SLOT_BYTES", "1000", ["1000", "multiple of 64"]),
    ("PYCOLL_SLOT_BYTES", "32", ["32", "64"]),
    ("PYCOLL_SLOT_BYTES", "lots", ["'lots'", "not a size"]),
    ("PYCOLL_SLOT_BYTES", "64k3", ["'64k3'"]),
    ("PYCOLL_SLOT_BYTES", "-64", ["'-64'"]),
    ("PYCOLL_WINDOW_BYTES", "99999999999999999999", ["not a size"]),
    ("PYCOLL_WINDOW_BYTES", "1G", ["not between"]),
    ("PYCOLL_FIFO_DEPTH", "1", ["1 is not between 2 and 64"]),
    ("PYCOLL_FIFO_DEPTH", "128", ["128 is not between 2 and 64"]),
    ("PYCOLL_FIFO_DEPTH", "3", ["3 is not a power of two"]),
    ("PYCOLL_FIFO_DEPTH", "63", ["63", "power of two"]),
    ("PYCOLL_SPIN_US", "-2", ["-2"]),
    ("PYCOLL_SPIN_US", "5ms", ["'5ms' is not a number"]),
    ("PYCOLL_CONNECT_TIMEOUT", "0", ["0.1"]),
    ("PYCOLL_CONNECT_TIMEOUT", "nan", ["nan"]),
    ("PYCOLL_CONNECT_TIMEOUT", "", []),  # empty is not set
    ("PYCOLL_SHARED_ALLOCATOR", "2", ["2 is not between 0 and 1"]),
    ("PYCOLL_ISA", "sse9", ["sse9", "not available"]),
    ("PYCOLL_ALGO", "ring", ["'ring'", "COLLECTIVE=ALGORITHM", "all_reduce"]),
    ("PYCOLL_ALGO", "all_reduce=rings", ["'rings'", "recursive_doubling", "two_shot"]),
    ("PYCOLL_ALGO", "all_reduce=", ["''"]),
    ("PYCOLL_ALGO", "reduce_all=ring", ["reduce_all"]),
    ("PYCOLL_ALGO", "all_reduce=ring:8k", ["ring:8k", "FROM-TO"]),
    ("PYCOLL_ALGO", "all_reduce=ring:8k-x", ["'x'"]),
    ("PYCOLL_ALGO", "all_reduce=ring;gather=tree", ["'tree'", "gather", "direct"]),
    ("PYCOLL_ALGO", "all_reduce=ring;", ["''"]),
    ("PYCOLL_ALGO", "all_reduce=ring:8k-8k", ["ring:8k-8k", "covers no size"]),
    ("PYCOLL_ALGO", "reduce=ring:2M-1M", ["ring:2M-1M", "covers no size"]),
    ("PYCOLL_ALGO", "reduce=ring;gather=ring;reduce=tree", ["reduce twice", "commas"]),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG_VALUES)
def test_a_wrong_value_is_refused_with_what_is_right(monkeypatch, tmp_path, name, value, words):
    monkeypatch.setenv(name, value)
    if not words:
        pycoll.Communicator(pycoll.FileStore(tmp_path), 0, 1).close()
        return
    with pytest.raises(pycoll.InvalidArgumentError) as caught:
        pycoll.Communicator(pycoll.FileStore(tmp_path), 0, 1)
    for word in [name, *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(("name", "value", "words"), WRONG_VALUES)
def test_options_are_checked_like_variables(tmp_path, name, value, words):
    if not words:
        return
    with pytest.raises(pycoll.InvalidArgumentError) as caught:
        pycoll.Communicator(pycoll.FileStore(tmp_path), 0, 1, options={name: value})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("name", "value", "words"), [row for row in WRONG_VALUES if row[2]])
def test_a_wrong_value_is_refused_before_peers_are_looked_for(tmp_path, name, value, words):
    options = {"PYCOLL_CONNECT_TIMEOUT": "0.2", name: value}
    with pytest.raises(pycoll.InvalidArgumentError) as caught:  # and not that the peer is missing
        pycoll.Communicator(pycoll.FileStore(tmp_path), 0, 2, options=options)
    for word in words:
        assert word in str(caught.value)
    assert not os.listdir(tmp_path), "the rank has announced itself"


@pytest.mark.parametrize("depth", ["2", "4", "16", "64"])
def test_every_depth_that_is_taken_works(depth):
    options = {"PYCOLL_FIFO_DEPTH": depth, "PYCOLL_SLOT_BYTES": "64"}
    group = ThreadRanks(3, options)

    def use(communicator):
        for _ in range(3):
            array = np.arange(5000.0) * (communicator.rank + 1)
            communicator.all_reduce(array, algorithm="ring")
            assert (array == 6 * np.arange(5000.0)).all()

    group.run(use)
    group.close()


def test_an_unknown_option_is_refused(tmp_path):
    with pytest.raises(pycoll.InvalidArgumentError, match="'PYCOLL_ALGOS'"):
        pycoll.Communicator(pycoll.FileStore(tmp_path), 0, 1, options={"PYCOLL_ALGOS": "x"})


def differing(rank, world_size, directory, name, values):
    try:
        pycoll.Communicator(
            pycoll.FileStore(directory), rank, world_size, options={name: values[rank]}
        )
    except pycoll.MismatchError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("PYCOLL_SLOT_BYTES", ["64k", "64k", "32k"]),
        ("PYCOLL_FIFO_DEPTH", ["4", "4", "8"]),
        ("PYCOLL_WINDOW_BYTES", ["4k", "4k", "8k"]),
        ("PYCOLL_ALGO", ["all_reduce=ring", "all_reduce=ring", "all_reduce=tree"]),
    ],
)
def test_variables_that_must_agree(name, values):
    for result in run_ranks(3, differing, name, values):
        assert name in result.value
        assert "rank 0" in result.value
        assert "rank 2" in result.value


# ---- Counters of many rounds ----


@pytest.mark.parametrize("world_size", [2, 3])
def test_thousands_of_rounds_in_consecutive_operations(world_size):
    group = ThreadRanks(world_size, {"PYCOLL_WINDOW_BYTES": "4096"})

    def use(communicator):
        rank = communicator.rank
        for i, n in enumerate([1_000_000, 3, 1024 * 700 + 1, 1_000_000]):
            for algorithm in ("two_shot", "one_shot"):
                array = np.arange(n, dtype=np.float32) % 4099 + np.float32(rank + i)
                expected = world_size * (np.arange(n) % 4099 + i) + sum(range(world_size))
                communicator.all_reduce(array, algorithm=algorithm)
                np.testing.assert_array_equal(array, expected.astype(np.float32))
                communicator.barrier()

    group.run(use)
    group.close()


def test_more_barriers_in_an_operation_than_twenty_bits_count():
    group = ThreadRanks(2, {"PYCOLL_WINDOW_BYTES": "4096"})
    barriers_a_round, rounds = 512, 2200
    assert barriers_a_round * rounds > 2**20

    def use(communicator):
        program = _core.build_programs("all_reduce", "two_shot", 2)[communicator.rank]
        steps = program.steps()
        first = [step.kind for step in steps].index("barrier")
        steps[first:first] = [steps[first]] * (barriers_a_round - 2)
        program.set_steps(0, steps)
        communicator._core.override_program(program)
        # The second starts where the first has left the counters.
        for i, n in enumerate([1024 * rounds, 1024 * 10 + 1]):
            array = np.arange(n, dtype=np.float32) % 4099 + np.float32(communicator.rank + i)
            communicator.all_reduce(array)
            expected = 2 * (np.arange(n) % 4099 + i) + 1
            np.testing.assert_array_equal(array, expected.astype(np.float32))

    group.run(use)
    group.close()


@pytest.mark.full
def test_more_rounds_in_an_operation_than_twenty_bits_count():
    group = ThreadRanks(2, {"PYCOLL_WINDOW_BYTES": "4096"})

    def use(communicator):
        pages = np.empty(((2**31 + 2**20) // 4096, 4096), np.uint8)
        page = (np.arange(len(pages)) % 251).astype(np.uint8)[:, None]
        pages[:] = page + np.uint8(communicator.rank + 1)  # a sum wraps, as it should
        communicator.all_reduce(pages, algorithm="two_shot", timeout=280)
        for begin in range(0, len(pages), 4096):  # in parts: the whole would need its size again
            part = slice(begin, begin + 4096)
            assert (pages[part] == page[part] * np.uint8(2) + np.uint8(3)).all(), begin

    group.run(use)
    group.close()


def differing_world(rank, world_size, directory):
    start = time.monotonic()
    try:
        pycoll.Communicator(pycoll.FileStore(directory), rank, 2 + rank)
    except pycoll.Error as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return None


def test_world_sizes_that_differ():
    for result in run_ranks(2, differing_world):
        kind, text, took = result.value
        assert kind == "MismatchError"
        assert took < 2  # rank 1 does not wait for a third one
        for word in ("world_size", "'2' on rank 0", "'3' on rank 1"):
            assert word in text


def chosen(communicator, sizes):
    out = []
    for collective, n in sizes:
        array = np.arange(float(n // 8 or 1))
        if collective == "all_reduce":
            communicator.all_reduce(array)
            assert array[-1] == communicator.world_size * (len(array) - 1)
        out.append(communicator.algorithm_for(collective, n))
    return out


def test_the_grammar_of_pycoll_algo():
    algo = "all_reduce=recursive_doubling:0-8k,ring:8k-1M,auto:1M-2M,tree;broadcast=tree"
    sizes = [("all_reduce", n) for n in (0, 8, 8191, 8192, 2**20 - 8, 2**20, 2**21, 2**22)]
    sizes += [("broadcast", 8), ("barrier", 0)]
    expected = ["recursive_doubling"] * 3 + ["ring"] * 2 + ["two_shot", "tree", "tree"]
    expected += ["tree", "one_shot"]
    for result in communicator_ranks(2, chosen, sizes, env={"PYCOLL_ALGO": algo}):
        assert result.value == expected


def test_sizes_with_suffixes_and_max():
    group = ThreadRanks(1, {"PYCOLL_ALGO": "all_reduce=ring:1k-1M,tree:1M-max"})
    (communicator,) = group.communicators
    assert communicator.algorithm_for("all_reduce", 1024) == "ring"
    assert communicator.algorithm_for("all_reduce", 1 << 20) == "tree"
    assert communicator.algorithm_for("all_reduce", 1 << 62) == "tree"
    assert communicator.algorithm_for("all_reduce", 1023) == "one_shot"
    group.close()


def test_every_instruction_set_gives_the_same_bytes():
    results = set()
    for isa in _core.isas():
        group = ThreadRanks(3, {"PYCOLL_ISA": isa})

        def reduce(communicator):
            rng = np.random.default_rng(communicator.rank)
            array = rng.normal(size=1001).astype(np.float16)
            communicator.all_reduce(array)
            return array.tobytes()

        results.update(group.run(reduce))
        group.close()
    assert len(results) == 1


def test_the_table_of_variables_lists_what_is_in_force(monkeypatch):
    monkeypatch.setenv("PYCOLL_SLOT_BYTES", "64k")
    rows = {row[0]: row for row in _core.config_variables()}
    assert rows["PYCOLL_SLOT_BYTES"][1] == "65536"
    assert rows["PYCOLL_SLOT_BYTES"][2] != "65536"
    assert rows["PYCOLL_SLOT_BYTES"][4] is True
    assert {row[0] for row in rows.values()} >= {"PYCOLL_ALGO", "PYCOLL_SPIN_US", "PYCOLL_ISA"}
