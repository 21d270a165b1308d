"""Time against error on log scales, a panel a network: the picture of compression*.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

LEAST_ERROR = 1e-8  # a log scale has no 0: what is exact stands at the left edge
DPI = 120
MARK = 8  # pixels from the middle of a point to its label
HEIGHT = 17  # of a label


@dataclass(frozen=True)
class Point:
    name: str
    error: float
    seconds: float

    @property
    def place(self) -> tuple[float, float]:
        return max(self.error, LEAST_ERROR), self.seconds * 1e3


def draw(panels: Mapping[str, Sequence[Point]], path: Path, of_what: str) -> None:
    """Writes a PNG. `of_what`: whose milliseconds they are."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (6 * len(panels), 5)
    figure, axes = plt.subplots(1, len(panels), figsize=size, dpi=DPI, squeeze=False)
    for panel, (title, points) in zip(axes[0], panels.items(), strict=True):
        panel.set(xscale="log", yscale="log", title=title, ylabel=f"ms a {of_what}")
        panel.set_xlabel(f"relative error of the mean ({LEAST_ERROR:g}: exact)")
        for number, point in enumerate(points):
            panel.plot(*point.place, "o", color=f"C{number % 10}", zorder=3)
        for ticks in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
            ticks(lambda value, _: f"{value:g}")
        panel.set_xlim(LEAST_ERROR / 5, 20)
        panel.margins(y=0.2)
        panel.grid(True, alpha=0.3)
    figure.tight_layout()
    figure.canvas.draw()  # only now it is known where on the canvas points are
    for panel, points in zip(axes[0], panels.values(), strict=True):
        label(panel, points)
    figure.savefig(path)
    plt.close(figure)


def label(panel: Any, points: Sequence[Point]) -> None:
    """Names beside their points, each in the first place that covers nothing else."""
    from matplotlib.transforms import Bbox

    marks = [panel.transData.transform(point.place) for point in points]
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in marks]
    frame = panel.get_window_extent()
    # Of a label: beside the point, then further and further above and below.
    heights = [0, *(sign * step * HEIGHT for step, sign in product(range(1, 30), (1, -1)))]
    for number, point in enumerate(points):
        color = f"C{number % 10}"
        line = {"arrowstyle": "-", "color": color, "lw": 0.5, "shrinkA": 0, "shrinkB": 4}
        text = panel.annotate(
            point.name, point.place, (MARK, 0), textcoords="offset pixels", color=color,
            va="center", fontsize=9, arrowprops=line,
        )  # fmt: skip
        width = text.get_window_extent().width
        for dy, dx in product(heights, (MARK, -MARK - width)):
            text.set_position((dx, dy))
            x, y = marks[number]
            box = Bbox.from_bounds(x + dx, y + dy - HEIGHT / 2, width, HEIGHT)
            inside = frame.x0 < box.x0 and frame.y0 < box.y0 and box.x1 < frame.x1
            if inside and box.y1 < frame.y1 and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
