"""Gradients of low rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pycoll._arguments import number, whole
from pycoll.hooks.plan import Layout, Part, Unit
from pycoll.hooks.reduction import Call, Group, random_bits

__all__ = ["PowerSGD"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A column of which no more than this is left beside the others is rounding noise of float32.
_NOTHING = 1e-6
# The settings that are whole numbers: what they are, and from where to below where.
_WHOLE: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("rank", "a number from 1 on", {"least": 1, "below": 1 << 31}),
    ("start_step", "a number of steps from 0 on", {"below": 1 << 63}),
    ("seed", "a number of 64 bits", {"below": 1 << 64}),
)


@dataclass(frozen=True)
class PowerSGD:
    """The gradient of a matrix as a product of two thin ones (Vogels, Karimireddy, Jaggi, NeurIPS
    2019): one step of power iteration that goes on from the last step's.

    A gradient of shape (n, ...) is a matrix M of n rows. With M the sum of gradient and residual:
    P = mean(M Q), made orthonormal; Q = mean(transpose(M) P); P transpose(Q) is the result. All P
    of a step are one all_reduce, and all Q another, when the last gradient has come; what is not
    compressed is a third, before. Sums are of float32.

    Attributes:
        rank: columns of P and Q, at least 1; never more than rows or columns of M.
        start_step: steps before it are exact (0: none is): gradients change fast at first.
        min_compression_rate: what does not become so many times smaller stays as it is.
        seed: 64 bits, the same on every rank: of the first Q, and of columns that have vanished.

    Raises `InvalidArgumentError` (a ValueError) for other numbers.
    """

    rank: int = 2
    start_step: int = 100
    min_compression_rate: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed, limits in _WHOLE:
            found = whole(f"PowerSGD: {name}", getattr(self, name), allowed, **limits)
            object.__setattr__(self, name, found)
        rate = self.min_compression_rate
        rate = number("PowerSGD: min_compression_rate", rate, "a number from 0 on")
        object.__setattr__(self, "min_compression_rate", rate)

    def _reduction(self, group: Group) -> _PowerSGD:
        return _PowerSGD(self, group)

    def _settings(self) -> dict[str, Any]:
        return {"kind": "power_sgd", **asdict(self)}


@dataclass
class _Matrix:
    """One gradient: `m` is (n, k), `p` (n, r) and `q` (k, r) lie in the step's flat vectors.
    `kept`: Q of the last step, and then of this one."""

    m: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    kept: torch.Tensor
    part: Part


class _PowerSGD:
    whole_step = True
    block = 1

    def __init__(self, settings: PowerSGD, group: Group) -> None:
        self._settings = settings
        self._group = group
        self.first_step = settings.start_step

    def takes(self, layout: Layout) -> bool:
        if layout.dtype not in _DTYPES or len(layout.shape) < 2 or layout.count == 0:
            return False
        # Rows must be rows in memory too, but for matrices, which may lie transposed.
        if len(layout.shape) > 2 and layout.stride[0] != max(layout.stride):
            return False
        n, k = layout.shape[0], layout.count // layout.shape[0]
        return n * k >= self._settings.min_compression_rate * self._columns(n, k) * (n + k)

    def memory_of(self, unit: Unit) -> dict[str, int]:
        counts = {}
        for part in unit.parts:
            n, k = part.layout.shape[0], part.layout.count // part.layout.shape[0]
            counts[self._key(part)] = k * self._columns(n, k)
        return counts

    def launch(self, call: Call) -> None:
        pass  # the whole step is one unit: there is nothing to overlap with

    def finish(self, calls: list[Call]) -> None:
        for call in calls:
            whole = call.values.float() if call.residual is None else call.residual
            if call.residual is not None:
                whole.add_(call.values)
            ps, qs, matrices = self._matrices(call, whole)
            self._start_columns(call, matrices)
            for x in matrices:
                torch.mm(x.m, x.kept, out=x.p)
            self._group.average(ps).wait()
            orthonormalise([x.p for x in matrices])
            for x in matrices:
                torch.mm(x.m.t(), x.p, out=x.q)
            self._group.average(qs).wait()
            for x in matrices:
                x.kept.copy_(x.q)
                result = product(x.p, x.q)
                self._matrix(x.part, call.values).copy_(result)
                if call.residual is not None:
                    x.m.sub_(result)

    def _columns(self, n: int, k: int) -> int:
        return min(self._settings.rank, n, k)

    def _key(self, part: Part) -> str:
        return f"q/{part.layout.name}"

    def _matrix(self, part: Part, vector: torch.Tensor) -> torch.Tensor:
        layout, flat = part.layout, part.of(vector)
        if len(layout.shape) == 2:
            return layout.shaped(flat)
        return flat.view(layout.shape[0], -1)

    def _matrices(
        self, call: Call, whole: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, list[_Matrix]]:
        ms = [(part, self._matrix(part, whole)) for part in call.unit.parts]
        columns = [self._columns(*m.shape) for _, m in ms]
        rows_p = [m.shape[0] for _, m in ms]
        rows_q = [m.shape[1] for _, m in ms]
        ps, p = _flat(rows_p, columns, whole)
        qs, q = _flat(rows_q, columns, whole)
        matrices = []
        for k, (part, m) in enumerate(ms):
            kept = call.open(self._key(part), q[k].numel()).view(q[k].shape)
            matrices.append(_Matrix(m, p[k], q[k], kept, part))
        return ps, qs, matrices

    def _start_columns(self, call: Call, matrices: list[_Matrix]) -> None:
        """Makes the last Q orthonormal. Columns that have vanished (all, in a first step) could
        never come back by themselves: they are drawn anew."""
        vanished = orthonormalise([x.kept for x in matrices])
        for k, x in enumerate(matrices):
            if not vanished[k].any():
                continue
            seed = random_bits(self._settings.seed, call.number, len(matrices))[k].item()
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(x.kept.shape, generator=generator).to(x.kept.device)
            x.kept.copy_(torch.where(vanished[k], drawn, x.kept))
            orthonormalise([x.kept])


def _flat(
    rows: Sequence[int], columns: Sequence[int], like: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A vector, and matrices that lie in it one after another."""
    shapes = list(zip(rows, columns, strict=True))
    vector = torch.empty(sum(n * r for n, r in shapes), dtype=torch.float32, device=like.device)
    parts = vector.split([n * r for n, r in shapes])
    return vector, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


