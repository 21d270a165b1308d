"""Topology files: JSON that describes hosts, which are alike, and the network between them.

    {
      "description": "...",              optional
      "ranks_per_host": 8,               0: all ranks on one host
      "host": {"cores": 8, ...},         HOST below
      "network": {"gb_s": 1.17, ...}     NETWORK below; needed when there are several hosts
    }

Bandwidths are in 1e9 bytes a second, null (or left out) where they limit nothing; times are in
microseconds, 0 when left out.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pycoll._core import MachineModel

SHIPPED = Path(__file__).parent / "topologies"
GB, MICRO, MB = 1e9, 1e-6, 2.0**20


@dataclass(frozen=True)
class Entry:
    """A number of a topology file: its attribute in the model, its unit, and what it means."""

    attribute: str
    unit: float
    meaning: str
    bandwidth: bool = False  # may be null: without limit


HOST = {
    "cores": Entry("cores", 1, "ranks that can run at the same time"),
    "cache_gb_s": Entry("cache_bandwidth", GB, "of a core, in its caches", True),
    "peer_gb_s": Entry("peer_bandwidth", GB, "of a core, reading what another wrote", True),
    "core_gb_s": Entry("core_bandwidth", GB, "of a core, from and to memory", True),
    "memory_gb_s": Entry("memory_bandwidth", GB, "of all cores, from and to memory", True),
    "reduce_gb_s": Entry("reduce_bandwidth", GB, "of a core's arithmetic alone", True),
    "cache_mb": Entry("cache_bytes", MB, "of all ranks' vectors that caches hold (2^20 bytes)"),
    "call_us": Entry("call_overhead", MICRO, "before the first step of a call"),
    "step_us": Entry("step_overhead", MICRO, "of a step, however short"),
    "flag_us": Entry("flag_latency", MICRO, "until another core sees a message or an arrival"),
    "switch_us": Entry("switch_overhead", MICRO, "of going on after a wait, without a free core"),
}
NETWORK = {
    "gb_s": Entry("bandwidth", GB, "of a host's port, each way, shared by its ranks", True),
    "latency_us": Entry("latency", MICRO, "from port to port"),
    "message_us": Entry("message_overhead", MICRO, "of a message, at each end"),
    "cpu_gb_s": Entry("cpu_bandwidth", GB, "of a core, to and from the network", True),
}
TOP = ("description", "ranks_per_host", "host", "network")
MOST_RANKS_PER_HOST = 2**31 - 1


class TopologyError(ValueError):
    """A topology file that cannot be used; says which entry and what may stand there."""


@dataclass(frozen=True)
class Topology:
    """A description that was read and found right."""

    name: str
    description: str
    ranks_per_host: int
    host: dict[str, float | None]
    network: dict[str, float | None]

    def machine(self) -> MachineModel:
        from pycoll import _core

        machine = _core.MachineModel()
        machine.ranks_per_host = self.ranks_per_host
        machine.host = filled(_core.HostModel(), HOST, self.host)
        machine.network = filled(_core.NetworkModel(), NETWORK, self.network)
        return machine

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in TOP if name != "network" or self.network}


def filled(model: Any, table: dict[str, Entry], values: dict[str, float | None]) -> Any:
    for name, value in values.items():
        entry = table[name]
        setattr(model, entry.attribute, math.inf if value is None else value * entry.unit)
    return model


def shipped() -> list[str]:
    """Names of the topologies that come with pycoll."""
    return sorted(file.stem for file in SHIPPED.glob("*.json"))


def load(name: str) -> Topology:
    """A topology from a file, or by its name one of those that come with pycoll.

    Raises TopologyError that says what is wrong and what may stand there.
    """
    file = SHIPPED / f"{name}.json" if name in shipped() else Path(name)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(
            f"{name}: {error}; give a file or one of {', '.join(shipped())}"
        ) from error
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise TopologyError(f"{name} is no JSON: {error}") from error
    return parse(content, name)


def parse(content: Any, name: str = "topology") -> Topology:
    """Checks every entry; `name` is for messages."""
    known_names(name, content, TOP)
    ranks_per_host = content.get("ranks_per_host", 0)
    if isinstance(ranks_per_host, bool) or not isinstance(ranks_per_host, int):
        raise TopologyError(f'{name}: "ranks_per_host" must be a whole number')
    if not 0 <= ranks_per_host <= MOST_RANKS_PER_HOST:
        raise TopologyError(
            f'{name}: "ranks_per_host" must be 0 (one host) or more, {MOST_RANKS_PER_HOST} at most'
        )
    description = content.get("description", "")
    if not isinstance(description, str):
        raise TopologyError(f'{name}: "description" must be a text')
    host = numbers(name, "host", content.get("host"), HOST)
    # An empty one would be a network that takes no time.
    if ranks_per_host > 0 and not content.get("network"):
        raise TopologyError(f'{name}: several hosts need a "network" with {", ".join(NETWORK)}')
    network = numbers(name, "network", content.get("network", {}), NETWORK)
    return Topology(Path(name).stem, description, ranks_per_host, host, network)


def known_names(where: str, content: Any, known: Any) -> None:
    if not isinstance(content, dict):
        raise TopologyError(f"{where}: must be an object with {', '.join(known)}")
    for name in content:
        if name not in known:
            raise TopologyError(f'{where}: no entry "{name}"; there are: {", ".join(known)}')


def numbers(
    file: str, section: str, content: Any, table: dict[str, Entry]
) -> dict[str, float | None]:
    where = f'{file}: "{section}"'
    known_names(where, content, table)
    values: dict[str, float | None] = {}
    for name, value in content.items():
        entry = table[name]
        if value is None and entry.bandwidth:
            values[name] = None
            continue
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        # A bandwidth of zero would never end, and hosts have a core.
        positive = entry.bandwidth or name == "cores"
        if not real or not math.isfinite(value) or value < 0 or (positive and value == 0):
            wanted = (
                "above 0" + (" or null" if entry.bandwidth else "") if positive else "0 or more"
            )
            raise TopologyError(
                f'{where}: "{name}" ({entry.meaning}) must be {wanted}, not {json.dumps(value)}'
            )
        values[name] = float(value)
    if section == "host" and "cores" not in values:
        raise TopologyError(f'{where}: "cores" is missing ({HOST["cores"].meaning})')
    return values
