"""Compressed gradients for stock DistributedDataParallel.

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    state = pycoll.CompressionState(None, "int4")
    ddp.register_comm_hook(state, pycoll.compress_hook)

What compresses is an argument: a codec of `pycoll.codecs` (its name or an object), `PowerSGD`,
`TopK` or `RandomK`. What the compression leaves out of a gradient is kept on its rank, by parameter
name, and goes into the next step (error feedback). `OneBitAdam` is an optimizer with a state of its
own for the hook. Every rank ends each step with the same bits, whatever compresses.
"""

from __future__ import annotations

from pycoll.hooks.hook import compress_hook
from pycoll.hooks.one_bit_adam import OneBitAdam
from pycoll.hooks.power_sgd import PowerSGD
from pycoll.hooks.sparse import RandomK, TopK
from pycoll.hooks.state import CompressionState, fewer_than_two_dimensions

__all__ = [
    "CompressionState",
    "OneBitAdam",
    "PowerSGD",
    "RandomK",
    "TopK",
    "compress_hook",
    "fewer_than_two_dimensions",
]
