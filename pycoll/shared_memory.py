"""Memory that the other ranks of this host can read and write in place.

A collective on such memory makes no staging copies. Everything works without it, and on a mixture:
what is not shareable is staged. All of it lies in one arena of this process, which its peers map
once; see "Shareable memory" in docs/architecture.md.

After `os.fork` a child has its own view of the arena: what it writes, nobody else sees. But what it
reads is no snapshot: memory that it has not written shows what the parent writes later. So a
DataLoader worker should not read shareable tensors of its parent.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from pycoll import _core, _native

if TYPE_CHECKING:
    import torch

    TensorT = TypeVar("TensorT", bound=torch.Tensor)


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised contiguous CPU tensor in shareable memory, of any size.

    `size` is the shape, as for `torch.empty`: integers, or one sequence of them. `dtype` defaults
    to torch's default dtype. When there is no room, or no arena (`pycoll doctor` says why), the
    tensor is in ordinary memory; `is_shareable` tells. Each tensor takes a multiple of 2 MiB of the
    arena's address space, so this is for large ones: a small one costs a page of memory.

    Raises RuntimeError for negative sizes, TypeError for what is no size or no torch.dtype, and
    ImportError without torch.
    """
    import torch

    if len(size) == 1 and isinstance(size[0], Sequence):
        size = tuple(size[0])
    sizes = [operator.index(length) for length in size]  # type: ignore[arg-type]
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"empty: dtype is {dtype!r}, and must be a torch.dtype like torch.float32")
    return _native.load().empty_shareable(sizes, dtype)


def empty_array(shape: int | Sequence[int], dtype: npt.DTypeLike = np.float64) -> npt.NDArray[Any]:
    """The same for NumPy, without torch: an uninitialised C-contiguous array of any shape.

    Raises InvalidArgumentError for a dtype whose elements are Python objects, ValueError for
    negative sizes, TypeError for what is no size.
    """
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise _core.InvalidArgumentError(
            f"empty_array: elements of dtype {kind} are Python objects, which other processes "
            "cannot read"
        )
    given = shape if isinstance(shape, Sequence) else (shape,)
    sizes = tuple(operator.index(length) for length in given)
    if any(length < 0 for length in sizes):
        raise ValueError(f"empty_array: negative dimensions are not allowed: {sizes}")
    length = math.prod(sizes) * kind.itemsize
    # What is larger than any memory is NumPy's to refuse.
    memory = _core.allocate_shareable(length) if 0 < length <= sys.maxsize else None
    if memory is None:
        return np.empty(sizes, kind)
    return np.ndarray(sizes, kind, buffer=memory)


