"""The benchmarks run, count wrong results, and say in table and picture what they measured."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pycoll.bench import calls, measure, memory, report, units
from pycoll.bench.calls import algorithm_forced
from pycoll.bench.collectives import COLLECTIVES
from pycoll.bench.plan import Contender, Plan, Row, Sample
from pycoll.bench.problem import Problem
from pycoll.cli import bench

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PNG = b"\x89PNG\r\n\x1a\n"
SHORT = ["--quick", "--rounds", "2", "--batch-ms", "1"]


def run(*command: str, timeout: float = 120, **environment: str) -> Any:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )


def bench_arguments(*arguments: str, collective: str = "all_reduce") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_options(parser)
    parser.set_defaults(collective=collective)
    return parser.parse_args(arguments)


@dataclass
class Bench:
    """`pycoll bench` in this process: its ranks come from one server, which has imported torch."""

    capture: pytest.CaptureFixture[str]

    def __call__(self, collective: str, *arguments: str, code: int = 0) -> str:
        got = bench.run(bench_arguments(*arguments, collective=collective))
        out, self.err = self.capture.readouterr()
        assert got == code, out + self.err
        return out


@pytest.fixture
def pycoll_bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(capsys)


def table_of(output: str, ranks: int) -> list[list[str]]:
    """The cells of the rows under the heading of `ranks`."""
    lines = output.split(f" {ranks} ranks\n", 1)[1].splitlines()[1:]
    rows = []
    for line in lines:
        cells = line.split()
        if line.startswith("#"):
            continue
        if not cells or not cells[0].isdigit():
            break
        rows.append(cells)
    return rows


def test_script_compares_backends_side_by_side(tmp_path: Path) -> None:
    file, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    arguments = ["--quick", "--sizes", "4,1000,64K", "--rounds", "3", "--batch-ms", "2", "--check"]
    arguments += ["--ranks", "2,3", "--json", str(file), "--plot", str(picture)]
    done = run(str(BENCHMARKS / "all_reduce.py"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.read_bytes().startswith(PNG)
    facts = json.loads(file.read_text())
    assert facts["plan"]["check"] is True
    assert [r["ranks"] for r in facts["runs"]] == [2, 3]
    for figures in facts["runs"]:
        check_run(figures, table_of(done.stdout, figures["ranks"]))


def check_run(figures: Any, table: list[list[str]]) -> None:
    """The JSON agrees with itself, and the table with the JSON."""
    ranks = figures["ranks"]
    ratios = []
    assert [row["bytes"] for row in figures["rows"]] == [4, 1000, 65536]
    for row, cells in zip(figures["rows"], table, strict=True):
        for sample in row["samples"].values():
            assert len(sample["rounds"]) == len(sample["cpu_rounds"]) == 3
            assert sample["us"] == statistics.median(sample["rounds"]) > 0
            assert sample["cpu_us"] == statistics.median(sample["cpu_rounds"]) > 0
            assert 0 < sample["p50_us"] <= sample["p99_us"]
            assert sample["algbw"] == pytest.approx(row["bytes"] / sample["us"] / 1e3)
            assert sample["busbw"] == pytest.approx(sample["algbw"] * 2 * (ranks - 1) / ranks)
            assert sample["wrong"] == 0
        gloo, pycoll = (row["samples"][name] for name in ("gloo", "pycoll"))
        ratios.append(gloo["us"] / pycoll["us"])
        assert int(cells[0]) == row["bytes"]
        shown = [float(cell) for cell in cells[1:4]]
        # Four digits are shown of the times, two decimals of the ratio.
        assert shown[:2] == pytest.approx([gloo["us"], pycoll["us"]], rel=1e-3)
        assert shown[2] == pytest.approx(ratios[-1], abs=0.006)
        assert cells[-1] == "0"
    assert figures["smallest_ratio"]["pycoll"] == min(ratios)
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    assert figures["geometric_mean"]["pycoll"] == pytest.approx(mean)


def test_algorithms_are_forced(pycoll_bench: Bench) -> None:
    """Each has a column and right results."""
    arguments = ["--sizes", "4K", "--algorithms", "ring,one_shot", "--backends", "pycoll"]
    out = pycoll_bench("all_reduce", *SHORT, *arguments, "--compare")
    title = out.split(" 2 ranks\n", 1)[1].splitlines()[0].split()
    assert [word for word in title if word in ("pycoll", "ring", "one_shot")] == [
        "pycoll",
        "ring",
        "one_shot",
    ]
    assert table_of(out, 2)[0][-1] == "0"


def test_a_forced_group_reads_its_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """PYCOLL_ALGO holds the forced algorithm inside and what it was outside."""
    monkeypatch.setenv("PYCOLL_ALGO", "all_reduce=tree")
    with algorithm_forced(Contender("pycoll", "ring"), "broadcast"):
        assert os.environ["PYCOLL_ALGO"] == "broadcast=ring"
    assert os.environ["PYCOLL_ALGO"] == "all_reduce=tree"
    with algorithm_forced(Contender("gloo"), "all_reduce"):
        assert os.environ["PYCOLL_ALGO"] == "all_reduce=tree"


# What nccl-tests' documentation gives as busbw over algbw, on 4 ranks; and what its tables show for
# 64 KiB of float: elements (of a block where vectors are blocks of all ranks), redop, root.
EXPECTED = {
    "all_reduce": (2 * 3 / 4, 16384, "sum", -1),
    "all_gather": (3 / 4, 4096, "none", -1),
    "reduce_scatter": (3 / 4, 4096, "sum", -1),
    "broadcast": (1, 16384, "none", 1),
    "reduce": (1, 16384, "sum", 1),
    "gather": (3 / 4, 4096, "none", 1),
    "scatter": (3 / 4, 4096, "none", 1),
    "all_to_all": (3 / 4, 4096, "none", -1),
    "sendrecv": (1, 16384, "none", -1),
}


@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name != "barrier"])
def test_columns_are_those_of_nccl_tests(collective: str) -> None:
    factor, count, redop, root = EXPECTED[collective]
    plan = Plan((Contender("pycoll"),), (65536,), collective, root=1)
    problem = Problem.of(plan, 65536, rank=0, ranks=4)
    sample = Sample("pycoll", 1, rounds=[90.0, 100.0, 300.0], calls=[7.0] * 98 + [8.0, 9.0])
    sample.cpu, sample.wrong = [12.0, 14.0, 13.0], 5
    row = Row(problem.bytes, problem.count, [sample])
    figures = report.Run(plan, 4, [row])
    table = report.LineTable(figures)
    titles = table.header().splitlines()[0].lstrip("#").split()
    assert titles[:5] == ["size", "count", "type", "redop", "root"]
    shown = dict(zip(titles, table.line(row).split(), strict=True))
    assert [shown[t] for t in titles[:5]] == ["65536", str(count), "float", redop, str(root)]
    assert float(shown["time"]) == 100.0
    assert float(shown["algbw"]) == pytest.approx(0.65536, abs=5e-4)
    assert float(shown["busbw"]) == pytest.approx(0.65536 * factor, abs=5e-4)
    assert shown["#wrong"] == "5"
    assert [float(shown[t]) for t in ("p50", "p99", "cpu")] == [7.0, 8.0, 13.0]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective(collective: str, pycoll_bench: Bench, tmp_path: Path) -> None:
    """Two ranks, two sizes, right results; the second size does not come out even."""
    file = tmp_path / "figures.json"
    arguments = ["--sizes", "4,5004", "-r", "1", "--json", str(file)]
    out = pycoll_bench(collective, *SHORT, *arguments)
    rows = json.loads(file.read_text())["runs"][0]["rows"]
    wrong = [sample["wrong"] for row in rows for sample in row["samples"].values()]
    if collective == "barrier":  # nothing to compare, and one size is all there is
        assert wrong == [None, None]
    else:
        assert wrong == [0, 0, 0, 0]
        assert [row["bytes"] for row in rows][1] in (5000, 5004)
    assert len(table_of(out, 2)) == 2 * len(rows)  # a line a backend


def spoiled(problem: Problem, at: int) -> int:
    """Wrong elements when everything is as it must be except element `at`."""
    size = max(problem.input_elements, problem.output_elements)
    operands = memory.Operands(*(_tensor(problem, size) for _ in range(2)))
    memory.write_pattern(problem, operands)
    expected = problem.expected(0, problem.output_elements)
    assert expected is not None
    operands.output[: len(expected)] = expected
    operands.output[at] += 1
    short = memory.Operands(operands.input, operands.output[: problem.output_elements])
    return memory.count_wrong(problem, short)


def _tensor(problem: Problem, size: int) -> Any:
    return torch.zeros(size, dtype=problem.dtype)


@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name != "barrier"])
def test_one_wrong_element_is_counted(collective: str) -> None:
    plan = Plan((), (4096,), collective, root=1)
    problem = Problem.of(plan, 4096, rank=1, ranks=3)
    assert spoiled(problem, problem.output_elements - 1) == 1


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_missing_or_doubled_rank_shows(op: str, dtype: str) -> None:
    """The patterns are such that a reduction over other ranks than all of them comes out wrong."""
    plan = Plan((), (997,), op=op, dtype=dtype)
    problems = [Problem.of(plan, 997, rank, 3) for rank in range(3)]
    count = problems[0].count
    expected = problems[0].expected(0, count)
    assert expected is not None and int(expected.max()) <= 126
    given = [problem.given(problem.rank, 0, count) for problem in problems]
    for missing in range(3):
        partial = given[(missing + 1) % 3].clone()
        combine = {"sum": "add", "avg": "add", "prod": "mul", "min": "minimum", "max": "maximum"}
        partial = getattr(torch, combine[op])(partial, given[(missing + 2) % 3])
        if op == "avg":
            partial //= 3
        assert (partial != expected).any()


class Broken:
    """A caller that all-reduces nothing and adds one to the last `spoil` elements: on one rank
    that is right where `spoil` is 0."""

    name = "broken"
    checked = True

    def __init__(self, spoil: int) -> None:
        self.spoil = spoil

    def call(self, problem: Problem) -> Any:
        def call(tensor: Any) -> None:
            tensor[tensor.numel() - self.spoil :] += 1

        return call

    def arguments(self, problem: Problem, operands: memory.Operands) -> Any:
        return (operands.output,)

    def operands(self, problem: Problem, offered: Any) -> Any:
        return offered


@pytest.mark.parametrize("spoil", [0, 1, 5])
def test_wrong_elements_of_a_call_are_counted(spoil: int, tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        problem = Problem.of(Plan((), (4036,)), 4036, 0, 1)
        offered = memory.Buffer([problem], "ordinary", cold=False).operands(problem)
        turn = measure.Turn(Broken(spoil), problem, offered)  # type: ignore[arg-type]
        assert measure.wrong_after_a_call(problem, turn) == spoil
    finally:
        dist.destroy_process_group()


def test_a_fault_in_a_run_ends_it_with_the_count(capsys: pytest.CaptureFixture[str]) -> None:
    samples = [Sample("gloo", 1, [1.0], [1.0], [1.0], 0), Sample("pycoll", 1, [1.0], [1.0], [1.0])]
    samples[1].wrong = 3
    plan = Plan((Contender("gloo"), Contender("pycoll")), (4,), check=True)
    arguments = bench_arguments("--quick")
    assert bench.conclude([report.Run(plan, 2, [Row(4, 1, samples)])], arguments, {}) == 1
    assert "3 elements are wrong" in capsys.readouterr().err


def test_flags_reach_the_plan() -> None:
    flags = ["-b1K", "-e16K", "-f4", "-n7", "-w3", "-c0", "-dhalf", "-omax", "-r1", "--cold"]
    flags += ["--async", "--backends", "pycoll,gloo,fake"]
    plan = bench.make_plan(bench_arguments(*flags))
    assert plan.sizes == (1024, 4096, 16384)
    assert (plan.iterations, plan.warmup, plan.check) == (7, 3, False)
    assert (plan.dtype, plan.op, plan.root) == ("float16", "max", 1)
    assert plan.cold and plan.asynchronous and not plan.rewrite
    assert [c.name for c in plan.contenders] == ["pycoll", "gloo", "fake"]
    assert bench.make_plan(bench_arguments()).check  # as in nccl-tests, unless told not to
    assert bench.make_plan(bench_arguments("--limit")).rewrite
    both = bench.make_plan(bench_arguments("--api", "dist,direct"))
    assert [c.name for c in both.contenders] == ["gloo", "pycoll", "pycoll.direct"]


def test_direct_calls_are_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """pycoll's own function takes its short way only so; the operation has pycoll's name."""
    import pycoll

    seen = []
    monkeypatch.setattr(pycoll, "all_reduce", lambda *given: seen.append(given), raising=False)
    monkeypatch.setattr(calls, "make_group", lambda contender, plan: "the group")
    contender = Contender("pycoll", api="direct")
    plan = Plan((contender,), (8,), op="prod")
    caller = calls.Caller(contender, plan)
    problem = Problem.of(plan, 8, 0, 2)
    [operands] = memory.Buffer([problem], "ordinary", cold=False).operands(problem)
    caller.call(problem)(*caller.arguments(problem, operands))
    assert seen == [(operands.output, "product", "the group")]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--backends", "nonsense"], "nonsense"),
        (["--algorithms", "bogus"], "bogus.*recursive_doubling"),
        (["--backends", "gloo,gloo"], "twice"),
        (["--api", "quick"], "direct"),
        (["--async", "--api", "direct"], "--async"),
        (["--limit", "-d", "half"], "hand-written"),
        (["--limit", "-g", "4"], "2 ranks"),
        (["-f", "1"], "--factor"),
        (["-b", "1M", "-e", "1K"], "nothing to measure"),
        (["--require-ahead", "--backends", "pycoll"], "--require-ahead"),
        (["--require-ahead", "--api", "direct"], "--require-ahead"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: list[str], says: str) -> None:
    with pytest.raises(bench.UsageError, match=says):
        bench.make_plan(bench_arguments(*flags))


def test_without_matplotlib_it_says_so_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if "matplotlib" in name else find(name),
    )
    with pytest.raises(bench.UsageError, match="--plot needs matplotlib"):
        bench.make_plan(bench_arguments("--plot", "a.png"))


def test_cold_vectors_are_apart_and_outgrow_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "last_level_cache", lambda: 1 << 20)
    plan = Plan((), (4, 1 << 18), "all_gather", cold=True)
    problems = [Problem.of(plan, size, 0, 2) for size in plan.sizes]
    buffer = memory.Buffer(problems, "ordinary", cold=True)
    for problem in problems:
        sets = buffer.operands(problem)
        starts = sorted(t.data_ptr() for o in sets for t in (o.input, o.output))
        assert len(set(starts)) == 2 * len(sets) >= 4
        assert all(b - a >= 4096 for a, b in itertools.pairwise(starts))
        assert starts[-1] - starts[0] >= (1 << 20) * 0.7  # of each of two ranks, twice the cache
        last = max((o.output for o in sets), key=lambda t: t.data_ptr())
        end = last.data_ptr() + last.numel() * last.element_size()
        assert end <= buffer.bytes.data_ptr() + buffer.bytes.numel()


def test_the_hand_written_loop_and_the_baseline_that_does_nothing(
    pycoll_bench: Bench, tmp_path: Path
) -> None:
    """The loop computes the sum over its shared memory; `fake` has nothing that could be right."""
    file, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    arguments = ["--sizes", "4,64K,300004", "--backends", "pycoll,fake", "--limit"]
    arguments += ["--json", str(file), "--plot", str(picture)]
    pycoll_bench("all_reduce", *SHORT, *arguments)
    assert picture.read_bytes().startswith(PNG)
    rows = json.loads(file.read_text())["runs"][0]["rows"]
    for row in rows:
        wrong = {name: sample["wrong"] for name, sample in row["samples"].items()}
        assert wrong == {"pycoll": 0, "fake": None, "limit": 0}
        assert all(sample["calls"] >= 2 for sample in row["samples"].values())
    assert rows[-1]["samples"]["fake"]["us"] < rows[-1]["samples"]["pycoll"]["us"]


def test_other_ways_to_call(pycoll_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous, cold, a mean of bfloat16, three ranks: right as well."""
    flags = ["--async", "--cold", "-d", "bfloat16", "-o", "avg", "-g", "3", "--sizes", "2,100K"]
    out = pycoll_bench("all_reduce", *SHORT, *flags, "--backends", "pycoll")
    assert "async_op=True" in out and "rotated" in out
    assert [cells[9] for cells in table_of(out, 3)] == ["0"] * 2