# What follows runs on every rank alike, and must give the same bits on any CPU: only operations on
# single elements, no library's matrix products or sums, whose order depends on the machine.


def product(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """p times transpose(q), (n, r) and (k, r): column by column."""
    result = torch.outer(p[:, 0], q[:, 0])
    for c in range(1, p.shape[1]):
        result.add_(torch.outer(p[:, c], q[:, c]))
    return result


def orthonormalise(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Makes the columns of each matrix (n, r), r <= n, orthonormal, in place: Gram-Schmidt in
    float64, with every projection done twice.

    Returns for each matrix which of its columns were nothing beside those before: they are zero
    now. Matrices that hold NaN or infinities are NaN afterwards.
    """
    alike = defaultdict(list)
    for k, matrix in enumerate(matrices):
        alike[matrix.shape].append(k)
    vanished: list[torch.Tensor] = [torch.empty(0)] * len(matrices)
    for which in alike.values():
        stacked = torch.stack([matrices[k] for k in which]).double()
        gone = _gram_schmidt(stacked)
        for j, k in enumerate(which):
            matrices[k].copy_(stacked[j])
            vanished[k] = gone[j]
    return vanished


def _gram_schmidt(x: torch.Tensor) -> torch.Tensor:
    """Of (matrices, n, r). Returns (matrices, r)."""
    gone = torch.zeros(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device)
    for c in range(x.shape[2]):
        column = x[:, :, c].clone()
        before = _norm(column)
        for _ in range(2):
            shares = [_sum(x[:, :, j] * column) for j in range(c)]
            for j in range(c):
                column -= x[:, :, j] * shares[j][:, None]
        left = _norm(column)
        gone[:, c] = (left <= _NOTHING * before) & before.isfinite()
        x[:, :, c] = torch.where(gone[:, c, None], 0.0, column / left[:, None])
    return gone


def _norm(column: torch.Tensor) -> torch.Tensor:
    return _sum(column * column).sqrt()


def _sum(terms: torch.Tensor) -> torch.Tensor:
    """Over the second dimension, by halves."""
    count = terms.shape[1]
    while count > 1:
        half = (count + 1) // 2
        terms = torch.cat(
            [terms[:, : count - half] + terms[:, half:count], terms[:, count - half : half]], 1
        )
        count = half
    return terms[:, 0]
