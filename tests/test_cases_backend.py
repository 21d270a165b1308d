"""Public bug reports, kind K: what clients of torch.distributed want of a backend."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from helpers_cases import (
    TRANSPORTS,
    Guarded,
    all_words,
    error_of,
    finish,
    numbered,
    run_case,
    same,
    still_works,
    total,
)
from helpers_environment import missing_entry_points
from helpers_scripts import run_commands

over_each_transport = pytest.mark.parametrize("transport", TRANSPORTS)
GLOO = {"backend": "gloo"}

# ---- K1 ----


def k1_ddp(rank, w):
    """Each gradient is the mean of the ranks', by Work.get_future()."""
    model = nn.Linear(5, 3, dtype=torch.float64)
    nn.init.constant_(model.weight, 0.5)
    ddp = DistributedDataParallel(model)
    for step in range(5):
        ddp.zero_grad()
        inputs = [numbered(r, (4, 5), torch.float64, salt=step) for r in range(w)]
        ddp(inputs[rank]).sum().backward()
        mean = torch.stack([x.sum(0) for x in inputs]).sum(0) / w
        torch.testing.assert_close(model.weight.grad, mean.expand(3, 5), rtol=1e-15, atol=0)
    return "done"


def k1_not_supported(rank, w):
    """What no CPU backend can do says what it was, and for whom; the group goes on."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    all_words(error_of(lambda: backend.mem_allocator), "pycoll", "getMemAllocator")
    text = error_of(lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND), RuntimeError)
    all_words(text, "band", "float32", "all_reduce")
    still_works(rank, w)
    return "done"


NAMES = ["pycoll", "PyColl", "cpu:pycoll", "cpu:pycoll,cuda:pycoll", "cpu:pycoll,cuda:gloo"]


@pytest.mark.parametrize("name", NAMES)
def test_k1_every_way_to_name_the_backend(name):
    """K1: DistributedDataParallel with every string that names pycoll."""
    run_case(2, k1_ddp, backend=name)


@over_each_transport
def test_k1_what_is_not_supported(transport):
    """K1: an operation that there is not is named, with the backend."""
    run_case(2, k1_not_supported, transport=transport)


IMPORTS = {
    "torch alone": "import torch",
    "pycoll first": "import pycoll, torch",
    "torch.distributed first": "import torch.distributed, pycoll",
    "no entry points": "import torch, pycoll",
}
SCRIPT = """
import os, sys
import torch.distributed as dist
dist.init_process_group(
    "pycoll", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2
)
x = torch.arange(3.0) + dist.get_rank()
dist.all_reduce(x)
print(x.tolist(), dist.get_backend())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("order", IMPORTS)
def test_k1_order_of_imports(order, tmp_path):
    """K1: the name is known whatever is imported first, and without `import pycoll`."""
    script = tmp_path / "script.py"
    script.write_text(IMPORTS[order] + SCRIPT)
    path = [*missing_entry_points(tmp_path), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    if order == "no entry points":
        env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    store = tmp_path / "store"
    commands = [[sys.executable, script, store, str(rank)] for rank in range(2)]
    for end in run_commands(commands, timeout=90, env=env, cwd=tmp_path):
        assert end.exitcode == 0, end
        assert end.stdout == "[1.0, 3.0, 5.0] pycoll\n", end
        end.check_quiet()


# ---- K2 ----


def k2_barriers_and_objects(rank, w):
    dist.barrier()
    dist.barrier(device_ids=None)
    finish(dist.barrier(async_op=True))
    gathered = [None] * w
    dist.all_gather_object(gathered, {"rank": rank, "tensor": numbered(rank, (3,))})
    for r, one in enumerate(gathered):
        assert one["rank"] == r
        same(one["tensor"], numbered(r, (3,)))
    things = [("from", 1), rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(things, src=1)
    assert things == [("from", 1), 1]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(w)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]
    group = dist.new_group([0, 1], backend=None)
    if rank < 2:
        dist.barrier(group)
        still_works(rank, 2, group)
    return "done"


def k2_monitored(rank, w):
    """Up to 2.13 torch itself refuses all names but Gloo's; the group's own has no such gate."""
    try:
        dist.monitored_barrier()
    except ValueError as error:
        all_words(str(error), "monitored_barrier", "gloo")
    dist.group.WORLD.monitored_barrier()
    still_works(rank, w)
    return "done"


@pytest.mark.parametrize("name", [*NAMES, "cpu:gloo,cuda:pycoll"])
def test_k2_barriers_and_objects(name):
    """K2: barriers and objects reach the backend of the CPU, whatever the string."""
    run_case(3, k2_barriers_and_objects, backend=name)


@over_each_transport
def test_k2_over_each_transport(transport):
    """K2: the same over each transport, and monitored_barrier."""
    run_case(3, k2_barriers_and_objects, transport=transport)
    run_case(3, k2_monitored, transport=transport)


# ---- K4 ----


def k4_lists(rank, w):
    sizes = [2 * r + 1 for r in range(w)]
    sources = [[numbered(r, (size,), salt=t) for t, size in enumerate(sizes)] for r in range(w)]
    output = Guarded(torch.zeros(sizes[rank]))
    dist.reduce_scatter(output.tensor, sources[rank])
    output.check(total([source[rank] for source in sources]), "reduce_scatter")

    outputs = [Guarded(torch.zeros(sizes[rank])) for _ in range(w)]
    dist.all_to_all([one.tensor for one in outputs], sources[rank])
    for r, one in enumerate(outputs):
        one.check(sources[r][rank], ("all_to_all", r))
    for t, size in enumerate(sizes):
        same(sources[rank][t], numbered(rank, (size,), salt=t), "input")
    return "done"


def k4_tensors(rank, w):
    wholes = [numbered(r, (2 * w, 3)) for r in range(w)]
    output = Guarded(torch.zeros(2, 3))
    dist.reduce_scatter_tensor(output.tensor, wholes[rank])
    output.check(total(wholes)[2 * rank : 2 * rank + 2], "reduce_scatter_tensor")
    gathered = Guarded(torch.zeros(w * 2 * w, 3))
    dist.all_gather_into_tensor(gathered.tensor, wholes[rank])
    gathered.check(torch.cat(wholes), "all_gather_into_tensor")
    return "done"


def k4_coalesced(rank, w):
    counts = (3, 700, 1)
    wholes = [[numbered(r, (w * n,), salt=n) for n in counts] for r in range(w)]
    outputs = [Guarded(torch.zeros(n)) for n in counts]
    with dist._coalescing_manager():
        for one, whole in zip(outputs, wholes[rank], strict=True):
            dist.reduce_scatter_tensor(one.tensor, whole)
    for i, (one, n) in enumerate(zip(outputs, counts, strict=True)):
        expected = total([whole[i] for whole in wholes])[n * rank : n * (rank + 1)]
        one.check(expected, ("reduce_scatter", n))
    outputs = [Guarded(torch.zeros(w * w * n)) for n in counts]
    with dist._coalescing_manager():
        for one, whole in zip(outputs, wholes[rank], strict=True):
            dist.all_gather_into_tensor(one.tensor, whole)
    for i, one in enumerate(outputs):
        one.check(torch.cat([whole[i] for whole in wholes]), ("all_gather", i))
    return "done"


@over_each_transport
@pytest.mark.parametrize("world_size", [1, 3])
def test_k4_lists_and_coalesced_forms(transport, world_size):
    """K4: reduce_scatter and all_to_all of lists of any lengths, and the forms of tensors."""
    for scenario in (k4_lists, k4_tensors, k4_coalesced):
        run_case(world_size, scenario, transport=transport)


def test_k4_control_on_gloo():
    """K4: Gloo, too, does what has equal lengths."""
    run_case(3, k4_tensors, **GLOO)


# ---- K6 ----


CLOSE = {torch.float32: 1e-6, torch.float64: 1e-13}


def k6_models(rows, dtype):
    torch.manual_seed(rows)
    reference = nn.Linear(4, rows, dtype=dtype)
    model = nn.Linear(4, rows, dtype=dtype)
    model.load_state_dict(reference.state_dict())
    return model, reference


def k6_steps(rank, w, model, reference):
    """Three steps of SGD, and those of one process with all batches: its parameters."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.25) for m in (model, reference)]
    for step in range(3):
        batches = [numbered(r, (2, 4), reference.weight.dtype, salt=step) / 8 for r in range(w)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batches[rank]).square().mean().backward()
        reference(torch.cat(batches)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach() for p in reference.parameters()]


def k6_close(found, wanted):
    tolerance = CLOSE[wanted.dtype]
    torch.testing.assert_close(found.detach(), wanted, rtol=tolerance, atol=tolerance)


def k6_fully_shard(rank, w, rows):
    """float32 is averaged with AVG, float64 with a SUM."""
    for dtype in CLOSE:
        model, reference = k6_models(rows, dtype)
        fully_shard(model)
        expected = k6_steps(rank, w, model, reference)
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            chunks = wanted.chunk(w)
            mine = chunks[rank].numel() if rank < len(chunks) else 0
            assert parameter.to_local().numel() == mine
            k6_close(parameter.full_tensor(), wanted)
    return "done"


def k6_fsdp(rank, w, rows):
    for dtype in CLOSE:
        model, reference = k6_models(rows, dtype)
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        expected = k6_steps(rank, w, wrapped, reference)
        with FullyShardedDataParallel.summon_full_params(wrapped):
            for parameter, wanted in zip((model.weight, model.bias), expected, strict=True):
                k6_close(parameter, wanted)
    return "done"


@over_each_transport
@pytest.mark.parametrize("world_size", [3, 4])
def test_k6_fully_sharded(transport, world_size):
    """K6: dimensions that ranks do not divide, and smaller ones; gradients are means."""
    for rows in (5, 3, 2):
        run_case(world_size, k6_fully_shard, rows, transport=transport)
    run_case(world_size, k6_fsdp, 5, transport=transport)


def test_k6_control_on_gloo():
    """K6: the same on Gloo."""
    run_case(3, k6_fully_shard, 5, **GLOO)
    run_case(3, k6_fsdp, 5, **GLOO)


# ---- K7 ----


def k7_uneven_shards(rank, w):
    mesh = init_device_mesh("cpu", (w,))
    for shape in [(5, 10), (w - 1, w + 1), (1, 2), (0, 3)]:
        whole = numbered(0, shape, torch.float64)
        shard = distribute_tensor(whole, mesh, [Shard(0)])
        replicate = shard.redistribute(mesh, [Replicate()])
        other = replicate.redistribute(mesh, [Shard(1)])
        back = other.redistribute(mesh, [Shard(0)])
        for tensor in (shard, replicate, other, back):
            assert tensor.shape == whole.shape
            same(tensor.full_tensor(), whole, (shape, tensor.placements))
    return "done"


@over_each_transport
@pytest.mark.parametrize("world_size", [3, 4])
def test_k7_uneven_shards(transport, world_size):
    """K7: tensors whose sizes ranks do not divide, or are below their number."""
    run_case(world_size, k7_uneven_shards, transport=transport)


# ---- K9 ----


def k9_subgroup(rank, w, path):
    """Ranks 1 and 3 save and load; 0 and 2 are elsewhere."""
    group = dist.new_group([1, 3])
    saving = dist.new_group([1, 3])
    if rank not in (1, 3):
        return "done"
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = numbered(5, (5, 4), torch.float64)
    tensor = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    dcp.save({"x": tensor}, checkpoint_id=path, process_group=group)
    future = dcp.async_save({"x": tensor}, checkpoint_id=path + "-async", process_group=saving)
    future.result()
    for place in (path, path + "-async"):
        loaded = distribute_tensor(torch.zeros(5, 4).double(), mesh, [Shard(1)], src_data_rank=None)
        dcp.load({"x": loaded}, checkpoint_id=place, process_group=group)
        same(loaded.full_tensor(), whole, place)
    return "done"


@over_each_transport
def test_k9_checkpoint_of_a_subgroup(transport, tmp_path):
    """K9: a group whose rank 0 is not global rank 0, synchronous and asynchronous."""
    run_case(4, k9_subgroup, str(tmp_path / "checkpoint"), transport=transport)


def test_k9_control_on_gloo(tmp_path):
    """K9: the same on Gloo."""
    run_case(4, k9_subgroup, str(tmp_path / "checkpoint"), **GLOO)


# ---- K10 ----


def k10_save(rank, w, path):
    mesh = init_device_mesh("cpu", (w,))
    tensor = distribute_tensor(numbered(0, (5, 2), torch.float64), mesh, [Shard(0)])
    plain = torch.full((3,), 10.0 + rank)
    dcp.save({"sharded": tensor, "plain": plain}, checkpoint_id=path)
    return "done"


def k10_load(rank, w, path):
    """The sharded tensor is whole in another layout; of the plain ones torch keeps one rank's."""
    mesh = init_device_mesh("cpu", (w,))
    state = {
        "sharded": distribute_tensor(torch.zeros(5, 2).double(), mesh, [Shard(1)]),
        "plain": torch.zeros(3),
    }
    dcp.load(state, checkpoint_id=path)
    same(state["sharded"].full_tensor(), numbered(0, (5, 2), torch.float64))
    assert state["plain"].unique().numel() == 1
    return state["plain"][0].item()


@over_each_transport
def test_k10_checkpoint_for_another_number_of_ranks(transport, tmp_path):
    """K10: four ranks save, three load; a plain tensor that differs is one rank's everywhere."""
    path = str(tmp_path / "checkpoint")
    run_case(4, k10_save, path, transport=transport)
    found = {result.value for result in run_case(3, k10_load, path, transport=transport)}
    assert len(found) == 1
    assert found <= {10.0, 11.0, 12.0, 13.0}


# ---- K12 ----


def k12_sync_batch_norm(rank, w):
    """torch's layer is for GPUs and says so, before it communicates."""
    layer = nn.SyncBatchNorm(3)
    text = error_of(lambda: layer(torch.randn([4, 0, 2][rank], 3, 2)), ValueError, RuntimeError)
    all_words(text, "SyncBatchNorm", "GPU")
    still_works(rank, w)
    return "done"


@over_each_transport
def test_k12_sync_batch_norm_is_for_gpus(transport):
    """K12: torch refuses SyncBatchNorm on the CPU; the group goes on."""
    run_case(3, k12_sync_batch_norm, transport=transport)


# Right for any number of ranks from 2 on, with these arguments: run over mixed transports, too.
ANY_WORLD = [
    (k1_ddp, ()),
    (k4_lists, ()),
    (k4_tensors, ()),
    (k4_coalesced, ()),
    (k6_fully_shard, (5,)),
    (k7_uneven_shards, ()),
]
