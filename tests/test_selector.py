"""Which algorithm is chosen: a table that covers every call, what PYCOLL_ALGO and files change."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pycoll
from pool import run_ranks
from pycoll import _core
from pycoll.selection import MAX_BYTES, Rule, Table, format_bytes, parse_bytes

SIZES = (0, 1, 4096, 64 << 10, 1 << 20, 1 << 30, 1 << 62)
PLACES = list(itertools.product((False, True), (False, True)))
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
select = _core.select_algorithm


@pytest.mark.parametrize("determinism", ["ranks", "run", "algorithm"])
@pytest.mark.parametrize("collective", _core.collectives())
def test_every_call_has_an_algorithm_that_can_run(collective: str, determinism: str) -> None:
    needs_window = {a.name: a.needs_window for a in _core.algorithms(collective)}
    for bytes, (window, several), ranks in itertools.product(SIZES, PLACES, (1, 2, 3, 8)):
        where = {"has_window": window, "several_hosts": several, "ranks": ranks}
        name = select(collective, bytes, determinism=determinism, **where)
        assert window or not needs_window[name]


def test_large_all_reduces_follow_hosts() -> None:
    chosen = {
        (bytes, several): select("all_reduce", bytes, has_window=False, several_hosts=several)
        for bytes in (4, 64 << 20)
        for several in (False, True)
    }
    assert chosen == {
        (4, False): "recursive_doubling",
        (4, True): "recursive_doubling",
        (64 << 20, False): "ring",
        (64 << 20, True): "hierarchical",
    }


@pytest.mark.parametrize(("ranks", "several"), [(4, False), (8, False), (6, False), (4, True)])
def test_without_windows_powers_of_two_on_one_host_halve_and_double(ranks, several) -> None:
    where = {"has_window": False, "several_hosts": several, "ranks": ranks}
    sizes = ((64 << 10, 128 << 10), (256 << 10, 1 << 20), (4 << 20, 1 << 30))
    chosen = [{select("all_reduce", bytes, **where) for bytes in group} for group in sizes]
    rings = {"hierarchical"} if several else {"ring"}
    if ranks != 6 and not several:
        assert chosen == [{"recursive_doubling"}, {"halving_doubling"}, rings]
    else:
        assert chosen == [rings] * 3
    # What the group promises, and windows, come first.
    assert select("all_reduce", 1 << 20, determinism="algorithm", **where) == "chain"
    assert select("all_reduce", 1 << 20, **{**where, "has_window": True}) == "two_shot"


def test_rules_come_first_where_they_cover_the_size() -> None:
    rules = "reduce=direct:0-1k,ring:1k-1M;gather=ring"
    found = [
        select("reduce", bytes, has_window=False, several_hosts=False, rules=rules)
        for bytes in (0, 1023, 1024, (1 << 20) - 1, 1 << 20)
    ]
    assert found == ["direct", "direct", "ring", "ring", "ring"]
    # Larger ones follow the built-in table, windows first.
    assert (
        select("reduce", 1 << 20, has_window=True, several_hosts=False, rules=rules) == "one_shot"
    )
    assert select("gather", 5, has_window=True, several_hosts=False, rules=rules) == "ring"
    forced = "all_reduce=hierarchical"
    assert select("all_reduce", 4, has_window=True, several_hosts=False, rules=forced) == (
        "hierarchical"
    )


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ("all_reduce=ring:8k-8k", "covers no size"),
        ("all_reduce=ring:9k-8k", "covers no size"),
        ("reduce=ring;gather=ring;reduce=tree", "names reduce twice"),
        ("scatter=tree", "no algorithm of scatter; there are: auto, direct, ring, one_shot"),
        ("reduce_all=ring", "all_reduce, all_gather, .*gather, scatter, all_to_all"),
    ],
)
def test_rules_that_mean_nothing(rules: str, text: str) -> None:
    with pytest.raises(_core.InvalidArgumentError, match=text):
        select("barrier", 0, has_window=False, several_hosts=False, rules=rules)


# ---- Tables ----


def rule(collective: str = "all_reduce", algorithm: str = "ring", **rest: object) -> dict:
    return {"collective": collective, "algorithm": algorithm, **rest}


def table(*rules: dict, version: object = 1) -> dict:
    return {"version": version, "machine": {"cpu": "any"}, "rules": list(rules)}


WRONG_TABLES = [
    ([], "must be a JSON object"),
    ({"rules": []}, "version is missing"),
    (table(version=True), "version is True"),
    (table(version=1.0), "version is 1.0"),
    (table(version=2), "version is 2.*reads version 1.*pycoll tune"),
    ({**table(), "rule": []}, "'rule'.*known are machine, rules, version"),
    ({"version": 1}, "'rules' must be a list, not nothing"),
    ({"version": 1, "rules": [], "machine": 7}, "'machine' must be an object"),
    (table(7), r"rules\[0\] must be an object, not int 7"),
    (table(rule(), rule("reduce_all")), r"rules\[1\]: no collective 'reduce_all'.*all_to_all"),
    (table(rule(algorithm="rings")), r"rules\[0\]: 'rings' is no algorithm of all_reduce.*two_sh"),
    (table({"collective": "reduce"}), "'None' is no algorithm of reduce"),
    (table(rule(size=3)), r"rules\[0\] has 'size'; known are algorithm, collective"),
    (table(rule(to="8q")), r"rules\[0\]: 'to' is '8q', and not a size"),
    (table(rule(**{"from": -1})), "'from' is -1, and not a size"),
    (table(rule(**{"from": True})), "'from' is True, and not a size"),
    (table(rule(**{"from": "8k", "to": 8192})), "covers no size"),
    (table(rule(to="99999999999G")), "not a size"),
    (table(rule(ranks=[3, 2])), r"'ranks' is a number from 1 on, or \[least, most\], not \[3, 2\]"),
    (table(rule(ranks=0)), "'ranks'"),
    (table(rule(ranks=[2])), "'ranks'"),
    (table(rule(ranks="2")), "'ranks'"),
    (table(rule(transport="udp")), "no transport 'udp'; there are: shm, tcp"),
    (table(rule(several_hosts=1)), "'several_hosts' is true or false"),
    (table(rule(to="8k"), rule(algorithm="tree")), r"rules\[0\] .*rules\[1\] .*cover the same"),
    (table(rule(ranks=[2, 4]), rule(ranks=[4, 8])), "cover the same"),
    (table(rule(transport="shm"), rule(ranks=2, several_hosts=False)), "cover the same"),
    (table(rule(to="8k"), rule(**{"from": "16k"})), "a gap from 8k to 16k.*auto"),
]


@pytest.mark.parametrize(("content", "text"), WRONG_TABLES)
def test_wrong_tables_are_refused(tmp_path, content, text) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps(content))
    with pytest.raises(pycoll.InvalidArgumentError, match=text) as caught:
        Table.load(file)
    assert str(file) in str(caught.value)
    # In the same words by whoever uses it, before peers are looked for.
    for options in (pycoll.Options(table=file), {"PYCOLL_TABLE": str(file)}):
        with pytest.raises(pycoll.InvalidArgumentError, match=text):
            pycoll.Communicator(pycoll.FileStore(tmp_path / "store"), 0, 2, options=options)


def test_files_that_are_no_tables(tmp_path) -> None:
    (tmp_path / "broken").write_text('{"version": 1,')
    with pytest.raises(pycoll.InvalidArgumentError, match="broken is no selection table: .*line 1"):
        Table.load(tmp_path / "broken")
    with pytest.raises(pycoll.InvalidArgumentError, match=r"cannot be read: .*no such\.json"):
        Table.load(tmp_path / "no such.json")


def test_a_table_that_fits() -> None:
    content = table(
        rule(to="8k", algorithm="tree"),
        rule(**{"from": "8k", "to": "1M"}),
        rule("reduce", "direct", ranks=[2, 4], transport="tcp"),
        rule("reduce", "ring", ranks=5, transport="tcp", several_hosts=True),
        rule("reduce", "one_shot", transport="shm"),
    )
    rows = Table.from_json(content).as_rows()

    def chosen(collective: str, bytes: int, **where: object) -> str:
        place = {"has_window": True, "several_hosts": False, "transport": "shm", **where}
        return select(collective, bytes, table=rows, **place)

    sizes = (0, 8191, 8192, (1 << 20) - 1, 1 << 20)
    expected = ["tree", "tree", "ring", "ring", "two_shot"]
    assert [chosen("all_reduce", n) for n in sizes] == expected
    # PYCOLL_ALGO comes before it; auto leaves it to the table.
    algo = "all_reduce=recursive_doubling:0-9k,auto:9k-max"
    assert [chosen("all_reduce", n, rules=algo) for n in sizes] == [
        *["recursive_doubling"] * 3,
        *expected[3:],
    ]
    tcp = {"has_window": False, "transport": "tcp"}
    assert chosen("reduce", 4, ranks=4, **tcp) == "direct"
    assert chosen("reduce", 4, ranks=5, **tcp) == "tree"
    assert chosen("reduce", 4, ranks=5, **{**tcp, "several_hosts": True}) == "ring"
    assert chosen("reduce", 4, ranks=9) == "one_shot"
    # One whose algorithm cannot run there is passed over.
    assert chosen("reduce", 4, has_window=False) == "tree"


def test_auto_in_a_table_asks_the_built_in_rules() -> None:
    rows = Table.from_json(table(rule(algorithm="auto", to="1k"), rule(**{"from": "1k"}))).as_rows()
    where = {"has_window": True, "several_hosts": False}
    assert select("all_reduce", 1023, table=rows, **where) == "one_shot"
    assert select("all_reduce", 1024, table=rows, **where) == "ring"


def test_tables_are_written_as_they_are_read(tmp_path) -> None:
    made = Table(
        (
            Rule("all_reduce", "ring", 0, 3 << 10, (2, 4), "shm", False),
            Rule("all_reduce", "auto", 3 << 10, 65537, (2, 4), "shm", False),
            Rule("gather", "direct", 65537, MAX_BYTES),
        ),
        {"cpu": "a", "cores": 2},
    )
    made.save(tmp_path / "table.json")
    assert Table.load(tmp_path / "table.json") == made
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


@given(st.integers(0, MAX_BYTES))
def test_sizes_are_written_as_they_are_read(size: int) -> None:
    assert parse_bytes(format_bytes(size), "it") == size


def with_tables(rank, world_size, directory, tables, unset):
    """What a group with each rank's own table chooses; or the error."""
    file = f"{directory}/table{rank}.json"
    with open(file, "w") as out:
        json.dump(tables[rank], out)
    options = None if rank in unset else pycoll.Options(table=file)
    try:
        store = pycoll.FileStore(directory)
        with pycoll.Communicator(store, rank, world_size, options=options) as group:
            array = np.arange(100.0) + rank
            group.all_reduce(array)
            assert (array == 2 * np.arange(100.0) + 1).all()
            return group.algorithm_for("all_reduce", 800)
    except pycoll.MismatchError as error:
        return str(error)


