"""DDP models whose gradients are given, and what compression makes of them, in NumPy."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec_reference as reference
import pycoll
from codec_model import all_reduced, random_numbers, round_up, through
from codec_reference import Kind
from pool import torch_ranks

SHAPES = {"a": (70, 100), "bias": (64,), "b": (50, 130), "scale": (), "c": (3, 4, 5, 130)}
MATRICES = ["c", "b", "a"]  # as they travel: in the reverse of the model's order
COUNTS = {name: int(np.prod(SHAPES[name])) for name in SHAPES}


def ranks_of(world_size: int, function: Any, *args: Any) -> list[Any]:
    """`torch_ranks`, with time: the first DDP of a process imports for seconds, on one free CPU."""
    return torch_ranks(world_size, function, *args, timeout=240)


class Given(nn.Module):
    """Its gradients are what is given to forward, in that order: the last gets its gradient first.

    So DDP, which begins with the reverse of the model's order, cuts its buckets anew.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype=torch.float32):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sum((getattr(self, name) * g).sum() for name, g in gradients.items())


def gradients_of(rank: int, step: int, shapes=SHAPES, dtype=torch.float32) -> dict[str, Any]:
    """Gaussian for matrices, small integers for others. In an order of their own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    names = sorted(shapes)
    values = {}
    for name in names:
        x = torch.randn(shapes[name], generator=generator) * (rank + 1)
        values[name] = (x if len(shapes[name]) > 1 else (x * 10).round()).to(dtype)
    return {name: values[name] for name in names[2:] + names[:2]}


def joined(values: Mapping[str, torch.Tensor], names=MATRICES) -> np.ndarray:
    parts = [values[name].detach().reshape(-1).to(torch.float32) for name in names]
    return torch.cat(parts).numpy().copy()


def arrays(nested: Any) -> Any:
    """Tensors as arrays, which travel between processes."""
    if isinstance(nested, torch.Tensor):
        return nested.detach().float().numpy().copy()
    if isinstance(nested, dict):
        return {key: arrays(value) for key, value in nested.items()}
    if isinstance(nested, list | tuple):
        return [arrays(value) for value in nested]
    return nested


def equal(a: Any, b: Any) -> bool:
    """Of nested tensors, arrays and plain values, to the bit."""
    if isinstance(a, torch.Tensor | np.ndarray):
        same = a.dtype == b.dtype and a.shape == b.shape
        return same and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


class Run:
    """A DDP model of given gradients with a compressed hook, on this rank."""

    def __init__(
        self,
        codec: Any,
        shapes=SHAPES,
        dtype=torch.float32,
        ddp=None,
        device: str = "cpu",
        **options: Any,
    ):
        self.model = Given(shapes, dtype).to(device)
        # Five buckets or so; torch's first one is of 1 MB else.
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.02, **(ddp or {}))
        made = isinstance(codec, pycoll.CompressionState)
        self.state = codec if made else pycoll.CompressionState(None, codec, **options)
        self.buckets: list[list[tuple[int, ...]]] = []
        self.ddp.register_comm_hook(self.state, self._recording_hook())

    def _recording_hook(self):
        def hook(state, bucket):
            if bucket.index() == 0:
                self.buckets.append([])
            self.buckets[-1].append([tuple(p.shape) for p in bucket.parameters()])
            return pycoll.compress_hook(state, bucket)

        return hook

    def step(self, gradients: Mapping[str, torch.Tensor], sync=True, factor=1.0) -> dict[str, Any]:
        """The averaged gradients."""
        with contextlib.nullcontext() if sync else self.ddp.no_sync():
            (self.ddp(gradients) * factor).backward()
        found = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        if sync:
            self.model.zero_grad()
        return found

    def residuals(self) -> dict[str, torch.Tensor]:
        return self.state.state_dict()["residuals"]


def options_of(what):
    codecs = {
        "two_way": "sign",
        "power_sgd": pycoll.PowerSGD(start_step=0, min_compression_rate=0),
        "top_k": pycoll.TopK(),
        "random_k": pycoll.RandomK(),
        "exempt": "int8",
    }
    return {"codec": codecs.get(what, what), "two_way": what == "two_way"}


# ---- What is right ----


class Replay:
    """Compression with error feedback of all ranks' vectors, in one process.

    `counts`: values of each parameter, in the unit's order. Where the codec has blocks, each but
    the last is filled up to whole ones with the values of its last block, again and again.
    """

    def __init__(self, kind: Kind, world_size: int, counts: Sequence[int], two_way: bool = False):
        self.kind, self.world_size, self.two_way = kind, world_size, two_way
        self.residuals = [np.zeros(sum(counts), np.float32) for _ in range(world_size)]
        block = 1 if kind.name in ("fp16", "bf16") else kind.block
        where, source, first = [], [], 0
        for count in counts:
            own = np.arange(count)
            where.append(own + sum(map(len, source)))
            filled = np.resize(own[count // block * block :], -count % block)
            source.append(np.concatenate([own, filled]) + first)
            first += count
        self.where = np.concatenate(where)
        self.source = np.concatenate(source)[: self.where[-1] + 1]
        self.lacking = np.zeros(len(self.source), np.float32)  # of the sums, whoever made them

    def step(self, gradients: list[np.ndarray], number: int) -> np.ndarray:
        pairs = zip(gradients, self.residuals, strict=True)
        sent = [(g + e)[self.source] for g, e in pairs]
        for rank, x in enumerate(sent):
            code = reference.encode(
                self.kind, x, random_numbers(self.kind, len(x), rank, 0, number)
            )
            self.residuals[rank] = (x - reference.decode(self.kind, [code], len(x)))[self.where]
        if not self.two_way:
            return all_reduced(self.kind, sent, "avg", number)[self.where]
        return self._two_way(sent, number)[self.where]

    def _two_way(self, sent: list[np.ndarray], number: int) -> np.ndarray:
        n, result = len(sent[0]), np.zeros_like(sent[0])
        chunk = round_up(-(-n // self.world_size), max(self.kind.block, 64))
        for owner, first in enumerate(range(0, n, chunk)):
            part = slice(first, min(first + chunk, n))
            codes = [through(self.kind, x[part], r, first, number) for r, x in enumerate(sent)]
            count = part.stop - part.start
            mean = reference.decode(self.kind, codes, count, self.world_size) + self.lacking[part]
            code = through(self.kind, mean, owner | 0x80000000, first, number)
            result[part] = reference.decode(self.kind, [code], count)
            self.lacking[part] = mean - result[part]
        return result


# ---- Training ----


ALGORITHMS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (name, {}) for name in reference.BITS},
    "int4_stochastic": (pycoll.Int4(block=64, stochastic=True, seed=5), {}),
    "sign_two_way": ("sign", {"two_way": True}),
    "ternary_two_way": ("ternary", {"error_feedback": True}),
    "int8_without_feedback": ("int8", {"error_feedback": False}),
    "power_sgd": (pycoll.PowerSGD(rank=2, start_step=3), {}),
    "top_k": (pycoll.TopK(0.05), {}),
    "random_k": (pycoll.RandomK(0.2, seed=3), {}),
    "one_bit_adam": (None, {}),
}


class Training:
    """A small regression under stock DDP, the same for every algorithm."""

    def __init__(self, rank: int, algorithm: str, freeze_step: int = 30) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(32, 125), nn.Tanh(), nn.Linear(125, 60), nn.Tanh(), nn.Linear(60, 8)
        )
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.01)
        codec, options = ALGORITHMS[algorithm]
        if codec is None:
            self.optimizer: Any = pycoll.OneBitAdam(
                self.ddp.parameters(), lr=3e-3, freeze_step=freeze_step
            )
            self.state = self.optimizer.compression(**options)
        else:
            self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.02, momentum=0.9)
            self.state = pycoll.CompressionState(None, codec, **options)
        self.ddp.register_comm_hook(self.state, pycoll.compress_hook)
        self.rank = rank

    def run(self, first: int, last: int) -> list[float]:
        """Losses of these steps."""
        teacher = torch.randn(32, 8, generator=torch.Generator().manual_seed(99)) / 4
        losses = []
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 * step + self.rank)
            x = torch.randn(16, 32, generator=generator)
            self.optimizer.zero_grad()
            loss = (self.ddp(x) - torch.tanh(x @ teacher)).square().mean()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def weights(self) -> bytes:
        return joined(dict(self.model.named_parameters()), names_of(self.model)).tobytes()


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]
