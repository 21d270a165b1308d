"""The collectives as nccl-tests sees them: their vectors and bandwidth factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def whole(ranks: int) -> float:
    return 1.0


def all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks


def there_and_back(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def nothing(ranks: int) -> float:
    return 0.0


@dataclass(frozen=True)
class Collective:
    """`input` and `output` are a rank's vectors: one block, one a rank ("all"), or "none"."""

    factor: Callable[[int], float]  # busbw = algbw * factor(ranks)
    blocks: bool = False  # the longer vector has one block a rank
    input: str = "one"
    output: str = "one"
    in_place: bool = False
    reduces: bool = False
    rooted: bool = False


COLLECTIVES = {
    "all_reduce": Collective(there_and_back, in_place=True, reduces=True),
    "all_gather": Collective(all_but_own, blocks=True, output="all"),
    "reduce_scatter": Collective(all_but_own, blocks=True, input="all", reduces=True),
    "broadcast": Collective(whole, in_place=True, rooted=True),
    "reduce": Collective(whole, in_place=True, reduces=True, rooted=True),
    "gather": Collective(all_but_own, blocks=True, output="all at root", rooted=True),
    "scatter": Collective(all_but_own, blocks=True, input="all at root", rooted=True),
    "all_to_all": Collective(all_but_own, blocks=True, input="all", output="all"),
    "sendrecv": Collective(whole),
    "barrier": Collective(nothing, input="none", output="none"),
}
