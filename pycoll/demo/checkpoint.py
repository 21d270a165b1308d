"""Checkpoints: one file, either the old one or the new one, never half of one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` beside `path`, then renames it over `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        # Without this a power cut can leave the new name on an empty file.
        os.fsync(file.fileno())
    part.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Raises FileNotFoundError that says how to get a checkpoint when there is none."""
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path}: train without resume first")
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def must_match(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raises ValueError that lists the settings which differ."""
    differing = [
        f"{name} was {theirs.get(name)!r}, is {value!r}"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]
    if differing:
        raise ValueError("the checkpoint is of another run: " + "; ".join(differing))
