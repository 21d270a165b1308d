"""One step of a model's gradients: from DDP's buckets into units, over the ranks, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pycoll import _core
from pycoll.hooks.memory import Memory
from pycoll.hooks.plan import Part, Unit, residual_key
from pycoll.hooks.reduction import Call, Reduction

__all__ = ["Buckets", "UnitStep"]


@dataclass
class Buckets:
    """Those of the step that have come."""

    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # flat views of buffers
    results: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = field(
        default_factory=list
    )

    def add(
        self, bucket: dist.GradBucket, names: dict[int, str]
    ) -> torch.futures.Future[torch.Tensor]:
        """The future of this bucket's averaged gradients."""
        buffer, first = bucket.buffer(), 0
        if buffer.layout != torch.strided:
            raise _core.UnsupportedError(
                "compress_hook: sparse gradients; DDP models with them need another hook "
                "(torch.nn.Embedding(sparse=False) has dense ones)"
            )
        for parameter in bucket.parameters():
            name = names.get(id(parameter))
            if name is None:
                raise _core.InvalidArgumentError(
                    f"compress_hook: a parameter of shape {tuple(parameter.shape)} is none of the "
                    "model's that this state was made for"
                )
            count = parameter.numel()
            self.gradients[name] = buffer[first : first + count]
            first += count
        devices = None if buffer.device.type == "cpu" else [buffer.device]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self.results.append((future, buffer))
        return future

    def have(self, unit: Unit) -> bool:
        return all(name in self.gradients for name in unit.names)

    def complete(self) -> None:
        for future, buffer in self.results:
            future.set_result(buffer)


class UnitStep:
    """A unit's gradients in one step, and the call that averages them."""

    def __init__(self, unit: Unit, buckets: Buckets, scratch: dict[int, torch.Tensor]) -> None:
        self.unit = unit
        self._gradients = [buckets.gradients[name] for name in unit.names]
        # Parts that sent no residual; with a mask on a GPU, which says whether it did not.
        self._withheld: list[tuple[Part, torch.Tensor | None]] = []
        if len(unit.parts) == 1:
            self.values = self._gradients[0]
            return
        # Kept from step to step: fresh memory costs more than the copy.
        if unit.index not in scratch:
            scratch[unit.index] = torch.empty(unit.count, dtype=unit.dtype, device=unit.device)
        self.values = scratch[unit.index]
        for part, gradient in zip(unit.parts, self._gradients, strict=True):
            part.of(self.values).copy_(gradient)

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Its parameters' names and gradients, in their shapes."""
        for part in self.unit.parts:
            yield part.layout.name, part.layout.shaped(part.of(self.values))

    def residual(self, memory: Memory, scale: float) -> torch.Tensor:
        """For this step. Parameters without a gradient on this rank send nothing, and keep their
        residual: they were not used, or the rank has run out of data (torch's Join)."""
        residual = memory.open(residual_key(self.unit), self.unit.count, self.unit.device, scale)
        for part in self.unit.parts:
            mine, values = part.of(residual), part.of(self.values)
            if self.unit.device.type == "cpu":
                if not _any(values):
                    self._withheld.append((part, None))
                    mine.zero_()
                continue
            # The GPU decides: asking it would stop the backward pass.
            none = values.any().logical_not()
            self._withheld.append((part, none))
            mine.masked_fill_(none, 0)
        return residual

    def launch(self, reduction: Reduction, call: Call) -> None:
        self.call = call
        if self.unit.padding is not None:
            places, sources = self.unit.padding
            for vector in (call.values, call.residual):
                if vector is not None:
                    vector[places] = vector[sources]
        reduction.launch(call)

    def give_back(self, factor: float) -> None:
        """Puts the averages, times `factor`, in place of the gradients."""
        if self.call.residual is not None:
            kept = self.call.memory.kept(residual_key(self.unit))
            for part, none in self._withheld if kept is not None else ():
                # Not in place of it: PowerSGD leaves what others' gradients lack.
                mine = part.of(self.call.residual)
                whole = torch.add(mine, part.of(kept), alpha=self.call.scale)
                mine.copy_(whole if none is None else torch.where(none, whole, mine))
        if factor != 1:
            self.values.mul_(factor)
        if len(self.unit.parts) > 1:
            for part, gradient in zip(self.unit.parts, self._gradients, strict=True):
                gradient.copy_(part.of(self.values))


def _any(values: torch.Tensor) -> bool:
    # The first few answer nearly always.
    return bool(values[:64].any()) or bool(values.any())