def test_ranks_may_read_equal_tables_from_different_files() -> None:
    tables = [table(rule(algorithm="tree")), {**table(rule(algorithm="tree", to="max"))}]
    tables[1]["machine"] = {"cpu": "another"}
    results = run_ranks(2, with_tables, tables, [])
    assert [result.value for result in results] == ["tree", "tree"]


@pytest.mark.parametrize("unset", [[], [0]])
def test_ranks_with_different_tables_are_told(unset) -> None:
    tables = [table(rule(algorithm="tree")), table(rule(algorithm="tree", to="1M"))]
    for result in run_ranks(2, with_tables, tables, unset):
        for word in ("PYCOLL_TABLE", "rank 0", "rank 1", "same on every rank"):
            assert word in result.value
        assert ("none" in result.value) == bool(unset)


def test_the_environment_names_a_table_that_options_can_leave_out(tmp_path, monkeypatch) -> None:
    Table.from_json(table(rule(algorithm="tree"))).save(tmp_path / "t.json")
    monkeypatch.setenv("PYCOLL_TABLE", str(tmp_path / "t.json"))

    def chosen(name: str, options: object) -> str:
        with pycoll.Communicator(pycoll.FileStore(tmp_path / name), 0, 1, options=options) as group:
            return group.algorithm_for("all_reduce", 1 << 20)

    assert chosen("a", None) == "tree"
    assert chosen("b", pycoll.Options(table="builtin")) == "two_shot"
    assert chosen("c", pycoll.Options(algo="all_reduce=ring")) == "ring"
    assert chosen("d", {"PYCOLL_TABLE": ""}) == "two_shot"


