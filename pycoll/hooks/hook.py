"""What DistributedDataParallel calls."""

from typing import Any

import torch
import torch.distributed as dist

from pycoll import _core
from pycoll.hooks.state import CompressionState

__all__ = ["compress_hook"]


# This file has no `from __future__ import annotations`: DDP compares the annotations of hooks.
def compress_hook(
    state: CompressionState, bucket: dist.GradBucket, *others: Any
) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: ``ddp.register_comm_hook(CompressionState(...), compress_hook)``.

    Averages the gradients of a bucket over the ranks of the state's group. The futures of all
    buckets are complete when the last bucket's call returns, which waits for the ranks; an error of
    a collective comes out of `backward()` as it is.

    Raises `InvalidArgumentError` (a ValueError) for another state, `UnsupportedError` where another
    wrapper than DDP calls it: FullyShardedDataParallel gives its hooks tensors, not buckets.
    """
    if not isinstance(state, CompressionState):
        raise _core.InvalidArgumentError(
            f"compress_hook: the state is a {type(state).__name__}, not a pycoll.CompressionState: "
            "ddp.register_comm_hook(pycoll.CompressionState(None, codec), pycoll.compress_hook) "
            "with a codec such as 'int8' or pycoll.PowerSGD(rank=2) (of a pycoll.OneBitAdam: "
            "optimizer.compression())"
        )
    if not isinstance(bucket, dist.GradBucket):
        raise _core.UnsupportedError(
            f"compress_hook was called with a {type(bucket).__name__}, not with a bucket of "
            "gradients: it is for torch.nn.parallel.DistributedDataParallel. For sharded models "
            "(FullyShardedDataParallel, fully_shard) there is no error feedback; their "
            "reduce_scatter is compressed by a codec of the group: "
            "init_process_group(..., pg_options=pycoll.Options(codec='int8'))"
        )
    return state._hook(bucket)
