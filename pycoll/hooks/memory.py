"""What compression keeps from step to step, with a copy to go back to."""

from __future__ import annotations

import torch

__all__ = ["Memory"]


class Memory:
    """Named float32 vectors. A step works on copies; at its end all are kept, or all forgotten.

    Kept values are in units of unscaled gradients. A step whose gradients are `scale` times as
    large works on copies that are, too: for a power of two nothing is rounded on the way (but for
    values that leave the range of normal numbers).
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._working: dict[str, torch.Tensor] = {}
        self._opened: dict[str, float] = {}

    def open(self, key: str, count: int, device: torch.device, scale: float) -> torch.Tensor:
        """The copy that this step may change: `count` values, zero if there were none."""
        if self._opened.get(key) == scale:
            return self._working[key]
        if key not in self._working:
            self._working[key] = torch.empty(count, dtype=torch.float32, device=device)
        working, kept = self._working[key], self._kept.get(key)
        if kept is None:
            working.zero_()
        else:
            torch.mul(kept, scale, out=working)
        self._opened[key] = scale
        return working

    def kept(self, key: str) -> torch.Tensor | None:
        """As the last step that was kept left it."""
        return self._kept.get(key)

    def put(self, key: str, values: torch.Tensor) -> None:
        self._kept[key] = values

    def kept_keys(self) -> list[str]:
        return list(self._kept)

    def abandon(self) -> None:
        """After an error in a step: calls that are under way may still write to its copies."""
        self._working.clear()
        self._opened.clear()

    def settle(self, keep: bool) -> None:
        """Keeps what the step did, or forgets it."""
        for key, scale in self._opened.items() if keep else ():
            working = self._working.pop(key)
            if scale != 1:
                working.div_(scale)
            if key in self._kept:
                self._working[key] = self._kept[key]
            self._kept[key] = working
        self._opened.clear()
