"""codec="auto" on groups of torch.distributed: pycoll/auto.py over backends."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from pycoll import _core, _native
from pycoll.advisor import ITEM_BYTES, Bytes
from pycoll.auto import Auto, Choice, Chooser, auto_only, choose
from pycoll.codecs import Codec
from pycoll.options import MIN_BYTES

__all__ = ["choose_codec", "codec_choice"]


class BackendTrial:
    """A backend as pycoll/auto.py measures it. `variables`: the group's own."""

    def __init__(self, backend: Any, variables: Mapping[str, str]) -> None:
        self.world_size: int = backend.size()
        self._backend = backend
        transports = variables.get("PYCOLL_TRANSPORT", os.environ.get("PYCOLL_TRANSPORT", "auto"))
        self._may_share = transports in ("", "auto") or "shm" in transports

    def shares_memory(self) -> bool:
        host = hashlib.sha256(_core.host_identity().encode()).digest()[:6]
        # 48 bits, exact in a float64.
        mine = [float(self._may_share), float(int.from_bytes(host, "little"))]
        rows = self.gather(mine)
        return self._may_share and all(row == mine for row in rows)

    def all_reduce(self, values: Bytes, dtype: str, codec: Codec | None) -> None:
        tensor = torch.from_numpy(values).view(getattr(torch, dtype))
        op = dist.ReduceOp(dist.ReduceOp.AVG)
        fields = None if codec is None else codec._fields(0)
        work = self._backend.all_reduce_over(tensor, op, False, fields, None, None)
        if work is not None:
            work.wait()

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        work = self._backend.allgather([rows], [own])
        if work is not None:
            work.wait()
        return [row.tolist() for row in rows]


class Groups:
    """What the groups of this process have chosen: torch's own objects have no room for it."""

    def __init__(self) -> None:
        self._choosers: WeakKeyDictionary[Any, Chooser] = WeakKeyDictionary()
        # By name: what Options gave a group, or chose for it. Torch may use a name again for a new
        # group, which then is made here too.
        self._fixed: dict[str, Choice] = {}

    def made(self, name: str, choice: Choice | None) -> None:
        self._fixed.pop(name, None)
        if choice is not None:
            self._fixed[name] = choice

    def fixed(self, group: Any) -> Choice | None:
        return self._fixed.get(group.group_name)

    def chooser(self, group: Any) -> Chooser:
        known = self._choosers.get(group)
        if known is None:
            known = Chooser(BackendTrial(backend_of(group), {}))
            known = self._choosers.setdefault(group, known)
        return known


groups = Groups()


CPU = torch.device("cpu")


def backend_of(group: Any, device: torch.device = CPU) -> Any:
    """The pycoll backend of the group for tensors there; None when another one serves them."""
    if not isinstance(group, dist.ProcessGroup):  # torch's mark of ranks outside a group
        return None
    try:
        backend = group._get_backend(device)
    except RuntimeError:
        return None
    return backend if isinstance(backend, _native.load().Backend) else None


def choose_for_new_group(
    name: str,
    variables: Mapping[str, str],
    auto: Auto,
    create: Callable[[str, Codec | None, int], Any],
) -> Choice:
    """Collective over the ranks of a group that is being made: by a group of its own, which is gone
    when this returns. `create(name, codec, min_bytes)` makes a backend of these ranks."""
    probe = create(f"{name}/codec_auto", None, MIN_BYTES)
    try:
        return choose(BackendTrial(probe, variables), auto, "float32")
    finally:
        probe.shutdown()


# ---- Calls ----


def codec_for(group: Any, codec: Auto, tensor: torch.Tensor, op: Any) -> Codec | None:
    """Of an all_reduce with codec="auto"; None: torch's own call does it.

    Collective where the group has to choose first.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    size = tensor.numel() * tensor.element_size()
    sums = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
    # Then the group's own codec serves its calls, or it has chosen none.
    fixed = groups.fixed(group) is not None
    if fixed or dtype not in ITEM_BYTES or not sums or size < MIN_BYTES:
        return None
    return groups.chooser(group).choice(codec, dtype).codec_for(size)


def codec_choice(
    group: Any = None, codec: str | Auto = "auto", dtype: str = "float32"
) -> Choice | None:
    """What a torch.distributed group has chosen for ``codec="auto"``, and why (`Choice.why`).

    For a group with a codec in its `Options` that one, chosen when the group was made or given;
    else what its first `pycoll.all_reduce` with `codec` of that dtype chose, None before. Raises
    ValueError for a group of another backend.
    """
    group = checked(group)
    fixed = groups.fixed(group)
    return fixed if fixed else groups.chooser(group).known(auto_only(codec), dtype)


def choose_codec(group: Any = None, codec: str | Auto = "auto", dtype: str = "float32") -> Choice:
    """Measures what pays, now, for later `pycoll.all_reduce` with `codec` of that dtype.

    Collective over the group. The first such call does so by itself, and no later one does. Raises
    UnsupportedError for a group with a codec in its `Options`, which it keeps.
    """
    group = checked(group)
    if groups.fixed(group):
        raise _core.UnsupportedError(
            "choose_codec: this group's Options gave it a codec, or let it choose one, for life: "
            "make a new group"
        )
    if dtype not in ITEM_BYTES:
        raise _core.InvalidArgumentError(f"codecs take {', '.join(ITEM_BYTES)}, not {dtype!r}")
    return groups.chooser(group).again(auto_only(codec), dtype)


def checked(group: Any) -> Any:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank does not belong to that group")
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("there is no default group: init_process_group() has not been called")
    if backend_of(group) is None:
        raise ValueError("the group's backend for CPU tensors is not pycoll's")
    return group
