"""What a compressed run saves, and what it takes up."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import pycoll
from helpers_hooks import ALGORITHMS, SHAPES, Run, Training, arrays, equal, gradients_of, ranks_of

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
            feedback = name != "int8_without_feedback"
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
        (changed(state, version=2), "version 2"),
        (changed(state, rank=1 - rank), f"is of rank {1 - rank}, this is rank {rank}"),
        (changed(state, world_size=5), "is of 5 ranks, this group has 2"),
        (changed(state, two_way=False), "two_way=False"),
        (changed(state, step=-1), "step=-1"),
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
    run = Run("int4")
    errors = []

    def hook(state, bucket):
        future = pycoll.compress_hook(state, bucket)
        if not bucket.is_last():
            for use in (state.state_dict, state.commit, state.roll_back):
                with pytest.raises(pycoll.Error, match="backward pass is under way"):
                    use()
                errors.append(use)
        return future

    ddp = torch.nn.parallel.DistributedDataParallel(run.model, bucket_cap_mb=0.02)
    ddp.register_comm_hook(pycoll.CompressionState(None, "int4", model=ddp), hook)
    for step in range(2):  # the first one has one bucket
        ddp(gradients_of(rank, step)).backward()
    assert errors


def in_turn(rank, w):
    for scenario in (saved_and_loaded, left_out, refused, within_a_step):
        scenario(rank, w)


def test_scenarios():
    """Each asserts for itself; an error's traceback says which it was."""
    ranks_of(2, in_turn)
