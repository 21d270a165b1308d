"""benchmarks/targets.py, idle.py, ddp.py and others; where all benchmarks write their results."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from pycoll import cli
from test_benchmarks import BENCHMARKS, run

# Whatever takes minutes and then writes files, with the options that name them.
OUTPUTS = [
    ("pycoll bench all_reduce", "--json"),
    ("pycoll bench all_reduce", "--plot"),
    ("pycoll simulate all_reduce", "--json"),
    ("pycoll tune", "--output"),
    ("targets", "--json"),
    ("ddp", "--json"),
    ("network", "--json"),
    ("compression", "--plot"),
    ("compression_ddp", "--plot"),
    ("codec_kernels", "--json"),
    ("simulator", "--save"),
    ("simulator", "--write"),
    ("simulator", "--plot"),
    ("peers/compare", "--json"),
]


def load(name: str) -> ModuleType:
    """A script of the benchmarks folder, which is no package."""
    file = BENCHMARKS / name
    sys.path.insert(0, str(file.parent))
    try:
        return importlib.import_module(file.name)
    finally:
        sys.path.remove(str(file.parent))


def test_targets_measure_and_judge(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One row, two runs: the figure is the median of their ratios, and says whether it is enough.

    What is asked for is set so that it is sure to be reached, or not.
    """
    targets = load("targets")
    asked = replace(targets.ROWS["nothing"], wanted={"4": 0.0, "64": 1e9})
    monkeypatch.setitem(targets.ROWS, "nothing", asked)
    command = ["targets.py", "--only", "nothing", "--runs", "2", "--json", str(tmp_path / "json")]
    monkeypatch.setattr(sys, "argv", command)
    assert targets.main() == 1
    shown = capsys.readouterr().out
    facts = json.loads((tmp_path / "json").read_text())
    first, second = facts["results"]
    assert [first["reached"], second["reached"]] == [False, True]
    assert len(first["runs"]) == facts["runs"] == 2
    assert first["figure"] == statistics.median(first["runs"]) > 0
    assert f"{first['figure']:.2f}" in shown and "NOT reached" in shown
    assert "1 of 2 reached" in shown


