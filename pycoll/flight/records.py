"""Flight records as the core lays them out (csrc/runtime/flight.cpp), and as Python objects."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from pycoll import _core

State = Literal["under way", "done", "failed"]
Life = Literal["live", "closed", "died"]

MAGIC = 0x31544847494C46  # "FLIGHT1"
RING = 1024
_WORD = np.dtype("<u8")

_SECOND_ANCHOR = 40  # ticks1 and time1

FILE = np.dtype(
    {
        "names": ["magic", "pid", "regions", "ticks0", "time0", "ticks1", "time1", "host"],
        "formats": [*[_WORD] * 7, "S512"],
        "offsets": [0, 8, 16, 24, 32, _SECOND_ANCHOR, 48, 64],
        "itemsize": 4096,
    }
)
HEAD = np.dtype(
    {
        "names": [
            *("life", "rank", "world", "queued", "ended", "posted", "ended_messages", "made"),
            *("gone", "key", "name", "transport", "reason"),
        ],
        "formats": [*[_WORD] * 9, "S64", "S320", "S64", "S2048"],
        "offsets": [*range(0, 72, 8), 128, 192, 512, 576],
        "itemsize": 4096,
    }
)
CALL = np.dtype([("tag", _WORD), ("start", _WORD), ("end", _WORD), ("call", "V40")])
MESSAGE = np.dtype(
    [
        *(("tag", _WORD), ("start", _WORD), ("end", _WORD), ("count", _WORD)),
        *(("peer", "<i4"), ("mark", "<i4")),
        *(("dtype", "u1"), ("receives", "u1"), ("codec", "u1"), ("", "V5")),
        *(("source", "<i4"), ("", "V12")),
    ]
)
REGION = np.dtype([("head", HEAD), ("calls", CALL, RING), ("messages", MESSAGE, RING)])

_STATES: dict[int, State] = {1: "under way", 2: "done", 3: "failed"}
_LIVES: dict[int, Life] = {1: "live", 2: "closed", 3: "died"}


@dataclass(frozen=True)
class CallRecord:
    """A collective. Times are seconds since 1970; `end` is None while it is under way, and of one
    that ended so soon that its time was not taken.
    """

    sequence: int
    state: State
    start: float
    end: float | None
    header: bytes = field(repr=False)
    fingerprint: int  # equal on all ranks whose calls fit together

    @cached_property
    def text(self) -> str:
        """ "all_reduce #12 (sum, 1024 x float32)" """
        return _core.describe_call(self.header)


@dataclass(frozen=True)
class MessageRecord:
    """One side of a point-to-point message; `peer` is None for a receive from any rank."""

    number: int
    state: State
    start: float
    end: float | None
    receives: bool
    peer: int | None
    tag: int
    count: int
    dtype: str

    @property
    def text(self) -> str:
        """ "recv from rank 1 (tag 0, 4 x int64)" """
        what = "recv from" if self.receives else "send to"
        who = "any rank" if self.peer is None else f"rank {self.peer}"
        return f"{what} {who} (tag {self.tag}, {self.count} x {self.dtype})"


@dataclass(frozen=True)
class Group:
    """One rank of a group. `key` is the same on all of its ranks, and of no other group.

    `queued`, `started` and `ended` are the numbers of the latest collective that came so far (a
    synchronous call is started at once). `calls` and `messages`: the latest, oldest first.
    """

    key: str
    name: str
    transport: str
    rank: int
    world_size: int
    life: Life
    reason: str
    made: float
    gone: float | None
    queued: int
    started: int
    ended: int
    calls: tuple[CallRecord, ...] = field(repr=False)
    messages: tuple[MessageRecord, ...] = field(repr=False)

    @property
    def current(self) -> CallRecord | None:
        """The collective under way."""
        last = self.calls[-1] if self.calls else None
        return last if last is not None and last.state == "under way" else None

    @property
    def open_messages(self) -> list[MessageRecord]:
        """The messages under way."""
        return [message for message in self.messages if message.state == "under way"]


@dataclass(frozen=True)
class Process:
    """What the process recorded. `taken`: when that was read."""

    pid: int
    host: str
    taken: float
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class _Clock:
    """Ticks of the processor to seconds since 1970, by two anchors."""

    ticks: int
    seconds: float
    per_tick: float

    @classmethod
    def through(cls, head: Any, now: tuple[int, int]) -> _Clock:
        ticks, time = now
        passed = ticks - int(head["ticks0"])
        per_tick = (time - int(head["time0"])) / passed * 1e-9 if passed > 0 else 0.0
        return cls(ticks, time * 1e-9, per_tick)

    def at(self, ticks: int) -> float:
        # From the newer anchor: what is asked about is mostly recent.
        return self.seconds - (self.ticks - ticks) * self.per_tick


def with_anchor(data: bytes) -> bytes:
    """A running process's file as the dump that it would make now."""
    words = [_core.ticks(), time.time_ns()]
    at = _SECOND_ANCHOR
    return data[:at] + np.array(words, _WORD).tobytes() + data[at + 16 :]


