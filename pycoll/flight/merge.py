"""The records of several ranks put together: where each one is, who went astray, who comes late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from pycoll.flight.records import CallRecord, Group, Process


@dataclass(frozen=True)
class Place:
    """A rank of a group, and the process that it is."""

    group: Group
    process: Process


@dataclass(frozen=True)
class Astray:
    """What is wrong with a group. `since`: when it was first seen by its records."""

    since: float
    text: str


@dataclass(frozen=True)
class Lateness:
    """How a rank came to the collectives that all ranks have records of. Times in seconds.

    `late`: after the first rank; `last`: how often it came last of all, out of `calls`.
    """

    rank: int
    calls: int
    last: int
    mean_late: float
    worst_late: float
    worst_call: str


@dataclass
class Merged:
    """A group with all ranks whose records are there, by rank."""

    key: str
    name: str
    world_size: int
    places: dict[int, Place] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Ranks without records."""
        return [rank for rank in range(self.world_size) if rank not in self.places]

    @property
    def hosts(self) -> int:
        return len({place.process.host for place in self.places.values()})

    def calls(self) -> dict[int, dict[int, CallRecord]]:
        """By sequence number, then by rank."""
        found: dict[int, dict[int, CallRecord]] = defaultdict(dict)
        for rank, place in self.places.items():
            for call in place.group.calls:
                found[call.sequence][rank] = call
        return dict(sorted(found.items()))


def merge(processes: Iterable[Process]) -> list[Merged]:
    """Groups in the order in which they were made."""
    groups: dict[str, Merged] = {}
    for process in processes:
        for group in process.groups:
            merged = groups.setdefault(group.key, Merged(group.key, group.name, group.world_size))
            merged.places[group.rank] = Place(group, process)
    for merged in groups.values():
        merged.places = dict(sorted(merged.places.items()))
    return sorted(groups.values(), key=lambda g: min(p.group.made for p in g.places.values()))


def astray(merged: Merged) -> Astray | None:
    """The first thing that went wrong in a group; None when nothing did, as far as records tell."""
    found = [one for one in (_mismatch(merged), _behind(merged), _died(merged)) if one]
    return min(found, key=lambda one: one.since) if found else None


def _mismatch(merged: Merged) -> Astray | None:
    for by_rank in merged.calls().values():
        kinds: dict[int, list[int]] = defaultdict(list)
        for rank, call in by_rank.items():
            kinds[call.fingerprint].append(rank)
        if len(kinds) > 1:
            sides = sorted(kinds.values(), key=lambda ranks: (len(ranks), ranks))
            said = "; ".join(f"{_ranks(ranks)} called {by_rank[ranks[0]].text}" for ranks in sides)
            return Astray(min(call.start for call in by_rank.values()), f"the calls differ: {said}")
    return None


def _behind(merged: Merged) -> Astray | None:
    """Ranks that have not come to a collective in which others wait."""
    waiting = {
        rank: call
        for rank, place in merged.places.items()
        if place.group.life != "closed" and (call := place.group.current) is not None
    }
    if not waiting:
        return None
    furthest = max(call.sequence for call in waiting.values())
    there = sorted(rank for rank, call in waiting.items() if call.sequence == furthest)
    call = waiting[there[0]]
    late = [rank for rank, place in merged.places.items() if place.group.started < furthest]
    if not late and not merged.missing:
        return None  # all are in it, and some still work
    said = [_where(merged.places[rank].group, rank) for rank in late]
    if merged.missing:
        said.append(f"{_ranks(merged.missing)} left no records")
    since = min(waiting[rank].start for rank in there)
    return Astray(since, f"{_ranks(there)} waited in {call.text}; {'; '.join(said)}")


def _where(group: Group, rank: int) -> str:
    if not group.calls:
        return f"rank {rank} has made no call on this group"
    last = group.calls[-1]
    how = "is in" if last.state == "under way" else "has not come beyond"
    ended = {"live": "", "closed": ", and has closed the group", "died": ""}[group.life]
    return f"rank {rank} {how} {last.text}{ended}"


def _died(merged: Merged) -> Astray | None:
    ends = [
        (place.group.gone or 0.0, rank, place.group.reason)
        for rank, place in merged.places.items()
        if place.group.life == "died"
    ]
    if not ends:
        return None
    when, rank, reason = min(ends)
    return Astray(when, f"rank {rank} gave up first: {reason}")


def lateness(merged: Merged) -> list[Lateness]:
    """Who came last to collectives, and by how much: the latest first. Empty where the records of
    no collective are there from all ranks. Between hosts this is as good as their clocks.
    """
    size = merged.world_size
    common = [calls for calls in merged.calls().values() if len(calls) == size > 1]
    found = []
    for rank in merged.places if common else ():
        late = []
        for calls in common:
            first = min(call.start for call in calls.values())
            late.append((calls[rank].start - first, calls[rank].text))
        last = sum(max(calls, key=lambda r: calls[r].start) == rank for calls in common)
        worst, text = max(late)
        mean = fmean(seconds for seconds, _ in late)
        found.append(Lateness(rank, len(common), last, mean, worst, text))
    return sorted(found, key=lambda one: -one.mean_late)


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
