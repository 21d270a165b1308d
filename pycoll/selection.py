"""Selection tables: which algorithm runs which call, as a JSON file.

A table stands between ``PYCOLL_ALGO`` and the built-in rules; `pycoll tune` writes one. In JSON::

    {
      "version": 1,
      "machine": {"cpu": "...", "cores": 2},          # what it was measured on; not interpreted
      "rules": [
        {"collective": "all_reduce", "algorithm": "one_shot", "from": 0, "to": "16k",
         "ranks": [2, 4], "transport": "shm", "several_hosts": false}
      ]
    }

A rule covers calls whose vectors have ``from <= bytes < to`` (numbers, or "16k", "1M", "max").
Optional, and without limit where they are left out: ``from``, ``to``, ``ranks`` (one number, or the
least and the most of the group), ``transport`` ("shm", "tcp"), ``several_hosts``. The algorithm may
be "auto": the built-in rules decide, as for every call that no rule covers, and for one whose
algorithm cannot run there. No two rules may cover the same call, and rules that differ in their
sizes alone must leave no gap between them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from pycoll import _core

__all__ = ["MAX_BYTES", "Rule", "Table", "format_bytes", "parse_bytes"]

VERSION = 1
MAX_BYTES = 2**64 - 1  # no limit
MAX_RANKS = 2**31 - 1  # likewise
TRANSPORTS = ("shm", "tcp")
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

# What the core takes: collective, algorithm, from, to, least and most ranks, transport, hosts.
Row = tuple[str, str, int, int, int, int, str, bool | None]


@dataclass(frozen=True)
class Rule:
    """One row of a table; the limits that are left out are the widest."""

    collective: str
    algorithm: str
    begin: int = 0  # bytes
    end: int = MAX_BYTES  # bytes, exclusive
    ranks: tuple[int, int] = (1, MAX_RANKS)  # least and most, both included
    transport: str = ""  # empty: any
    several_hosts: bool | None = None  # None: either

    @property
    def where(self) -> tuple[str, tuple[int, int], str, bool | None]:
        """Everything but the sizes and the algorithm."""
        return self.collective, self.ranks, self.transport, self.several_hosts

    def meets(self, other: Rule) -> bool:
        """Whether some call is covered by both."""
        return (
            self.collective == other.collective
            and max(self.begin, other.begin) < min(self.end, other.end)
            and max(self.ranks[0], other.ranks[0]) <= min(self.ranks[1], other.ranks[1])
            and ("" in (self.transport, other.transport) or self.transport == other.transport)
            and (
                None in (self.several_hosts, other.several_hosts)
                or self.several_hosts == other.several_hosts
            )
        )

    def __str__(self) -> str:
        text = f"{self.collective}, {format_bytes(self.begin)} to {format_bytes(self.end)}"
        least, most = self.ranks
        if (least, most) != (1, MAX_RANKS):
            ranks = str(least) if least == most else f"{least} to {most}"
            text += f", {ranks if most < MAX_RANKS else f'{least} or more'} ranks"
        if self.transport:
            text += f", {self.transport}"
        if self.several_hosts is not None:
            text += ", several hosts" if self.several_hosts else ", one host"
        return f"{text}: {self.algorithm}"

    def as_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "collective": self.collective,
            "algorithm": self.algorithm,
            "from": format_bytes(self.begin),
            "to": format_bytes(self.end),
        }
        if self.ranks != (1, MAX_RANKS):
            content["ranks"] = list(self.ranks)
        if self.transport:
            content["transport"] = self.transport
        if self.several_hosts is not None:
            content["several_hosts"] = self.several_hosts
        return content

    def as_row(self) -> Row:
        return (
            self.collective,
            self.algorithm,
            self.begin,
            self.end,
            *self.ranks,
            self.transport,
            self.several_hosts,
        )


@dataclass(frozen=True)
class Table:
    """Rules that have been checked: no two cover the same call.

    Raises `InvalidArgumentError` that names the rules which do not fit.
    """

    rules: tuple[Rule, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_overlaps(self.rules)
        check_gaps(self.rules)

    @staticmethod
    def load(file: str | os.PathLike[str]) -> Table:
        """Raises `InvalidArgumentError` with the file's name for one that is not a table."""
        try:
            content = json.loads(Path(file).read_text())
            return Table.from_json(content)
        except OSError as error:
            raise refuse(f"the selection table cannot be read: {error}") from error
        except ValueError as error:  # of json and of this module
            raise refuse(f"{os.fspath(file)} is no selection table: {error}") from error

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes it in one step: whoever reads meanwhile sees the old file or the new one."""
        temporary = Path(f"{os.fspath(file)}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        temporary.replace(file)

    @staticmethod
    def from_json(content: Any) -> Table:
        if not isinstance(content, dict):
            raise refuse(f"it must be a JSON object, not {kind_of(content)}")
        version = content.get("version", "missing")
        if version != VERSION or not isinstance(version, int) or isinstance(version, bool):
            raise refuse(
                f"its version is {version}, and this pycoll reads "
                f"version {VERSION}: make a new one with `pycoll tune`"
            )
        refuse_unknown(content, {"version", "machine", "rules"}, "the table")
        rules, machine = content.get("rules"), content.get("machine", {})
        if not isinstance(rules, list):
            raise refuse(f"'rules' must be a list, not {kind_of(rules)}")
        if not isinstance(machine, dict):
            raise refuse(f"'machine' must be an object, not {kind_of(machine)}")
        return Table(tuple(rule_of(row, f"rules[{i}]") for i, row in enumerate(rules)), machine)

    def as_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "machine": dict(self.machine),
            "rules": [rule.as_json() for rule in self.rules],
        }

    def as_rows(self) -> list[Row]:
        return [rule.as_row() for rule in self.rules]


def refuse(text: str) -> _core.InvalidArgumentError:
    return _core.InvalidArgumentError(text)


def kind_of(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"


def refuse_unknown(content: dict[str, Any], known: set[str], where: str) -> None:
    unknown = [name for name in content if name not in known]
    if unknown:
        raise refuse(
            f"{where} has {', '.join(map(repr, unknown))}; known are {', '.join(sorted(known))}"
        )


def rule_of(content: Any, where: str) -> Rule:
    """Raises `InvalidArgumentError` that begins with `where`."""
    if not isinstance(content, dict):
        raise refuse(f"{where} must be an object, not {kind_of(content)}")
    known = {"collective", "algorithm", "from", "to", "ranks", "transport", "several_hosts"}
    refuse_unknown(content, known, where)
    collective, algorithm = str(content.get("collective")), str(content.get("algorithm"))
    if collective not in _core.collectives():
        there_are = ", ".join(_core.collectives())
        raise refuse(f"{where}: no collective {collective!r}; there are: {there_are}")
    names = ["auto", *(a.name for a in _core.algorithms(collective))]
    if algorithm not in names:
        raise refuse(
            f"{where}: {algorithm!r} is no algorithm of {collective}; there are: {', '.join(names)}"
        )
    begin = parse_bytes(content.get("from", 0), f"{where}: 'from'")
    end = parse_bytes(content.get("to", "max"), f"{where}: 'to'")
    if begin >= end:
        raise refuse(f"{where} covers no size: 'from' must be smaller than 'to'")
    transport = content.get("transport", "")
    if transport not in ("", *TRANSPORTS):
        raise refuse(f"{where}: no transport {transport!r}; there are: {', '.join(TRANSPORTS)}")
    several = content.get("several_hosts")
    if several is not None and not isinstance(several, bool):
        raise refuse(f"{where}: 'several_hosts' is true or false, not {kind_of(several)}")
    ranks = rank_range(content.get("ranks", [1, MAX_RANKS]), where)
    return Rule(collective, algorithm, begin, end, ranks, transport, several)


def parse_bytes(value: Any, what: str) -> int:
    """Bytes from 8192, "8k", "1M" or "max"; `what` begins the text of the error."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_BYTES:
        return value
    if value == "max":
        return MAX_BYTES
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)([kmg]?)", value.lower())):
        size = int(match[1]) * UNITS[match[2]]
        if size <= MAX_BYTES:
            return size
    raise refuse(f"{what} is {value!r}, and not a size: a number of bytes, 8k, 1M, 2G or max")


