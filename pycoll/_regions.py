"""Regions of a program whose calls travel over a codec: ``with pycoll.codec("int8"):``."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import NamedTuple

from pycoll import _core
from pycoll.auto import Auto, asked_for
from pycoll.codecs import EXACT, Codec, codec_of

__all__ = ["codec", "codec_of_call", "current_region", "open_regions", "outside_of_regions"]


class Region(NamedTuple):
    """What a context is in. The torch module takes `fields`; both are None where calls are exact.
    `entered`: by which object; `outer`: what comes back behind it."""

    codec: Codec | None
    fields: tuple[str, int, bool, int, int | None] | None
    entered: object = None
    outer: Region | None = None


class OpenRegions:
    """How many regions any thread of the process is in.

    Calls read this number, and look for a region of their own only where it is not 0: a context
    variable costs a call in Python a tenth of its time, and one that torch makes the GIL.
    """

    __slots__ = ("_lock", "_module", "count")

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._module: ModuleType | None = None

    def add(self, change: int) -> None:
        with self._lock:
            self.count += change
            if self._module is not None:
                self._module.set_open_regions(self.count)

    def after_fork(self) -> None:
        """In the child, where no thread is left to give the lock back."""
        self._lock = threading.Lock()

    def tell(self, module: ModuleType) -> None:
        """The torch module hears the number, now and whenever it changes."""
        with self._lock:
            self._module = module
            module.set_region_variable(current_region)
            module.set_open_regions(self.count)


current_region: ContextVar[Region | None] = ContextVar("pycoll.codec", default=None)
open_regions = OpenRegions()
os.register_at_fork(after_in_child=open_regions.after_fork)


class CodecRegion(ContextDecorator):
    """May be entered again, also by several threads, and inside of itself."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def __enter__(self) -> None:
        # Counted before it is set and as long as it is: whoever is in a region sees a count.
        open_regions.add(1)
        current_region.set(self._region._replace(entered=self, outer=current_region.get()))

    def __exit__(self, *error: object) -> None:
        region = current_region.get()
        # Else a generator is being closed in another context, whose region is its own.
        if region is not None and region.entered is self:
            current_region.set(region.outer)
        open_regions.add(-1)


def codec(codec: str | Codec | None) -> CodecRegion:
    """A region whose calls travel over a codec, as if each were given ``codec=``.

        with pycoll.codec("int8"):
            dist.all_reduce(tensor)      # also pycoll.all_reduce, and calls of a Communicator
            with pycoll.codec(None):
                dist.all_reduce(loss)    # exact

    Args:
        codec: a name, or an object of `pycoll.codecs`; None or "none": exact, also in groups whose
            `Options` name a codec.

    It holds for calls made in it, by its thread (context, as of `contextvars`: an asyncio task
    keeps its own): an asynchronous call has the codec of the moment when it is made, wherever it
    is waited for. The innermost region counts; ``codec=`` of a call comes before it, and the
    `Options` of the group after it. What is exempt from codecs stays so. Every rank must be in the
    same region. Gradients that DDP reduces in ``backward()`` are such calls for models on the CPU
    alone: see docs/semantics.md.

    What is returned may be kept and entered again; as a decorator it is a region around each call
    of a function. Raises `InvalidArgumentError` (a ValueError) for what is no codec. "auto" is for
    groups and for single calls.
    """
    return CodecRegion(_region_of(codec))


def codec_of_call(
    given: str | Codec | Auto | None, group: Codec | Auto | None
) -> Codec | Auto | None:
    """Of a call that was given `given`, in a group whose own codec is `group`."""
    if given is not None:
        return asked_for(given)
    region = current_region.get() if open_regions.count else None
    return group if region is None else region.codec


@contextmanager
def outside_of_regions() -> Iterator[None]:
    token = current_region.set(None)
    try:
        yield
    finally:
        current_region.reset(token)


def _region_of(codec: str | Codec | None) -> Region:
    if codec is None or codec == EXACT:
        return Region(None, None)
    try:
        given = codec_of(codec)
    except _core.InvalidArgumentError as error:
        raise _core.InvalidArgumentError(f"{error}, or None") from None
    return Region(given, given._fields())
