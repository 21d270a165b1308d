"""Regions of a program whose calls travel over a codec: ``with pycoll.codec("int8"):``."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar

from pycoll import _core
from pycoll.auto import Auto, asked_for
from pycoll.codecs import EXACT, Codec, codec_of

__all__ = ["codec", "codec_of_call", "here", "open_regions", "outside_of_regions"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Region:
    """One time that a block was entered, by `entered`. The torch module takes `fields`; both are
    None where calls are exact.

    Contexts may know it when its block is over: copies of one (tasks, `asyncio.to_thread`), and
    that of a generator which ends elsewhere, or out of turn. It counts no more then: `outer` does.
    """

    __slots__ = ("codec", "entered", "fields", "open", "outer", "thread")

    def __init__(self, codec: Codec | None, entered: CodecRegion, outer: Region | None) -> None:
        self.codec = codec
        self.fields = None if codec is None else codec._fields()
        self.entered = entered
        self.outer = outer
        self.thread = threading.get_ident()
        self.open = True


class OpenRegions:
    """How many regions any thread of the process is in.

    Calls read this number, and look for a region of their own only where it is not 0: a context
    variable costs a call in Python a tenth of its time, and one that torch makes the GIL.
    """

    __slots__ = ("_lock", "_module", "count")

    def __init__(self) -> None:
        self.count = 0
        # Whoever has it may be interrupted by the end of a region, as of a generator that is
        # collected just then.
        self._lock = threading.RLock()
        self._module: ModuleType | None = None

    def add(self, change: int) -> None:
        with self._lock:
            self.count += change
            if self._module is not None:
                self._module.set_open_regions(self.count)

    def after_fork(self) -> None:
        """In the child, where no thread is left to give the lock back."""
        self._lock = threading.RLock()

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

    def __init__(self, codec: Codec | None) -> None:
        self._codec = codec
        self._open: list[Region] = []  # in any context

    def __enter__(self) -> None:
        # Counted before it is set and as long as it is open: whoever is in a region sees a count.
        open_regions.add(1)
        region = Region(self._codec, self, here())
        self._open.append(region)
        current_region.set(region)

    def __exit__(self, *error: object) -> None:
        region = here()
        while region is not None and not (region.open and region.entered is self):
            region = region.outer
        if region is None:
            # A generator is closed in another context than it was begun in: in this thread, likely.
            mine = [one for one in self._open if one.thread == threading.get_ident()]
            region = (mine or self._open)[-1]
        region.open = False
        self._open.remove(region)
        if current_region.get() is region:
            current_region.set(region.outer)
        open_regions.add(-1)

    def __call__(self, function: _Function) -> _Function:
        later = (
            inspect.iscoroutinefunction,
            inspect.isgeneratorfunction,
            inspect.isasyncgenfunction,
        )
        if any(runs_later(function) for runs_later in later):
            raise _core.InvalidArgumentError(
                f"pycoll.codec cannot decorate {getattr(function, '__qualname__', function)}: the "
                "code of coroutines and generators runs when the call has returned; write "
                "`with pycoll.codec(...):` in it"
            )
        return super().__call__(function)


def codec(codec: str | Codec | None) -> CodecRegion:
    """A region whose calls travel over a codec, as if each were given ``codec=``.

        with pycoll.codec("int8"):
            dist.all_reduce(tensor)      # also pycoll.all_reduce, and calls of a Communicator
            with pycoll.codec(None):
                dist.all_reduce(loss)    # exact

    Args:
        codec: a name, or an object of `pycoll.codecs`; None or "none": exact, also in groups whose
            `Options` name a codec.

    It holds for calls made in it, by its thread (context, as of `contextvars`: an asyncio task has
    its own, and those around it until they end): an asynchronous call has the codec of the moment
    when it is made, wherever it is waited for. The innermost region counts; ``codec=`` of a call
    comes before it, and the `Options` of the group after it. What is exempt from codecs stays so.
    Every rank must be in the same region. Gradients that DDP reduces in ``backward()`` are such
    calls for models on the CPU alone: see docs/semantics.md.

    What is returned may be kept and entered again; as a decorator it is a region around each call
    of a function. Raises `InvalidArgumentError` (a ValueError) for what is no codec, and where it
    decorates coroutines and generators. "auto" is for groups and for single calls.
    """
    return CodecRegion(_checked(codec))


def codec_of_call(
    given: str | Codec | Auto | None, group: Codec | Auto | None
) -> Codec | Auto | None:
    """Of a call that was given `given`, in a group whose own codec is `group`."""
    if given is not None:
        return asked_for(given)
    region = here()
    return group if region is None else region.codec


def here() -> Region | None:
    """The innermost region of this context."""
    if not open_regions.count:
        return None
    region = current_region.get()
    while region is not None and not region.open:
        region = region.outer
    return region


@contextmanager
def outside_of_regions() -> Iterator[None]:
    token = current_region.set(None)
    try:
        yield
    finally:
        current_region.reset(token)


def _checked(codec: str | Codec | None) -> Codec | None:
    if codec is None or codec == EXACT:
        return None
    try:
        return codec_of(codec)
    except _core.InvalidArgumentError as error:
        raise _core.InvalidArgumentError(f"{error}, or None") from None
