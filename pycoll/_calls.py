"""What a call is told beside its arrays, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycoll import _core
from pycoll._arrays import Array

if TYPE_CHECKING:
    from pycoll.auto import Auto
    from pycoll.codecs import Codec


class Call:
    """A collective."""

    def __init__(
        self,
        collective: str,
        op: str,
        factor: float,
        root: int,
        algorithm: str,
        timeout: float | None,
        codec: str | Codec | Auto | None = None,
        step: int | None = None,
    ) -> None:
        if factor != 1.0 and op != "premul_sum":
            raise _core.InvalidArgumentError(
                f"{collective}: factor={factor} is for op='premul_sum', not for op='{op}'"
            )
        self.collective = collective
        self.op = op
        self.factor = factor
        self.root = root
        self.algorithm = algorithm
        self.timeout = timeout
        self.codec = codec
        self.step = step
        self.residuals: tuple[Array | None, Array | None] = (None, None)


class Message:
    """One side of a point-to-point message."""

    def __init__(
        self,
        receives: bool,
        array: Array,
        peer: int | None,
        tag: int,
        timeout: float | None,
        codec: str | Codec | None = None,
        step: int | None = None,
    ) -> None:
        self.receives = receives
        self.array = array
        self.peer = peer
        self.tag = tag
        self.timeout = timeout
        self.codec = codec
        self.step = step


class Work:
    """A call that was started with ``async_op=True``."""

    def __init__(self, core: _core.WorkCore | _core.DeviceWork, arrays: Sequence[Any] = ()) -> None:
        self._core = core
        self._arrays = arrays  # on a GPU: they live as long as this

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the result is in the output arrays (a send: until the array is free again).

        Returns False when `timeout` (seconds) passed first; the operation goes on. Raises what the
        synchronous call would raise. For arrays on a GPU this waits for the GPU, and raises what
        went wrong there.
        """
        return self._core.wait(timeout)

    def is_completed(self) -> bool:
        """True when wait() would return at once: the outputs hold the result, or it failed."""
        return self._core.done()

    @property
    def source(self) -> int | None:
        """The rank whose message a finished `recv` took; None for everything else."""
        source = self._core.source
        return None if source < 0 else source
