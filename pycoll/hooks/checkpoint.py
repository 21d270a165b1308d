"""The state of compression as plain types and tensors, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from pycoll import _core
from pycoll.codecs import Codec
from pycoll.hooks.memory import Memory
from pycoll.hooks.plan import Plan, Unit, residual_key
from pycoll.hooks.reduction import Compressor, Reduction

__all__ = [
    "VERSION",
    "check_header",
    "check_parameters",
    "load",
    "save",
    "settings_of",
]

VERSION = 2
_TEXTS = {
    "version": "is of version {theirs}; this pycoll reads version {ours}",
    "codec": "is of {theirs}, this state of {ours}",
    "error_feedback": "has error_feedback={theirs}, this state {ours}",
    "two_way": "has two_way={theirs}, this state {ours}",
    "world_size": "is of {theirs} ranks, this group has {ours}: residuals belong to one rank of so "
    "many; begin with a new state, which has none",
    "rank": "is of rank {theirs}, this is rank {ours}: each rank saves and loads its own",
}


def settings_of(compressor: Codec | Compressor) -> dict[str, Any]:
    if isinstance(compressor, Codec):
        return {"kind": compressor.kind, **asdict(compressor)}
    return compressor._settings()


def save(header: dict[str, Any], plan: Plan | None, memory: Memory) -> dict[str, Any]:
    residuals: dict[str, torch.Tensor] = {}
    others = {key: memory.kept(key) for key in memory.kept_keys()}
    for unit in plan.units if plan is not None else ():
        kept = others.pop(residual_key(unit), None)
        for part in unit.parts if kept is not None else ():
            residuals[part.layout.name] = part.layout.shaped(part.of(kept)).clone()
    return {
        **header,
        "plan": None if plan is None else plan.describe(),
        "residuals": residuals,
        "others": {key: kept.clone() for key, kept in others.items() if kept is not None},
    }


def check_header(state: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """That a saved state was made by a state like this one, on this rank."""
    if not isinstance(state, Mapping):
        _refuse(f"is a {type(state).__name__}, not what state_dict() gave")
    if state.get("version", VERSION) != VERSION:
        _refuse(_TEXTS["version"].format(theirs=state["version"], ours=VERSION))
    wanted = {*ours, "plan", "residuals", "others"}
    missing, unknown = sorted(wanted - set(state)), sorted(map(str, set(state) - wanted))
    if missing or unknown:
        _refuse(f"lacks {missing} and has {unknown} beside what state_dict() gives")
    for key, text in _TEXTS.items():
        theirs = state[key]
        # Before its first step a state is anybody's.
        anyone = state["plan"] is None or None in (theirs, ours[key])
        if theirs != ours[key] and not (key in ("world_size", "rank") and anyone):
            _refuse(text.format(theirs=theirs, ours=ours[key]))
    if not isinstance(state["step"], int) or state["step"] < 0:
        _refuse(f"has step={state['step']!r}")
    if not isinstance(state["history"], str):
        _refuse(f"has history={state['history']!r}")


def check_parameters(state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> None:
    """That its residuals are of parameters of this model."""
    for name, residual in state["residuals"].items():
        if name not in parameters:
            _refuse(f"has a residual of {name!r}, which the model has not")
        if residual.shape != parameters[name].shape:
            _refuse(
                f"has a residual of shape {tuple(residual.shape)} for {name!r} of shape "
                f"{tuple(parameters[name].shape)}"
            )


def load(state: Mapping[str, Any], plan: Plan, reduction: Reduction) -> Memory:
    """The memory that was saved. Nothing is left out, nothing is made up."""
    memory = Memory()
    if state["plan"] is None:  # saved before its first step
        return memory
    _check_plan(state["plan"], plan)
    parameters = {part.layout.name for unit in plan.units for part in unit.parts}
    residuals, others = dict(state["residuals"]), dict(state["others"])
    for unit in plan.units:
        if unit.compressed and any(name in residuals for name in unit.names):
            memory.put(residual_key(unit), _joined(unit, residuals))
        for key, count in reduction.memory_of(unit).items() if unit.compressed else ():
            if key in others:
                memory.put(key, _of_count(key, others.pop(key), count, unit))
    if residuals:
        foreign = sorted(set(residuals) - parameters)
        _refuse(f"has residuals of {foreign or sorted(residuals)}, which are not compressed here")
    if others:
        _refuse(f"has {sorted(others)}, which this state has no use for")
    return memory


def _check_plan(theirs: list[dict[str, Any]], plan: Plan) -> None:
    ours = plan.describe()
    if theirs == ours:
        return
    names = [{n for unit in units for n in unit["parameters"]} for units in (theirs, ours)]
    compressed = [
        {n for unit in units if unit["compressed"] for n in unit["parameters"]}
        for units in (theirs, ours)
    ]
    for what, (saved, here) in (("trains", names), ("compresses", compressed)):
        if saved != here:
            _refuse(
                f"{what} {sorted(saved - here) or 'nothing'} that this run does not, which {what} "
                f"{sorted(here - saved) or 'nothing'} that it does not"
            )
    orders: list[dict[str, list[int]]] = []
    for units in (theirs, ours):
        every = [pair for u in units for pair in zip(u["parameters"], u["orders"], strict=True)]
        orders.append(dict(every))
    for name, order in orders[0].items():
        if order != orders[1][name]:
            _refuse(
                f"has {name!r} with dimensions in the order {order} in memory, here it is "
                f"{orders[1][name]}: use the memory format of the saved run"
            )
    _refuse(
        "has the parameters in other units: unit_bytes, min_bytes, dtypes and the order of the "
        "model's parameters must be those of the saved run"
    )


def _joined(unit: Unit, residuals: dict[str, torch.Tensor]) -> torch.Tensor:
    kept = torch.zeros(unit.count, dtype=torch.float32, device=unit.device)
    for part in unit.parts:
        name, layout = part.layout.name, part.layout
        residual = residuals.pop(name, None)
        if residual is None:
            _refuse(f"lacks the residual of {name!r}")
        if residual.dtype != torch.float32 or tuple(residual.shape) != layout.shape:
            _refuse(
                f"has a residual of {residual.dtype} and shape {tuple(residual.shape)} for "
                f"{name!r}, not of float32 and shape {layout.shape}"
            )
        layout.shaped(part.of(kept)).copy_(residual)
    return kept


def _of_count(key: str, values: torch.Tensor, count: int, unit: Unit) -> torch.Tensor:
    if values.dtype != torch.float32 or tuple(values.shape) != (count,):
        _refuse(f"has {key!r} of {values.dtype} and shape {tuple(values.shape)}, not ({count},)")
    return values.to(unit.device, copy=True)


def _refuse(text: str) -> Any:
    raise _core.InvalidArgumentError(f"CompressionState.load_state_dict: the state {text}")
