"""Pictures: time and bandwidth by size, both axes logarithmic, a line a contender."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycoll.bench.report import Run, microseconds
from pycoll.bench.units import format_size

# What is there to compare with, and is no library.
REFERENCES: dict[str, dict[str, Any]] = {
    "fake": {"linestyle": ":", "color": "#666666"},
    "limit": {"linestyle": "--", "color": "#666666"},
}


def plot(runs: list[Run], file: Path, title: str) -> None:
    """A column of panels a number of ranks: time above, bus bandwidth below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # A barrier has no sizes.
    figure = by_size(plt, runs) if runs[0].rows[0].bytes else by_ranks(plt, runs)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def by_size(plt: Any, runs: list[Run]) -> Any:
    figure, panels = plt.subplots(
        2,
        len(runs),
        figsize=(max(7.0, 5.6 * len(runs)), 8.0),
        sharex="col",
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for column, run in enumerate(runs):
        above, below = panels[0][column], panels[1][column]
        above.set_title(f"{run.ranks} ranks", fontsize=10)
        sizes = [row.bytes for row in run.rows]
        for at, name in enumerate(run.contenders):
            samples = [row.samples[at] for row in run.rows]
            draw(above, sizes, [microseconds(sample) for sample in samples], name)
            # What moves nothing has no bandwidth.
            if name != "fake":
                draw(below, sizes, run.busbw(name), name)
        for axes in (above, below):
            decorate(axes, sizes, format_size)
        below.set_xlabel("size (B)")
    panels[0][0].set_ylabel("time of a call (us)")
    panels[1][0].set_ylabel("bus bandwidth (GB/s)")
    panels[0][0].legend(frameon=False, fontsize=9)
    return figure


def by_ranks(plt: Any, runs: list[Run]) -> Any:
    figure, axes = plt.subplots(figsize=(7.0, 4.3), layout="constrained")
    ranks = [run.ranks for run in runs]
    for at, name in enumerate(runs[0].contenders):
        draw(axes, ranks, [microseconds(run.rows[0].samples[at]) for run in runs], name)
    decorate(axes, ranks, str)
    axes.set_xlabel("ranks")
    axes.set_ylabel("time of a call (us)")
    axes.legend(frameon=False, fontsize=9)
    return figure


def draw(axes: Any, places: Sequence[int], values: Sequence[float], name: str) -> None:
    look = {"marker": "o", "markersize": 3.5, "linewidth": 1.5, **REFERENCES.get(name, {})}
    axes.plot(places, values, label=name, **look)


def decorate(axes: Any, places: list[int], show: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(places[:: 1 + len(places) // 9])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: show(round(place))))
    axes.yaxis.set_major_formatter(FuncFormatter(plain))
    axes.grid(True, which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def plain(value: float, _: int) -> str:
    """10,000 and 0.001 rather than powers; below that, powers are shorter."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