def test_targets_know_what_cannot_be_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that fails is not reached, and hides no other."""
    targets = load("targets")
    three = replace(targets.ROWS["limit"], ranks=3, memory="ordinary", wanted={"4": 0.0})
    monkeypatch.setitem(targets.ROWS, "limit", three)
    [result] = targets.run_row("limit", runs=1)
    assert not result.reached and targets.as_json(result)["figure"] is None
    assert "for 2 ranks" in capsys.readouterr().out


def test_an_idle_rank_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits; milliseconds of CPU of each way to wait come back."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # the ranks import the script by name
    used = load("idle").cpu_of_a_waiting_rank(0.2, runs=2)
    assert list(used) == ["all_reduce", "work.wait()", "recv"]
    assert all(len(values) == 2 and min(values) > 0 for values in used.values())


def test_ddp_compares_steps_and_losses(capsys: pytest.CaptureFixture[str]) -> None:
    ddp = load("ddp")
    gloo = ddp.Outcome([10.0, 12.0, 11.0], [2.0, 1.0])
    outcomes = {
        "gloo": gloo,
        "pycoll": ddp.Outcome([10.0, 10.0, 10.0], [2.0, 1.01]),
        "shareable": ddp.Outcome([5.0, 5.5, 6.0], [2.0, 1.0], 0, 800, 0),
    }
    verdicts = {verdict["what"]: verdict for verdict in ddp.report("mlp", [outcomes])}
    assert [(v["figure"], v["reached"]) for v in verdicts.values()] == [
        (pytest.approx(2.0), True),
        (pytest.approx(1.1), False),
        (pytest.approx(0.01), False),
        (0.0, True),
        (0, True),
    ]
    assert "NOT reached" in capsys.readouterr().out


@pytest.mark.full
def test_ddp_trains_all_variants(tmp_path: Path) -> None:
    file = tmp_path / "ddp.json"
    short = ["--runs", "1", "--blocks", "2", "--steps", "1", "--json", str(file)]
    done = run(str(BENCHMARKS / "ddp.py"), *short, timeout=240)
    assert done.returncode in (0, 1), done.stderr  # 1: a target is not reached, on any machine
    for figures in json.loads(file.read_text())["models"].values():
        [outcomes] = figures["runs"]
        assert outcomes["pycoll"]["losses"] == outcomes["gloo"]["losses"]
        assert outcomes["nothing"]["losses"] != outcomes["gloo"]["losses"]
        assert all(len(outcome["step_ms"]) == 2 for outcome in outcomes.values())


@pytest.mark.parametrize(("command", "option"), OUTPUTS)
def test_files_that_cannot_be_made_are_refused_at_the_start(
    command: str, option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *arguments = command.split()
    for file, why in (("/no/such/file", "there is no folder /no/such"), ("/tmp", "is a folder")):
        monkeypatch.setattr(sys, "argv", [name, *arguments, option, file])
        with pytest.raises(SystemExit) as ended:
            cli.main() if name == "pycoll" else load(name).main()
        assert ended.value.code == 2
        out, err = capsys.readouterr()
        assert not out
        assert f"argument {option}: {file}" in err and why in err


def test_fused_kernels_are_timed_beside_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = load("fused")
    monkeypatch.setattr(fused, "LISTS", {"3 of 100": [100] * 3})
    monkeypatch.setattr(sys, "argv", ["fused.py", "--quick"])
    threads = fused.torch.get_num_threads()
    try:
        fused.main()
    finally:
        fused.torch.set_num_threads(threads)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:2] for row in rows] == [
        ["cast", "float16"],
        ["cast", "bfloat16"],
        *([name, dtype] for name in ("unscale", "clip") for dtype in fused.NAMES),
    ]
    assert all(float(figure) > 0 for row in rows for figure in row[-2:])


def test_codecs_are_timed_beside_a_copy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A size in cache and one that is not; what is asked for is judged from memory alone."""
    codecs = load("codec_kernels")
    monkeypatch.setattr(codecs, "last_level_cache", lambda: 64 << 10)
    cpus = os.sched_getaffinity(0)
    for wanted, status in ((0.0, 0), (1e9, 1)):
        monkeypatch.setattr(codecs, "WANTED", {"int8": wanted})
        command = [
            "codec_kernels.py",
            "--codecs",
            "fp16,int8",
            "--sizes",
            "16K,64K",
            "--rounds",
            "2",
        ]
        monkeypatch.setattr(sys, "argv", [*command, "--require", "--json", str(tmp_path / "json")])
        assert codecs.main() == status
    assert os.sched_getaffinity(0) == cpus
    names = {
        "memcpy",
        *(f"{way} {name}" for way in ("encode", "decode") for name in ("fp16", "int8")),
    }
    warm, cold = json.loads((tmp_path / "json").read_text())["results"]
    assert [warm["cold"], cold["cold"]] == [False, True]
    for figures in (warm, cold):
        assert figures["seconds"].keys() == names
        assert all(len(times) == 2 and min(times) > 0 for times in figures["seconds"].values())
    shown = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in shown if line.startswith("int8")]
    assert [row[6:] for row in rows][-2:] == [[], ["1000000000.00", "NOT", "reached"]]
    share = statistics.median(cold["seconds"]["memcpy"]) / statistics.median(
        cold["seconds"]["decode int8"]
    )
    assert float(rows[-1][5]) == pytest.approx(share, abs=0.006)


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("compression_ddp", ["--hosts", "3x1"], "3x1 is neither 2x1 nor 2x2"),
        (
            "compression_ddp",
            ["--contenders", "nccl/fp16"],
            "nccl/fp16 does not begin with one of: pycoll, gloo",
        ),
        (
            "compression_ddp",
            ["--contenders", "pycoll/top_k"],
            "hooks of pycoll are: powersgd, topk",
        ),
        ("compression_ddp", ["--rounds", "0"], "'0' is not a number from 1 on"),
        ("compression", ["--codecs", "none,int7"], "no 'int7'; there are: none, gloo, fp16"),
        ("compression", ["--sizes", "1X"], "'1X' is not a size"),
        ("compression", ["--rounds", "-1"], "--rounds"),
    ],
)
def test_what_benchmarks_of_compression_cannot_use_is_refused_at_the_start(
    script: str,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        load(script).main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_labels_of_a_plot_cover_nothing() -> None:
    """Twelve points in a heap in a corner, some at one place."""
    plt = pytest.importorskip("matplotlib.pyplot")
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    scatter = load("scatter")
    figure, panel = plt.subplots(figsize=(6, 5), dpi=scatter.DPI)
    panel.set(xscale="log", yscale="log", xlim=(1e-9, 20), ylim=(10, 1000))
    points = [scatter.Point(f"pycoll/codec {i}", 1 + i % 3, 0.9 - i % 4 / 100) for i in range(12)]
    figure.canvas.draw()
    scatter.label(panel, points)
    figure.canvas.draw()
    names = [Text.get_window_extent(text) for text in panel.texts]  # without the lines to points
    middles = [panel.transData.transform(point.place) for point in points]
    marks = [Bbox.from_bounds(x - 3, y - 3, 6, 6) for x, y in middles]
    frame = panel.get_window_extent()
    plt.close(figure)
    assert all(frame.x0 <= b.x0 and b.x1 <= frame.x1 and b.y1 <= frame.y1 for b in names)
    others = [*names, *marks]
    met = [(a, b) for i, a in enumerate(names) for b in others[i + 1 :] if a.overlaps(b)]
    assert len(names) == 12 and not met, met
