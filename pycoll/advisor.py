"""Whether a codec pays on a link: time on the wire against time in the codec.

A compressed all_reduce (docs/architecture.md, Codecs) encodes its values, exchanges the codes of
all chunks, sums those of its own chunk, encodes the sum and gathers the codes of all sums. It runs
in pieces, so that a core is busy with one while another is on the wire: of W seconds of wire and C
seconds of a core, in P pieces, the longer one counts in full and the shorter one for its first
piece: max(W, C) + min(W, C) / P. A rank is taken to have one core, which also feeds the network.

What codecs take is measured here, on one core. What the wire takes comes from the simulator
(`pycoll simulate`), which runs the same Programs as the library does. For a group that exists,
`pycoll.Auto` measures calls themselves (pycoll/auto.py).
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pycoll import _core
from pycoll.codecs import Codec
from pycoll.simulator import topology
from pycoll.simulator.topology import Topology

__all__ = ["Advice", "Estimate", "Link", "Speed", "Workload", "advise", "measure_speed"]

# A codec that gains less is not worth its error.
LEAST_GAIN = 1.1
# Of codecs whose times differ by less one that is twice as exact is taken.
ALIKE = 1.05

# How runtime/codec_call.cpp cuts a rank's chunk.
PIECES = 8
LEAST_PIECE, MOST_PIECE = 1 << 16, 1 << 20

# What remains of Ethernet's bits for a TCP stream of full frames: 1448 of 1538 bytes.
PAYLOAD = 1448 / 1538
LINK_UNITS = {
    "kbit": 1e3 / 8 * PAYLOAD,
    "mbit": 1e6 / 8 * PAYLOAD,
    "gbit": 1e9 / 8 * PAYLOAD,
    "MB/s": 1e6,
    "GB/s": 1e9,
}
DISTINCT = 1 << 18  # values that are drawn; longer vectors repeat them
Bytes: TypeAlias = npt.NDArray[np.uint8]
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


# ---- Codecs on this machine ----


@dataclass(frozen=True)
class Speed:
    """Of a codec on one core: seconds a value, and what it does to gaussian values."""

    codec: Codec
    encode: float
    decode: float  # of one code; a sum decodes one of every rank
    error: float  # relative L2 error of one quantisation

    @property
    def sum_error(self) -> float:
        """Of an all_reduce, which quantises values and sum: two independent errors."""
        return math.sqrt(2) * self.error

    def seconds(self, count: float, world_size: int) -> float:
        """CPU time of one rank in an all_reduce of `count` values.

        It encodes all values and the sum of its own chunk; it decodes its chunk's codes of all
        ranks, and the codes of all sums.
        """
        return self.encode * count * (1 + 1 / world_size) + self.decode * count * 2


def measure_speed(
    codec: Codec,
    dtype: str = "float32",
    *,
    count: int = 1 << 21,
    rounds: int = 3,
    clock: Callable[[], float] = time.thread_time,
) -> Speed:
    """Medians of `rounds` on `count` gaussian values of a dtype, after one that does not count.

    By default more than a core's own caches hold, as gradients are. CPU time of this thread, so
    that other processes do not count as the codec's.
    """
    values = values_of(count, dtype)
    code = np.empty(codec.code_bytes(count), np.uint8)
    back, key = np.empty_like(values), _core.RandomKey()
    native = codec._native()
    encoding, decoding = [], []
    for _ in range(rounds + 1):
        start = clock()
        _core.encode(codec=native, values=values, dtype=dtype, code=code, key=key)
        middle = clock()
        _core.decode(codec=native, codes=[code], values=back, dtype=dtype)
        encoding.append(middle - start)
        decoding.append(clock() - middle)
    exact, got = (as_float64(data[: DISTINCT * 2], dtype) for data in (values, back))
    error = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
    encode, decode = (statistics.median(times[1:]) / count for times in (encoding, decoding))
    return Speed(codec, encode, decode, error)


def values_of(count: int, dtype: str) -> Bytes:
    """Gaussian values as bytes, the same on every rank: NumPy alone has no bfloat16."""
    few = np.random.default_rng(7).standard_normal(min(count, DISTINCT), dtype=np.float32)
    values = np.resize(few, count)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(dtype).view(np.uint8)


def as_float64(data: Bytes, dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data.view(dtype).astype(np.float64)


# ---- The wire ----


@dataclass(frozen=True)
class Link:
    """A host's port: bytes a second for a TCP stream, each way, shared by the host's ranks."""

    name: str
    bytes_per_second: float

    @staticmethod
    def of(text: str) -> Link:
        """Of "1gbit", "100mbit", "2.5gbit" (of Ethernet) or "1.1GB/s", "110MB/s" (of payload).

        Raises InvalidArgumentError that says so for others.
        """
        match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z/]+)", text.strip())
        units = {unit if "/" in unit else unit.lower(): x for unit, x in LINK_UNITS.items()}
        unit = match[2] if match else ""
        unit = unit if unit in units else unit.lower().removesuffix("/s").removesuffix("s")
        if match is None or unit not in units or not 0 < float(match[1]) * units[unit] < math.inf:
            raise _core.InvalidArgumentError(
                f"{text!r} is no link: give a rate of Ethernet such as 100mbit, 1gbit or 2.5gbit, "
                "or what it carries, such as 110MB/s or 1.1GB/s"
            )
        return Link(text.strip(), float(match[1]) * units[unit])


@dataclass(frozen=True)
class Workload:
    """One step of data-parallel training: all_reduces of buckets, one after the other.

    Raises InvalidArgumentError for what cannot be.
    """

    model_bytes: int
    world_size: int = 2
    hosts: int = 2
    bucket_bytes: int = 25 << 20  # DistributedDataParallel's bucket_cap_mb
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise _core.InvalidArgumentError(
                f"codecs take {', '.join(ITEM_BYTES)}, not {self.dtype!r}"
            )
        if self.world_size < 2 or not 1 <= self.hosts <= self.world_size:
            raise _core.InvalidArgumentError(
                f"{self.world_size} ranks on {self.hosts} hosts: there must be at least 2 ranks, "
                "and 1 to as many hosts"
            )
        if min(self.model_bytes, self.bucket_bytes) < ITEM_BYTES[self.dtype]:
            raise _core.InvalidArgumentError(
                f"a model of {self.model_bytes} bytes in buckets of {self.bucket_bytes} has no "
                f"{self.dtype} in it"
            )

    @property
    def count(self) -> int:
        """Values of a bucket."""
        return min(self.model_bytes, self.bucket_bytes) // ITEM_BYTES[self.dtype]

    @property
    def buckets(self) -> float:
        return self.model_bytes / (self.count * ITEM_BYTES[self.dtype])

    @property
    def ranks_per_host(self) -> int:
        return -(-self.world_size // self.hosts)

    @property
    def summed_inside(self) -> int:
        """Ranks that sum exactly inside of a host, before one of them sends codes of each part;
        1 where hosts have different numbers of ranks, which then all send codes of everything."""
        return self.ranks_per_host if self.world_size % self.hosts == 0 else 1

    @property
    def coded(self) -> tuple[int, int]:
        """Values of the compressed all_reduce of one rank, and how many ranks it has."""
        return -(-self.count // self.summed_inside), self.world_size // self.summed_inside

    @property
    def pieces(self) -> int:
        return pieces_of(*self.coded)


def pieces_of(count: int, world_size: int) -> int:
    """In which an all_reduce of `count` values runs."""
    chunk = max(1, count // world_size)
    return -(-chunk // min(max(chunk // PIECES, LEAST_PIECE), MOST_PIECE))


@dataclass(frozen=True)
class OnWire:
    """Seconds of a collective, and of a core that feeds the network meanwhile."""

    total: float
    core: float


class _Ranks:
    """Ranks that run collectives of their own: all of them, those of a host, one of each host."""

    def __init__(self, count: int, ranks_per_host: int, link: Link) -> None:
        self._count = count
        self._several_hosts = count > ranks_per_host
        self._transport = "tcp" if ranks_per_host == 1 else "shm+tcp"
        if not self._several_hosts:
            self._transport = "shm"
        here = on_link(link, ranks_per_host)
        free = {"gb_s": None, "latency_us": 0.0}
        cores_alone = replace(here, network=here.network | free)
        self._machines = (here.machine(), cores_alone.machine())
        self._known: dict[tuple[str, int], OnWire] = {}  # several codecs have codes of one size

    def run(self, collective: str, size: int, dtype: str) -> OnWire:
        """A vector of so many bytes, by the built-in rules of which algorithm runs."""
        if (collective, size) in self._known:
            return self._known[collective, size]
        algorithm = _core.select_algorithm(
            collective,
            size,
            has_window=False,
            several_hosts=self._several_hosts,
            ranks=self._count,
            transport=self._transport,
        )
        seconds = [
            _core.simulate(collective, algorithm, self._count, size, machine, dtype=dtype).seconds
            for machine in self._machines
        ]
        self._known[collective, size] = OnWire(*seconds)
        return self._known[collective, size]


class Wire:
    """Simulated times of one workload's collectives between hosts on a link."""

    def __init__(self, workload: Workload, link: Link) -> None:
        self._workload = workload
        world, each = workload.world_size, workload.summed_inside
        self._all = _Ranks(world, workload.ranks_per_host, link)
        if each == 1:
            self._across = self._all
        else:
            self._inside = _Ranks(each, each, link)
            # The ranks of a host are under way at once, each with its part of the vector.
            shared = replace(link, bytes_per_second=link.bytes_per_second / each)
            self._across = _Ranks(world // each, 1, shared)

    def exact(self) -> float:
        """Seconds of an all_reduce of a bucket."""
        work = self._workload
        return self._all.run("all_reduce", work.count * ITEM_BYTES[work.dtype], work.dtype).total

    def compressed(self, codec: Codec) -> OnWire:
        """What the codes of a bucket take, piece after piece; and with several ranks a host the
        exact sums and copies inside of it, before and after."""
        work = self._workload
        pieces = work.pieces
        size = max(1, codec.code_bytes(work.coded[0]) // pieces)
        parts = [self._across.run(name, size, "uint8") for name in ("all_to_all", "all_gather")]
        times = [OnWire(pieces * part.total, pieces * part.core) for part in parts]
        if work.summed_inside > 1:
            size = work.count * ITEM_BYTES[work.dtype]
            for name in ("reduce_scatter", "all_gather"):
                times.append(self._inside.run(name, size, work.dtype))
        return OnWire(sum(time.total for time in times), sum(time.core for time in times))

    def gathered(self, size: int) -> OnWire:
        """What it takes until every rank has `size` bytes of each."""
        return self._all.run("all_gather", size * self._workload.world_size, "uint8")


def on_link(link: Link, ranks_per_host: int) -> Topology:
    """The hosts of the topology `cluster`, joined by a link."""
    cluster = topology.load("cluster")
    network = cluster.network | {"gb_s": link.bytes_per_second / topology.GB}
    return replace(cluster, ranks_per_host=ranks_per_host, network=network)


# ---- Advice ----


@dataclass(frozen=True)
class Estimate:
    """One step of training with a codec, or without: seconds of all its buckets together."""

    name: str
    bits: float  # a value
    error: float  # relative L2 error of the mean of gaussian values
    wire: float
    codec: float  # CPU time of a rank
    seconds: float
    refused: str = ""  # why it is not recommended, however fast


@dataclass(frozen=True)
class Advice:
    """`best` is one of `estimates`, of which the first is that without a codec."""

    estimates: list[Estimate]
    best: Estimate
    reason: str


def overlapped(wire: float, core: float, pieces: int) -> float:
    """Seconds of a pipeline of two parts."""
    return max(wire, core) + min(wire, core) / pieces


def advise(
    workload: Workload,
    link: Link,
    speeds: Sequence[Speed],
    *,
    max_error: float = 0.02,
    wire: Wire | None = None,
    others: Sequence[Estimate] = (),
) -> Advice:
    """Which codec, if any, for the gradients of this workload over this link.

    `max_error`: of an all_reduce, relative L2 error of gaussian values. `wire`: instead of that of
    the link. `others`: to be chosen from too (pycoll/sparse_advice.py). Raises InvalidArgumentError
    when the simulator cannot run the workload, or `max_error` is no finite number from 0 on.
    """
    if not 0 <= max_error < math.inf:
        raise _core.InvalidArgumentError(f"max_error is a number from 0 on, not {max_error!r}")
    if workload.hosts == 1:
        exact = Estimate("none", 8.0 * ITEM_BYTES[workload.dtype], 0.0, 0.0, 0.0, 0.0)
        return Advice([exact], exact, "none: all ranks share memory, nothing crosses the link")
    wire = wire or Wire(workload, link)
    seconds = wire.exact() * workload.buckets
    exact = Estimate("none", 8.0 * ITEM_BYTES[workload.dtype], 0.0, seconds, 0.0, seconds)
    found = [*(estimate_of(workload, wire, speed, max_error) for speed in speeds), *others]
    able = [estimate for estimate in found if not estimate.refused]
    if not able:
        reason = f"none: no codec has an error of at most {max_error:g}"
        return Advice([exact, *found], exact, reason)
    place, pays = pick(seconds, [e.seconds for e in able], [e.error for e in able])
    reason = reason_of(exact, able[place], pays, link)
    if not pays and workload.summed_inside < workload.ranks_per_host:
        reason += " (codes are summed inside of hosts only where all have as many ranks)"
    return Advice([exact, *found], able[place] if pays else exact, reason)


def estimate_of(workload: Workload, wire: Wire, speed: Speed, max_error: float) -> Estimate:
    count, buckets = workload.count, workload.buckets
    on_wire = wire.compressed(speed.codec)
    in_codec = speed.seconds(*workload.coded)
    seconds = overlapped(on_wire.total, on_wire.core + in_codec, workload.pieces)
    bits = speed.codec.code_bytes(count) * 8 / count
    refused = ""
    if speed.sum_error > max_error:
        refused = f"error above {max_error:g}"
    return Estimate(
        speed.codec.kind,
        bits,
        speed.sum_error,
        on_wire.total * buckets,
        in_codec * buckets,
        seconds * buckets,
        refused,
    )


def pick(exact: float, seconds: Sequence[float], errors: Sequence[float]) -> tuple[int, bool]:
    """Which codec to take, by its place, and whether it pays against `exact` seconds without one.

    The fastest, or one that is about as fast, and twice as exact.
    """
    first = min(range(len(seconds)), key=seconds.__getitem__)
    if seconds[first] * LEAST_GAIN > exact:
        return first, False
    most = min(seconds[first] * ALIKE, exact / LEAST_GAIN)
    alike = [
        i for i in range(len(seconds)) if seconds[i] <= most and errors[i] <= errors[first] / 2
    ]
    return min(alike, key=errors.__getitem__, default=first), True


def reason_of(exact: Estimate, best: Estimate, pays: bool, link: Link) -> str:
    saved = exact.wire - best.wire
    if pays:
        return (
            f"{best.name}: at {link.name} it saves {format_seconds(saved)} of wire a step and "
            f"costs {format_seconds(best.codec)} of codec: {exact.seconds / best.seconds:.2g} "
            "times faster"
        )
    none = f"none: at {link.name} {best.name}, the best,"
    if saved <= 0:
        instead = f"{format_seconds(best.wire)} instead of {format_seconds(exact.wire)}"
        return f"{none} saves no wire: {instead}"
    return (
        f"{none} saves {format_seconds(saved)} of wire a step and costs "
        f"{format_seconds(best.codec)} of codec"
    )


def format_seconds(seconds: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