def format_bytes(size: int) -> str:
    """The shortest exact form: 65536 is "64k", 65537 is "65537"."""
    if size == MAX_BYTES:
        return "max"
    for unit in "GMk":
        factor = UNITS[unit.lower()]
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def rank_range(value: Any, where: str) -> tuple[int, int]:
    pair = [value, value] if isinstance(value, int) else value
    if (
        not isinstance(pair, list)
        or len(pair) != 2
        or not all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
        or not 1 <= pair[0] <= pair[1] <= MAX_RANKS
    ):
        raise refuse(f"{where}: 'ranks' is a number from 1 on, or [least, most], not {value!r}")
    return pair[0], pair[1]


def check_overlaps(rules: Sequence[Rule]) -> None:
    for (i, first), (j, second) in combinations(enumerate(rules), 2):
        if first.meets(second):
            raise refuse(f"rules[{i}] ({first}) and rules[{j}] ({second}) cover the same calls")


def check_gaps(rules: Sequence[Rule]) -> None:
    for group in by_place(rules):
        for before, after in pairwise(sorted(group, key=lambda rule: rule.begin)):
            if before.end < after.begin:
                raise refuse(
                    f"there is a gap from {format_bytes(before.end)} to "
                    f'{format_bytes(after.begin)} between "{before}" and "{after}": write '
                    "algorithm auto for it where the built-in rules shall decide"
                )


def by_place(rules: Sequence[Rule]) -> Iterator[list[Rule]]:
    """The rules that differ in sizes and algorithm alone."""
    places: dict[Any, list[Rule]] = {}
    for rule in rules:
        places.setdefault(rule.where, []).append(rule)
    yield from places.values()
