"""Groups that go on without some of their ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["shrink_group"]


def shrink_group(
    ranks_to_exclude: Iterable[int], group: ProcessGroup | None = None, *, abort: bool = False
) -> ProcessGroup:
    """`torch.distributed.shrink_group`, for groups that DistributedDataParallel shall use.

    torch (2.13) gives every shrunken group the type of Gloo or NCCL, for whose classes
    DistributedDataParallel then takes its backend, and the process crashes. Here it gets its own.

    Args:
        ranks_to_exclude: ranks of `group` that do not take part, and need not live. All callers
            give the same.
        group: of the backend pycoll; None is the default group, which the new one then replaces:
            all other groups are destroyed, and ranks are numbered anew. It may have ended by an
            error; its store must live.
        abort: ends what is under way in `group` first.

    Returns the group of the ranks that are left, whose order is kept.

    Raises ValueError or RuntimeError for lists that cannot be, and what making a group raises: a
    rank that does not come, or comes with another list, is waited for until PYCOLL_CONNECT_TIMEOUT.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    old = c10d._get_default_group() if group is None else group
    devices = list(old._device_types)
    flags = c10d.SHRINK_ABORT if abort else c10d.SHRINK_DEFAULT
    made = dist.shrink_group(list(ranks_to_exclude), group, flags)
    # torch registers it for one device alone.
    (backend,) = {made._get_backend(device) for device in made._device_types}
    kind = dist.ProcessGroup.BackendType.CUSTOM
    for device in devices:
        made._register_backend(device, kind, backend)
    made._set_default_backend(kind)
    return made
