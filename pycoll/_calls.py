"""What a call is told beside its arrays."""

from __future__ import annotations

from pycoll import _core
from pycoll._arrays import Array


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


class Message:
    """One side of a point-to-point message."""

    def __init__(
        self, receives: bool, array: Array, peer: int | None, tag: int, timeout: float | None
    ) -> None:
        self.receives = receives
        self.array = array
        self.peer = peer
        self.tag = tag
        self.timeout = timeout
