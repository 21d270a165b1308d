"""The benchmarks run, count wrong results, and say in table and JSON what they measured."""

from __future__ import annotations

import importlib
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PNG = b"\x89PNG\r\n\x1a\n"


def load(name: str) -> ModuleType:
    """A module of the benchmarks folder, which is no package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


def run(*arguments: str, timeout: float = 120, **environment: str) -> Any:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "all_reduce.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )


def table_of(output: str, ranks: int) -> list[list[str]]:
    """The cells of the rows under the heading of `ranks`."""
    lines = output.split(f" {ranks} ranks\n", 1)[1].splitlines()[1:]
    rows = []
    for line in lines:
        cells = line.split()
        if not cells or not cells[0].isdigit():
            break
        rows.append(cells)
    return rows


def test_quick_run(tmp_path: Path) -> None:
    file, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    arguments = ["--quick", "--sizes", "4,1000,64K", "--rounds", "3", "--batch-ms", "2", "--check"]
    done = run(*arguments, "--ranks", "2,3", "--json", str(file), "--plot", str(picture))
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
            assert len(sample["rounds"]) == 3
            assert sample["us"] == statistics.median(sample["rounds"]) > 0
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


def test_algorithms_are_forced() -> None:
    """Each has a column and right results; a name that does not exist is refused at once."""
    arguments = ["--quick", "--sizes", "4K", "--ranks", "2", "--rounds", "1", "--batch-ms", "1"]
    done = run(*arguments, "--algorithms", "ring,one_shot", "--backends", "pycoll", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    title = done.stdout.split(" 2 ranks\n", 1)[1].splitlines()[0].split()
    assert [word for word in title if word in ("pycoll", "ring", "one_shot")] == [
        "pycoll",
        "ring",
        "one_shot",
    ]
    assert table_of(done.stdout, 2)[0][-1] == "0"
    refused = run("--algorithms", "bogus", timeout=30)
    assert refused.returncode != 0
    assert "bogus" in refused.stderr and "recursive_doubling" in refused.stderr


def test_a_forced_group_reads_its_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """PYCOLL_ALGO holds the forced algorithm inside and what it was outside."""
    measure = load("measure")
    monkeypatch.setenv("PYCOLL_ALGO", "all_reduce=tree")
    with measure.algorithm_forced(measure.Contender("pycoll", "ring")):
        assert os.environ["PYCOLL_ALGO"] == "all_reduce=ring"
    assert os.environ["PYCOLL_ALGO"] == "all_reduce=tree"
    with measure.algorithm_forced(measure.Contender("gloo")):
        assert os.environ["PYCOLL_ALGO"] == "all_reduce=tree"


class BrokenGroup:
    """All-reduces nothing: on one rank that is right, and then `spoil` elements are changed."""

    def __init__(self, spoil: int) -> None:
        self.spoil = spoil

    def calls(self, tensor: Any, count: int) -> None:
        tensor[tensor.numel() - self.spoil :] += 1


@pytest.mark.parametrize("spoil", [0, 1, 5])
def test_wrong_elements_are_counted(spoil: int, tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist

    measure = load("measure")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        tensor = torch.zeros(1009)
        assert measure.count_wrong(BrokenGroup(spoil), tensor) == spoil
    finally:
        dist.destroy_process_group()


def test_require_ahead() -> None:
    """Exit code 1 and the sizes by name where pycoll is behind."""
    module = load("all_reduce")
    report, measure = load("report"), load("measure")

    def row(size: int, gloo: float, pycoll: float) -> Any:
        samples = [measure.Sample("gloo", 1, [gloo]), measure.Sample("pycoll", 1, [pycoll])]
        return measure.Row(size, size // 4, samples)

    rows = [row(4, 100.0, 10.0), row(1024, 100.0, 125.0)]
    figures = report.Run(2, ["gloo", "pycoll"], rows)
    assert module.behind([figures]) == ["1K on 2 ranks (0.80)"]
    refused = run("--require-ahead", "--backends", "pycoll", timeout=30)
    assert refused.returncode != 0 and "--require-ahead" in refused.stderr


def test_sizes_and_statistics() -> None:
    common = load("common")
    assert [common.parse_size(text) for text in ("4", "64K", "1m", "2GB")] == [
        4,
        65536,
        1 << 20,
        2 << 30,
    ]
    for text in ("", "K", "-4", "0", "4.5M", "4X"):
        with pytest.raises(ValueError, match="is not a size"):
            common.parse_size(text)
    assert common.format_size(65536) == "64K" and common.format_size(65537) == "65537"
    assert common.sizes_between(4, 300, 4) == [4, 16, 64, 256]
    assert common.quantile(range(1, 1001), 0.99) == 990
    assert common.quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert common.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
