"""`pycoll tune`: what follows from measured times, and a short run of the whole command."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_threads import ThreadRanks
from pool import communicator_ranks
from pycoll import _core, cli
from pycoll.cli import checks, cross_memory, tune_measure
from pycoll.cli.tune_measure import Plan
from pycoll.cli.tune_rules import Measured, choose, rules_of
from pycoll.selection import MAX_BYTES, Rule, Table

SIZES = tuple(64 << (2 * i) for i in range(6))  # 64 bytes to 64 KiB


def measured(
    times: dict[str, list[float]],
    builtin: str = "ring",
    fastest: dict[str, list[float]] | None = None,
) -> Measured:
    sizes = SIZES[: len(next(iter(times.values())))]
    place = ("all_reduce", 2, "shm", False, sizes)
    return Measured(*place, times, fastest or times, (builtin,) * len(sizes))


def test_each_size_has_the_algorithm_that_wins_there_clearly():
    found = measured({"tree": [1, 2, 8, 32, 100, 300], "ring": [4, 4, 6, 10, 20, 60]})
    assert choose(found) == ["tree", "tree", "ring", "ring", "ring", "ring"]


def test_one_size_that_is_a_little_faster_changes_nothing():
    found = measured({"tree": [9, 9, 9, 9, 9, 9], "ring": [10, 10, 10, 10, 10, 10]})
    assert choose(found) == ["tree"] * 6  # everywhere a little is a lot
    found = measured({"tree": [20, 20, 9.3, 20, 20, 20], "ring": [10, 10, 10, 10, 10, 10]})
    assert choose(found) == ["ring"] * 6
    found = measured({"tree": [20, 20, 5, 20, 20, 20], "ring": [10, 10, 10, 10, 10, 10]})
    assert choose(found) == ["ring", "ring", "tree", "ring", "ring", "ring"]


def test_of_equal_ones_the_one_in_use_stays():
    times = {"tree": [9.9, 9.9, 10, 9.9], "ring": [10.0, 10, 10, 10], "chain": [10.0, 9.9, 9.9, 10]}
    for builtin in times:
        assert choose(measured(times, builtin)) == [builtin] * 4


def test_a_median_alone_or_a_fastest_round_alone_changes_nothing():
    slow, fast = [10.0] * 4, [5.0] * 4
    for median, best in ((fast, slow), (slow, fast)):
        found = measured({"tree": median, "ring": slow}, fastest={"tree": best, "ring": slow})
        assert choose(found) == ["ring"] * 4
    found = measured({"tree": fast, "ring": slow}, fastest={"tree": fast, "ring": slow})
    assert choose(found) == ["tree"] * 4


def test_one_in_use_that_was_left_behind_is_replaced():
    found = measured({"tree": [1.0, 1, 1, 1], "ring": [9.0, 9, 9, math.inf]})
    assert choose(found) == ["tree"] * 4


def test_an_algorithm_that_was_not_measured_is_not_chosen():
    found = measured({"tree": [1, math.inf, math.inf], "ring": [1.2, 7, 9]})
    assert choose(found) == ["tree", "ring", "ring"]
    assert [rule.end for rule in rules_of(found, choose(found))] == [128, MAX_BYTES]  # half way


def test_bounds_are_where_the_times_cross():
    # Lines in logarithms that cross in the middle of 1 KiB and 4 KiB: at 2 KiB.
    found = measured({"tree": [1, 2, 4, 16], "ring": [9, 8, 8, 8]})
    first, second = rules_of(found, choose(found))
    assert (first.algorithm, second.algorithm) == ("tree", "ring")
    assert (first.begin, first.end) == (0, second.begin) == (0, 2048)
    assert second.end == MAX_BYTES
    assert first.ranks == second.ranks == (2, 2)


@given(st.data())
def test_rules_cover_every_size_once_and_cost_little(data):
    count = data.draw(st.integers(1, 6))
    time = st.floats(1, 1000)
    times = {
        name: data.draw(st.lists(time, min_size=count, max_size=count))
        for name in ("chain", "ring", "tree")
    }
    found = measured(times)
    path = choose(found)
    table = Table(tuple(rules_of(found, path)))  # raises for overlaps and gaps
    assert table.rules[0].begin == 0
    assert table.rules[-1].end == MAX_BYTES
    for size, name in zip(found.sizes, path, strict=True):
        covering = [rule for rule in table.rules if rule.begin <= size < rule.end]
        assert [rule.algorithm for rule in covering] == [name]
    # No worse than any one algorithm everywhere, up to the margin for newcomers.
    cost = sum(math.log(times[name][i]) for i, name in enumerate(path))
    for name, values in times.items():
        assert cost <= sum(map(math.log, values)) + 0.03 * count + 1e-9, name


def measure_here(communicator):
    plan = Plan(tuple(tune_measure_names()), (64, 4096), rounds=2, batch_seconds=1e-4)
    return tune_measure.measure(communicator, plan)


def tune_measure_names() -> list[str]:
    return [name for name in _core.collectives() if len(_core.algorithms(name)) > 1]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_collective_can_be_measured(transport):
    group = ThreadRanks(2, {"PYCOLL_TRANSPORT": transport})
    first, second = group.run(measure_here)
    group.close()
    assert first == second  # all ranks decide alike
    assert [m.collective for m in first.measured] == tune_measure_names()
    for found in first.measured:
        infos = _core.algorithms(found.collective)
        runnable = {
            a.name
            for a in infos
            if not a.needs_lease and (transport == "shm" or not a.needs_window)
        }
        assert set(found.times) == runnable
        assert all(0 < min(times) < math.inf for times in found.times.values())
        assert not found.several_hosts
        Table(tuple(rules_of(found, choose(found))))


def attach(communicator):
    return cross_memory.compare(communicator, [64, 300_000])


def test_cross_memory_attach_is_compared():
    # The sum over it is checked inside.
    for result in communicator_ranks(2, attach, check=False):
        if result.error and result.error.is_a("OSError"):
            assert "process_vm_readv" in result.error.message  # forbidden here: it must say so
            continue
        assert not result.failed, result.report()
        assert [row.bytes for row in result.value] == [64, 300_000]
        assert all(row.staged > 0 and row.attached > 0 for row in result.value)


def lying_peer(communicator):
    """Another process's number where the nonce should be: the peer's pid means somebody else."""
    if communicator.rank == 0:
        try:
            cross_memory.PeerMemory(communicator)
        except OSError as error:
            return str(error)
        return None
    nonce = np.array([1], np.int64)
    both = np.empty((2, 3), np.int64)
    communicator.all_gather(both, np.array([os.getpid(), nonce.ctypes.data, 2], np.int64))
    failed = np.zeros(1, np.int64)
    communicator.all_reduce(failed)
    return None


def test_memory_that_is_not_the_peers_is_noticed():
    text = communicator_ranks(2, lying_peer)[0].value
    assert "not the peer's memory" in text or "process_vm_readv" in text


def tune(*arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "pycoll", "tune", *arguments]
    env = {**os.environ, "PYCOLL_TORCH": "0"}  # it is not needed, and takes seconds to import
    return subprocess.run(
        line, capture_output=True, text=True, timeout=timeout, check=False, env=env
    )


def test_the_command_writes_a_table_that_can_be_used(tmp_path):
    file = tmp_path / "table.json"
    base = {
        "version": 1,
        "rules": [
            {"collective": "gather", "algorithm": "ring", "ranks": 7},
            # Cover what is measured, and so cannot stay beside it.
            {"collective": "barrier", "algorithm": "auto", "ranks": [2, 8], "to": "1k"},
            {"collective": "barrier", "algorithm": "auto", "ranks": [2, 8], "from": "1k"},
            {"collective": "all_reduce", "algorithm": "ring", "ranks": [4, 9]},
        ],
    }
    (tmp_path / "base.json").write_text(json.dumps(base))
    short = ["--begin", "1k", "--end", "4k", "--factor", "4", "--rounds", "2"]
    done = tune(
        *("--ranks", "2,3,2", "--output", str(file)),
        *("--collectives", "all_reduce,barrier,all_reduce"),
        *("--base", str(tmp_path / "base.json"), *short),
    )
    assert done.returncode == 0, done.stderr
    assert "cross-memory attach" in done.stdout
    assert done.stdout.count("not kept, because it covers calls that were measured too") == 2
    rules = Table.load(file).rules
    assert {(rule.collective, rule.ranks[0]) for rule in rules} == {
        *(("all_reduce", n) for n in (2, 3)),
        *(("barrier", n) for n in (2, 3)),
        ("gather", 7),
        ("all_reduce", 4),
    }
    assert Table.load(file).machine["cores"] == _core.available_cpus()
    checked = tune("--check", str(file), "--ranks", "7")
    assert checked.returncode == 0
    assert checked.stdout.count("ring*") == 2  # of gather and all_reduce


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "2,x"], "--ranks is a list of numbers from 2 on"),
        (["--ranks", "1"], "--ranks"),
        (["--collectives", "all_to_all"], "no 'all_to_all'; there are: all_reduce"),
        (["--begin", "8q"], "--begin is '8q', and not a size"),
        (["--begin", "2M", "--end", "1M"], "not above --end"),
        (["--factor", "1"], "--factor"),
        (["--factor", "nan"], "--factor"),
        (["--check", "/no/such/file"], "/no/such/file"),
    ],
)
def test_wrong_arguments_are_told(arguments, text, capsys):
    assert cli.main(["tune", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_the_doctor_looks_at_the_table_in_force(tmp_path, monkeypatch):
    def finding() -> checks.Finding:
        (found,) = (f for f in checks.environment() if f.name == "PYCOLL_TABLE")
        return found

    monkeypatch.setenv("PYCOLL_TABLE", str(tmp_path / "t.json"))
    assert finding().state == checks.State.missing
    assert "t.json" in finding().text
    Table((Rule("all_reduce", "ring"),)).save(tmp_path / "t.json")
    assert finding().state == checks.State.ok
    assert "1 rules" in finding().text
    monkeypatch.delenv("PYCOLL_TABLE")
    assert finding().state == checks.State.info


# ---- benchmarks/cliffs.py ----


def cliffs_module():
    folder = str(Path(__file__).parents[1] / "benchmarks")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("cliffs")


def test_cliffs_are_what_neighbours_do_not_predict():
    module = cliffs_module()
    sizes = [1000, 1250, 1562, 1953, 2441, 3052]
    assert module.cliffs(sizes, [1, 1.2, 1.5, 1.9, 2.4, 3]) == []
    (peak,) = module.cliffs(sizes, [1, 1, 1.6, 1, 1, 1])
    assert (peak.size, peak.index) == (1562, 2)
    assert peak.ratio == pytest.approx(1.6)
    # A step up that stays: the first size behind it.
    assert [c.size for c in module.cliffs(sizes, [1, 1, 1, 2, 2, 2])] == [1953]
    assert module.cliffs(sizes, [1, 1, 1, 1.8, 1.8, 1.8]) == []  # 1.44 of the scaled neighbour
    # The last one has only one neighbour.
    assert [c.size for c in module.cliffs(sizes, [1, 1, 1, 1, 1, 2])] == [3052]
    # A step down: the last size before it could have been faster. Being faster is no fault.
    assert [c.size for c in module.cliffs(sizes, [9, 9, 9, 1, 1, 1])] == [1562]
    assert module.cliffs(sizes, [2, 2, 1, 2, 2, 2])[0].index != 2


def test_cliffs_must_be_there_twice():
    module = cliffs_module()
    first = [module.Cliff(3, 30, 2, 1), module.Cliff(9, 90, 2, 1)]
    assert module.confirmed(first, [module.Cliff(4, 40, 2, 1)]) == first[:1]
    assert module.confirmed(first, []) == []
