"""pycoll.Options: what may be set for one group, and what each level of determinism promises."""

from __future__ import annotations

import itertools
import json
import time

import numpy as np
import pytest

import pycoll
from helpers_shareable import shareable_empty
from helpers_threads import ThreadRanks
from pool import run_ranks
from pycoll import _core
from pycoll.selection import Rule, Table

RAGGED = 3001  # elements: whole slices and a tail
REDUCING = ("all_reduce", "reduce_scatter", "reduce")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"determinism": "runs"}, ["'ranks', 'run', 'algorithm'", "'runs'"]),
        ({"determinism": True}, ["'algorithm'", "True"]),
        ({"table": 7}, ["pycoll.selection.Table", "7"]),
        ({"algo": ["ring"]}, ["all_reduce=ring", "['ring']"]),
        ({"algo": "all_reduce=rings"}, ["'rings'", "two_shot"]),
        ({"variables": {"PYCOLL_ALGO": 7}}, ["'PYCOLL_ALGO'", "7"]),
    ],
)
def test_options_say_what_is_allowed(arguments, words):
    with pytest.raises(ValueError) as caught:
        pycoll.Options(**arguments)
    assert isinstance(caught.value, pycoll.InvalidArgumentError)
    for word in words:
        assert word in str(caught.value)


def test_options_of_another_kind_are_refused(tmp_path):
    with pytest.raises(pycoll.InvalidArgumentError, match=r"pycoll\.Options.*not int"):
        pycoll.Communicator(pycoll.FileStore(tmp_path), 0, 1, options=7)
    with pytest.raises(pycoll.InvalidArgumentError, match="'PYCOLL_ALGOS'"):
        options = pycoll.Options(variables={"PYCOLL_ALGOS": "x"})
        pycoll.Communicator(pycoll.FileStore(tmp_path), 0, 1, options=options)


def test_a_wrong_level_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PYCOLL_DETERMINISM", "algorithms")
    with pytest.raises(pycoll.InvalidArgumentError, match="PYCOLL_DETERMINISM=algorithms.*ranks"):
        pycoll.Communicator(pycoll.FileStore(tmp_path), 0, 1)


def with_levels(rank, world_size, directory, levels):
    options = pycoll.Options(determinism=levels[rank])
    with pytest.raises(pycoll.MismatchError) as caught:
        pycoll.Communicator(pycoll.FileStore(directory), rank, world_size, options=options)
    return str(caught.value)


def test_ranks_must_promise_the_same():
    for result in run_ranks(2, with_levels, ["run", "algorithm"]):
        for word in ("PYCOLL_DETERMINISM", "'run' on rank 0", "'algorithm' on rank 1"):
            assert word in result.value


def with_codecs(rank, world_size, directory, options, by_torch):
    mine = pycoll.Options(**options[rank])
    if not by_torch:
        with pytest.raises(pycoll.MismatchError) as caught:
            pycoll.Communicator(pycoll.FileStore(directory), rank, world_size, options=mine)
        return str(caught.value)
    import torch.distributed as dist

    with pytest.raises(dist.DistBackendError) as caught:
        dist.init_process_group(
            "pycoll",
            store=dist.FileStore(f"{directory}/torch", world_size),
            rank=rank,
            world_size=world_size,
            pg_options=mine,
        )
    return str(caught.value)


@pytest.mark.parametrize("by_torch", [False, True], ids=["communicator", "torch"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            [{"codec": "int8"}, {"codec": pycoll.Int8(block=64)}],
            ["Options.codec", "Int8(block=256", "Int8(block=64"],
        ),
        ([{}, {"codec": "int8"}], ["Options.codec", "'None' on rank 0", "Int8(block=256"]),
        ([{"codec": "auto"}, {"codec": "none"}], ["Options.codec", "Auto(", "'None' on rank 1"]),
        (
            [{"codec": "int8", "min_bytes": 0}, {"codec": "int8"}],
            ["Options.min_bytes", "'0' on rank 0", "'16384' on rank 1"],
        ),
    ],
    ids=["block", "none", "auto", "min_bytes"],
)
def test_ranks_must_give_the_same_codec(options, words, by_torch):
    for result in run_ranks(2, with_codecs, options, by_torch):
        for word in ("on rank 0", "on rank 1", *words):
            assert word in result.value


