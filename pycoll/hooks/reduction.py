"""What a way of compressing gradients has to give, and the one that does not compress."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from pycoll import _core
from pycoll.direct import all_reduce
from pycoll.hooks.memory import Memory
from pycoll.hooks.plan import Layout, Unit

__all__ = [
    "Call",
    "Compressor",
    "Exact",
    "Group",
    "Reduction",
    "all_finite",
    "are_finite",
    "check",
    "random_bits",
]


@dataclass(frozen=True)
class Group:
    """The ranks; `handle` is torch's group, None the default one."""

    handle: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        check(
            self.handle is None or isinstance(self.handle, dist.ProcessGroup),
            f"CompressionState: group is a process group of torch.distributed that this rank is "
            f"in, or None for the default one, not {self.handle!r}",
        )

    @property
    def rank(self) -> int:
        return dist.get_rank(self.handle)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.handle)

    def check_ranks(self, other: dist.ProcessGroup) -> None:
        """Raises InvalidArgumentError unless the model's group has the same ranks."""
        mine, theirs = map(dist.get_process_group_ranks, (self.handle or dist.group.WORLD, other))
        check(
            mine == theirs,
            f"compress_hook: the state's group has ranks {mine}, the model's {theirs}; give "
            "CompressionState the group of the model",
        )

    def check_agreement(self, what: Any, device: torch.device) -> None:
        """Raises MismatchError on every rank unless all have the same (in JSON's types)."""
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).digest()
        mine = torch.frombuffer(bytearray(digest[:8]), dtype=torch.int64).to(device)
        work, everyone = self.gather(mine)
        work.wait()
        others = (everyone[:, 0] != everyone[0, 0]).nonzero().view(-1).tolist()
        if others:
            raise _core.MismatchError(
                f"compress_hook: the states of ranks {others} are unlike that of rank 0 (codec, "
                "seed, other settings, exempt parameters, model, step, or what was loaded: "
                "load_state_dict() is for every rank, with the same step of the same run)"
            )

    def average(self, tensor: torch.Tensor) -> Any:
        """Starts the exact mean over the ranks, in place, whatever codec the group or a region has;
        torch's Work."""
        return all_reduce(tensor, "avg", self.handle, True, codec="none")

    def gather(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Starts to collect a vector of every rank; torch's Work, and (ranks, length)."""
        everyone = tensor.new_empty(self.size, len(tensor))
        return dist.all_gather(list(everyone), tensor, self.handle, async_op=True), everyone


@dataclass
class Call:
    """One unit of one step.

    `values`: its gradients, a dense vector, in place of which the mean over the ranks comes.
    `residual`: float32, of that length, or None without error feedback: what is compressed is
    values + residual, and the residual becomes what its compressed form lacks. Where values are not
    finite it may become anything: the step is forgotten.
    """

    unit: Unit
    values: torch.Tensor
    residual: torch.Tensor | None
    memory: Memory
    scale: float
    number: int  # 32 bits, of no other call of this state: for random numbers
    work: Any = None  # between launch and finish

    def open(self, key: str, count: int) -> torch.Tensor:
        """Memory of a reduction's own."""
        return self.memory.open(key, count, self.unit.device, self.scale)


class Reduction(Protocol):
    """Runs the calls of a step. All ranks run the same ones in the same order."""

    @property
    def first_step(self) -> int:
        """Steps before it are exact."""

    @property
    def whole_step(self) -> bool:
        """Whether all gradients are to be one unit."""

    @property
    def block(self) -> int:
        """Values that are coded together, which those of two parameters must not be."""

    def takes(self, layout: Layout) -> bool:
        """Whether it can compress this parameter's gradient; else that travels as it is."""

    def memory_of(self, unit: Unit) -> dict[str, int]:
        """Elements of each memory of its own that it opens for a unit."""

    def launch(self, call: Call) -> None:
        """Starts what can be started now."""

    def finish(self, calls: list[Call]) -> None:
        """Ends those that were launched, in this order."""


class Compressor(Protocol):
    """Settings of a way of compressing: immutable, comparable, picklable."""

    def _reduction(self, group: Group) -> Reduction:
        """One for a state."""

    def _settings(self) -> dict[str, Any]:
        """In plain types, for state_dict."""


class Exact:
    """The mean as it is, for what is not compressed."""

    first_step = 0
    whole_step = False
    block = 1

    def __init__(self, group: Group) -> None:
        self._group = group

    def takes(self, layout: Layout) -> bool:
        return True

    def memory_of(self, unit: Unit) -> dict[str, int]:
        return {}

    def launch(self, call: Call) -> None:
        call.work = self._group.average(call.values)

    def finish(self, calls: list[Call]) -> None:
        for call in calls:
            call.work.wait()


def random_bits(seed: int, number: int, count: int) -> torch.Tensor:
    """`count` words of 32 random bits in int64, the same on every machine.

    SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) of a counter. Libraries' generators may change with
    their versions, which ranks need not share.
    """
    with np.errstate(over="ignore"):
        start = _mix(np.array([seed], np.uint64)) + np.uint64(number) * np.uint64(1 << 32)
        words = _mix(start + np.arange(count, dtype=np.uint64))
    return torch.from_numpy((words >> np.uint64(32)).astype(np.int64))


def _mix(counter: Any) -> Any:
    z = (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def all_finite(values: torch.Tensor) -> bool:
    if values.is_complex():
        values = torch.view_as_real(values)
    # A sum costs a tenth of looking at every value, and is finite only if they are.
    if values.numel() == 0 or math.isfinite(values.sum().item()):
        return True
    least, greatest = torch.aminmax(values)  # both NaN where one is
    return math.isfinite(least.item()) and math.isfinite(greatest.item())


def are_finite(vectors: Sequence[torch.Tensor]) -> bool:
    """All of them, of any dtypes. Each GPU is asked once, if they are."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for values in vectors:
        if values.numel() > 0:
            by_device.setdefault(values.device, []).append(values)
    return all(
        (device.type != "cpu" and _have_finite_sums(on_it)) or all(map(all_finite, on_it))
        for device, on_it in by_device.items()
    )


def _have_finite_sums(vectors: Sequence[torch.Tensor]) -> bool:
    sums = [(torch.view_as_real(x) if x.is_complex() else x).sum().float() for x in vectors]
    return bool(torch.stack(sums).isfinite().all())


def check(condition: bool, text: str) -> None:
    if not condition:
        raise _core.InvalidArgumentError(text)
