"""Which gradients travel together.

DistributedDataParallel cuts its buckets anew after the first step of a process, so a run that is
resumed begins with other buckets than the run that goes on. Units depend on nothing but the model:
the same gradients share the blocks of a code, and the same random numbers, however DDP packs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

__all__ = ["Layout", "Part", "Plan", "Unit", "layout_of", "make_plan", "residual_key"]


@dataclass(frozen=True)
class Layout:
    """One parameter's gradient: `stride` is how its elements lie in DDP's buckets."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def order(self) -> tuple[int, ...]:
        """Its dimensions, but for those of one element, from the outermost in memory on."""
        dimensions = [d for d, size in enumerate(self.shape) if size != 1]
        return tuple(sorted(dimensions, key=lambda d: -self.stride[d]))

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """A dense vector of this parameter's elements in its shape."""
        return flat.as_strided(self.shape, self.stride)


def layout_of(name: str, parameter: torch.Tensor) -> Layout:
    # DDP keeps the strides of dense parameters (channels_last), others become contiguous.
    stride, expected = tuple(parameter.stride()), 1
    for step, size in sorted(zip(stride, parameter.shape, strict=True)):
        if size != 1 and step != expected:
            stride = torch.empty(parameter.shape, device="meta").stride()
            break
        expected *= size
    return Layout(name, tuple(parameter.shape), stride, parameter.dtype, parameter.device)


@dataclass(frozen=True)
class Part:
    layout: Layout
    first: int  # of its elements in the unit's vector

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        return vector[self.first : self.first + self.layout.count]


@dataclass(frozen=True)
class Unit:
    """Gradients of one dtype and device that travel as one vector.

    Each part but the last is followed by `padding`, up to the next multiple of `block`: where
    values are coded in blocks, no block holds those of two parameters. So a parameter without
    gradients is blocks of zeros, which every codec keeps. (Codes like those of `Sign` have no zero:
    in a block with other values zeros come back as something else.)
    """

    index: int
    compressed: bool
    parts: tuple[Part, ...]
    block: int = 1

    @property
    def count(self) -> int:
        last = self.parts[-1]
        return last.first + last.layout.count

    @cached_property
    def padding(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Places of padding, and of what goes there: copies, in turn, of the values in its block.
        Zeros would make the scales of blocks with a mean too small. None: there is none."""
        places, sources = [], []
        for part, following in itertools.pairwise(self.parts):
            end = part.first + part.layout.count
            in_block = end % self.block
            here = torch.arange(end, following.first)
            places.append(here)
            sources.append(end - in_block + (here - end) % max(in_block, 1))
        if not any(map(len, places)):
            return None
        return torch.cat(places).to(self.device), torch.cat(sources).to(self.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].layout.dtype

    @property
    def device(self) -> torch.device:
        return self.parts[0].layout.device

    @property
    def names(self) -> list[str]:
        return [part.layout.name for part in self.parts]


def residual_key(unit: Unit) -> str:
    """Of its residual in the memory of a state."""
    return f"residual/{unit.index}"


@dataclass(frozen=True)
class Plan:
    units: tuple[Unit, ...]

    def describe(self) -> list[dict[str, Any]]:
        """In plain types, for state_dict."""
        return [
            {
                "compressed": unit.compressed,
                "parameters": unit.names,
                "orders": [list(part.layout.order) for part in unit.parts],
            }
            for unit in self.units
        ]


def make_plan(
    layouts: Iterable[Layout],
    compressed: Callable[[Layout], bool],
    unit_bytes: int | None,
    min_bytes: int,
    block: int = 1,
) -> Plan:
    """Units of gradients in this order.

    Args:
        compressed: what may be compressed.
        unit_bytes: gradients of that size are a unit of their own, others are collected until a
            unit has it; None: one unit for all.
        min_bytes: less travels as it is.
        block: of compressed units, see Unit.
    """
    every = list(layouts)
    groups = []
    exact = [layout for layout in every if not compressed(layout)]
    for chosen in _grouped([layout for layout in every if compressed(layout)], unit_bytes):
        if sum(map(_bytes_of, chosen)) < min_bytes:
            exact += chosen
        else:
            groups.append((True, chosen))
    exact.sort(key=every.index)
    groups += [(False, chosen) for chosen in _grouped(exact, unit_bytes)]
    return Plan(
        tuple(
            _unit(k, compressed, chosen, block if compressed else 1)
            for k, (compressed, chosen) in enumerate(groups)
        )
    )


def _bytes_of(layout: Layout) -> int:
    return layout.count * layout.dtype.itemsize


def _grouped(layouts: list[Layout], unit_bytes: int | None) -> list[list[Layout]]:
    groups: list[list[Layout]] = []
    open_groups: dict[Any, list[Layout]] = {}
    for layout in layouts:
        if unit_bytes is not None and _bytes_of(layout) >= unit_bytes:
            groups.append([layout])
            continue
        kind = (layout.dtype, layout.device)
        if kind not in open_groups:
            open_groups[kind] = []
            groups.append(open_groups[kind])
        open_groups[kind].append(layout)
        if unit_bytes is not None and sum(map(_bytes_of, open_groups[kind])) >= unit_bytes:
            del open_groups[kind]
    return groups


def _unit(index: int, compressed: bool, layouts: list[Layout], block: int) -> Unit:
    parts, first = [], 0
    for layout in layouts:
        parts.append(Part(layout, first))
        first += -(-layout.count // block) * block
    return Unit(index, compressed, tuple(parts), block)
