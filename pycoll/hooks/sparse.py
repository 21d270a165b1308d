"""A few values of a gradient instead of all."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pycoll._arguments import number, refuse, whole
from pycoll.hooks.plan import Layout, Unit
from pycoll.hooks.reduction import Call, Group, all_finite, random_bits

__all__ = ["RandomK", "TopK"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class TopK:
    """The largest magnitudes of each rank (Aji and Heafield, EMNLP 2017; Stich, Cordonnier, Jaggi,
    NeurIPS 2018), each with its place: 8 bytes a value, gathered from every rank.

    Without error feedback it is biased: what is never among the largest never moves. Fewer
    bytes than those of an exact all_reduce are moved only if `ratio` is below 1 / ranks; a warning
    says so.

    Attributes:
        ratio: of the values that are sent, 0 < ratio <= 1: ceil(ratio * n) of n, of a unit of
            gradients that travel together. NaN counts as larger than infinity; of equal magnitudes
            those of the lowest places are sent.

    Raises `InvalidArgumentError` (a ValueError) for another ratio.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", _checked_ratio("TopK", self.ratio))

    def _reduction(self, group: Group) -> _TopK:
        return _TopK(self, group)

    def _settings(self) -> dict[str, Any]:
        return {"kind": "top_k", **asdict(self)}


@dataclass(frozen=True)
class RandomK:
    """Values at random places, the same on every rank: an all_reduce of few values, and no indices
    on the wire (Stich, Cordonnier, Jaggi, NeurIPS 2018).

    A vector is cut into as many equal stretches as values are sent, and each gives one of its
    values: every place is drawn with the same probability. Without error feedback values are
    multiplied by the length of their stretch, so that the expected result is the mean.

    Attributes:
        ratio: of the values that are sent, as of `TopK`.
        seed: 64 bits, the same on every rank. With it, the step and the place of a unit in the
            model fix which values.

    Raises `InvalidArgumentError` (a ValueError) for other numbers.
    """

    ratio: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", _checked_ratio("RandomK", self.ratio))
        seed = whole("RandomK: seed", self.seed, "a number of 64 bits", below=1 << 64)
        object.__setattr__(self, "seed", seed)

    def _reduction(self, group: Group) -> _RandomK:
        return _RandomK(self, group)

    def _settings(self) -> dict[str, Any]:
        return {"kind": "random_k", **asdict(self)}


def _checked_ratio(whose: str, ratio: Any) -> float:
    what, allowed = f"{whose}: ratio", "a number above 0 and up to 1"
    found = number(what, ratio, allowed, above=0)
    if found > 1:
        raise refuse(what, allowed, ratio)
    return found


def top_places(values: torch.Tensor, k: int) -> torch.Tensor:
    """Where the `k` largest magnitudes of a float32 vector are, in ascending order."""
    # Bits of magnitudes are ordered as the magnitudes are, with NaN above infinity.
    size = values.view(torch.int32) & 0x7FFFFFFF
    least = torch.topk(size, k, sorted=False).values.min()
    above = (size > least).nonzero().view(-1)
    equal = (size == least).nonzero().view(-1)[: k - len(above)]
    return torch.cat([above, equal]).sort().values


def random_places(seed: int, number: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One place of each of `k` stretches of a vector of `n`, and the lengths of the stretches."""
    edges = torch.arange(k + 1, dtype=torch.int64) * n // k
    lengths = edges[1:] - edges[:-1]
    return edges[:-1] + (random_bits(seed, number, k) * lengths >> 32), lengths


class _Sparse:
    first_step = 0
    whole_step = False
    block = 1

    def __init__(self, settings: TopK | RandomK, group: Group) -> None:
        self._settings = settings
        self._group = group

    def takes(self, layout: Layout) -> bool:
        return layout.dtype in _DTYPES

    def memory_of(self, unit: Unit) -> dict[str, int]:
        return {}

    def _count(self, n: int) -> int:
        return min(n, max(1, math.ceil(self._settings.ratio * n)))


def _to_send(call: Call) -> torch.Tensor:
    """What is to be sent sooner or later: the residual, with the values added to it."""
    if call.residual is not None:
        return call.residual.add_(call.values)
    return call.values.float()


class _TopK(_Sparse):
    def __init__(self, settings: TopK, group: Group) -> None:
        super().__init__(settings, group)
        if settings.ratio * group.size >= 1:
            warnings.warn(
                f"{settings} on {group.size} ranks: an exact all_reduce moves no more bytes; below "
                f"{1 / group.size:.2g} it does",
                stacklevel=2,
            )

    def launch(self, call: Call) -> None:
        values = _to_send(call)
        places = top_places(values, self._count(call.unit.count))
        # One message: places, then the bits of the values.
        sent = torch.cat([places.to(torch.int32), values[places].view(torch.int32)])
        if call.residual is not None:
            call.residual[places] = 0
        call.work = (*self._group.gather(sent), sent)

    def finish(self, calls: list[Call]) -> None:
        for call in calls:
            work, received, _ = call.work
            work.wait()
            total = torch.zeros(call.unit.count, dtype=torch.float32, device=received.device)
            # Rank by rank: places of one rank differ, so nothing depends on an order of threads.
            for places, bits in received.view(self._group.size, 2, -1):
                total.index_add_(0, places, bits.view(torch.float32))
            call.values.copy_(total.div_(self._group.size))


class _RandomK(_Sparse):
    _settings: RandomK

    def launch(self, call: Call) -> None:
        values = _to_send(call)
        n = call.unit.count
        places, lengths = random_places(self._settings.seed, call.number, n, self._count(n))
        places = places.to(values.device)
        sent = values[places]
        if not all_finite(values):
            sent.fill_(math.nan)  # it may not be among the drawn ones
        if call.residual is not None:
            call.residual[places] = 0
        else:
            sent *= lengths.to(sent)
        call.work = (self._group.average(sent), places, sent)

    def finish(self, calls: list[Call]) -> None:
        for call in calls:
            work, places, sent = call.work
            work.wait()
            call.values.zero_()
            call.values[places] = sent.to(call.values.dtype)
