"""What the collectives of a torch group have done so far."""

from __future__ import annotations

from typing import Any


def statistics(group: Any = None) -> dict[str, int]:
    """How many collectives of a torch.distributed group began with and without staging copies.

    `group` is a process group of the "pycoll" backend, None for the default one. The names are
    those of `Communicator.statistics()`: `zero_copy_calls`, `zero_copy_bytes`, `staged_calls`,
    `staged_bytes`, of this rank. Raises ValueError for a group of another backend, and for one that
    this rank does not belong to.
    """
    import torch
    import torch.distributed as dist

    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank does not belong to that group")
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("there is no default group: init_process_group() has not been called")
    backend = group._get_backend(torch.device("cpu"))
    if not hasattr(backend, "statistics"):
        raise ValueError(f"the group's backend for CPU tensors is {backend.name()}, not pycoll")
    counted: dict[str, int] = backend.statistics()
    return counted
