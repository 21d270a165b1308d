"""Shared by the tests of public bug reports (test_cases_*.py).

A scenario is a module-level function `scenario(rank, world_size, ...)` that asserts for itself, so
that the same one runs over any transport, and on Gloo where Gloo is right. `ANY_WORLD` of each file
lists those that hold for any number of ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from pool import RankResult, torch_ranks

TRANSPORTS = ["shm", "tcp"]
# 64 float32 a message and 1024 a window: hundreds of elements cross many slice boundaries.
SMALL_SLICES = {
    "PYCOLL_SLOT_BYTES": "256",
    "PYCOLL_WINDOW_BYTES": "4096",
    "PYCOLL_FIFO_DEPTH": "2",
}
GUARD_BYTES = 64
GUARD = 0xA5


def run_case(
    world_size: int,
    scenario: Callable[..., Any],
    *args: Any,
    transport: str = "shm",
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    **options: Any,
) -> list[RankResult]:
    """`torch_ranks` over one transport. No rank may fail, nor native code end one on its own."""
    variables = {"PYCOLL_TRANSPORT": transport, **(env or {})}
    results = torch_ranks(world_size, scenario, *args, env=variables, timeout=timeout, **options)
    for result in results:
        assert "terminate called" not in result.stderr, result.stderr
        assert "Segmentation fault" not in result.stderr, result.stderr
    return results


# ---- Data ----


def numbered(rank: int, shape: Any, dtype: torch.dtype = torch.float32, salt: int = 0) -> Any:
    """Small integers that depend on position and rank: sums over a few ranks are exact."""
    count = torch.Size(shape).numel()
    whole = (torch.arange(count) * 7 + torch.arange(count) // 5 + 13 * rank + 3 * salt) % 11
    if dtype == torch.bool:
        return (whole % 3 == 0).reshape(shape)
    if dtype.is_complex:
        return torch.complex(whole.double(), (whole * 3 % 7).double()).to(dtype).reshape(shape)
    if dtype.itemsize == 1 and dtype.is_floating_point:
        whole %= 3  # two or three bits of mantissa
    return whole.to(torch.float32).to(dtype).reshape(shape)


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    """Their sum, where it is exact in their dtype; integers wrap, bools are or-ed."""
    dtype = parts[0].dtype
    if dtype == torch.bool:
        return torch.stack(parts).any(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if not (dtype.is_floating_point or dtype.is_complex):
        wide = torch.int64
    return torch.stack([part.to(wide) for part in parts]).sum(0).to(dtype)


def as_bytes(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return dense.view(torch.uint8).numpy().tobytes()


def same(tensor: torch.Tensor, expected: torch.Tensor, what: Any = "") -> None:
    """Shape, dtype and every bit."""
    assert tensor.shape == expected.shape, (what, tensor.shape, expected.shape)
    assert tensor.dtype == expected.dtype, (what, tensor.dtype, expected.dtype)
    if as_bytes(tensor) == as_bytes(expected):
        return
    for i, (got, wanted) in enumerate(zip(tensor.flatten(), expected.flatten(), strict=True)):
        if as_bytes(got) != as_bytes(wanted):
            raise AssertionError(
                f"{what}: element {i} of {list(tensor.shape)}: {got}, not {wanted}"
            )


class Guarded:
    """A tensor between two regions that nobody may write."""

    def __init__(self, values: torch.Tensor) -> None:
        size = values.numel() * values.element_size()
        self.base = torch.full((size + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8)
        inside = self.base[GUARD_BYTES : GUARD_BYTES + size]
        self.tensor = inside.view(values.dtype).view(values.shape)
        self.tensor.copy_(values)

    def check(self, expected: torch.Tensor, what: Any = "") -> None:
        same(self.tensor, expected, what)
        assert (self.base[:GUARD_BYTES] == GUARD).all(), f"{what}: wrote before the tensor"
        assert (self.base[-GUARD_BYTES:] == GUARD).all(), f"{what}: wrote behind the tensor"


# ---- Calls ----


def finish(work: Any) -> None:
    """A synchronous call may give no work."""
    if work is not None:
        work.wait()


def error_of(call: Callable[[], Any], *kinds: type[BaseException]) -> str:
    """The text of the error that `call` must raise."""
    allowed = kinds or (RuntimeError, ValueError)
    try:
        call()
    except allowed as error:
        return str(error)
    raise AssertionError("no error was raised")


def all_words(text: str, *words: Any) -> None:
    for word in words:
        assert str(word).lower() in text.lower(), f"{word!r} is not in: {text}"


def still_works(rank: int, w: int, group: Any = None) -> None:
    tensor = torch.arange(5.0) + rank
    dist.all_reduce(tensor, group=group)
    same(tensor, torch.arange(5.0) * w + w * (w - 1) // 2, "after an error")


# ---- What is left ----


def footprint() -> tuple[int, int, int]:
    """Descriptors and threads of this process, and files in /dev/shm."""
    files = sum("pycoll" in name for name in os.listdir("/dev/shm"))
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), files


@contextlib.contextmanager
def leaves_nothing() -> Iterator[None]:
    """No more descriptors, threads and files afterwards than before; they get a moment to end.
    Called by all ranks."""
    # The group's own threads start when there is something that nobody waits for.
    for work in [dist.barrier(async_op=True) for _ in range(20)]:
        while not work.is_completed():
            time.sleep(0.001)
    descriptors, threads, files = footprint()
    # A second thread serves while the first is in a callback: it may not have been needed yet.
    limits = (descriptors, threads + 1, files)
    yield
    gc.collect()
    deadline = time.monotonic() + 3
    while any(now > limit for now, limit in zip(footprint(), limits, strict=True)):
        assert time.monotonic() < deadline, (limits, footprint())
        time.sleep(0.02)


def on_own_group(rank: int, w: int, seconds: float, call: Callable[[Any], Any]) -> Any:
    """`call(group)` on a group of all ranks that may end by it. Afterwards the world's group works,
    and nothing is left of this one."""

    def made() -> Any:
        group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
        still_works(rank, w, group)
        # An abort may overtake results: nobody ends the group before all have used it.
        dist.barrier()
        try:
            return call(group)
        finally:
            dist.destroy_process_group(group)

    still_works(rank, w)
    with leaves_nothing():
        value = made()
    still_works(rank, w)
    return value


def rss_bytes(field: str = "VmRSS") -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")
