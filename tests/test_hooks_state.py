"""What a compressed run saves, and what it takes up."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch

import pycoll
from helpers_hooks import (
    ALGORITHMS,
    SHAPES,
    Given,
    Run,
    Training,
    arrays,
    equal,
    gradients_of,
    ranks_of,
)

SAVED, END = 7, 14  # steps; PowerSGD starts at 3, 1-bit Adam freezes at 5


def straight(rank, w, directory):
    results = {}
    for name in ALGORITHMS:
        training = Training(rank, name, freeze_step=5)
        training.run(0, SAVED)
        parts = (training.model, training.optimizer, training.state)
        torch.save([part.state_dict() for part in parts], f"{directory}/{name}.{rank}")
        training.run(SAVED, END)
        results[name] = outcome(training)
    # A checkpoint after the first step, before DDP has made its buckets anew.
    early = Training(rank, "int4_stochastic")
    early.run(0, 1)
    parts = (early.model, early.optimizer, early.state)
    torch.save([part.state_dict() for part in parts], f"{directory}/early.{rank}")
    early.run(1, END)
    results["early"] = outcome(early)
    return results


def resumed(rank, w, directory):
    results = {}
    for name in [*ALGORITHMS, "early"]:
        early = name == "early"
        training = Training(rank, "int4_stochastic" if early else name, freeze_step=5)
        states = torch.load(f"{directory}/{name}.{rank}", weights_only=True)
        parts = (training.model, training.optimizer, training.state)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        assert equal(training.state.state_dict(), states[2])
        training.run(1 if early else SAVED, END)
        results[name] = outcome(training)
    return results


def outcome(training):
    return training.weights(), arrays(training.state.state_dict())


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    """To the bit, in new processes, whose DDP begins with other buckets."""
    whole = [r.value for r in ranks_of(2, straight, str(tmp_path))]
    again = [r.value for r in ranks_of(2, resumed, str(tmp_path))]
    for rank in range(2):
        for name, (weights, state) in whole[rank].items():
            assert again[rank][name][0] == weights, name
            assert equal(again[rank][name][1], state), name
            feedback = name not in ("int8_without_feedback", "ternary")
            assert bool(state["residuals"]) == feedback, name


def saved_and_loaded(rank, w):
    run = Run("int4")
    for step in range(3):
        run.step(gradients_of(rank, step))
    state = run.state.state_dict()
    assert list(state["residuals"]) == ["c", "b", "a"]
    assert all(x.shape == SHAPES[name] for name, x in state["residuals"].items())
    assert all(x.dtype == torch.float32 for x in state["residuals"].values())
    kept = copy.deepcopy(state)
    run.step(gradients_of(rank, 3))
    assert equal(state, kept), "what was saved changes with the run"
    # Into a state that has run already, and into one of another model's object.
    expected = Run("int4")
    expected.state.load_state_dict(state)
    assert equal(expected.state.state_dict(), kept)
    run.state.load_state_dict(state)
    assert run.state.step == 3
    for step in (3, 4):
        assert equal(run.step(gradients_of(rank, step)), expected.step(gradients_of(rank, step)))
    fresh = Run("int4")
    fresh.state.load_state_dict(Run("int4").state.state_dict() | {"rank": 1 - rank})
    # By pickle: before the first step, and later.
    unused = pickle.loads(pickle.dumps(pycoll.CompressionState(None, "int4")))
    first = Run(unused).step(gradients_of(rank, 0))
    assert equal(first, Run("int4").step(gradients_of(rank, 0)))
    buffer = io.BytesIO()
    torch.save(run.state, buffer)
    buffer.seek(0)
    again = Run(torch.load(buffer, weights_only=False))
    assert equal(again.state.state_dict(), run.state.state_dict())
    assert equal(again.step(gradients_of(rank, 5)), run.step(gradients_of(rank, 5)))
    assert equal(again.residuals(), run.residuals())


def left_out(rank, w):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run = Run(pickle.loads(pickle.dumps(pycoll.CompressionState(None, "int4", scaler=scaler))))
    with pytest.raises(pycoll.Error, match=r"without its scaler.*state\.scaler"):
        run.step(gradients_of(rank, 0))
    run = Run(pickle.loads(pickle.dumps(run.state)))
    run.state.scaler = scaler
    run.step(gradients_of(rank, 0), factor=scaler.get_scale())
    training = Training(rank, "one_bit_adam", freeze_step=1)
    state = pickle.loads(pickle.dumps(training.state))
    ddp = torch.nn.parallel.DistributedDataParallel(training.model)
    ddp.register_comm_hook(state, pycoll.compress_hook)
    with pytest.raises(pycoll.Error, match="without its optimizer"):
        ddp(torch.ones(1, 32)).sum().backward()
    training.optimizer.attach(state)
    ddp = torch.nn.parallel.DistributedDataParallel(training.model)
    ddp.register_comm_hook(state, pycoll.compress_hook)
    ddp(torch.ones(1, 32)).sum().backward()
    training.optimizer.step()
    assert training.optimizer.frozen


def changed(state, **entries):
    return {**state, **entries}


def refused(rank, w):
    run = Run("int4", two_way=True)
    run.step(gradients_of(rank, 0))
    state = run.state.state_dict()
    residuals, others = state["residuals"], state["others"]
    without_b = {name: x for name, x in residuals.items() if name != "b"}
    for wrong, text in (
        (5, "is a int"),
        ({}, "lacks"),
        (changed(state, more=1), "more"),
        (changed(state, version=1), "version 1"),
        (changed(state, rank=1 - rank), f"is of rank {1 - rank}, this is rank {rank}"),
        (changed(state, world_size=5), "is of 5 ranks, this group has 2"),
        (changed(state, two_way=False), "two_way=False"),
        (changed(state, step=-1), "step=-1"),
        (changed(state, history=5), "history=5"),
        (changed(state, codec=Run("int8").state.state_dict()["codec"]), "int8"),
        (changed(state, codec={**state["codec"], "block": 64}), "64"),
        (changed(state, residuals=without_b), "lacks the residual of 'b'"),
        (changed(state, residuals={**residuals, "z": residuals["a"]}), "'z'"),
        (changed(state, residuals={**residuals, "a": residuals["b"]}), r"\(50, 130\)"),
        (changed(state, residuals={**residuals, "a": residuals["a"].double()}), "float64"),
        (changed(state, residuals={**residuals, "bias": torch.zeros(64)}), "not compressed"),
        (changed(state, others={"sum/0": others["sum/0"][1:]}), "sum/0"),
        (changed(state, others={**others, "q/a": others["sum/0"]}), "no use for"),
        (changed(state, plan=state["plan"][:1]), "trains nothing"),
    ):
        with pytest.raises(pycoll.InvalidArgumentError, match=text):
            run.state.load_state_dict(wrong)
    assert equal(run.state.state_dict(), state)
    for options, text in (
        ({"exempt": ["a", "bias", "scale"]}, r"compresses \['a'\]"),
        ({"unit_bytes": 1000}, "other units"),
    ):
        other = Run("int4", two_way=True, **options)
        other.state.load_state_dict(state)  # the plan is known later
        with pytest.raises(pycoll.InvalidArgumentError, match=text):
            other.step(gradients_of(rank, 0))
        # It does not go on without what was loaded. (DDP cannot, after an error in its pass.)
        assert equal(other.state.state_dict(), state)
    model = Run("int4", two_way=True, shapes={"a": (70, 100), "b": (50, 131)})
    with pytest.raises(pycoll.InvalidArgumentError, match=r"'c', which the model has not"):
        model.state.load_state_dict(state)


def within_a_step(rank, w):
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        run, twin = (Run("int4", ddp=options) for _ in range(2))
        before = []

        def hook(state, bucket, run=run, twin=twin, before=before):
            future = pycoll.compress_hook(state, bucket)
            if len(state._launched) > 0:
                for use in (state.commit, state.roll_back, lambda: state.load_state_dict({})):
                    with pytest.raises(pycoll.Error, match="backward pass is under way"):
                        use()
                assert equal(state.state_dict(), twin.state.state_dict())
                before.append(state.step)
            return future

        run.ddp = torch.nn.parallel.DistributedDataParallel(
            run.model, bucket_cap_mb=0.02, **options
        )
        run.state = pycoll.CompressionState(None, "int4", model=run.ddp, unit_bytes=20_000)
        twin.state._settings["unit_bytes"] = 20_000
        run.ddp.register_comm_hook(run.state, hook)
        for step in range(3):  # the first one has one bucket
            got = run.step(gradients_of(rank, step))
            assert equal(got, twin.step(gradients_of(rank, step)))
        assert before, options


def wrapped(model, state):
    gc.collect()  # a wrapper whose pass failed would still count gradients
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    ddp.register_comm_hook(state, pycoll.compress_hook)
    return ddp


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ZeroDivisionError("in the middle of a backward pass")
        return gradient, None


class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (torch.nn.Linear(96, 96) for _ in range(2))

    def forward(self, x, fails):
        return self.second(Fails.apply(self.first(x), fails))


def failed_pass(rank, w):
    """Buckets have come, and their calls were made, when a backward pass fails elsewhere."""
    runs = []
    for recover in (
        lambda state, saved: None,
        lambda state, saved: state.commit(),
        lambda state, saved: state.roll_back(),
        lambda state, saved: state.load_state_dict(saved),
        lambda state, saved: setattr(state, "scaler", None),
    ):
        model = Halves()
        state = pycoll.CompressionState(None, "int4", two_way=True, unit_bytes=0)

        def step(ddp, number, fails=False):
            generator = torch.Generator().manual_seed(10 * number + rank)
            ddp(torch.randn(4, 96, generator=generator), fails).square().sum().backward()

        ddp = wrapped(model, state)
        step(ddp, 0)
        step(ddp, 1)  # buckets are made anew
        saved = state.state_dict()
        with pytest.raises(ZeroDivisionError):
            step(ddp, 2, fails=True)
        del ddp  # it cannot go on after an error in a pass
        assert state._launched, "no bucket had come"
        assert equal(state.state_dict(), saved)
        recover(state, saved)
        assert equal(state.state_dict(), saved)
        model.zero_grad()
        step(wrapped(model, state), 2)
        runs.append([state.state_dict(), [p.grad for p in model.parameters()]])
    without = runs[0]
    assert all(equal(run, without) for run in runs)
    assert without[0]["step"] == 3


LOADED = {
    "int4": {},
    "sign": {"two_way": True},
    "random_k": {"codec": pycoll.RandomK()},
    "power_sgd": {"codec": pycoll.PowerSGD(start_step=2, min_compression_rate=0)},
}


def loaded_otherwise(rank, w):
    """Each rank another step, or the same step of another run: into a state that has run, and into
    a new one."""
    for name, options in LOADED.items():
        run, other = (Run(**{"codec": name, **options}) for _ in range(2))
        saved = []
        for step in range(3):
            run.step(gradients_of(rank, step))
            other.step(gradients_of(rank, 10 + step))
            saved.append(run.state.state_dict())
        for mine in (saved[1 + rank], (saved[2], other.state.state_dict())[rank]):
            run.state.load_state_dict(mine)
            for _ in range(2):  # it does not go on when it was caught once
                with pytest.raises(pycoll.MismatchError, match=r"ranks \[1\] are unlike.*loaded"):
                    run.step(gradients_of(rank, 3))
                run.ddp = None
                run.ddp = wrapped(run.model, run.state)
        fresh = Run(**{"codec": name, **options})
        fresh.state.load_state_dict((saved[2], other.state.state_dict())[rank])
        with pytest.raises(pycoll.MismatchError, match=r"ranks \[1\] are unlike.*loaded"):
            fresh.step(gradients_of(rank, 3))
        run.state.load_state_dict(saved[1])
        twin = Run(**{"codec": name, **options})
        twin.state.load_state_dict(saved[1])
        run.model.zero_grad()
        for step in (2, 3):
            got = run.step(gradients_of(rank, step))
            assert equal(got, twin.step(gradients_of(rank, step)))
        assert equal(run.state.state_dict(), twin.state.state_dict())


def loaded_by_one(rank, w):
    run = Run(pycoll.TopK())
    run.step(gradients_of(rank, 0))
    if rank == 1:
        run.state.load_state_dict(run.state.state_dict())
    with pytest.raises(torch.distributed.DistBackendError, match="all_gather"):
        run.step(gradients_of(rank, 1))


def channels_last(rank, w):
    alone = [torch.distributed.new_group([r]) for r in range(w)][rank]
    shapes = {"kernel": (16, 8, 3, 3), "matrix": (40, 24)}

    def model_in(memory_format):
        model = Given(shapes)
        model.kernel.data = model.kernel.data.to(memory_format=memory_format)
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=alone)
        optimizer = pycoll.OneBitAdam(ddp.parameters(), lr=0.01, freeze_step=1)
        ddp.register_comm_hook(optimizer.compression(alone), pycoll.compress_hook)
        return model, ddp, optimizer

    def step(ddp, optimizer, number):
        optimizer.zero_grad()
        ddp(gradients_of(rank, number, shapes)).backward()
        optimizer.step()

    formats = (torch.contiguous_format, torch.channels_last)
    for saved_in, loaded_in in (formats, formats[::-1]):
        saved, loaded = model_in(saved_in), model_in(loaded_in)
        for number in range(3):
            step(*saved[1:], number)
        for part in (0, 2):
            loaded[part].load_state_dict(copy.deepcopy(saved[part].state_dict()))
        for number in (3, 4):
            step(*saved[1:], number)
            step(*loaded[1:], number)
            assert equal(
                arrays(dict(saved[0].named_parameters())),
                arrays(dict(loaded[0].named_parameters())),
            )
    # Residuals of sums lie as the gradients do.
    states = []
    for memory_format in formats:
        run = Run("sign", shapes=shapes, two_way=True, min_bytes=0)
        run.model.kernel.data = run.model.kernel.data.to(memory_format=memory_format)
        run.ddp = wrapped(run.model, run.state)
        run.step(gradients_of(rank, 0, shapes))
        states.append(run.state)
    saved = [state.state_dict() for state in states]
    for state, theirs in zip(states, saved[::-1], strict=True):
        with pytest.raises(pycoll.InvalidArgumentError, match="'kernel'.*memory format"):
            state.load_state_dict(theirs)


def in_turn(rank, w):
    for scenario in (
        saved_and_loaded,
        left_out,
        refused,
        within_a_step,
        failed_pass,
        loaded_otherwise,
        channels_last,
        loaded_by_one,  # the last: it ends the group
    ):
        scenario(rank, w)


def test_scenarios():
    """Each asserts for itself; an error's traceback says which it was."""
    ranks_of(2, in_turn)
