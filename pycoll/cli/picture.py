"""The picture of `pycoll explain --plot`: who sends which chunk to whom, when."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from pycoll._core import Trace, Transfer

LABELS_A_RANK = 2  # more arrows a rank and step leave no room for labels
LEGEND_ENTRIES = 16


def draw_transfers(trace: Trace, title: str, path: Path) -> None:
    """Writes a PNG: a column a rank, time downwards, an arrow a transfer, a colour a chunk.

    Where there is only one chunk the colour is the sender's.
    """
    ranks = len(trace.rows[0].values)
    steps = defaultdict(list)
    for transfer in trace.transfers:
        steps[transfer.time].append(transfer)
    last = max(steps, default=1)
    figure, axes = make_axes(ranks, last, crowd=max(map(len, steps.values()), default=0))
    palette = Palette(trace.transfers)
    for transfers in steps.values():
        draw_step(axes, transfers, palette, labels=len(transfers) <= LABELS_A_RANK * ranks)
    palette.add_legend(axes)
    axes.set_title(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def make_axes(ranks: int, last: int, crowd: int) -> tuple[Any, Any]:
    """Empty columns; `crowd`, the most arrows in one step, makes steps taller."""
    step = min(2.5, max(0.95, 0.06 * crowd))
    size = (min(24.0, max(5.5, 1.5 * ranks + 1.8)), min(40.0, step * last + 1.4))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    for rank in range(ranks):
        axes.plot([rank, rank], [0, last], color="#b0b0b0", linewidth=1.2, zorder=1)
    axes.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_yticks(range(last + 1), ["start", *map(str, range(1, last + 1))])
    axes.set_ylabel("after step")
    axes.set(xlim=(-0.6, ranks - 0.4), ylim=(last + 0.12, -0.15))
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    return figure, axes


class Palette:
    """A colour for each chunk: ten distinct ones while they last, then a wheel of hues."""

    def __init__(self, transfers: list[Transfer]) -> None:
        self.by_chunk = len({t.chunk for t in transfers}) > 1
        keys = sorted({self.key(t) for t in transfers})
        if len(keys) <= 10:
            self.colours = {key: plt.get_cmap("tab10")(i) for i, key in enumerate(keys)}
        else:
            self.colours = {key: plt.get_cmap("hsv")(i / len(keys)) for i, key in enumerate(keys)}

    def key(self, transfer: Transfer) -> int:
        return transfer.chunk if self.by_chunk else transfer.source

    def __getitem__(self, transfer: Transfer) -> Any:
        return self.colours[self.key(transfer)]

    def add_legend(self, axes: Any) -> None:
        if not 1 < len(self.colours) <= LEGEND_ENTRIES:
            return
        kind = "chunk" if self.by_chunk else "from rank"
        handles = [plt.Line2D([], [], color=c, linewidth=2.5) for c in self.colours.values()]
        names = [f"{kind} {key}" for key in self.colours]
        axes.legend(handles, names, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def draw_step(axes: Any, transfers: list[Transfer], palette: Palette, labels: bool) -> None:
    pairs = defaultdict(list)
    for transfer in transfers:
        pairs[transfer.source, transfer.destination].append(transfer)
    for several in pairs.values():
        for i, transfer in enumerate(several):
            # Transfers of one pair in one step lie side by side.
            shift = (i - (len(several) - 1) / 2) * 0.1
            draw_arrow(axes, transfer, shift, palette[transfer], thin=not labels)
        if labels and palette.by_chunk:
            draw_label(axes, several, palette)


def draw_arrow(axes: Any, transfer: Transfer, shift: float, colour: Any, thin: bool) -> None:
    top, bottom = transfer.time - 0.94, transfer.time - 0.06
    axes.annotate(
        "",
        xy=(transfer.destination + shift, bottom),
        xytext=(transfer.source + shift, top),
        arrowprops={
            "arrowstyle": "-|>",
            "color": colour,
            "linewidth": 1.1 if thin else 1.6,
            "alpha": 0.9,
            "shrinkA": 0,
            "shrinkB": 0,
            "mutation_scale": 9 if thin else 12,
        },
        zorder=2,
    )


def draw_label(axes: Any, transfers: list[Transfer], palette: Palette) -> None:
    """The chunk numbers on the arrow, a third of the way down: arrows cross in the middle."""
    first = transfers[0]
    along = 0.3
    numbers = sorted({t.chunk for t in transfers})
    text = ",".join(map(str, numbers)) if len(numbers) <= 4 else f"{len(numbers)} chunks"
    axes.text(
        first.source + along * (first.destination - first.source),
        first.time - 0.94 + 0.88 * along,
        text,
        color=palette[first] if len(numbers) == 1 else "#404040",
        fontsize=8,
        ha="center",
        va="center",
        bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none"},
        zorder=3,
    )
