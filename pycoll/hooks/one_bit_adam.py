"""Adam with momenta of one bit a value."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pycoll import _core
from pycoll._arguments import number, refuse, whole
from pycoll.codecs import Codec
from pycoll.hooks.reduction import check
from pycoll.hooks.state import CompressionState

__all__ = ["OneBitAdam"]


def _checked_betas(betas: Any) -> tuple[float, float]:
    what, allowed = "OneBitAdam: betas", "two numbers from 0 to below 1"
    try:
        first, second = (number(what, beta, allowed) for beta in betas)
    except (TypeError, ValueError):  # no pair, or not of numbers
        raise refuse(what, allowed, betas) from None
    if first >= 1 or second >= 1:
        raise refuse(what, allowed, betas)
    return first, second


class OneBitAdam(torch.optim.Optimizer):
    """1-bit Adam (Tang et al., ICML 2021): Adam at first; then its variance is frozen, and what
    travels is the momentum, compressed, with error feedback on both ways.

        optimizer = pycoll.OneBitAdam(ddp.parameters(), lr=1e-3, freeze_step=1000)
        state = optimizer.compression()
        ddp.register_comm_hook(state, pycoll.compress_hook)

    To resume, save and load both: ``optimizer.state_dict()``, which is alike on all ranks, and
    ``state.state_dict()``, which each rank has its own of.

    Until `freeze_step` the hook gives exact mean gradients and `step()` is Adam's, with bias
    correction. Then v is divided by its bias correction, raised to `variance_floor` times the mean
    of its tensor where it is less (few gradients have been seen of some parameters, which would
    take huge steps), and stays. From then on the hook gives, in place of gradients, m: the mean
    over the ranks of ``beta1 m + (1 - beta1) g``. `step()` takes it: ``p -= lr * m / (1 -
    beta1**t) / (sqrt(v) + eps)``. So `p.grad` is a momentum then; clipping clips it, and gradients
    of several passes are accumulated under `no_sync()` only. With a GradScaler (give it to
    `compression`), steps whose averages are not finite change neither momentum nor residuals.

    Args:
        params: parameters or groups of them, of the DDP model; float32.
        lr, betas, eps: as of torch.optim.Adam.
        weight_decay: decoupled, as of torch.optim.AdamW: ``p -= lr * weight_decay * p``.
        freeze_step: steps of Adam, 15 to 25 % of all in the paper; at least 1.
        variance_floor: see above; 0: none.

    Raises `InvalidArgumentError` (a ValueError) for numbers that cannot be.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int,
        variance_floor: float = 1e-3,
    ) -> None:
        freeze_step = whole(
            "OneBitAdam: freeze_step", freeze_step, "a number of steps from 1 on", least=1
        )
        numbers: dict[str, Any] = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        numbers["variance_floor"] = variance_floor
        for name, value in numbers.items():
            is_tensor = isinstance(value, torch.Tensor)  # as torch's optimizers take it
            plain = value.tolist() if is_tensor else value
            found = number(f"OneBitAdam: {name}", plain, "a number from 0 on")
            numbers[name] = value if is_tensor else found
        defaults = {
            **numbers,
            "betas": _checked_betas(betas),
            "freeze_step": freeze_step,
            "steps": 0,
        }
        self._group_of: dict[int, int] = {}
        self._delivered = False
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        first, group = self.param_groups[0], self.param_groups[-1]
        check(
            group["freeze_step"] == first["freeze_step"] and group["steps"] == first["steps"] == 0,
            "OneBitAdam: v is frozen for all groups at once; give them all at the start, with one "
            "freeze_step",
        )
        for p in group["params"]:
            # torch would round the moments to narrower types when they are loaded.
            check(p.dtype == torch.float32, f"OneBitAdam: parameters are float32, not {p.dtype}")
            self._group_of[id(p)] = len(self.param_groups) - 1

    @property
    def frozen(self) -> bool:
        """Whether the next backward pass gives momenta."""
        group = self.param_groups[0]
        return bool(group["steps"] >= group["freeze_step"])

    def compression(
        self, group: Any = None, codec: str | Codec = "sign", **options: Any
    ) -> CompressionState:
        """A state for `pycoll.compress_hook`; arguments as of `CompressionState`, but that error
        feedback is the default for every codec, and `two_way` where it can be."""
        feedback = options.pop("error_feedback", True)
        two_way = options.pop("two_way", feedback and isinstance(codec, str | Codec))
        state = CompressionState(group, codec, error_feedback=feedback, two_way=two_way, **options)
        self.attach(state)
        return state

    def attach(self, state: CompressionState) -> None:
        """Makes a state that was unpickled serve this optimizer again."""
        state._momentum = self
        state._missing.discard("optimizer")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises `Error` once v is frozen and `p.grad` is not what the hook gave."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        frozen = self.frozen
        if frozen and not self._delivered:
            raise _core.Error(
                "OneBitAdam.step: the gradients are no momenta; the DDP model needs "
                "ddp.register_comm_hook(optimizer.compression(), pycoll.compress_hook), and a "
                "backward pass before each step"
            )
        self._delivered = False
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.mul_(1 - group["lr"] * group["weight_decay"])
                if frozen:
                    self._momentum_step(p, group)
                else:
                    self._adam_step(p, group)
        if not frozen and self.frozen:
            self._freeze()
        return loss

    def _of(self, p: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
        return state

    def _adam_step(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self._of(p), group["betas"]
        gradient = p.grad.float()
        m = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        self._move(p, m, v / (1 - beta2 ** group["steps"]), group)

    def _momentum_step(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self._of(p)
        self._move(p, state["exp_avg"].copy_(p.grad), state["exp_avg_sq"], group)

    def _move(
        self, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, group: dict[str, Any]
    ) -> None:
        direction = m / (v.sqrt() + group["eps"])
        size = group["lr"] / (1 - group["betas"][0] ** group["steps"])
        p.add_(direction.to(p.dtype), alpha=-size)

    def _freeze(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    v = self.state[p]["exp_avg_sq"].div_(1 - group["betas"][1] ** group["steps"])
                    v.clamp_(min=group["variance_floor"] * v.mean().item())

    # ---- For CompressionState ----

    def replace(
        self,
        gradients: Iterable[tuple[str, torch.Tensor]],
        parameters: dict[str, torch.Tensor],
        scale: float,
    ) -> None:
        """Makes momenta of gradients that are `scale` times as large, in the parameters' shapes:
        moments that were loaded may lie otherwise in memory."""
        for name, gradient in gradients:
            p = parameters[name]
            if id(p) not in self._group_of:
                raise _core.Error(f"OneBitAdam: parameter {name!r} is not the optimizer's")
            beta1 = self.param_groups[self._group_of[id(p)]]["betas"][0]
            momentum = self._of(p)["exp_avg"]
            gradient.mul_(1 - beta1).add_(momentum, alpha=beta1 * scale)

    def check_resumed(self, step: int) -> None:
        """Warns of a state at `step` that was not loaded although the optimizer was."""
        group = self.param_groups[0]
        if step == 0 and group["steps"] > group["freeze_step"]:
            warnings.warn(
                f"OneBitAdam: the optimizer goes on after {group['steps']} steps, its "
                "CompressionState begins anew: what the codes lacked so far is lost, and the run "
                "is not the one that was saved. Save and load state_dict() of "
                "state = optimizer.compression() too, on every rank",
                stacklevel=2,
            )

    def deliver(self, momenta: bool) -> None:
        self._delivered = momenta
