"""codec="auto": a group measures whether a codec pays on its own network, once, and keeps to it.

Times differ from rank to rank, and choices may not: ranks that chose differently could not hear
each other. So whatever is measured is gathered first, and each rank decides by the same numbers,
the slowest rank's. A choice is made in three steps; groups that cannot gain end at an early one:

1. Ranks that share memory, and a rank alone, choose none: nothing crosses a wire.
2. Codecs are timed on one core, and exact all_reduces once a size. A codec whose CPU time alone is
   not below the exact call's cannot pay, however narrow its codes.
3. Those that are left are run, in turns with the exact call, at sizes up to 4 MiB: medians. The
   fastest at the largest size is taken where it gains `advisor.LEAST_GAIN`, for vectors from the
   size on from which it does; smaller ones stay exact.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pycoll import _core
from pycoll._arguments import number
from pycoll.advisor import (
    ITEM_BYTES,
    LEAST_GAIN,
    Bytes,
    Speed,
    format_seconds,
    measure_speed,
    pick,
    values_of,
)
from pycoll.codecs import EXACT, Codec, canonical, codec_of
from pycoll.selection import format_bytes

__all__ = ["Auto", "Choice", "Chooser", "Trial", "asked_for", "choose"]

logger = logging.getLogger("pycoll")

SIZES = tuple(16384 * 4**k for k in range(5))  # 16 KiB to 4 MiB
# Of each contender at a size: few where they take long.
ROUNDS, ROUNDS_OF_LONG_CALLS = 9, 3
LONG_SECONDS = 0.05
# No larger size is tried after a call that took so long: each is four times the last.
LONGEST_SECONDS = 0.25
SPEED_VALUES = 1 << 20


@dataclass(frozen=True)
class Auto:
    """What a group chooses from under ``codec=pycoll.Auto(...)``; ``"auto"`` is ``Auto()``.

    Raises InvalidArgumentError for what cannot be.

    Attributes:
        max_error: of an all_reduce: relative L2 error of gaussian values, both quantisations.
        candidates: names, or objects of `pycoll.codecs`. By default those that training does not
            notice and that need no error feedback: int8, bf16 and fp16 (errors 0.010, 0.0024 and
            0.0003). Narrower codecs are chosen only if named here and within `max_error`.
    """

    max_error: float = 0.02
    candidates: Sequence[str | Codec] = ("int8", "bf16", "fp16")

    def __post_init__(self) -> None:
        error = number("Auto: max_error", self.max_error, "a number above 0", above=0)
        object.__setattr__(self, "max_error", error)
        if isinstance(self.candidates, str) or not self.candidates:
            raise _core.InvalidArgumentError(
                f"candidates are codecs, such as ('int8', 'fp16'), not {self.candidates!r}"
            )
        # A tuple of objects, so that equal ones are equal and may be keys.
        object.__setattr__(self, "candidates", tuple(codec_of(c) for c in self.candidates))

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return tuple(codec_of(candidate) for candidate in self.candidates)


def canonical_choice(codec: str | Codec | Auto | None) -> Codec | Auto | None:
    """`asked_for`, as ranks compare it (codecs.canonical)."""
    codec = asked_for(codec)
    if isinstance(codec, Auto):
        return Auto(codec.max_error, tuple(canonical(one) for one in codec.codecs))
    return None if codec is None else canonical(codec)


def asked_for(codec: str | Codec | Auto | None) -> Codec | Auto | None:
    """None for None and "none". Raises InvalidArgumentError for what is no codec."""
    if codec is None or isinstance(codec, Auto):
        return codec
    if codec == "auto":
        return Auto()
    if codec == EXACT:
        return None
    try:
        return codec_of(codec)
    except _core.InvalidArgumentError as error:
        raise _core.InvalidArgumentError(f"{error}, 'auto' or 'none'") from None


def auto_only(codec: str | Auto) -> Auto:
    if isinstance(codec, Auto) or codec == "auto":
        return codec if isinstance(codec, Auto) else Auto()
    raise _core.InvalidArgumentError(f"codec is 'auto' or pycoll.Auto(...), not {codec!r}")


@dataclass(frozen=True)
class Choice:
    """What a group has chosen for a dtype; the same on every rank."""

    codec: Codec | None
    min_bytes: int  # vectors of fewer bytes stay exact
    why: str

    def codec_for(self, nbytes: int) -> Codec | None:
        return self.codec if nbytes >= self.min_bytes else None


class Trial(Protocol):
    """A group as a choice needs it. Every method is collective."""

    world_size: int

    def shares_memory(self) -> bool:
        """All ranks do, with all others."""

    def all_reduce(self, values: Bytes, dtype: str, codec: Codec | None) -> None:
        """The mean, in place."""

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Those of every rank, by rank; as many on each."""


