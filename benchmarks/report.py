"""Tables, JSON and plots of what measure.py measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common import format_size, geometric_mean, quantile
from measure import Row, Sample


@dataclass
class Run:
    """All sizes on one number of ranks; the first contender is what the others are compared to."""

    ranks: int
    contenders: list[str]
    rows: list[Row] = field(default_factory=list)

    def ratios(self, name: str) -> list[float]:
        """By size: how many times faster `name` is than the first contender."""
        at = self.contenders.index(name)
        return [microseconds(row.samples[0]) / microseconds(row.samples[at]) for row in self.rows]

    def wrong(self) -> int:
        return sum(sample.wrong or 0 for row in self.rows for sample in row.samples)

    def as_json(self) -> dict[str, object]:
        others = self.contenders[1:]
        return {
            "ranks": self.ranks,
            "contenders": self.contenders,
            "rows": [row_as_json(row, self.ranks) for row in self.rows],
            "geometric_mean": {name: geometric_mean(self.ratios(name)) for name in others},
            "smallest_ratio": {name: min(self.ratios(name)) for name in others},
        }


def microseconds(sample: Sample) -> float:
    """A call: median over rounds."""
    return statistics.median(sample.rounds)


def algbw(row: Row, sample: Sample) -> float:
    """GB/s as nccl-tests defines it: size over time."""
    return row.bytes / microseconds(sample) / 1e3


def busbw(row: Row, sample: Sample, ranks: int) -> float:
    """GB/s as nccl-tests defines it: what each rank must at least send, over time."""
    return algbw(row, sample) * 2 * (ranks - 1) / ranks


def row_as_json(row: Row, ranks: int) -> dict[str, object]:
    samples = {}
    for sample in row.samples:
        facts = asdict(sample)
        del facts["name"], facts["calls"]
        samples[sample.name] = {
            "us": microseconds(sample),
            "p99_us": quantile(sample.calls, 0.99),
            "algbw": algbw(row, sample),
            "busbw": busbw(row, sample, ranks),
            "calls": len(sample.calls),
            **facts,
        }
    return {"bytes": row.bytes, "elements": row.elements, "samples": samples}


@dataclass(frozen=True)
class Column:
    title: str
    width: int

    def cell(self, text: str) -> str:
        return text.rjust(self.width)


def number(value: float) -> str:
    """Four significant digits, without an exponent."""
    digits = 3 if value < 10 else 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:.{digits}f}"


class PairTable:
    """One or two contenders, with everything about each."""

    def __init__(self, run: Run, checked: bool) -> None:
        self.run = run
        self.checked = checked

    def header(self) -> str:
        return "  ".join(column.cell(column.title) for column in self._columns())

    def line(self, row: Row) -> str:
        cells = zip(self._columns(), self._cells(row), strict=True)
        return "  ".join(column.cell(text) for column, text in cells)

    def _columns(self) -> Iterator[Column]:
        yield Column("bytes", 10)
        yield from (Column(f"{name} us", 10) for name in self.run.contenders)
        if len(self.run.contenders) == 2:
            yield Column("ratio", 6)
        for name in self.run.contenders:
            yield Column(f"{name} algbw/busbw", max(17, len(name) + 12))
        yield from (Column(f"{name} p99 us", 13) for name in self.run.contenders)
        if self.checked:
            yield Column("#wrong", 6)

    def _cells(self, row: Row) -> Iterator[str]:
        yield str(row.bytes)
        times = [microseconds(sample) for sample in row.samples]
        yield from map(number, times)
        if len(times) == 2:
            yield f"{times[0] / times[1]:.2f}"
        for sample in row.samples:
            yield f"{algbw(row, sample):.3f}/{busbw(row, sample, self.run.ranks):.3f}"
        for sample in row.samples:
            yield number(quantile(sample.calls, 0.99))
        if self.checked:
            yield str(sum(sample.wrong or 0 for sample in row.samples))


class ManyTable:
    """Any number of contenders: the time of each, the fastest, and how far the built-in selection
    (`pycoll`) is behind it."""

    def __init__(self, run: Run, checked: bool) -> None:
        self.run = run
        self.checked = checked
        self._names = [Column(f"{name} us", max(10, len(name) + 3)) for name in run.contenders]
        self._best = Column("fastest", max(map(len, run.contenders)))

    def header(self) -> str:
        titles = [Column("bytes", 10), *self._names, self._best]
        if "pycoll" in self.run.contenders:
            titles.append(Column("pycoll/fastest", 14))
        if self.checked:
            titles.append(Column("#wrong", 6))
        return "  ".join(column.cell(column.title) for column in titles)

    def line(self, row: Row) -> str:
        times = {sample.name: microseconds(sample) for sample in row.samples}
        best = min(times, key=lambda name: times[name])
        cells = [str(row.bytes).rjust(10)]
        cells += [c.cell(number(t)) for c, t in zip(self._names, times.values(), strict=True)]
        cells.append(self._best.cell(best))
        if "pycoll" in times:
            cells.append(f"{times['pycoll'] / times[best]:.2f}".rjust(14))
        if self.checked:
            cells.append(str(sum(sample.wrong or 0 for sample in row.samples)).rjust(6))
        return "  ".join(cells)


def table(run: Run, checked: bool) -> PairTable | ManyTable:
    return (PairTable if len(run.contenders) <= 2 else ManyTable)(run, checked)


def footer(run: Run) -> list[str]:
    base = run.contenders[0]
    lines = []
    for name in run.contenders[1:]:
        ratios = run.ratios(name)
        worst = ratios.index(min(ratios))
        lines.append(
            f"{name}: {geometric_mean(ratios):.2f} times as fast as {base} (geometric mean), "
            f"at least {ratios[worst]:.2f} (at {format_size(run.rows[worst].bytes)})"
        )
    return lines


def plot(runs: list[Run], file: Path, title: str) -> None:
    """Time by size, both axes logarithmic: a panel a number of ranks, a line a contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, panels = plt.subplots(
        1, len(runs), figsize=(6.2 * len(runs), 5), sharey=True, squeeze=False, layout="constrained"
    )
    for run, axes in zip(runs, panels[0], strict=True):
        sizes = [row.bytes for row in run.rows]
        for at, name in enumerate(run.contenders):
            times = [microseconds(row.samples[at]) for row in run.rows]
            axes.plot(sizes, times, marker="o", markersize=3.5, linewidth=1.5, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes[:: 1 + len(sizes) // 9])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(round(size))))
        axes.set_xlabel("bytes")
        axes.set_title(f"{run.ranks} ranks")
        axes.grid(True, which="major", alpha=0.3)
    panels[0][0].set_ylabel("microseconds a call")
    panels[0][0].legend()
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=130)
    plt.close(figure)
