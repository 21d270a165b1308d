"""Flight records in words: for `pycoll status` and `pycoll doctor --dump`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pycoll.flight.merge import Lateness, Merged, Place, astray, lateness, merge
from pycoll.flight.records import Process

WIDTH = 100
LAST_CALLS = 5


def as_json(processes: Iterable[Process]) -> list[dict[str, Any]]:
    """One object a group."""
    report = []
    for merged in merge(processes):
        wrong = astray(merged)
        report.append(
            {
                "key": merged.key,
                "name": merged.name,
                "world_size": merged.world_size,
                "missing": merged.missing,
                "astray": None if wrong is None else asdict(wrong),
                "ranks": [_rank_as_json(place) for place in merged.places.values()],
                "lateness": [asdict(one) for one in lateness(merged)],
            }
        )
    return report


def _rank_as_json(place: Place) -> dict[str, Any]:
    group, process = place.group, place.process
    current = group.current
    return {
        "rank": group.rank,
        "pid": process.pid,
        "host": process.host,
        "life": group.life,
        "reason": group.reason,
        "queued": group.queued,
        "started": group.started,
        "ended": group.ended,
        "current": None if current is None else current.text,
        "seconds": None if current is None else process.taken - current.start,
        "messages": [message.text for message in group.open_messages],
    }


def report(processes: Iterable[Process], *, closed: bool) -> str:
    """`closed`: with groups that were closed in good order on all ranks."""
    parts = []
    wrong = []
    for merged in merge(processes):
        if not closed and all(p.group.life == "closed" for p in merged.places.values()):
            continue
        parts.append(_group(merged))
        found = astray(merged)
        if found is not None:
            wrong.append((found.since, merged.name, found.text))
    if wrong:
        _, name, text = min(wrong)
        parts.append(_wrap("First that went astray: ", f"{name}: {text}."))
    return "\n\n".join(parts) or "no groups"


def _group(merged: Merged) -> str:
    transports = {place.group.transport for place in merged.places.values()}
    lines = [f"{merged.name}: {merged.world_size} ranks over {', '.join(sorted(transports))}"]
    for rank, place in merged.places.items():
        head = f"  rank {rank:<4} pid {place.process.pid:<8} {_host(place.process):<12} "
        lines.append(_wrap(head, _doing(place)))
        messages = place.group.open_messages
        for message in messages[:LAST_CALLS]:
            waited = seconds(place.process.taken - message.start)
            lines.append(_wrap(" " * len(head), f"and in {message.text} for {waited}"))
        if len(messages) > LAST_CALLS:
            lines.append(" " * len(head) + f"and in {len(messages) - LAST_CALLS} messages more")
    if merged.missing:
        lines.append(f"  no records of ranks {', '.join(map(str, merged.missing))}")
    if late := lateness(merged):
        lines.append(_wrap("  ", _lateness(late, merged.hosts)))
    return "\n".join(lines)


def _doing(place: Place) -> str:
    group, now = place.group, place.process.taken
    if group.life == "died":
        return f"failed {seconds(now - (group.gone or now))} before: {group.reason}"
    if group.life == "closed":
        return f"closed the group, whose last collective was #{group.ended}"
    if group.current is not None:
        # Numbers have gaps: calls over codecs are recorded in groups of their own.
        more = ", with others queued" if group.queued > group.started else ""
        return f"in {group.current.text} for {seconds(now - group.current.start)}{more}"
    if not group.calls:
        return "has made no call"
    last = group.calls[-1]
    since = seconds(now - (last.end or last.start))
    return f"in no collective for {since}, the last was {last.text}"


def _lateness(late: list[Lateness], hosts: int) -> str:
    worst = late[0]
    text = (
        f"Of the last {worst.calls} collectives rank {worst.rank} came last to "
        f"{worst.last}; on average {seconds(worst.mean_late)} after the first rank, at most "
        f"{seconds(worst.worst_late)} ({worst.worst_call})."
    )
    return text + (" Clocks of hosts may differ by as much." if hosts > 1 else "")


def _host(process: Process) -> str:
    return process.host.rsplit(" ", 1)[-1]


def seconds(value: float) -> str:
    """ "3.2 s", "150 us" """
    value = max(value, 0.0)
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1000 * scale else f"{value:.0f} s"
    return "0 us"


def _wrap(head: str, text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * min(len(head), 12)
    )
