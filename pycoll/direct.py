"""Collectives on torch tensors, called directly: for code that is bound by the cost of a call.

`torch.distributed.all_reduce` spends some microseconds in Python and in torch's dispatcher before a
backend sees the call; these functions do not. They run on the same groups, in the same order of
calls, with the same results and errors, and may be mixed with torch's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pycoll import _core, _native
from pycoll._codec_choice import backend_of, codec_for
from pycoll._regions import codec as region
from pycoll._regions import codec_of_call, here, outside_of_regions
from pycoll.auto import Auto
from pycoll.codecs import Codec

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


def _all_reduce(
    tensor: torch.Tensor,
    op: str | Any = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: str | Codec | Auto | None = None,
    step: int | None = None,
    residual: torch.Tensor | None = None,
    sum_residual: torch.Tensor | None = None,
) -> Any:
    """Combines `tensor` over all ranks of the group, in place; every rank gets the same bits.

    `tensor`: any shape, strides and dtype that `torch.distributed.all_reduce` takes, the same
    number of elements on every rank. `op`: "sum", "avg", "product", "min", "max", "band", "bor",
    "bxor", or what torch has (`ReduceOp.SUM`, ...). `group`: None is the default group. Returns
    None, with `async_op` torch's Work.

    `codec`: tensors of float32, float16 and bfloat16 travel as codes (a name such as "int8", or
    an object of `pycoll.codecs`) under "sum" and "avg", but for those below the group's
    `Options.min_bytes`; "none": exact; None: as the region (`pycoll.codec`) says, else as the
    group's `Options` do. Every rank must give the same one, and gets the same bits: what the codes
    of the sum decode to. `step`: what the random numbers of stochastic rounding depend on beside
    the codec's seed; None: the number of the call. A call on a GPU that is captured in a graph has
    one step in all replays.
    "auto", or a `pycoll.Auto`, of CPU tensors: the first such call of the group, also an
    asynchronous one, measures what pays on its network, and the group keeps to it (`codec_choice`,
    `choose_codec`).

    `residual`: error feedback (Karimireddy et al., ICML 2019). A dense float32 tensor of as
    many elements on the same device, zeros at first. What is encoded is the value plus its
    residual, which then becomes what the code lacks of it; values that are not finite leave it as
    it is, and so does a call that is exempt. `sum_residual`: the same for the sum (the mean, under
    "avg"), which is encoded by its owners: each rank uses a part of its own.

    Raises what torch.distributed raises: `DistBackendError`
    when a rank died, came too late or called something else, `RuntimeError` and `ValueError` for
    arguments.
    """
    import torch

    if isinstance(op, str):
        if op not in _OPS:
            raise ValueError(f"{op!r} is no reduce operation; there are: {', '.join(_OPS)}")
        op = _OPS[op]
    if codec is None:
        if residual is None and sum_residual is None:
            return dist.all_reduce(tensor, op, group, async_op)  # as the region or the group says
        if here() is None:
            raise ValueError("all_reduce: residuals are those of a codec, which was not given")
    given = codec_of_call(codec, None)
    if not isinstance(tensor, torch.Tensor) or group is dist.GroupMember.NON_GROUP_MEMBER:
        return dist.all_reduce(tensor, op, group, async_op)  # which says so
    group = group or dist.group.WORLD
    backend = backend_of(group, tensor.device)
    if backend is None:
        if given is None:
            with region(None):
                return dist.all_reduce(tensor, op, group, async_op)
        raise _core.UnsupportedError(
            f"all_reduce with a codec: a group of {dist.get_backend(group)} and a tensor on "
            f"{tensor.device}; codecs serve tensors of groups of pycoll"
        )
    if isinstance(given, Auto) and tensor.device.type != "cpu":
        raise _core.UnsupportedError(
            f"all_reduce of a tensor on {tensor.device}: 'auto' measures what pays for CPU "
            "tensors; name a codec, such as 'int8'"
        )
    chosen = codec_for(group, given, tensor, op) if isinstance(given, Auto) else given
    if chosen is None and given is not None:
        with outside_of_regions():
            return dist.all_reduce(tensor, op, group, async_op)
    for name, kept in (("residual", residual), ("sum_residual", sum_residual)):
        if kept is not None and not isinstance(kept, torch.Tensor):
            raise ValueError(
                f"all_reduce: {name} is a dense float32 CPU tensor of as many elements as the "
                f"tensor, not a {type(kept).__name__}"
            )
    if not isinstance(op, dist.ReduceOp):
        op = dist.ReduceOp(op)
    fields = None if chosen is None else chosen._fields(step)
    return backend.all_reduce_over(tensor, op, async_op, fields, residual, sum_residual)


all_reduce = _native.load().make_all_reduce(distributed_c10d._world, backend_of, _all_reduce)
