"""The demo's text, its trigram entropy, and the batches that are drawn from it.

The text is CPython's own language reference, ``pydoc_data.topics``, which every Python carries, so
nothing is downloaded. It differs between Python versions; `Corpus.sha256` says which one it was.
Paragraphs that the reference repeats word for word are kept once: a repeated paragraph on both
sides of the split would let a model score by memory.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Corpus:
    """A text as character numbers; the last tenth is held out for validation."""

    vocabulary: str
    train: Tensor  # int64, one number a character
    validation: Tensor  # int64
    sha256: str

    def decode(self, numbers: Tensor) -> str:
        return "".join(self.vocabulary[i] for i in numbers.tolist())

    def encode(self, text: str) -> Tensor:
        """Character numbers; raises ValueError on a character that the corpus does not have."""
        return torch.tensor([self.vocabulary.index(c) for c in text], dtype=torch.int64)


def python_reference() -> str:
    """The text of ``pydoc_data.topics``, topics in alphabetical order, each paragraph once."""
    from pydoc_data.topics import topics

    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs))


def make_corpus(text: str) -> Corpus:
    """Cuts `text` into a training part and a validation part (its last tenth)."""
    vocabulary = "".join(sorted(set(text)))
    number = {c: i for i, c in enumerate(vocabulary)}
    numbers = torch.tensor([number[c] for c in text], dtype=torch.int64)
    cut = int(len(text) * (1 - VALIDATION_SHARE))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Corpus(vocabulary, numbers[:cut].clone(), numbers[cut:].clone(), digest)


@lru_cache(maxsize=1)
def load_corpus() -> Corpus:
    return make_corpus(python_reference())


def trigram_entropy(text: Tensor) -> float:
    """The empirical conditional entropy H(c3 | c1, c2) of `text`, in nats a character.

    Counted on the very text it is asked about, so no trigram predictor can do better on that text,
    whatever it was fitted on (Shannon 1951, F_3, estimated by relative frequencies).
    """
    characters = text.tolist()
    triples = Counter(zip(characters, characters[1:], characters[2:], strict=False))
    pairs: Counter[tuple[int, int]] = Counter()
    for (first, second, _), count in triples.items():
        pairs[first, second] += count
    total = sum(triples.values())
    return -sum(n * math.log(n / pairs[t[0], t[1]]) for t, n in triples.items()) / total


def trigram_cross_entropy(train: Tensor, held_out: Tensor, vocabulary_size: int) -> float:
    """Nats a character of an interpolated trigram model of `train` on `held_out`.

    The conditional probability is Witten-Bell smoothed (Bell, Cleary, Witten 1990): each order
    backs off to the next lower one in proportion to the number of different characters that
    followed its context, down to the uniform distribution. This is what an honest trigram model
    reaches on text it has not seen.
    """
    contexts: dict[tuple[int, ...], Counter[int]] = {}
    characters = train.tolist()
    for i, c in enumerate(characters):
        for order in range(min(i, 2) + 1):
            contexts.setdefault(tuple(characters[i - order : i]), Counter())[c] += 1
    totals = {context: sum(counts.values()) for context, counts in contexts.items()}

    def probability(context: tuple[int, ...], c: int) -> float:
        lower = probability(context[1:], c) if context else 1 / vocabulary_size
        counts = contexts.get(context)
        if counts is None:
            return lower
        return (counts[c] + len(counts) * lower) / (totals[context] + len(counts))

    held = held_out.tolist()
    triples = Counter(zip(held, held[1:], held[2:], strict=False))
    nats = -sum(n * math.log(probability(t[:2], t[2])) for t, n in triples.items())
    return nats / sum(triples.values())


@dataclass(frozen=True)
class Sampler:
    """Global batches of (`batch`, `length` + 1) characters, each a pure function of (seed, step).

    An epoch cuts the text into consecutive windows from a random start and visits them in a random
    order, each once. Rank r of n takes rows [r * batch / n, (r + 1) * batch / n), so every number
    of ranks sees the same global batches.
    """

    text: Tensor
    batch: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.text) < 2 * self.length + 1:
            raise ValueError(
                f"a text of {len(self.text)} characters is too short for windows of {self.length}"
            )

    def rows(self, step: int, rank: int = 0, ranks: int = 1) -> Tensor:
        """The rows of `rank`: int64 (batch / ranks, length + 1)."""
        if self.batch % ranks:
            raise ValueError(f"a global batch of {self.batch} cannot be shared by {ranks} ranks")
        share = self.batch // ranks
        windows = (len(self.text) - self.length - 1) // self.length
        first = step * self.batch + rank * share
        starts = [self._start(divmod(i, windows), windows) for i in range(first, first + share)]
        columns = torch.arange(self.length + 1)
        return self.text[torch.tensor(starts)[:, None] + columns]

    def _start(self, position: tuple[int, int], windows: int) -> int:
        epoch, index = position
        shift, order = _epoch(self.seed, epoch, windows, self.length)
        return shift + self.length * order[index]


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, windows: int, length: int) -> tuple[int, list[int]]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shift = int(torch.randint(length, (1,), generator=generator))
    order: list[int] = torch.randperm(windows, generator=generator).tolist()
    return shift, order