# ---- Bits ----


def contribution(rank: int, elements: int, dtype: str) -> np.ndarray:
    """Numbers of very different size: nearly every order of summation gives other bits."""
    rng = np.random.default_rng(100 + rank)
    wide = rng.normal(size=elements) * 10.0 ** rng.integers(-2, 3, size=elements)
    return wide.astype(dtype)


def in_rank_order(world_size: int, elements: int, dtype: str, op: str) -> np.ndarray:
    """What one process gets that goes through the ranks."""
    total = contribution(0, elements, dtype).astype(np.float32)
    for rank in range(1, world_size):
        total = total + contribution(rank, elements, dtype).astype(np.float32)
    if op == "avg":
        total = total / np.float32(world_size)
    return total.astype(dtype)


def reduce_all(group, collective: str, dtype: str, op: str) -> bytes:
    """This rank's result of each root, one after the other."""
    mine = contribution(group.rank, RAGGED * group.world_size, dtype)
    if collective == "all_reduce":
        group.all_reduce(mine, op)
        return mine.tobytes()
    if collective == "reduce_scatter":
        part = np.empty(RAGGED, dtype)
        group.reduce_scatter(part, mine.reshape(group.world_size, RAGGED), op)
        return part.tobytes()
    results = []
    for root in range(group.world_size):
        array = mine.copy()
        group.reduce(array, root, op)
        results.append(array.tobytes() if group.rank == root else b"")
    return b"".join(results)


def expected_of(rank: int, world_size: int, collective: str, dtype: str, op: str) -> bytes:
    whole = in_rank_order(world_size, RAGGED * world_size, dtype, op)
    if collective == "reduce_scatter":
        return whole[rank * RAGGED : (rank + 1) * RAGGED].tobytes()
    return whole.tobytes()