@pytest.mark.full
def test_under_torchrun() -> None:
    """It takes the ranks that are there; one of them speaks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "pycoll", "bench", "broadcast", *SHORT, "--sizes", "64"]
    done = run(*launcher, *command, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("broadcast, float32, 2 ranks") == 1
    assert len(table_of(done.stdout, 2)) == 2


def test_a_rank_that_fails_is_told_without_a_traceback_of_the_launcher(
    pycoll_bench: Bench,
) -> None:
    pycoll_bench("broadcast", *SHORT, "-r", "2", "--sizes", "4", code=1)
    assert "there are 2 ranks" in pycoll_bench.err and "report_run" not in pycoll_bench.err


def test_require_ahead() -> None:
    """Exit code 1 and the sizes by name where pycoll is behind."""
    plan = Plan((Contender("gloo"), Contender("pycoll")), (4, 1024))

    def row(size: int, gloo: float, pycoll: float) -> Row:
        samples = [Sample("gloo", 1, [gloo]), Sample("pycoll", 1, [pycoll])]
        return Row(size, size // 4, samples)

    rows = [row(4, 100.0, 10.0), row(1024, 100.0, 125.0)]
    assert bench.behind([report.Run(plan, 2, rows)]) == ["1K on 2 ranks (0.80)"]


def test_sizes_and_statistics() -> None:
    assert [units.parse_size(text) for text in ("4", "64K", "1m", "2GB")] == [
        4,
        65536,
        1 << 20,
        2 << 30,
    ]
    for text in ("", "K", "-4", "0", "4.5M", "4X"):
        with pytest.raises(ValueError, match="is not a size"):
            units.parse_size(text)
    assert [units.format_size(n) for n in (65536, 65537, 0)] == ["64K", "65537", "0"]
    assert units.sizes_between(4, 300, 4) == [4, 16, 64, 256]
    assert units.quantile(range(1, 1001), 0.99) == 990
    assert units.quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert units.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
