"""FSDP and FSDP2 on pycoll: as on Gloo, and as one process with the global batch."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from helpers_clients import (
    EXACT,
    WORLD,
    Block,
    alike,
    alone,
    batch,
    blocks,
    compare,
    fit,
    outcome,
    plain,
    values,
)
from pool import torch_ranks


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def equals_one_process(results, world_size):
    """The mean of the ranks' losses and everybody's parameters are those of one process."""
    expected = alone(range(world_size))
    losses = np.mean([result["losses"] for result in results], axis=0)
    alike(losses.tolist(), expected["losses"], EXACT, "losses")
    for rank, result in enumerate(results):
        alike(result["state"], expected["state"], EXACT, f"rank {rank}")


# ---- FSDP ----

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]


def fsdp(rank, w, strategy, dtype=torch.float64, after_backward=lambda model: None):
    mesh = init_device_mesh("cpu", (2, w // 2), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        blocks(dtype=dtype),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        device_mesh=mesh if strategy == "HYBRID_SHARD" else None,
        use_orig_params=True,
    )
    losses = fit(
        model, sgd(model), [rank], dtype=dtype, after_backward=lambda: after_backward(model)
    )
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {"losses": losses, "state": plain(model.state_dict())}


def fsdp_strategies(rank, w):
    return {strategy: fsdp(rank, w, strategy) for strategy in STRATEGIES}


def test_fsdp():
    results = compare(WORLD, fsdp_strategies)
    for strategy in STRATEGIES:
        equals_one_process([result[strategy] for result in results], WORLD)


def fsdp_clipped(rank, w):
    """In float32: for the norm of other gradients torch lacks a conversion."""
    norms = []

    def clip(model):
        norms.append(model.clip_grad_norm_(0.5).item())

    result = fsdp(rank, w, "FULL_SHARD", torch.float32, clip)
    assert max(norms) > 0.5, "nothing was clipped"
    return {**result, "norms": norms}


def test_fsdp_clips_the_norm_of_all_shards():
    compare(WORLD, fsdp_clipped, tolerance=1e-5)


# ---- FSDP2 ----


def sharded(mesh=None, **options):
    model = blocks()
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2_plain(rank, w):
    model = sharded()
    norms = []

    def norm():
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        norms.append(total.full_tensor().item())

    losses = fit(model, sgd(model), [rank], after_backward=norm)
    return {**outcome(model, losses), "norms": norms}


def fsdp2_kept(rank, w):
    model = sharded(reshard_after_forward=False)
    return outcome(model, fit(model, sgd(model), [rank]))


def fsdp2_hybrid(rank, w):
    mesh = init_device_mesh("cpu", (2, w // 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    return outcome(model, fit(model, sgd(model), [rank]))


def fsdp2_accumulated(rank, w):
    """Two micro-steps, the first without communication."""
    model = sharded()
    optimizer = sgd(model)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            x, y = batch(1 + last, rank)
            loss = torch.nn.functional.mse_loss(model(x), y) / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return outcome(model, losses)


FORMS = [fsdp2_plain, fsdp2_kept, fsdp2_hybrid]


def fsdp2_forms(rank, w):
    forms = {form.__name__: form(rank, w) for form in FORMS}
    return {**forms, "accumulated": fsdp2_accumulated(rank, w)}


def test_fsdp2():
    results = compare(WORLD, fsdp2_forms)
    for form in FORMS:
        equals_one_process([result[form.__name__] for result in results], WORLD)


def test_fsdp2_on_three_ranks():
    equals_one_process(compare(3, fsdp2_plain), 3)


# What parameters and gradients travel in. torch averages float16 by hand, as a SUM of parts.
PRECISIONS = [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")]


def fsdp2_mixed(rank, w, parameters, gradients):
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, parameters), reduce_dtype=getattr(torch, gradients)
    )
    model = blocks(dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return outcome(model, fit(model, sgd(model), [rank], dtype=torch.float32))


def fsdp2_precisions(rank, w):
    return {f"{p} {g}": fsdp2_mixed(rank, w, p, g) for p, g in PRECISIONS}


def test_fsdp2_in_mixed_precision():
    """Gloo rounds each partial sum of 16-bit gradients, pycoll the whole: not the same bits."""
    compare(WORLD, fsdp2_precisions, tolerance=2e-3)


def fsdp2_divided(rank, w, factor):
    """Gradients are sums over ranks divided by `factor`: on CPU, a reduce_scatter of PREMUL_SUM."""
    model = sharded()
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(factor)
    optimizer = torch.optim.SGD(model.parameters(), 0.1 * factor / w, momentum=0.9)
    return plain(outcome(model, fit(model, optimizer, [rank])))


def test_fsdp2_divides_gradients_by_any_factor():
    """Gloo has no PREMUL_SUM. The learning rate makes up for the factor."""
    for factor in (2.0, 3.0):
        equals_one_process(values(torch_ranks(WORLD, fsdp2_divided, factor, timeout=90)), WORLD)


def fsdp2_over_subgroup(rank, w):
    """Ranks 1 and 3 train; the others do not take part."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
    model = sharded(mesh)
    return outcome(model, fit(model, sgd(model), [rank // 2]))


def test_fsdp2_on_a_subgroup():
    results = compare(WORLD, fsdp2_over_subgroup)
    equals_one_process([results[1], results[3]], 2)
