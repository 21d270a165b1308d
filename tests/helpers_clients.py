"""Runs clients of torch.distributed (DDP, FSDP, DTensor, ...) on pycoll and on Gloo, and compares.

A client is a module-level function `client(rank, world_size, ...)`, as for `pool.torch_ranks`, that
returns numbers and tensors in dicts and lists. What it trains returns the `outcome` of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pool import RankResult, torch_ranks

WORLD = 4
# Where sums may be taken in another order.
EXACT = 1e-12
SINGLE = 1e-5  # in float32


def compare(
    world_size: int,
    client: Callable[..., Any],
    *args: Any,
    tolerance: float = EXACT,
    backend: str = "pycoll",
    timeout: float = 120,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """What `client` returned on each rank of `backend`, after a comparison with Gloo's.

    `tolerance` is relative and absolute, for floats; all else must be equal.
    """
    arguments: Any = (on_backend, client, args)
    ours = torch_ranks(world_size, *arguments, "pycoll", backend=backend, timeout=timeout, env=env)
    theirs = torch_ranks(world_size, *arguments, "gloo", backend="gloo", timeout=timeout, env=env)
    for mine, other in zip(ours, theirs, strict=True):
        alike(mine.value, other.value, tolerance, f"rank {mine.rank}")
    return values(ours)


def values(results: list[RankResult]) -> list[Any]:
    return [result.value for result in results]


def on_backend(
    rank: int, w: int, client: Callable[..., Any], args: tuple[Any, ...], expected: str
) -> Any:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert expected in type(backend).__module__ + type(backend).__name__.lower(), type(backend)
    torch.manual_seed(1)
    return plain(client(rank, w, *args))


def plain(value: Any) -> Any:
    """With arrays in place of tensors, which would travel between processes by descriptor."""
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        dense = value.detach().clone().resolve_conj()
        return (dense.float() if dense.dtype == torch.bfloat16 else dense).numpy()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def alike(mine: Any, other: Any, tolerance: float, path: str) -> None:
    """The same structure, and the same numbers to `tolerance`."""
    assert type(mine) is type(other), (path, mine, other)
    if isinstance(mine, dict):
        assert mine.keys() == other.keys(), path
        for key, item in mine.items():
            alike(item, other[key], tolerance, f"{path}, {key}")
    elif isinstance(mine, list):
        assert len(mine) == len(other), path
        for i, (one, another) in enumerate(zip(mine, other, strict=True)):
            alike(one, another, tolerance, f"{path}[{i}]")
    elif isinstance(mine, (np.ndarray, float)):
        first, second = np.asarray(mine), np.asarray(other)
        assert (first.dtype, first.shape) == (second.dtype, second.shape), path
        np.testing.assert_allclose(first, second, tolerance, tolerance, err_msg=path)
    else:
        assert mine == other, (path, mine, other)


# ---- Training ----


class Block(nn.Module):
    """Layers whose sizes no number of ranks divides, with a residual connection."""

    def __init__(self, size: int, hidden: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size, dtype=dtype)
        self.up = nn.Linear(size, hidden, dtype=dtype)
        self.down = nn.Linear(hidden, size, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def blocks(size: int = 7, hidden: int = 13, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The same model on every rank; its last layer has fewer rows than there are ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(
            Block(size, hidden, dtype), Block(size, hidden, dtype), nn.Linear(size, 3, dtype=dtype)
        )


def batch(step: int, part: int, size: int = 7, dtype: torch.dtype = torch.float64) -> Any:
    """Inputs and targets of one step and one part of the global batch; `part` is mostly a rank."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    x = torch.randn(5, size, generator=generator, dtype=torch.float64)
    y = torch.stack([x.sum(1).sin(), x.prod(1), x.amax(1)], 1)
    return x.to(dtype), y.to(dtype)


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: Iterable[int],
    steps: int = 5,
    dtype: torch.dtype = torch.float64,
    after_backward: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Losses of training on these parts of each step's batch; a step sees always the same one."""
    parts, losses = list(parts), []
    for _ in range(steps):
        optimizer.zero_grad()
        pairs = [batch(0, part, dtype=dtype) for part in parts]
        x, y = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        after_backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    return losses


def outcome(model: nn.Module, losses: list[float]) -> dict[str, Any]:
    """Losses, and parameters and buffers as one process would have them."""
    return {"losses": losses, "state": plain(model.state_dict())}


def in_one_process(parts: Iterable[int], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """The outcome of one process with the whole batch: what data parallelism must come to."""
    model = blocks(dtype=dtype)
    losses = fit(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), parts, dtype=dtype)
    return outcome(model, losses)
