"""Collectives on torch tensors, called directly: for code that is bound by the cost of a call.

`torch.distributed.all_reduce` spends some microseconds in Python and in torch's dispatcher before a
backend sees the call; these functions do not. They run on the same groups, in the same order of
calls, with the same results and errors, and may be mixed with torch's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pycoll import _native

if TYPE_CHECKING:
    import torch

__all__ = ["all_reduce"]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def _backend_of(group: dist.ProcessGroup) -> Any:
    """The pycoll backend of the group for CPU tensors; None when another one serves them."""
    import torch

    if not isinstance(group, dist.ProcessGroup):  # torch's mark of ranks outside a group
        return None
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
    return backend if isinstance(backend, _native.load().Backend) else None


def _all_reduce(
    tensor: torch.Tensor,
    op: str | Any = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Combines `tensor` over all ranks of the group, in place; every rank gets the same bits.

    `tensor`: any shape, strides and dtype that `torch.distributed.all_reduce` takes, the same
    number of elements on every rank. `op`: "sum", "avg", "product", "min", "max", "band", "bor",
    "bxor", or what torch has (`ReduceOp.SUM`, ...). `group`: None is the default group. Returns
    None, with `async_op` torch's Work. Raises what torch.distributed raises: `DistBackendError`
    when a rank died, came too late or called something else, `RuntimeError` and `ValueError` for
    arguments.
    """
    if isinstance(op, str):
        if op not in _OPS:
            raise ValueError(f"{op!r} is no reduce operation; there are: {', '.join(_OPS)}")
        op = _OPS[op]
    return dist.all_reduce(tensor, op, group, async_op)


all_reduce = _native.load().make_all_reduce(distributed_c10d._world, _backend_of, _all_reduce)
