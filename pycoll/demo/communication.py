"""How long training waits for gradients.

No `from __future__ import annotations` here: DDP compares the hook's annotations with its types.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


class BackwardWait:
    """Seconds that backward passes spent on communication and did nothing else.

    The hook is torch's own all-reduce hook between two clock readings. It counts

    * the time inside the hook: a backend may run a small all-reduce in the caller's thread;
    * the time from the return of the last hook to the end of backward: the last bucket is full
      when the last gradient is there, so what is left is waiting.

    Communication that hides behind the rest of backward costs the training nothing and is not
    counted; waiting for a rank that comes late is. The measurement itself is a Python call a
    bucket, tens of microseconds a step.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = 0.0  # return of the newest hook of this backward pass; 0: none yet

    def hook(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        start = time.perf_counter()
        future = allreduce_hook(dist.group.WORLD, bucket)
        self._last = time.perf_counter()
        self.seconds += self._last - start
        return future

    def start(self) -> None:
        self._last = 0.0

    def stop(self) -> None:
        if self._last:
            self.seconds += time.perf_counter() - self._last
