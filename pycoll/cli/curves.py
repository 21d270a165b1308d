"""The picture of `pycoll simulate --plot`: time by size, log-log, a line an algorithm."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from pycoll.cli.simulate import format_size, format_time

if TYPE_CHECKING:
    from pycoll.simulator.sweep import Curve

MARKERS = "osD^vP*X"


def draw_curves(curves: list[Curve], title: str, file: Path) -> None:
    """Writes a PNG. Algorithms without any time are left out."""
    figure, axes = plt.subplots(figsize=(8, 5.2), layout="constrained")
    shown = [curve for curve in curves if curve.seconds]
    for at, curve in enumerate(shown):
        sizes = sorted(curve.seconds)
        axes.plot(
            sizes,
            [curve.seconds[size] for size in sizes],
            marker=MARKERS[at % len(MARKERS)],
            markersize=4.5,
            linewidth=1.6,
            label=curve.algorithm,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({size for curve in shown for size in curve.seconds})
    axes.xaxis.set_major_locator(FixedLocator(sizes[:: 1 + len(sizes) // 10]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_size(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_time(value)))
    times = [t for curve in shown for t in curve.seconds.values()]
    if times and math.log10(max(times) / min(times)) > 2:
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: format_time(value)))
    axes.set_xlabel("bytes")
    axes.set_ylabel("time of a call")
    axes.set_title(title, fontsize=11)
    axes.grid(True, which="major", alpha=0.3)
    if shown:
        axes.legend(frameon=False)
    figure.savefig(file, dpi=120)
    plt.close(figure)