def share_(tensor: TensorT) -> TensorT:
    """Moves the memory of a CPU tensor into shareable memory, and returns the tensor.

    Values stay, and so does every view: all tensors on that storage move together, gradients and
    parameters included. A later `resize_` stays in shareable memory. The whole storage moves, also
    when the tensor is a small part of it. When there is no room nothing happens; `is_shareable`
    tells.

    Raises InvalidArgumentError for what is no torch tensor, is not on the CPU, is sparse, nested or
    a wrapper around others, or whose memory is known outside of torch (`from_numpy`, `.numpy()`,
    `share_memory_()`, memory-mapped files). torch does not know of raw pointers and DLPack
    capsules that were made before; they must not be used any more. So must no operation be under
    way on the tensor, as with all that gives a tensor other memory.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise _core.InvalidArgumentError(
            f"share_: a {type(tensor).__name__} is no torch tensor; NumPy arrays cannot be moved, "
            "make them with pycoll.empty_array"
        )
    if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_shared():
        reason = "the tensor is in torch's own shared memory, where other processes may see it"
    else:
        reason = _native.load().share(tensor)
    if reason:
        raise _core.InvalidArgumentError(
            f"share_: {reason}; copy it into a tensor from pycoll.empty(...) instead"
        )
    return tensor


@contextlib.contextmanager
def shareable() -> Iterator[None]:
    """CPU tensors of 64 KiB and more that this thread makes inside land in shareable memory.

        with pycoll.shareable():
            ddp = DistributedDataParallel(model)

    puts all buckets of DDP there (and `param.grad` with `gradient_as_bucket_view=True`), also those
    that it makes in its second forward pass, when it rebuilds them in the order of the gradients.
    The buffers of `fully_shard` are made in each step: put the training loop inside.

    A generator or coroutine that is suspended inside leaves its thread in the scope meanwhile.

    Only what goes through torch's CPU allocator is served: not `from_numpy`, not `copy.deepcopy` of
    a tensor, not memory-mapped files. Tensors stay shareable after the scope. Raises ImportError
    without torch.
    """
    from torch.nn.modules import module

    native = _native.load()
    cover = functools.partial(_cover_bucket_rebuild, threading.get_ident())
    hook = module.register_module_module_registration_hook(cover)
    entered = native.enter_shareable()
    try:
        yield
    finally:
        native.leave_shareable(entered)
        hook.remove()


def is_shareable(memory: torch.Tensor | npt.NDArray[Any]) -> bool:
    """Whether other ranks of this host can read and write all of a tensor or array in place.

    False in a forked child for what its parent made: its memory is its own there. False, too, for
    what a peer may still write after an operation failed: it was made this process's own, so that
    it can be filled anew. Memory of no bytes is shareable. Raises InvalidArgumentError for what is
    neither a tensor nor an array.
    """
    if isinstance(memory, np.ndarray):
        if memory.size == 0:
            return True
        spans = [stride * (n - 1) for stride, n in zip(memory.strides, memory.shape, strict=True)]
        low = memory.ctypes.data + sum(span for span in spans if span < 0)
        length = sum(map(abs, spans)) + memory.itemsize
        return _core.is_shareable(low, length)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(memory, torch.Tensor):
        raise _core.InvalidArgumentError(
            f"is_shareable: a {type(memory).__name__} is neither a tensor nor a numpy.ndarray"
        )
    if memory.layout is not torch.strided or memory.device.type != "cpu":
        return False
    if memory.numel() == 0:
        return True
    storage = memory.untyped_storage()
    return _core.is_shareable(storage.data_ptr(), storage.nbytes())


def shared_memory_stats() -> dict[str, int]:
    """What this process's arena holds, in bytes; all zero before its first use.

    `size` is its address space, `live` what tensors and arrays hold, `peak` the most that ever was,
    `cached` what is freed and kept for the next, `quarantined` what is freed but may still be
    written by a peer after an operation that failed, `backed` the memory that the kernel has given
    to all of it, `large` how much was ever made into large pages. `blocks`, `allocations`, `reused`
    (from the cache) and `refused` (for want of room) are counts.
    """
    return _core.shareable_statistics()


def serve_whole_process() -> None:
    """What PYCOLL_SHARED_ALLOCATOR=1 does: every CPU tensor of 1 MiB or more, on every thread."""
    _native.load().serve_everywhere()


def _cover_bucket_rebuild(thread: int, module: Any, name: str, _submodule: Any) -> None:
    """Sees the DDP instances that are made in a scope; called for every module that gets a child.

    DDP allocates its final buckets outside of the scope, between two steps of `_pre_forward`, so
    that one is covered until it has happened. The name is private to torch: where it is missing,
    those buckets are in ordinary memory.
    """
    from torch.nn.parallel import DistributedDataParallel

    if (
        name == "module"
        and threading.get_ident() == thread
        and isinstance(module, DistributedDataParallel)
        and hasattr(type(module), "_pre_forward")
    ):
        # On the instance, by a partial: it can be pickled and copied with it.
        module.__dict__["_pre_forward"] = functools.partial(_pre_forward_in_scope, module)


def _pre_forward_in_scope(ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
    native = _native.load()
    entered = native.enter_shareable()
    try:
        return type(ddp)._pre_forward(ddp, *inputs, **kwargs)
    finally:
        native.leave_shareable(entered)
        if getattr(ddp, "_has_rebuilt_buckets", False):
            ddp.__dict__.pop("_pre_forward", None)