def parse(data: bytes) -> Process:
    """Reads a dump. Raises ValueError, which says what is wrong, for anything else."""
    if len(data) < FILE.itemsize:
        raise ValueError(f"{len(data)} bytes are no flight records")
    head = np.frombuffer(data, FILE, 1)[0]
    if int(head["magic"]) != MAGIC:
        raise ValueError("these are no flight records of this version of pycoll")
    regions = int(head["regions"])
    if len(data) < FILE.itemsize + regions * REGION.itemsize:
        raise ValueError(f"a part is missing: {len(data)} bytes for {regions} groups")
    clock = _Clock.through(head, (int(head["ticks1"]), int(head["time1"])))
    found = np.frombuffer(data, REGION, regions, FILE.itemsize)
    groups = [_group(region, clock) for region in found if int(region["head"]["life"]) in _LIVES]
    return Process(int(head["pid"]), _text(head["host"]), clock.seconds, tuple(groups))


def settled(first: bytes, second: bytes) -> bytes:
    """Of two readings of a running process's file the first, without records that were being
    written then: they have another number in the second.
    """
    data = bytearray(first)
    count = max(0, len(data) - FILE.itemsize) // REGION.itemsize
    before = np.frombuffer(data, REGION, count, FILE.itemsize)
    if len(second) < FILE.itemsize + count * REGION.itemsize:
        raise ValueError("the file has become shorter")
    after = np.frombuffer(second, REGION, count, FILE.itemsize)
    for ring in ("calls", "messages"):
        tags = before[ring]["tag"]
        tags[tags >> np.uint64(2) != after[ring]["tag"] >> np.uint64(2)] = 0
    return bytes(data)


def _group(region: Any, clock: _Clock) -> Group:
    head = region["head"]
    life = _LIVES[int(head["life"])]
    ended = int(head["ended"])
    calls = tuple(_call(record, ended, clock) for record in _in_order(region["calls"]))
    started = calls[-1].sequence if calls else 0
    return Group(
        key=_text(head["key"]),
        name=_text(head["name"]),
        transport=_text(head["transport"]),
        rank=int(head["rank"]),
        world_size=int(head["world"]),
        life=life,
        reason=_text(head["reason"]),
        made=clock.at(int(head["made"])),
        gone=None if life == "live" else clock.at(int(head["gone"])),
        queued=max(int(head["queued"]), started),
        started=started,
        ended=ended,
        calls=calls,
        messages=tuple(_message(record, clock) for record in _in_order(region["messages"])),
    )


def _in_order(ring: Any) -> Any:
    """The records that hold something; one that is being written does not."""
    numbers = ring["tag"] >> np.uint64(2)
    order = np.argsort(numbers, kind="stable")
    return ring[order[numbers[order] > 0]]


def _state_and_times(record: Any, clock: _Clock) -> tuple[State, float, float | None]:
    state = _STATES.get(int(record["tag"]) & 3, "failed")
    end = None if state == "under way" else clock.at(int(record["end"]))
    return state, clock.at(int(record["start"])), end


def _call(record: Any, ended: int, clock: _Clock) -> CallRecord:
    sequence = int(record["tag"]) >> 2
    state, start, end = _state_and_times(record, clock)
    if state == "under way" and sequence <= ended:
        state = "done"
    header = record["call"].tobytes()
    return CallRecord(sequence, state, start, end, header, _core.call_fingerprint(header))


def _message(record: Any, clock: _Clock) -> MessageRecord:
    state, start, end = _state_and_times(record, clock)
    receives = bool(record["receives"])
    # Of a receive from any rank: whose message it got.
    peer = int(record["source"]) if int(record["peer"]) < 0 else int(record["peer"])
    return MessageRecord(
        number=int(record["tag"]) >> 2,
        state=state,
        start=start,
        end=end,
        receives=receives,
        peer=None if peer < 0 else peer,
        tag=int(record["mark"]),
        count=int(record["count"]),
        dtype=_core.dtype_name(int(record["dtype"])),
    )


def _text(value: bytes) -> str:
    return bytes(value).split(b"\0", 1)[0].decode(errors="replace")
