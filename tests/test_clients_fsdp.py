"""FSDP and FSDP2 on pycoll: as on Gloo, and as one process with the global batch."""

from __future__ import annotations

import numpy as np
import pytest
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
    SINGLE,
    WORLD,
    Block,
    alike,
    batch,
    blocks,
    compare,
    fit,
    in_one_process,
    outcome,
    plain,
    values,
)
from pool import RanksFailed, torch_ranks


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def equals_one_process(results, world_size, dtype=torch.float64, tolerance=EXACT):
    """The mean of the ranks' losses and everybody's parameters are those of one process."""
    expected = in_one_process(range(world_size), dtype)
    losses = np.mean([result["losses"] for result in results], axis=0)
    alike(losses.tolist(), expected["losses"], tolerance, "losses")
    for rank, result in enumerate(results):
        alike(result["state"], expected["state"], tolerance, f"rank {rank}")


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
    compare(WORLD, fsdp_clipped, tolerance=SINGLE)


# ---- FSDP2 ----
# In float32 and bfloat16 gradients are reduced with AVG or PREMUL_SUM; in other types torch divides
# before and after a SUM.

SINGLE_PRECISION = {"dtype": torch.float32, "tolerance": SINGLE}


def sharded(mesh=None, dtype=torch.float32, **options):
    model = blocks(dtype=dtype)
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def trained(rank, model, dtype=torch.float32, **options):
    return outcome(model, fit(model, sgd(model), [rank], dtype=dtype, **options))


def fsdp2_plain(rank, w):
    model = sharded()
    norms = []

    def norm():
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        norms.append(total.full_tensor().item())

    return {**trained(rank, model, after_backward=norm), "norms": norms}


def fsdp2_kept(rank, w):
    return trained(rank, sharded(reshard_after_forward=False))


def fsdp2_hybrid(rank, w):
    mesh = init_device_mesh("cpu", (2, w // 2), mesh_dim_names=("replicate", "shard"))
    return trained(rank, sharded(mesh))


def fsdp2_double(rank, w):
    return trained(rank, sharded(dtype=torch.float64), torch.float64)


def fsdp2_accumulated(rank, w):
    """Two micro-steps, the first without communication."""
    model = sharded()
    optimizer = sgd(model)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            x, y = batch(1 + last, rank, dtype=torch.float32)
            loss = torch.nn.functional.mse_loss(model(x), y) / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return outcome(model, losses)


FORMS = [fsdp2_plain, fsdp2_kept, fsdp2_hybrid]


def fsdp2_forms(rank, w):
    return {form.__name__: form(rank, w) for form in (*FORMS, fsdp2_accumulated)}


def test_fsdp2():
    results = compare(WORLD, fsdp2_forms, tolerance=SINGLE)
    for form in FORMS:
        own = [result[form.__name__] for result in results]
        equals_one_process(own, WORLD, **SINGLE_PRECISION)


def test_fsdp2_on_three_ranks():
    results = compare(3, fsdp2_plain, tolerance=SINGLE)
    equals_one_process(results, 3, **SINGLE_PRECISION)


def test_fsdp2_in_double_precision():
    equals_one_process(compare(WORLD, fsdp2_double), WORLD)


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
    """Gradients are sums over ranks divided by `factor`: a reduce_scatter with PREMUL_SUM."""
    model = sharded()
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(factor)
    optimizer = torch.optim.SGD(model.parameters(), 0.1 * factor / w, momentum=0.9)
    return plain(outcome(model, fit(model, optimizer, [rank], dtype=torch.float32)))


def test_fsdp2_divides_gradients_by_any_factor():
    """Gloo has no PREMUL_SUM. The learning rate makes up for the factor."""
    for factor in (2.0, 3.0):
        results = values(torch_ranks(WORLD, fsdp2_divided, factor, timeout=90))
        equals_one_process(results, WORLD, **SINGLE_PRECISION)
    with pytest.raises(RanksFailed, match="PREMUL_SUM with Gloo"):
        torch_ranks(2, fsdp2_divided, 3.0, timeout=90, backend="gloo")


def fsdp2_over_subgroup(rank, w):
    """Ranks 1 and 3 train; the others do not take part."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
    return trained(rank // 2, sharded(mesh))


def test_fsdp2_on_a_subgroup():
    results = compare(WORLD, fsdp2_over_subgroup, tolerance=SINGLE)
    equals_one_process([results[1], results[3]], 2, **SINGLE_PRECISION)
