"""Pictures: time and bandwidth by size, both axes logarithmic, a line a contender."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pycoll.bench.report import Run, busbw, microseconds
from pycoll.bench.units import format_size


def plot(runs: list[Run], file: Path, title: str) -> None:
    """A column of panels a number of ranks: time above, bus bandwidth below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # A barrier moves nothing.
    rows = 2 if all(run.rows[0].bytes for run in runs) else 1
    figure, panels = plt.subplots(
        rows,
        len(runs),
        figsize=(max(7.0, 5.6 * len(runs)), 0.6 + 3.7 * rows),
        sharex="col",
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for column, run in enumerate(runs):
        panels[0][column].set_title(f"{run.ranks} ranks", fontsize=10)
        draw(panels[0][column], run, lambda run, row, sample: microseconds(sample))
        if rows == 2:
            draw(panels[1][column], run, busbw)
        panels[-1][column].set_xlabel("size" if rows == 2 else "")
    panels[0][0].set_ylabel("time of a call (us)")
    if rows == 2:
        panels[1][0].set_ylabel("bus bandwidth (GB/s)")
    panels[0][0].legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def draw(axes: Any, run: Run, value: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    sizes = [row.bytes or 1 for row in run.rows]
    for at, name in enumerate(run.contenders):
        values = [value(run, row, row.samples[at]) for row in run.rows]
        reference = {"linestyle": "--", "color": "#777777"} if name in ("fake", "limit") else {}
        axes.plot(sizes, values, marker="o", markersize=3.5, linewidth=1.5, label=name, **reference)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes[:: 1 + len(sizes) // 9] if run.rows[0].bytes else [])
    axes.xaxis.set_minor_locator(plain_locator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(round(size))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(True, which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def plain_locator() -> Any:
    """No ticks between the sizes."""
    from matplotlib.ticker import NullLocator

    return NullLocator()