class Chooser:
    """The choices of one group, each made when it is first asked for."""

    def __init__(self, trial: Trial, clock: Callable[[], float] = time.perf_counter) -> None:
        self._trial = trial
        self._clock = clock
        self._lock = threading.Lock()
        self._made: dict[tuple[Auto, str], Choice] = {}

    def choice(self, auto: Auto, dtype: str) -> Choice:
        """Collective when it is the first for `auto` and `dtype`; the same from then on."""
        with self._lock:
            key = (auto, dtype)
            if key not in self._made:
                self._made[key] = choose(self._trial, auto, dtype, self._clock)
            return self._made[key]

    def again(self, auto: Auto, dtype: str) -> Choice:
        """Collective: measures anew. Results of later calls may have other bits."""
        with self._lock:
            self._made[auto, dtype] = choose(self._trial, auto, dtype, self._clock)
            return self._made[auto, dtype]

    def known(self, auto: Auto, dtype: str) -> Choice | None:
        """What has been chosen so far."""
        return self._made.get((auto, dtype))


# ---- Choosing ----


def choose(
    trial: Trial, auto: Auto, dtype: str, clock: Callable[[], float] = time.perf_counter
) -> Choice:
    """Collective. Raises MismatchError when ranks ask for different things."""
    choice = _choose(trial, auto, dtype, clock)
    logger.info("codec auto, %s: %s", dtype, choice.why)
    return choice


def _choose(trial: Trial, auto: Auto, dtype: str, clock: Callable[[], float]) -> Choice:
    if trial.world_size == 1:
        return none("a group of one rank moves nothing")
    if trial.shares_memory():
        return none("all ranks share memory: nothing crosses a wire, and codes would cost time")
    speeds = agreed_speeds(trial, auto, dtype)
    able = [speed for speed in speeds if speed.sum_error <= auto.max_error]
    if not able:
        least = min(speeds, key=lambda s: s.sum_error)
        return none(
            f"no candidate has an error of at most {auto.max_error:g} "
            f"({least.codec.kind}: {least.sum_error:.2g})"
        )
    calls = Calls(trial, dtype, clock)
    sizes, exact = exact_times(calls)
    count = sizes[-1] // ITEM_BYTES[dtype]
    costs = [speed.seconds(count, trial.world_size) for speed in able]
    left = [s for s, c in zip(able, costs, strict=True) if c * LEAST_GAIN < exact]
    if not left:
        cost, speed = min(zip(costs, able, strict=True), key=lambda pair: pair[0])
        return none(
            f"an exact all_reduce of {format_bytes(sizes[-1])} takes {format_seconds(exact)}, and "
            f"{speed.codec.kind}, the fastest codec, {format_seconds(cost)} of a core for it"
        )
    codecs = [speed.codec for speed in left]
    rounds = ROUNDS_OF_LONG_CALLS if exact > LONG_SECONDS else ROUNDS
    times = {size: timed(calls, size, [None, *codecs], rounds) for size in sizes}
    return decide(times, left, dtype, trial.world_size)


