"""Tables and JSON of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from pycoll.bench.collectives import COLLECTIVES
from pycoll.bench.plan import DTYPES, Plan, Row, Sample
from pycoll.bench.units import format_size, geometric_mean, quantile


@dataclass
class Run:
    """All sizes on one number of ranks; the first contender is what the others are compared to."""

    plan: Plan
    ranks: int
    rows: list[Row] = field(default_factory=list)

    @property
    def contenders(self) -> list[str]:
        return [contender.name for contender in self.plan.contenders]

    def ratios(self, name: str) -> list[float]:
        """By size: how many times faster `name` is than the first contender."""
        at = self.contenders.index(name)
        return [microseconds(row.samples[0]) / microseconds(row.samples[at]) for row in self.rows]

    def busbw(self, name: str) -> list[float]:
        at = self.contenders.index(name)
        return [busbw(self, row, row.samples[at]) for row in self.rows]

    def wrong(self) -> int:
        return sum(sample.wrong or 0 for row in self.rows for sample in row.samples)

    def as_json(self) -> dict[str, object]:
        others = self.contenders[1:]
        return {
            "ranks": self.ranks,
            "contenders": self.contenders,
            "rows": [row_as_json(self, row) for row in self.rows],
            "geometric_mean": {name: geometric_mean(self.ratios(name)) for name in others},
            "smallest_ratio": {name: min(self.ratios(name)) for name in others},
            "average_busbw": {n: statistics.mean(self.busbw(n)) for n in self.contenders},
        }


def microseconds(sample: Sample) -> float:
    """A call: median over rounds."""
    return statistics.median(sample.rounds)


def algbw(row: Row, sample: Sample) -> float:
    """GB/s as nccl-tests defines it: size over time."""
    return row.bytes / microseconds(sample) / 1e3


def busbw(run: Run, row: Row, sample: Sample) -> float:
    """GB/s as nccl-tests defines it: what the busiest link must at least carry, over time."""
    return algbw(row, sample) * COLLECTIVES[run.plan.collective].factor(run.ranks)


def row_as_json(run: Run, row: Row) -> dict[str, object]:
    samples = {}
    for sample in row.samples:
        facts = asdict(sample)
        del facts["name"], facts["calls"]
        facts["cpu_rounds"] = facts.pop("cpu")
        samples[sample.name] = {
            "us": microseconds(sample),
            "p50_us": quantile(sample.calls, 0.5),
            "p99_us": quantile(sample.calls, 0.99),
            "cpu_us": statistics.median(sample.cpu),
            "algbw": algbw(row, sample),
            "busbw": busbw(run, row, sample),
            "calls": len(sample.calls),
            **facts,
        }
    return {
        "bytes": row.bytes,
        "count": row.count,
        "type": type_name(run.plan),
        "redop": operation(run),
        "root": root(run),
        "samples": samples,
    }


def type_name(plan: Plan) -> str:
    """nccl-tests' name of a dtype."""
    return next(name for name, dtype in DTYPES.items() if dtype == plan.dtype)


def operation(run: Run) -> str:
    return run.plan.op if COLLECTIVES[run.plan.collective].reduces else "none"


def root(run: Run) -> int:
    """-1 where there is none, as in nccl-tests."""
    return run.plan.root if COLLECTIVES[run.plan.collective].rooted else -1


@dataclass(frozen=True)
class Column:
    title: str
    width: int
    unit: str = ""

    def cell(self, text: str) -> str:
        return text.rjust(self.width)


def number(value: float) -> str:
    """Four significant digits, without an exponent."""
    digits = 3 if value < 10 else 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:.{digits}f}"


def count_of_wrong(sample: Sample) -> str:
    return "N/A" if sample.wrong is None else str(sample.wrong)


