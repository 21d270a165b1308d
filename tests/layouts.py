"""Arrays in every layout, whose memory is compared whole: elements, gaps and guards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from helpers_shareable import shareable_empty
from reference import GUARD, GUARD_BYTES, Array

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How an array of some shape lies in memory: a view of a dense base at an offset."""

    base: Callable[[Shape], Shape] = lambda shape: shape
    view: Callable[[Array], Array] = lambda base: base
    items: int = 0  # offset
    bytes: int = 0  # more offset: elements are not aligned to their size


def _moved(shape: Shape) -> Shape:
    return (*shape[:-3], *shape[-2:], shape[-3])


LAYOUTS = {
    "dense": Layout(),
    "offset": Layout(items=3),
    "unaligned": Layout(bytes=1),
    "strided": Layout(lambda s: (*s[:-1], 2 * s[-1]), lambda base: base[..., ::2]),
    # Each block is dense if it has one row; there is a gap to the next.
    "gaps": Layout(lambda s: (*s[:-1], s[-1] + 3), lambda base: base[..., :-3]),
    "negative": Layout(view=np.flip),
    "transposed": Layout(lambda s: s[::-1], lambda base: base.T),
    "channels_last": Layout(_moved, lambda base: np.moveaxis(base, -1, -3)),
}


def shape_of(count: int) -> Shape:
    """Three dimensions, none of them 1 if the divisors of `count` allow it."""
    if count == 0:
        return (2, 0, 3)
    first = next((d for d in (3, 2, 5, 7) if count % d == 0), 1)
    rest = count // first
    second = next((d for d in (2, 3, 5, 7) if rest % d == 0), 1)
    return (first, second, rest // second)


class Buffer:
    """An array in a layout, between guard bytes. Nothing in it but what was filled in is data."""

    def __init__(
        self, shape: Shape, dtype: npt.DTypeLike, layout: Layout, shared: bool = False
    ) -> None:
        self._dtype, self._layout = np.dtype(dtype), layout
        self._base = layout.base(shape)
        size = int(np.prod(self._base)) * self._dtype.itemsize
        self._begin = GUARD_BYTES + layout.items * self._dtype.itemsize + layout.bytes
        bytes_ = self._begin + size + GUARD_BYTES
        self.memory = shareable_empty((bytes_,), np.uint8) if shared else np.empty(bytes_, np.uint8)
        self.memory[:] = GUARD
        self.array = self._view(self.memory)
        assert self.array.shape == shape
        self.wanted: npt.NDArray[np.uint8] | None = None

    def _view(self, memory: npt.NDArray[np.uint8]) -> Array:
        base: Array = np.ndarray(self._base, self._dtype, memory.data, self._begin)
        return self._layout.view(base)

    def freeze(self) -> None:
        """What is in memory is what must be there at the end, but for what `expected` changes."""
        if self.wanted is None:
            self.wanted = self.memory.copy()

    def expected(self) -> Array:
        assert self.wanted is not None
        return self._view(self.wanted)

    def problem(self) -> str:
        assert self.wanted is not None
        if np.array_equal(self.memory, self.wanted):
            return ""
        differ = np.flatnonzero(self.memory != self.wanted)
        text = f"{len(differ)} bytes differ, from byte {differ[0] - self._begin} of its memory on"
        # Bytes of elements, where they can be told apart from gaps: by number, in row-major order.
        got = np.ascontiguousarray(self.array).reshape(-1)
        want = np.ascontiguousarray(self.expected()).reshape(-1)
        width = self._dtype.itemsize
        same = got.view(np.uint8).reshape(-1, width) == want.view(np.uint8).reshape(-1, width)
        wrong = np.flatnonzero(~same.all(1))
        if len(wrong) == 0:
            return f"{text}: outside its elements"
        first = wrong[0]
        return (
            f"{text}: {len(wrong)} of {len(got)} elements, the first is {first}: "
            f"{got[first]} instead of {want[first]}"
        )


class Blocks:
    """The blocks of one side of a call: rows of one array, or arrays of their own."""

    def __init__(
        self,
        counts: list[int],
        dtype: npt.DTypeLike,
        layout: Layout,
        *,
        stacked: bool,
        shared: bool = False,
    ) -> None:
        if stacked:
            assert len(set(counts)) == 1
            buffer = Buffer((len(counts), *shape_of(counts[0])), dtype, layout, shared)
            self._buffers = [buffer]
            self.blocks: Array | list[Array] = buffer.array
        else:
            self._buffers = [Buffer(shape_of(count), dtype, layout, shared) for count in counts]
            self.blocks = [buffer.array for buffer in self._buffers]
        self._stacked = stacked

    def fill(self, where: Iterable[int], values: list[Array]) -> None:
        for i, value in zip(where, values, strict=True):
            self.blocks[i][...] = value.reshape(self.blocks[i].shape)

    def freeze(self) -> None:
        for buffer in self._buffers:
            buffer.freeze()

    def expect(self, where: Iterable[int], values: list[Array]) -> None:
        for i, value in zip(where, values, strict=True):
            whole = self._buffers[0 if self._stacked else i].expected()
            block = whole[i] if self._stacked else whole
            block[...] = value.reshape(block.shape)

    def problems(self, name: str) -> list[str]:
        found = [(i, buffer.problem()) for i, buffer in enumerate(self._buffers)]
        single = self._stacked or len(self._buffers) == 1
        return [f"{name if single else f'{name}[{i}]'}: {text}" for i, text in found if text]
