"""What the demo shows: a progress bar, a summary, a plot and a few lines of text."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pycoll.demo.model import CharTransformer
from pycoll.demo.text import Corpus, trigram_cross_entropy, trigram_entropy
from pycoll.demo.train import History


@dataclass(frozen=True)
class Yardsticks:
    """What counting triples of characters reaches on the validation text, nats a character."""

    uniform: float  # guessing: the logarithm of the number of different characters
    fitted: float  # a smoothed trigram model of the training text: what trigrams can honestly do
    entropy: float  # H(c3 | c1, c2) of the validation text itself: what no trigram model can beat

    @classmethod
    def of(cls, corpus: Corpus) -> Yardsticks:
        size = len(corpus.vocabulary)
        fitted = trigram_cross_entropy(corpus.train, corpus.validation, size)
        return cls(math.log(size), fitted, trigram_entropy(corpus.validation))


class ProgressBar:
    """One line on standard error, redrawn in place (or nothing at all in quiet mode)."""

    def __init__(self, steps: int, quiet: bool) -> None:
        from tqdm import tqdm

        layout = "{desc}: {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} {elapsed}{postfix}"
        self.bar = tqdm(total=steps, desc="training", bar_format=layout, disable=quiet)

    def __call__(self, history: History) -> None:
        self.bar.n = len(history.train)
        parts = [f"train {history.train[-1]:.3f}"]
        if history.validation:
            parts.append(f"val {history.validation[-1][1]:.3f}")
        parts.append(f"{history.tokens_per_second:,.0f} tok/s")
        parts.append(f"comm {history.communication_share:.1%}")
        self.bar.set_postfix_str(" ".join(parts))

    def close(self) -> None:
        self.bar.close()


def summary(
    history: History, yardsticks: Yardsticks, target: float | None, total_seconds: float
) -> str:
    """A table of the run; `total_seconds` includes validation, checkpoints and start-up."""
    steps = len(history.train)
    rows = [
        ("backend, ranks", f"{history.backend}, {history.ranks}"),
        ("parameters", f"{history.parameters:,}"),
        ("steps, characters", f"{steps}, {history.tokens:,}"),
        ("speed", f"{history.tokens_per_second:,.0f} characters/s"),
        ("training time", f"{history.seconds:.1f} s, with everything {total_seconds:.1f} s"),
        ("waiting for gradients", f"{history.communication_share:.1%} of training"),
        ("", ""),
        ("nats a character", "on the validation text"),
        ("guessing", f"{yardsticks.uniform:.4f}"),
        ("trigram model", f"{yardsticks.fitted:.4f}  fitted on the training text"),
        ("trigram entropy", f"{yardsticks.entropy:.4f}  no trigram model can beat it"),
    ]
    if history.validation:
        rows.append(("transformer", f"{history.validation[-1][1]:.4f}"))
    if target is not None:
        rows.append(("target", f"{target:.4f}  {'reached' if history.reached else 'NOT reached'}"))
    return "\n".join(f"  {name:<22} {value}".rstrip() for name, value in rows)


def write_history(
    history: History, yardsticks: Yardsticks, target: float | None, path: Path
) -> None:
    content = asdict(history) | {
        "tokens_per_second": history.tokens_per_second,
        "communication_share": history.communication_share,
        "yardsticks": asdict(yardsticks),
        "target": target,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def plot(history: History, yardsticks: Yardsticks, path: Path) -> None:
    """Losses over steps as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    steps = range(1, len(history.train) + 1)
    axes.plot(steps, history.train, color="#9ecae1", linewidth=0.9, label="training")
    if history.validation:
        where, losses = zip(*history.validation, strict=True)
        label = f"validation (last {losses[-1]:.3f})"
        axes.plot(
            where,
            losses,
            color="#08519c",
            linewidth=2,
            marker="o",
            ms=4,
            label=label,
            clip_on=False,
        )
    for value, style, name in (
        (yardsticks.fitted, ":", "trigram model of the training text"),
        (yardsticks.entropy, "--", "trigram entropy of the validation text"),
    ):
        axes.axhline(value, color="#d94801", linestyle=style, label=f"{name} ({value:.3f})")
    ranks = f"{history.ranks} rank{'s' if history.ranks > 1 else ''}"
    axes.set_title(
        f"{history.backend}, {ranks}: {history.tokens_per_second:,.0f} characters/s, "
        f"{history.communication_share:.1%} of the time waiting for gradients"
    )
    axes.set(xlabel="step", ylabel="loss, nats a character")
    axes.set_xlim(0, max(steps.stop - 1, 1))
    axes.set_ylim(min(1.0, *history.train) - 0.05, max(history.train[0], yardsticks.fitted) + 0.1)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


PROMPT = "The expression "


def sample(model: CharTransformer, corpus: Corpus, count: int = 320, seed: int = 1) -> str:
    """The prompt and `count` characters that the model continues it with."""
    generator = torch.Generator().manual_seed(seed)
    return corpus.decode(model.sample(corpus.encode(PROMPT), count, generator))