def tables() -> list[Table]:
    """One for each algorithm of each reducing collective, for all sizes."""
    rules = {
        collective: [Rule(collective, info.name) for info in _core.algorithms(collective)]
        for collective in REDUCING
    }
    longest = max(map(len, rules.values()))
    return [Table(tuple(r[i % len(r)] for r in rules.values())) for i in range(longest)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_same_bits_with_every_table_and_transport(world_size, transport):
    for table, slot in zip([Table(), *tables()], itertools.cycle(["128k", "4k"])):
        variables = {"PYCOLL_TRANSPORT": transport, "PYCOLL_SLOT_BYTES": slot}
        options = pycoll.Options(determinism="algorithm", table=table, variables=variables)
        group = ThreadRanks(world_size, options)
        assert group.communicators[0].transport == transport
        for collective, (dtype, op) in itertools.product(
            REDUCING, [("float32", "sum"), ("float16", "avg")]
        ):
            got = group.run(reduce_all, collective, dtype, op)
            for rank, result in enumerate(got):
                assert result == expected_of(rank, world_size, collective, dtype, op)
        group.close()


def test_without_that_promise_a_table_changes_bits():
    results = set()
    for name in ("ring", "two_shot", "halving_doubling"):
        options = pycoll.Options(table=Table((Rule("all_reduce", name),)))
        group = ThreadRanks(4, options)
        got = group.run(reduce_all, "all_reduce", "float32", "sum")
        assert len(set(got)) == 1  # on every rank the same, always
        results.add(got[0])
        group.close()
    assert len(results) == 3


def in_memory(group, shareable: bool) -> bytes:
    mine = contribution(group.rank, 100_000, "float32")
    array = shareable_empty(mine.shape, mine.dtype) if shareable else np.empty_like(mine)
    array[...] = mine
    group.all_reduce(array)
    return array.tobytes()


def all_memories(group):
    # The last: shareable on some ranks only.
    return [in_memory(group, shareable) for shareable in (False, True, group.rank != 1)]


@pytest.mark.parametrize("determinism", ["run", "algorithm"])
@pytest.mark.parametrize("name", ["", "ring", "halving_doubling", "zero_copy"])
def test_the_same_bits_in_every_memory(determinism, name):
    table = Table((Rule("all_reduce", name),) if name else ())
    group = ThreadRanks(4, pycoll.Options(determinism=determinism, table=table))
    results = group.run(all_memories)
    group.close()
    assert len({bytes for ranks in results for bytes in ranks}) == 1
    if determinism == "algorithm":
        assert results[0][0] == in_rank_order(4, 100_000, "float32", "sum").tobytes()


def delayed(group, run: int, sizes):
    """Ranks come late, each time another one."""
    results = []
    for i, elements in enumerate(sizes):
        array = contribution(group.rank, elements, "float32")
        if (i + run) % group.world_size == group.rank:
            time.sleep(0.01)
        group.all_reduce(array)
        results.append(array.tobytes())
    return results


@pytest.mark.parametrize("table", [Table(), *tables()[::3]])
def test_the_same_bits_in_every_run(table):
    runs = []
    for run in range(2):
        group = ThreadRanks(3, pycoll.Options(determinism="run", table=table))
        runs += group.run(delayed, run, [1, 1000, 100_000])
        group.close()
    assert all(result == runs[0] for result in runs)


def test_a_call_cannot_ask_for_what_breaks_the_promise():
    group = ThreadRanks(3, pycoll.Options(determinism="algorithm"))

    def use(communicator):
        array = np.ones(3)
        with pytest.raises(pycoll.InvalidArgumentError, match="ring cannot run here.*chain"):
            communicator.all_reduce(array, algorithm="ring")
        communicator.all_reduce(array, algorithm="chain")
        return array.tolist()

    assert group.run(use) == [[3, 3, 3]] * 3
    group.close()


# ---- torch ----


def torch_groups(rank, world_size, directory):
    import torch
    import torch.distributed as dist

    store = dist.FileStore(f"{directory}/store", world_size)
    Table((Rule("all_reduce", "tree"),)).save(f"{directory}/table{rank}.json")
    dist.init_process_group(
        "pycoll",
        store=store,
        rank=rank,
        world_size=world_size,
        pg_options=pycoll.Options(table=f"{directory}/table{rank}.json"),
    )
    ordered = dist.new_group(pg_options=pycoll.Options(determinism="algorithm"))
    ringed = dist.new_group(pg_options=pycoll.Options(algo="all_reduce=ring"))
    results = []
    for group in (None, ordered, ringed):
        tensor = torch.from_numpy(contribution(rank, RAGGED, "float32"))
        dist.all_reduce(tensor, group=group)
        results.append(tensor.numpy().tobytes())
    texts = []
    for wrong in (7, {"PYCOLL_ALGO": "all_reduce=rings"}, pycoll.Options(table="/no/such")):
        with pytest.raises(ValueError) as caught:
            dist.new_group(pg_options=wrong)
        texts.append(str(caught.value))
    dist.destroy_process_group()
    return results, texts


def test_pg_options_of_torch():
    for result in run_ranks(4, torch_groups, timeout=60):
        (tree, ordered, ring), texts = result.value
        assert ordered == in_rank_order(4, RAGGED, "float32", "sum").tobytes()
        assert len({tree, ordered, ring}) == 3
        for text, word in zip(texts, ["pycoll.Options", "'rings'", "/no/such"], strict=True):
            assert word in text


def test_tables_in_options_are_objects_too():
    table = Table((Rule("all_reduce", "tree"),))
    assert json.loads(json.dumps(table.as_json()))["rules"] == [
        {"collective": "all_reduce", "algorithm": "tree", "from": "0", "to": "max"}
    ]
    group = ThreadRanks(2, pycoll.Options(table=table))
    assert group.communicators[0].algorithm_for("all_reduce", 100) == "tree"
    group.close()
