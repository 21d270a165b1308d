"""The state of a compressed DDP model: what it sends, what it keeps, when it keeps it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from pycoll import _core
from pycoll._arguments import number, whole
from pycoll.codecs import Codec, codec_of
from pycoll.hooks import checkpoint, history
from pycoll.hooks.codec_reduction import CodecReduction, feedback_of
from pycoll.hooks.memory import Memory
from pycoll.hooks.names import find_model, named_parameters
from pycoll.hooks.plan import Layout, Plan, Unit, layout_of, make_plan
from pycoll.hooks.reduction import (
    Call,
    Compressor,
    Exact,
    Group,
    Reduction,
    are_finite,
    check,
)
from pycoll.hooks.step import Buckets, UnitStep
from pycoll.options import MIN_BYTES

__all__ = ["CompressionState", "fewer_than_two_dimensions"]

Exempt = Callable[[str, torch.Tensor], bool] | Collection[str]


def fewer_than_two_dimensions(name: str, parameter: torch.Tensor) -> bool:
    """Biases and the weights of norms: few bytes, and their errors show most."""
    return parameter.dim() < 2


class CompressionState:
    """How the gradients of one DDP model travel, and what each step leaves for the next.

    Gradients are sent as gradient + residual, and the residual becomes what their compressed form
    lacks (error feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019). Residuals
    belong to parameters: DDP may cut its buckets anew. They are float32, in units of unscaled
    gradients, and a step changes them only when it counts: if every averaged gradient of the model
    is finite. All ranks see the same averages, so they decide alike without asking each other. The
    decision falls when the next backward pass begins, or when the state is saved; until then
    `roll_back()` forgets a step that is skipped for another reason. Passes under `no_sync()` change
    nothing. A parameter whose gradient on this rank is zero throughout sends nothing and keeps its
    residual.

    Every rank must make its state alike. A state serves one model, of CPU tensors or, with a codec,
    of GPU tensors. At the end of a backward pass it waits for the averages on the GPU: whether the
    step counts depends on them.

    Args:
        group: DDP's process group, of pycoll, None for the default one. A codec of its own
            (`Options.codec`), or of a region (`pycoll.codec`), does not count here.
        codec: a name such as "int4" or an object of `pycoll.codecs`, or `PowerSGD`, `TopK`,
            `RandomK` of `pycoll.hooks`.
        error_feedback: whether residuals are kept. None: yes, but for "ternary", which is right in
            the mean without.
        two_way: with a codec and error feedback: the rank that sums a part also keeps what the
            code of the sum lacks (Zheng, Huang, Kwok, NeurIPS 2019). Otherwise that is lost. None:
            no, but for "ternary" with error feedback, which trains badly on one way only (a
            warning says so). "sign" diverges with it at learning rates at which it learns without.
        exempt: parameters whose gradients travel as they are: ``exempt(name, parameter) -> bool``,
            or names as of ``ddp.module.named_parameters()``. By default those of fewer than two
            dimensions. Always exempt are dtypes that the codec does not take.
        scaler: the `torch.amp.GradScaler` of the gradients, if there is one: anything with
            `get_scale()`. Residuals follow its scale, exactly if that is a power of two. Whether a
            step counts does not depend on it: it skips the steps of averages that are not finite,
            and its scale may fall for other reasons.
        predivide_factor: gradients are divided by it before ranks are summed and averages
            multiplied by it: sums of large gradients stay finite, and means are what they were
            (to the bit for a power of two).
        unit_bytes: gradients are sent in units of about this size, larger ones alone.
        min_bytes: units of fewer bytes travel as they are; None: 16384. With a codec
            `Options.min_bytes` of the group, 16384 by default, holds too.
        model: the DDP model or what it wraps, to name the parameters; None: the one that the
            state is registered with.

    Raises `InvalidArgumentError` (a ValueError) for arguments that cannot be.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        codec: str | Codec | Compressor,
        *,
        error_feedback: bool | None = None,
        two_way: bool | None = None,
        exempt: Exempt | None = None,
        scaler: Any = None,
        predivide_factor: float = 1.0,
        unit_bytes: int = 4 << 20,
        min_bytes: int | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        # A class is refused as a codec: with a hint, also at PowerSGD instead of PowerSGD().
        is_codec = isinstance(codec, str | Codec | type) or not hasattr(codec, "_reduction")
        self._compressor: Any = codec_of(codec) if is_codec else codec  # type: ignore[arg-type]
        kept, kept_of_sums = feedback_of(self._compressor, error_feedback, two_way)
        check(is_codec or not kept_of_sums, f"two_way is for codecs, not for {codec!r}")
        names = isinstance(exempt, Collection) and not isinstance(exempt, str | bytes)
        check(
            exempt is None or callable(exempt) or names,
            f"exempt is a function or names of parameters, not {exempt!r}",
        )
        check(
            model is None or isinstance(model, torch.nn.Module),
            f"model is a torch.nn.Module, not {model!r}",
        )
        factor, size = "CompressionState: predivide_factor", "a number from 0 on"
        predivide_factor = number(factor, predivide_factor, "a positive number", above=0)
        unit_bytes = whole("CompressionState: unit_bytes", unit_bytes, size)
        if min_bytes is not None:
            min_bytes = whole("CompressionState: min_bytes", min_bytes, size)
        check(
            scaler is None or hasattr(scaler, "get_scale"),
            f"scaler is a torch.amp.GradScaler, not a {type(scaler).__name__}",
        )
        self._settings: dict[str, Any] = {
            "error_feedback": kept,
            "two_way": kept_of_sums,
            "exempt": exempt,
            "predivide_factor": predivide_factor,
            "unit_bytes": unit_bytes,
            "min_bytes": MIN_BYTES if min_bytes is None else min_bytes,
        }
        self._scaler = scaler
        self._momentum: Any = None
        self._missing: set[str] = set()
        self._step = 0
        self._history = history.EMPTY
        self._loaded: dict[str, Any] | None = None
        self._connect(group, model)

    def _connect(self, group: dist.ProcessGroup | None, model: torch.nn.Module | None) -> None:
        """What is not saved."""
        self._group = Group(group)
        self._model = model
        self._names: dict[int, str] = {}
        self._ignored: set[str] = set()
        self._parameters: dict[str, torch.Tensor] = {}
        self._memory = Memory()
        self._plans: dict[bool, Plan] = {}  # exact, compressed
        self._scratch: dict[bool, dict[int, torch.Tensor]] = {False: {}, True: {}}
        self._exact: Reduction | None = None
        self._reduction: Reduction | None = None
        self._agreed = False  # with the other ranks, on all that must be alike
        self._buckets: Buckets | None = None  # in a backward pass
        self._launched: list[UnitStep] = []
        self._finite: bool | None = None  # the last step's averages; None: it is settled
        self._last_scale = 1.0

    # ---- Between steps ----

    @property
    def scaler(self) -> Any:
        """May be set between steps, and must be after unpickling a state that had one."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        self._check_between("scaler")
        self.commit()
        self._scaler = scaler
        self._missing.discard("scaler")

    @property
    def group(self) -> dist.ProcessGroup | None:
        """May be set before the first step, and must be after unpickling a state that had one."""
        return self._group.handle

    @group.setter
    def group(self, group: dist.ProcessGroup | None) -> None:
        self._check_between("group")
        if self._plans:
            raise _core.Error("CompressionState.group: steps were made with the one that it has")
        self._group = Group(group)
        self._missing.discard("group")

    @property
    def step(self) -> int:
        """Backward passes so far, with those that did not count."""
        return self._step

    def commit(self) -> bool:
        """Settles the last step now: keeps what it left if its averages are finite. Returns whether
        they are; True if there is nothing to settle."""
        self._check_between("commit")
        if self._finite is None:
            return True
        keep = self._finite
        self._memory.settle(keep)
        self._finite = None
        return keep

    def roll_back(self) -> None:
        """Forgets what the last step left, for a step that does not count although it is finite:
        on every rank, or ranks' residuals are of different steps.

        Raises `Error` when it is settled already: the next backward pass has begun, or the state
        was saved.
        """
        self._check_between("roll_back")
        if self._finite is None:
            raise _core.Error("roll_back: the last step is settled; call it right after backward()")
        self._finite = False
        self.commit()

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, of this rank: tensors and plain types. Settles the
        last step. In a backward pass, or after one that an error ended: as before it. "residuals"
        are by parameter name, float32 in its shape, in units of unscaled gradients; every rank has
        its own."""
        if self._buckets is None:  # else the pass has settled it when it began
            self.commit()
        if not self._plans and self._loaded is not None:
            return dict(self._loaded)
        return checkpoint.save(self._header(), self._plans.get(True), self._memory)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up what `state_dict()` gave on the same rank of as many, for the same model and
        settings: the run goes on as the saved one would have, to the bit. Every rank must do so,
        with what was saved after the same step of the same run; the next backward pass compares.

        Raises `InvalidArgumentError` (a ValueError) that names what differs; before the first step,
        some of it may be found only then.
        """
        self._check_between("load_state_dict")
        self.commit()
        checkpoint.check_header(state_dict, self._header())
        model = self._model or find_model(self)
        if model is not None:
            checkpoint.check_parameters(state_dict, named_parameters(model))
        if self._reduction is not None:
            self._memory = checkpoint.load(state_dict, self._plans[True], self._reduction)
        else:
            self._loaded = dict(state_dict)
        self._step, self._history = state_dict["step"], state_dict["history"]
        self._agreed = False

    def _header(self) -> dict[str, Any]:
        ready = dist.is_available() and dist.is_initialized()
        return {
            "version": checkpoint.VERSION,
            "codec": checkpoint.settings_of(self._compressor),
            "error_feedback": self._settings["error_feedback"],
            "two_way": self._settings["two_way"],
            "world_size": self._group.size if ready else None,
            "rank": self._group.rank if ready else None,
            "step": self._step,
            "history": self._history,
        }

    def __getstate__(self) -> dict[str, Any]:
        missing = set(self._missing)
        if self._group.handle is not None:
            missing.add("group")
        if self._scaler is not None:
            missing.add("scaler")
        if self._momentum is not None:
            missing.add("optimizer")
        return {
            "compressor": self._compressor,
            "settings": self._settings,
            "missing": sorted(missing),
            "state": self.state_dict(),
        }

    def __setstate__(self, given: dict[str, Any]) -> None:
        """A group, a scaler, an optimizer and a model cannot come along: group (but for the default
        one), scaler and optimizer must be given anew."""
        self._compressor = given["compressor"]
        self._settings = given["settings"]
        self._missing = set(given["missing"])
        self._scaler = self._momentum = None
        self._loaded = given["state"]
        self._step, self._history = given["state"]["step"], given["state"]["history"]
        self._connect(None, None)

    def _check_between(self, name: str) -> None:
        if self._buckets is None:
            return
        if torch._C._current_graph_task_id() != -1:  # in autograd, on this thread
            raise _core.Error(f"CompressionState.{name}: a backward pass is under way")
        self._abandon()

    def _abandon(self) -> None:
        """After an error in a pass. Its calls may still run: what they write to is left to them."""
        self._buckets, self._launched = None, []
        self._memory.abandon()
        self._scratch = {False: {}, True: {}}

    # ---- A step ----

    def _hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._buckets is None or self._repeats(bucket):
            self._begin()
        buckets = self._buckets
        assert buckets is not None
        try:
            future = buckets.add(bucket, self._names)
            # In the first pass of a static graph DDP gives no bucket an index, nor calls one last.
            last = bucket.is_last() or self._all_came(buckets)
            if last:
                self._check_trained(buckets)
            if last and not self._plans:
                self._make_plans(buckets)
            elif self._plans and not self._agreed:  # something was loaded since
                self._agree(self._plans[True], bucket.buffer().device)
            self._launch(buckets)
            if last:
                self._finish(buckets)
        except BaseException:
            self._abandon()
            raise
        return future

    def _repeats(self, bucket: dist.GradBucket) -> bool:
        """Whether the bucket belongs to another pass than those that have come."""
        assert self._buckets is not None
        names = [self._names.get(id(parameter)) for parameter in bucket.parameters()]
        return any(name in self._buckets.gradients for name in names)

    def _trained(self) -> set[str]:
        """Parameters whose gradients a pass brings."""
        if self._plans:
            return {name for unit in self._plans[True].units for name in unit.names}
        return {
            name
            for name, parameter in self._parameters.items()
            if parameter.requires_grad and name not in self._ignored
        }

    def _all_came(self, buckets: Buckets) -> bool:
        return len(buckets.gradients) >= len(self._trained())

    def _check_trained(self, buckets: Buckets) -> None:
        """A gradient of no unit would stay this rank's own, and ranks would part."""
        if not self._plans or set(buckets.gradients) == self._trained():
            return
        names = sorted(set(buckets.gradients) ^ self._trained())
        raise _core.InvalidArgumentError(
            "compress_hook: the model trains other parameters than when this state was first used "
            f"({', '.join(names[:5])}); make a new state with each new DistributedDataParallel"
        )

    def _begin(self) -> None:
        if self._buckets is not None:  # of a pass that an error ended elsewhere
            self._abandon()
        self.commit()
        if self._missing:
            raise _core.Error(
                f"compress_hook: the state was unpickled without its {', '.join(self._missing)}; "
                "set state.group, state.scaler, call optimizer.attach(state)"
            )
        if not self._names:
            self._name_parameters()
        self._last_scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        self._buckets, self._launched, self._finite = Buckets(), [], False

    def _name_parameters(self) -> None:
        model = self._model or find_model(self)
        if model is None:
            raise _core.InvalidArgumentError(
                "compress_hook: no DDP model has this state; register the state itself, "
                "ddp.register_comm_hook(state, pycoll.compress_hook), or make it with model=ddp "
                "(which is also what to do after gc.freeze(), which hides models)"
            )
        theirs = getattr(model, "process_group", None)
        if theirs is not None:
            self._group.check_ranks(theirs)
        self._ignored = set(getattr(model, "parameters_to_ignore", ()))
        self._parameters = named_parameters(model)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}

    def _make_plans(self, buckets: Buckets) -> None:
        """Of the parameters in DDP's buckets: it has no frozen and no ignored ones."""
        reduction = self._make_reduction()
        # The order in which backward passes give gradients, as a rule.
        layouts = [
            layout_of(name, parameter)
            for name, parameter in reversed(self._parameters.items())
            if name in buckets.gradients
        ]
        exempt, several = self._exempt_names(), self._group.size > 1

        def compressed(layout: Layout) -> bool:
            fits = several and layout.count > 0 and layout.name not in exempt
            return fits and reduction.takes(layout)

        size, least = self._settings["unit_bytes"], self._settings["min_bytes"]
        unit_bytes = None if reduction.whole_step else size
        plan = make_plan(layouts, compressed, unit_bytes, least, reduction.block)
        self._agree(plan, layouts[0].device)
        if self._loaded is not None:
            checkpoint.check_header(self._loaded, self._header())
            self._memory = checkpoint.load(self._loaded, plan, reduction)
            self._loaded = None
        # Only now: a state that does not fit is refused again in the next step.
        self._plans = {False: make_plan(layouts, lambda layout: False, size, least), True: plan}
        self._exact, self._reduction = Exact(self._group), reduction
        if self._momentum is not None and several:
            self._momentum.check_resumed(self._step)
        if several and not any(unit.compressed for unit in plan.units):
            warnings.warn(
                f"CompressionState: {self._compressor!r} compresses nothing of this model: its "
                "gradients are exempt, too small, or of other dtypes",
                stacklevel=2,
            )

    def _agree(self, plan: Plan, device: torch.device) -> None:
        settings = {k: v for k, v in self._settings.items() if k != "exempt"}
        compressor, exempt = checkpoint.settings_of(self._compressor), sorted(self._exempt_names())
        what = [compressor, settings, exempt, plan.describe(), self._step, self._history]
        self._group.check_agreement(what, device)
        self._agreed = True

    def _make_reduction(self) -> Reduction:
        if not isinstance(self._compressor, Codec):
            return self._compressor._reduction(self._group)
        return CodecReduction(self._compressor, self._settings["two_way"], self._group)

    def _exempt_names(self) -> set[str]:
        exempt = self._settings["exempt"]
        if exempt is None:
            exempt = fewer_than_two_dimensions
        if callable(exempt):
            return {name for name, x in self._parameters.items() if exempt(name, x)}
        unknown = sorted(set(exempt) - set(self._parameters))
        check(not unknown, f"exempt: the model has no parameters {', '.join(unknown)}")
        return set(exempt)

    def _compresses(self) -> bool:
        """This step, rather than sending exact gradients for a start."""
        assert self._reduction is not None
        if self._momentum is not None:
            return bool(self._momentum.frozen)
        return self._step >= self._reduction.first_step

    def _reduction_of(self, unit: Unit) -> Reduction:
        reduction = self._reduction if unit.compressed else self._exact
        assert reduction is not None
        return reduction

    def _launch(self, buckets: Buckets) -> None:
        """Starts the units whose gradients have all come."""
        if not self._plans:
            return
        compresses = self._compresses()
        plan = self._plans[compresses]
        started = {step.unit.index for step in self._launched}
        for unit in plan.units:
            if unit.index in started or not buckets.have(unit):
                continue
            step = UnitStep(unit, buckets, self._scratch[compresses])
            if self._momentum is not None and compresses:
                self._momentum.replace(step.parts(), self._parameters, self._last_scale)
            step.launch(self._reduction_of(unit), self._call_of(step, len(plan.units)))
            self._launched.append(step)

    def _call_of(self, step: UnitStep, units: int) -> Call:
        factor = self._settings["predivide_factor"]
        if factor != 1:
            step.values.div_(factor)
        scale = self._last_scale / factor
        residual = None
        if self._settings["error_feedback"] and step.unit.compressed:
            residual = step.residual(self._memory, scale)
        return Call(
            step.unit,
            step.values,
            residual,
            self._memory,
            scale,
            number=(self._step * units + step.unit.index) % (1 << 32),
        )

    def _finish(self, buckets: Buckets) -> None:
        for reduction in (self._exact, self._reduction):
            assert reduction is not None
            calls = [s.call for s in self._launched if self._reduction_of(s.unit) is reduction]
            reduction.finish(calls)
        factor = self._settings["predivide_factor"]
        for step in self._launched:
            step.give_back(factor)
        averages = [step.values for step in self._launched]
        self._finite = are_finite(averages)
        self._history = history.after(self._history, averages)
        if self._momentum is not None:
            self._momentum.deliver(self._compresses())
        self._step += 1
        self._buckets, self._launched = None, []
        buckets.complete()