def none(why: str) -> Choice:
    return Choice(None, 0, f"none: {why}")


def agreed_speeds(trial: Trial, auto: Auto, dtype: str) -> list[Speed]:
    """Of the candidates: the slowest rank's."""
    tag = fingerprint(auto, dtype)
    tags = [row[0] for row in trial.gather([tag])]
    strangers = [rank for rank, other in enumerate(tags) if other != tag]
    if strangers:
        raise _core.MismatchError(
            f"codec auto: rank {strangers[0]} gave other candidates, another max_error or dtype; "
            f"here they are {[codec.kind for codec in auto.codecs]}, {auto.max_error:g} and {dtype}"
        )
    own = [measure_speed(codec, dtype, count=SPEED_VALUES) for codec in auto.codecs]
    rows = trial.gather([x for s in own for x in (s.encode, s.decode, s.error)])
    slowest = [max(column) for column in zip(*rows, strict=True)]
    return [Speed(s.codec, *slowest[3 * i : 3 * i + 3]) for i, s in enumerate(own)]


def fingerprint(auto: Auto, dtype: str) -> float:
    """Of what every rank must have given: 48 bits, exact in a float64."""
    text = repr((canonical_choice(auto), dtype))
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little"))


class Calls:
    """Timed all_reduces of vectors of a dtype."""

    def __init__(self, trial: Trial, dtype: str, clock: Callable[[], float]) -> None:
        self.trial = trial
        self._dtype = dtype
        self._clock = clock
        self._values = values_of(SIZES[-1] // ITEM_BYTES[dtype], dtype)

    def seconds(self, size: int, codec: Codec | None = None) -> float:
        """Of one, on this rank."""
        start = self._clock()
        self.trial.all_reduce(self._values[:size], self._dtype, codec)
        return self._clock() - start


def exact_times(calls: Calls) -> tuple[list[int], float]:
    """The sizes to try, and the slowest rank's seconds of an exact call of the largest."""
    calls.seconds(SIZES[0])  # the first of all makes connections: it does not count
    sizes: list[int] = []
    seconds = 0.0
    for size in SIZES:
        if seconds > LONGEST_SECONDS:
            break
        seconds = max(row[0] for row in calls.trial.gather([calls.seconds(size)]))
        sizes.append(size)
    return sizes, seconds


def timed(calls: Calls, size: int, contenders: Sequence[Codec | None], rounds: int) -> list[float]:
    """Seconds of each contender at a size: the slowest rank's medians."""
    table = [[calls.seconds(size, codec) for codec in contenders] for _ in range(rounds)]
    medians = [statistics.median(times) for times in zip(*table, strict=True)]
    return [max(column) for column in zip(*calls.trial.gather(medians), strict=True)]


def decide(
    times: Mapping[int, Sequence[float]], speeds: Sequence[Speed], dtype: str, world_size: int
) -> Choice:
    """By times of the exact call, then of each codec, at each size."""
    largest = max(times)
    exact, *compressed = times[largest]
    place, pays = pick(exact, compressed, [speed.error for speed in speeds])
    speed, seconds = speeds[place], compressed[place]
    what = f"an all_reduce of {format_bytes(largest)} of {dtype}"
    if not pays:
        return none(
            f"{what} takes {format_seconds(exact)}, and {format_seconds(seconds)} with "
            f"{speed.codec.kind}, the fastest codec"
        )
    paying = largest
    for size in sorted(times, reverse=True):
        if times[size][0] < times[size][1 + place] * LEAST_GAIN:
            break
        paying = size
    cpu = speed.seconds(largest // ITEM_BYTES[dtype], world_size)
    why = (
        f"{speed.codec.kind}: {what} takes {format_seconds(seconds)} instead of "
        f"{format_seconds(exact)}, with {format_seconds(cpu)} of a core for codes and an error of "
        f"{speed.sum_error:.2g}; it pays from {format_bytes(paying)} on"
    )
    return Choice(speed.codec, paying, why)