class LineTable:
    """nccl-tests' columns, and more at the end: a line a size and contender."""

    def __init__(self, run: Run) -> None:
        self.run = run
        longest = max(len("backend"), *map(len, run.contenders))
        self._columns = [
            Column("size", 12, "(B)"),
            Column("count", 10, "(elements)"),
            Column("type", 8),
            Column("redop", 5),
            Column("root", 4),
            Column("backend", longest),
            Column("time", 9, "(us)"),
            Column("algbw", 7, "(GB/s)"),
            Column("busbw", 7, "(GB/s)"),
            Column("#wrong", 6),
            Column("p50", 9, "(us)"),
            Column("p99", 9, "(us)"),
            Column("cpu", 9, "(us)"),
        ]

    def header(self) -> str:
        titles = "  ".join(column.cell(column.title) for column in self._columns)
        units = "  ".join(column.cell(column.unit) for column in self._columns)
        return f"#{titles[1:]}\n#{units[1:]}"

    def line(self, row: Row) -> str:
        return "\n".join(self._line(row, sample) for sample in row.samples)

    def _line(self, row: Row, sample: Sample) -> str:
        run = self.run
        texts = [
            str(row.bytes),
            str(row.count),
            type_name(run.plan),
            operation(run),
            str(root(run)),
            sample.name,
            number(microseconds(sample)),
            f"{algbw(row, sample):.3f}",
            f"{busbw(run, row, sample):.3f}",
            count_of_wrong(sample),
            number(quantile(sample.calls, 0.5)),
            number(quantile(sample.calls, 0.99)),
            number(statistics.median(sample.cpu)),
        ]
        return "  ".join(c.cell(text) for c, text in zip(self._columns, texts, strict=True))


class PairTable:
    """A line a size: one or two contenders, with everything about each."""

    def __init__(self, run: Run) -> None:
        self.run = run

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
        if self.run.plan.check:
            yield Column("#wrong", 6)

    def _cells(self, row: Row) -> Iterator[str]:
        yield str(row.bytes)
        times = [microseconds(sample) for sample in row.samples]
        yield from map(number, times)
        if len(times) == 2:
            yield f"{times[0] / times[1]:.2f}"
        for sample in row.samples:
            yield f"{algbw(row, sample):.3f}/{busbw(self.run, row, sample):.3f}"
        for sample in row.samples:
            yield number(quantile(sample.calls, 0.99))
        if self.run.plan.check:
            yield str(sum(sample.wrong or 0 for sample in row.samples))


class ManyTable:
    """Any number of contenders: the time of each, the fastest, and how far the built-in selection
    (`pycoll`) is behind it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._names = [Column(f"{name} us", max(10, len(name) + 3)) for name in run.contenders]
        self._best = Column("fastest", max(len("fastest"), *map(len, run.contenders)))

    def header(self) -> str:
        titles = [Column("bytes", 10), *self._names, self._best]
        if "pycoll" in self.run.contenders:
            titles.append(Column("pycoll/fastest", 14))
        if self.run.plan.check:
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
        if self.run.plan.check:
            cells.append(str(sum(sample.wrong or 0 for sample in row.samples)).rjust(6))
        return "  ".join(cells)


def table(run: Run, compare: bool) -> LineTable | PairTable | ManyTable:
    """nccl-tests' table; with `compare` a line a size with all contenders side by side."""
    if not compare:
        return LineTable(run)
    return PairTable(run) if len(run.contenders) <= 2 else ManyTable(run)


def footer(run: Run, compare: bool) -> list[str]:
    lines = []
    if not compare:
        means = ", ".join(f"{n} {statistics.mean(run.busbw(n)):.3f}" for n in run.contenders)
        lines = [f"# Wrong elements    : {run.wrong()}", f"# Avg bus bandwidth : {means} GB/s"]
    base = run.contenders[0]
    for name in run.contenders[1:]:
        ratios = run.ratios(name)
        worst = ratios.index(min(ratios))
        lines.append(
            f"{name}: {geometric_mean(ratios):.2f} times as fast as {base} (geometric mean), "
            f"at least {ratios[worst]:.2f} (at {format_size(run.rows[worst].bytes)})"
        )
    return lines


def policy(plan: Plan) -> str:
    batch = f"{plan.iterations} calls" if plan.iterations else f"{plan.batch_seconds * 1e3:g} ms"
    how = [
        "async_op=True and wait" if plan.asynchronous else "synchronous calls",
        f"{plan.memory} tensors",
        "rotated through more memory than the caches hold" if plan.cold else "caches warm",
    ]
    if plan.rewrite:
        how.append("written anew before each call, which is timed alone")
    return (
        f"policy    {', '.join(how)};\n"
        f"          batches of {batch}, up to {plan.rounds} rounds, contenders in random order in "
        f"each (seed {plan.seed});\n"
        "          median over rounds of the slowest rank; 1 thread a rank, CPUs not pinned"
    )
