"""Functional collectives, DDP and FSDP2 under torch.compile, as without it and on Gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from helpers_cases import numbered
from helpers_clients import alike, blocks, compare, fit, outcome, plain

WORLD = 2  # each rank compiles
COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)]


def collectives(x, group, w):
    """Every functional collective, between operations that a compiler may move or fuse."""
    y = functional.all_reduce(x * 2, "sum", group) + 1
    y = y + functional.all_reduce(y, "avg", group)
    gathered = functional.all_gather_tensor(y.sin(), 0, group)
    scattered = functional.reduce_scatter_tensor(gathered * gathered, "sum", 0, group)
    columns = functional.all_gather_tensor(scattered, 1, group)
    several = functional.all_reduce_coalesced([scattered, scattered.cos()], "max", group)
    sent = functional.all_to_all_single(scattered, None, None, group)
    root = functional.broadcast(scattered + 3, 1, group)
    return [y, gathered, scattered, columns, *several, sent, root]


def with_gradients(x, group):
    y = functional.all_gather_tensor_autograd(x.sin(), 0, group)
    return functional.reduce_scatter_tensor_autograd(y * y, "sum", 0, group).sum()


def functional_collectives(rank, w, compiler):
    group = dist.group.WORLD
    x = numbered(rank, (4 * w, 3), torch.float64) / 5

    def both(x):
        return collectives(x, group, w)

    compiled = torch.compile(both, backend=compiler, fullgraph=True)
    results = [plain(compiled(x + step)) for step in range(2)]
    alike(results, [plain(both(x + step)) for step in range(2)], 1e-12, "not compiled")

    leaves = [x.clone().requires_grad_() for _ in range(2)]
    differentiated = torch.compile(lambda x: with_gradients(x, group), backend=compiler)
    differentiated(leaves[0]).backward()
    with_gradients(leaves[1], group).backward()
    alike(plain(leaves[0].grad), plain(leaves[1].grad), 1e-12, "gradient")
    return [results, plain(leaves[0].grad)]


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def data_parallel(rank, w, compiler):
    ddp = DistributedDataParallel(blocks())
    losses = fit(torch.compile(ddp, backend=compiler), sgd(ddp), [rank], steps=3)
    return outcome(ddp.module, losses)


def fully_sharded(rank, w, compiler):
    model = blocks()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for layer in model:
        layer.compile(backend=compiler)
    return outcome(model, fit(model, sgd(model), [rank], steps=3))


def compiled_clients(rank, w, compiler):
    return {
        client.__name__: client(rank, w, compiler)
        for client in (functional_collectives, data_parallel, fully_sharded)
    }


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled(compiler, tmp_path):
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    results = compare(WORLD, compiled_clients, compiler, timeout=280, env=cache)
    model = blocks()
    expected = outcome(model, fit(model, sgd(model), range(WORLD), steps=3))
    for client in ("data_parallel", "fully_sharded"):
        for result in results:
            alike(result[client]["state"], expected["state"], 1e-12, client)