# ---- The order of summation ----


def order_of(collective: str, name: str, ranks: int) -> str:
    return _core.build_programs(collective, name, ranks)[0].order


@pytest.mark.parametrize("collective", REDUCING)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_one_order_of_summation_where_that_is_promised(collective: str, ranks: int) -> None:
    # Every rule that a table may have, also those that break the promise.
    for info in _core.algorithms(collective):
        rows = Table((Rule(collective, info.name),)).as_rows()
        for bytes, (window, several) in itertools.product(SIZES, PLACES):
            where = {"has_window": window, "several_hosts": several, "ranks": ranks}
            name = select(collective, bytes, table=rows, determinism="algorithm", **where)
            order = order_of(collective, name, ranks)
            assert order == "rank_order" or (ranks == 2 and order == "lower_first")


def test_rules_that_break_a_promise_are_refused() -> None:
    with pytest.raises(_core.InvalidArgumentError) as caught:
        select(
            *("all_reduce", 4),
            has_window=True,
            several_hosts=False,
            rules="all_reduce=ring",
            ranks=3,
            determinism="algorithm",
        )
    for word in ("PYCOLL_ALGO", "ring", "order of ranks", "one_shot, two_shot, chain"):
        assert word in str(caught.value)
    # What is only moved has no order.
    assert (
        select(
            *("all_gather", 4),
            has_window=True,
            several_hosts=False,
            rules="all_gather=ring",
            determinism="algorithm",
        )
        == "ring"
    )


def test_memory_changes_no_bits_from_run_to_run() -> None:
    where = {"has_window": True, "several_hosts": False, "ranks": 4, "leases": True}
    ring = Table((Rule("all_reduce", "ring"),)).as_rows()
    size = 1 << 20
    for determinism in ("ranks", "run", "algorithm"):
        assert select("all_reduce", size, determinism=determinism, **where) == "zero_copy"
    # Vectors in ordinary memory take the ring, which sums in another order.
    assert select("all_reduce", size, table=ring, determinism="ranks", **where) == "zero_copy"
    assert select("all_reduce", size, table=ring, determinism="run", **where) == "ring"
    assert select("all_reduce", size, rules="all_reduce=zero_copy", **where) == "zero_copy"
    # It is passed over here, and two_shot takes its place.
    assert select("all_reduce", size, table=ring, determinism="algorithm", **where) == "zero_copy"
    # What is only moved has no order.
    moved = Table((Rule("all_gather", "ring"),)).as_rows()
    assert select("all_gather", size, table=moved, **where) == "zero_copy"
