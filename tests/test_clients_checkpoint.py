"""torch.distributed.checkpoint on pycoll: other numbers of ranks, asynchronous, on a subgroup."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from helpers_clients import WORLD, alike, blocks, fit, plain, values
from pool import torch_ranks

STEPS = 3


def sharded_model(mesh=None):
    model = blocks()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def trained_and_saved(rank, w, path, way):
    """Trains, saves, trains on: the state that was saved, as whole tensors."""
    model, optimizer = sharded_model()
    fit(model, optimizer, [rank], STEPS)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    states["step"] = STEPS
    expected = plain(model.state_dict())
    if way == "async":
        # Training goes on meanwhile, so the thread that saves needs a group of its own. What is
        # saved are the values of the call.
        group = dist.new_group()
        future = dcp.async_save(states, checkpoint_id=path, process_group=group)
        fit(model, optimizer, [rank], STEPS)
        future.result()
    else:
        dcp.save(states, checkpoint_id=path)
    return expected


def loaded(rank, w, path):
    model, optimizer = sharded_model()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    states["step"] = 0
    dcp.load(states, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    state = plain(model.state_dict())
    fit(model, optimizer, range(w), 1 + STEPS)  # with the moments of the saved optimizer
    return {"state": state, "step": states["step"], "moments": len(optimizer.state)}


@pytest.mark.parametrize("way", ["sync", "async"])
def test_saved_by_four_ranks_and_loaded_by_three(tmp_path, way):
    path = str(tmp_path / "checkpoint")
    saved = values(torch_ranks(WORLD, trained_and_saved, path, way, timeout=90))
    for backend in ("pycoll", "gloo"):
        for result in values(torch_ranks(3, loaded, path, backend=backend, timeout=90)):
            alike(result["state"], saved[0], 0.0, backend)
            assert result["step"] == STEPS
            assert result["moments"] == len(saved[0])


def test_a_checkpoint_of_gloo(tmp_path):
    path = str(tmp_path / "checkpoint")
    arguments = (trained_and_saved, path, "sync")
    saved = values(torch_ranks(2, *arguments, backend="gloo", timeout=90))
    for result in values(torch_ranks(WORLD, loaded, path, timeout=90)):
        alike(result["state"], saved[0], 0.0, "loaded")
