"""The names of the parameters in a bucket: torch gives a hook the parameters alone."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from pycoll import _core

__all__ = ["find_model", "named_parameters"]


def find_model(state: Any) -> torch.nn.Module | None:
    """The DDP model that a state is registered with.

    Nothing leads from a hook to its model, so one look through this process's objects must do. It
    shows none that `gc.freeze` has put aside.
    """
    found = _models_with(state)
    if len(found) > 1:
        found = []
        gc.collect()  # a model that was wrapped before may be garbage
        found = _models_with(state)
    if len(found) > 1:
        raise _core.InvalidArgumentError(
            f"{type(state).__name__} is registered with {len(found)} models; each needs a state of "
            "its own"
        )
    return found[0] if found else None


def _models_with(state: Any) -> list[torch.nn.Module]:
    # A set, not isinstance: there are a million objects, DDP is an abstract base class, which takes
    # its time, and proxies answer isinstance with code of their own.
    classes = _with_subclasses(DistributedDataParallel)
    models = [candidate for candidate in gc.get_objects() if type(candidate) in classes]
    return [
        model
        for model in models
        if any(given is state for _, given in model.__dict__.get("_comm_hooks", ()))
    ]


def _with_subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_with_subclasses, cls.__subclasses__()))


def named_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """In the model's order, named as inside the wrapper: `ddp.module.named_parameters()`, and as
    without torch.compile: a run may be resumed with it or without."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {name.replace("_orig_mod.", ""): x for name, x in inner.named_parameters()}
