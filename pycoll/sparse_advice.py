"""Whether sending few gradients pays on a link: `pycoll.hooks.TopK` beside the codecs of `advisor`.

Every rank sends a share of its values, with their places: 8 bytes each. They are gathered, so that
a rank receives 8 r n (W-1) bytes of n values of W ranks; an exact all_reduce of float32 moves
8 n (W-1)/W: nothing is saved from r = 1/W on. In a step most of a gradient is missing, and with
error feedback comes later; what that does to training no figure of one step says. So it is
proposed, and recommended only to who allows an error that large.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pycoll import advisor
from pycoll.advisor import Advice, Estimate, Wire, Workload

__all__ = ["Cost", "estimates", "measure_cost", "proposal"]

# Of the values: what TopK sends unless told otherwise, and what Deep Gradient Compression does (Lin
# et al., ICLR 2018).
RATIOS = (0.01, 0.001)
NAME = "top_k "  # of an estimate; the share follows
PLACED = 8  # bytes of a value and its place
UNIT = 4 << 20  # bytes of gradients that CompressionState sends at a time


@dataclass(frozen=True)
class Cost:
    """Of top-k on one core: seconds a value of a unit's gradients, and what a step lacks of them if
    they are gaussian. (They are rarely so even: their largest values hold more.)"""

    ratio: float
    choose: float  # and to keep the rest for the next step
    add: float  # what all ranks sent, and to write the mean
    error: float  # relative L2 error of a step's mean; no less over ranks, which choose alone

    @property
    def name(self) -> str:
        return f"{NAME}{self.ratio:g}"


def estimates(workload: Workload, wire: Wire, *, max_error: float = 0.02,
              cost: Callable[[float, Workload], Cost] | None = None) -> list[Estimate]:  # fmt: skip
    """One of each ratio below 1 / ranks; none on a single host, or without torch."""
    cost = cost or measure_cost
    if workload.hosts == 1 or not has_torch():
        return []
    ratios = [ratio for ratio in RATIOS if ratio * workload.world_size < 1]
    return [estimate_of(workload, wire, cost(ratio, workload), max_error) for ratio in ratios]


def has_torch() -> bool:
    try:
        import pycoll.hooks  # noqa: F401
    except ImportError:
        return False
    return True


def estimate_of(workload: Workload, wire: Wire, cost: Cost, max_error: float) -> Estimate:
    units = max(1, round(workload.count * advisor.ITEM_BYTES[workload.dtype] / UNIT))
    sent = PLACED * math.ceil(cost.ratio * workload.count)
    on_wire = wire.gathered(sent // units)
    in_core = (cost.choose + cost.add) * workload.count
    total, core = units * on_wire.total, units * on_wire.core + in_core
    return Estimate(
        cost.name,
        sent * 8 / workload.count,
        cost.error,
        total * workload.buckets,
        in_core * workload.buckets,
        advisor.overlapped(total, core, units) * workload.buckets,
        f"error above {max_error:g}" if cost.error > max_error else "",
    )


def proposal(advice: Advice) -> str:
    """What to say of top-k beside the advice; empty where it gains nothing over what is advised."""
    few = [e for e in advice.estimates if e.name.startswith(NAME) and e.refused]
    if not few:
        return ""
    best = min(few, key=lambda estimate: estimate.seconds)
    gain = advice.best.seconds / best.seconds
    if gain < advisor.LEAST_GAIN:
        return ""
    ratio = best.name.removeprefix(NAME)
    return (
        f"or {best.name}: {gain:.2g} times faster than {advice.best.name}, if training can do with "
        f"{ratio} of each rank's values in a step and the others later (of gaussian values a "
        f"step lacks {best.error:.2g}): pycoll.CompressionState(None, "
        f"pycoll.TopK({ratio})), which keeps them"
    )


# ---- Top-k on this machine ----


def measure_cost(ratio: float, workload: Workload, *, rounds: int = 3,
                 clock: Callable[[], float] = time.thread_time) -> Cost:  # fmt: skip
    """Medians of `rounds` of what `TopK` does with a unit, after one that does not count."""
    import torch

    from pycoll.hooks.sparse import TopK

    size = UNIT // advisor.ITEM_BYTES[workload.dtype]
    count = min(size, workload.count)
    given = torch.from_numpy(advisor.values_of(count, workload.dtype))
    values = given.view(getattr(torch, workload.dtype))
    choosing, adding, error = [], [], 0.0
    with one_thread():
        group: Any = _Echo(workload.world_size)
        reduction = TopK(ratio)._reduction(group)
        for turn in range(rounds + 1):
            call: Any = _Call(values.clone(), torch.zeros(count))
            start = clock()
            reduction.launch(call)
            middle = clock()
            reduction.finish([call])
            choosing.append(middle - start)
            adding.append(clock() - middle)
            if turn == 0:
                exact = values.double()
                error = float((call.values.double() - exact).norm() / exact.norm())
    choose, add = (statistics.median(times[1:]) / count for times in (choosing, adding))
    return Cost(ratio, choose, add, error)


class _Echo:
    """A group in which every rank has sent what this one does, at once."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, sent: Any) -> tuple[Any, Any]:
        return self, sent.expand(self.size, -1).contiguous()

    def wait(self) -> None:
        pass


@dataclass
class _Unit:
    count: int


@dataclass
class _Call:
    values: Any
    residual: Any
    work: Any = None
    unit: _Unit = field(init=False)

    def __post_init__(self) -> None:
        self.unit = _Unit(len(self.values))


@contextmanager
def one_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
