"""DTensor, tensor and sequence parallelism and 2-D meshes, as on Gloo and in one process."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from helpers_cases import numbered, same
from helpers_clients import WORLD, alike, blocks, compare, fit, outcome

# ---- DTensor ----


def redistributed(rank, w):
    """Every placement to every other: even and uneven sizes, sizes below the number of ranks."""
    mesh = init_device_mesh("cpu", (w,))
    for shape, dtype in itertools.product(
        [(5, 10), (8, 4), (2, 3), (1, 9)], [torch.float32, torch.int64]
    ):
        whole = numbered(0, shape, dtype, salt=1)
        for source, target in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2):
            what = (shape, dtype, source, target)
            tensor = distribute_tensor(whole, mesh, [source])
            moved = tensor.redistribute(mesh, [target])
            assert moved.placements == (target,), what
            same(moved.full_tensor(), whole, what)
            same(tensor.full_tensor(), whole, what)
            if isinstance(target, Shard):
                chunks = list(whole.chunk(w, target.dim))
                mine = chunks[rank] if rank < len(chunks) else whole.narrow(target.dim, 0, 0)
                same(moved.to_local(), mine.contiguous(), what)
    return "done"


PARTIALS = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
    "product": lambda parts: parts.prod(0),
}


def partial_sums(rank, w):
    mesh = init_device_mesh("cpu", (w,))
    for shape in [(5, 3), (8, 2)]:
        parts = torch.stack([numbered(r, shape, torch.float64) for r in range(w)])
        for op, expected in PARTIALS.items():
            partial = DTensor.from_local(parts[rank], mesh, [Partial(op)])
            same(partial.full_tensor(), expected(parts), op)
            for dim in (0, 1) if op in ("sum", "avg") else ():
                shard = partial.redistribute(mesh, [Shard(dim)])
                same(shard.full_tensor(), expected(parts), (op, dim))
    return "done"


def computed(rank, w):
    """Operations that communicate by themselves, with gradients."""
    mesh = init_device_mesh("cpu", (w,))
    a = distribute_tensor(numbered(1, (6, 5), torch.float64), mesh, [Shard(1)]).requires_grad_()
    b = distribute_tensor(numbered(2, (5, 7), torch.float64), mesh, [Shard(0)]).requires_grad_()
    product = a @ b
    assert product.placements == (Partial(),)
    total = (torch.softmax(product / 50, 1) * product).sum()
    total.backward()
    return {
        "product": product,
        "total": total,
        "a": a.grad,
        "b": b.grad,
        "norm": torch.linalg.vector_norm(a),
        "order": torch.sort(product.redistribute(mesh, [Shard(0)]), 1)[0],
    }


def two_dimensions(rank, w):
    """A 2-D mesh: both dimensions at once, its parts, and the flattened one."""
    mesh = init_device_mesh("cpu", (2, w // 2), mesh_dim_names=("rows", "columns"))
    whole = numbered(3, (5, 7), torch.float64)
    for first, second in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2):
        tensor = distribute_tensor(whole, mesh, [first, second])
        same(tensor.full_tensor(), whole, (first, second))
        moved = tensor.redistribute(mesh, [second, first])
        same(moved.full_tensor(), whole, (second, first))
    x = torch.tensor(float(rank))
    for name in ("rows", "columns"):
        dist.all_reduce(x, group=mesh[name].get_group())
    assert x.item() == w * (w - 1) / 2
    y = torch.tensor(float(rank))
    dist.all_reduce(y, dist.ReduceOp.MAX, group=mesh["rows", "columns"]._flatten("all").get_group())
    assert y.item() == w - 1
    return [mesh.get_coordinate(), mesh["rows"].get_local_rank()]


DTENSOR = [redistributed, partial_sums, computed, two_dimensions]


def dtensor_clients(rank, w):
    return {client.__name__: client(rank, w) for client in DTENSOR}


def test_dtensor():
    compare(WORLD, dtensor_clients)


def test_dtensor_on_three_ranks():
    compare(3, redistributed)


# ---- Tensor and sequence parallelism ----

SIZE, HIDDEN = 8, 12  # that ranks divide: tensor parallelism wants that


def tensor_parallel_plan():
    plan = {}
    for block in ("0", "1"):
        plan[f"{block}.up"] = ColwiseParallel()
        plan[f"{block}.down"] = RowwiseParallel()
    return plan


def sequence_parallel_plan():
    """Between the linear layers of blocks each rank has a part of the rows, for norms and sums."""
    rows = Shard(0)
    plan = {"0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=rows)}
    for block in ("0", "1"):
        plan[f"{block}.norm"] = SequenceParallel(sequence_dim=0)
        plan[f"{block}.up"] = ColwiseParallel(input_layouts=rows)
        plan[f"{block}.down"] = RowwiseParallel(output_layouts=rows, use_local_output=False)
    plan["2"] = PrepareModuleInput(
        input_layouts=rows, desired_input_layouts=Replicate(), use_local_output=True
    )
    return plan


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(7, SIZE, dtype=torch.float64)
        self.layers = blocks(SIZE, HIDDEN)
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(8)
            self.inside.reset_parameters()

    def forward(self, x):
        return self.layers(self.inside(x))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.02)


def parallel(w, plan):
    model = Model()
    parallelize_module(model.layers, init_device_mesh("cpu", (w,)), plan)
    return outcome(model, fit(model, adam(model), range(w)))


def tensor_parallel(rank, w):
    return parallel(w, tensor_parallel_plan())


def sequence_parallel(rank, w):
    return parallel(w, sequence_parallel_plan())


def fully_sharded_too(rank, w):
    """Tensor parallelism inside, FSDP2 outside."""
    mesh = init_device_mesh("cpu", (2, w // 2), mesh_dim_names=("data", "tensor"))
    model = Model()
    parallelize_module(model.layers, mesh["tensor"], tensor_parallel_plan())
    for layer in [model.inside, *model.layers]:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    part = mesh["data"].get_local_rank()
    return outcome(model, fit(model, adam(model), [2 * part, 2 * part + 1]))


def loss_of_shards(rank, w):
    """Cross entropy of logits that are sharded over classes."""
    mesh = init_device_mesh("cpu", (w,))
    logits = distribute_tensor(numbered(1, (6, 8), torch.float64) / 3, mesh, [Shard(1)])
    logits.requires_grad_()
    with loss_parallel():
        loss = nn.functional.cross_entropy(logits, torch.arange(6) % 8)
        loss.backward()
    whole = logits.full_tensor().detach().requires_grad_()
    expected = nn.functional.cross_entropy(whole, torch.arange(6) % 8)
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(logits.grad.full_tensor(), whole.grad)
    return {"loss": loss, "gradient": logits.grad}


PARALLEL = [tensor_parallel, sequence_parallel, fully_sharded_too]


def parallel_clients(rank, w):
    results = {client.__name__: client(rank, w) for client in PARALLEL}
    return {**results, "loss_of_shards": loss_of_shards(rank, w)}


def test_tensor_parallel():
    results = compare(WORLD, parallel_clients)
    model = Model()
    expected = outcome(model, fit(model, adam(model), range(WORLD)))
    for client in PARALLEL:
        for result in results:
            alike(result[client.__name__]["state"], expected["state"], 1e-9, client.__name__)
    alike(results[0]["tensor_parallel"]["losses"], expected["losses"], 1e-9, "losses")
