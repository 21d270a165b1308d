"""benchmarks/cuda_kernels.py as far as it goes without a GPU: floors, the table, its ranks."""

from __future__ import annotations

import json

import pytest

from test_benchmark_scripts import load
from test_benchmarks import BENCHMARKS


@pytest.fixture(scope="module")
def script():
    return load("cuda_kernels")


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_floors_of_rings_and_trees(script, ranks):
    """A ring sends each part ranks - 1 times while it sums and as often again, a tree over each of
    its edges up and down; each message is written and read. Besides every rank reads its vector
    and writes the result; both places that forward what they also keep read it once."""
    assert script.message_passes("ring", ranks) == pytest.approx(6 * ranks - 4)
    edges = 2 * 2 * (ranks - 1)  # messages up and down, each written and read
    at_least, at_most = edges + 2 * ranks, 2 * edges + 2 * ranks
    assert at_least <= script.message_passes("tree", ranks) <= at_most


def test_floors_need_every_input_and_output_once(script):
    for what in script.COLLECTIVE:
        for ranks in (2, 4, 8):
            assert script.FLOORS[what](ranks) >= 2 * ranks, what
    assert script.FLOORS["two_shot_kernel"](2) == 8


def test_the_table_judges(script, capsys):
    megabytes = 1 << 20
    good = script.Row("ring", 2, 256 * megabytes, 8e9, [0.002, 0.001, 0.001], 0.7)
    bad = script.Row("cast_check_float16", 1, 64 * megabytes, 8e9, [0.002], 0.9)
    ours = script.Row("processes: pycoll", 2, 64 * megabytes, 8e9, [0.01])
    gloo = script.Row("processes: gloo", 2, 64 * megabytes, 8e9, [0.1])
    figures = script.Figures(1e13)
    figures.add(good, bad, ours, gloo)
    figures.miss("CuPy", "not installed")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ring", "2", "256M", "1000.0", "8000.0", "80.0%", "70%", "reached"]
    assert lines[1].endswith("40.0%  90% NOT reached")
    assert lines[3].endswith("0.8%")
    assert lines[4:] == ["did not run: CuPy: not installed"]
    assert script.summary(figures) == [
        "2 processes, 64M: pycoll takes 0.100 of the time of gloo",
        "1 of 2 reached, 1 did not run",
    ]
    facts = json.loads(json.dumps(script.as_json(figures, {"gpu": "none"})))
    assert [row["share"] for row in facts["rows"]] == pytest.approx([0.8, 0.4, 0.08, 0.008])
    assert facts["did_not_run"] == {"CuPy": "not installed"}


def test_what_is_wanted_is_what_the_kernels_are_called(script):
    megabytes = 1 << 20
    wanted = {what for what in script.FLOORS if script.wanted_of(what, 256 * megabytes)}
    casts = {"cast_check_float16", "cast_check_bfloat16"}
    assert wanted == {"ring", "tree", "two_shot_kernel", *casts}
    assert not any(script.wanted_of(what, megabytes) for what in script.FLOORS)
    assert script.wanted_of("processes: pycoll", 64 * megabytes) == 0.8


def test_ranks_are_timed_and_verified(script, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # the ranks import the script by name
    [row] = script.time_processes("gloo", 2, "cpu", [4096], rounds=2, limit=60)
    assert row.what == "processes: gloo" and row.traffic == 4 * 4096
    assert len(row.seconds) == 2 and min(row.seconds) > 0


def test_a_contender_that_fails_is_a_reason(script, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with pytest.raises(RuntimeError, match="Error: "):  # of the rank, not that it ended
        script.time_processes("symm_mem two_shot", 2, "cpu", [4096], rounds=1, limit=60)


def test_without_a_gpu_it_says_so(script, capsys, monkeypatch):
    if not script.why_no_gpu():
        pytest.skip("there is a GPU")
    monkeypatch.setattr("sys.argv", ["cuda_kernels.py", "--quick"])
    assert script.main() == 1
    assert "nothing was measured" in capsys.readouterr().out
