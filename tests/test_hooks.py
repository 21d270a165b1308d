"""Compressed gradients under stock DDP: what arrives, what is kept, and when."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pycoll
from codec_reference import BITS, Kind
from helpers_hooks import (
    COUNTS,
    MATRICES,
    SHAPES,
    Replay,
    Run,
    arrays,
    equal,
    gradients_of,
    joined,
    options_of,
    ranks_of,
)

STEPS = 4
TOTAL = sum(COUNTS[name] for name in MATRICES)
CASES = {(name, two_way) for name in BITS for two_way in (False, True)}
UNITS = 2  # matrices, and the rest: for the numbers of calls


# ---- Against a replay in one process ----


def follow_codecs(rank, w):
    results = {}
    for name, two_way in sorted(CASES):
        run = Run(name, error_feedback=True, two_way=two_way)
        means, residuals = [], []
        for step in range(STEPS):
            means.append(run.step(gradients_of(rank, step)))
            residuals.append(joined(run.residuals()))
        assert run.buckets[0] != run.buckets[1] == run.buckets[2], "DDP made no new buckets"
        results[name, two_way] = ([joined(x) for x in means], residuals)
        results["exact"] = [joined(x, ["bias", "scale"]) for x in means]
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_and_residuals_are_those_of_a_replay(world_size):
    ranks = [r.value for r in ranks_of(world_size, follow_codecs)]
    for name, two_way in CASES:
        replay = Replay(Kind(name), world_size, [COUNTS[n] for n in MATRICES], two_way)
        for step in range(STEPS):
            inputs = [joined(gradients_of(r, step)) for r in range(world_size)]
            expected = replay.step(inputs, step * UNITS)
            for rank in range(world_size):
                means, residuals = ranks[rank][name, two_way]
                where = (name, two_way, step, rank)
                assert means[step].tobytes() == expected.tobytes(), where
                assert residuals[step].tobytes() == replay.residuals[rank].tobytes(), where
    for step in range(STEPS):
        inputs = [joined(gradients_of(r, step), ["bias", "scale"]) for r in range(world_size)]
        expected = np.sum(inputs, 0) / np.float32(world_size)
        for result in ranks:
            assert result["exact"][step].tobytes() == expected.tobytes()


def telescope(rank, w):
    run = Run("sign", two_way=True)
    given, got = np.zeros(TOTAL), np.zeros(TOTAL)
    for step in range(50):
        gradients = gradients_of(rank, step)
        if rank == 1 and step % 3 == 1:
            gradients["b"].zero_()  # keeps its residual, and shares blocks with others
        given += joined(gradients)
        got += joined(run.step(gradients))
    state = run.state.state_dict()
    (lacking,) = state["others"].values()
    lacking = lacking[Replay(Kind("sign"), w, [COUNTS[n] for n in MATRICES]).where]
    norm = np.linalg.norm(joined(run.residuals()))
    return given, got, joined(state["residuals"]), lacking.numpy(), norm


def test_nothing_is_lost_on_both_ways():
    """All that was sent, and what is still kept, is all that was given."""
    ranks = [r.value for r in ranks_of(2, telescope)]
    given = np.mean([r[0] for r in ranks], 0)
    # Of sums each rank has kept what its own part lacks, and zeros.
    kept = np.mean([r[2] for r in ranks], 0) + np.sum([r[3] for r in ranks], 0)
    assert np.linalg.norm(kept) > 1
    np.testing.assert_allclose(ranks[0][1] + kept, given, atol=2e-3)
    for rank, result in enumerate(ranks):
        # 1-bit codes leave 0.6 of a gaussian vector; what is kept must not pile up.
        assert result[4] < 5 * (rank + 1) * math.sqrt(TOTAL)


def small_units(rank, w):
    run = Run("int4", unit_bytes=30_000, min_bytes=27_000)
    results = [run.step(gradients_of(rank, step)) for step in range(3)]
    return run.state.state_dict()["plan"], arrays(results)


def test_units_do_not_depend_on_buckets():
    """c is large enough for a unit of its own, and b and a share one; alone, b were too small."""
    ranks = [r.value for r in ranks_of(2, small_units)]
    names = [["c"], ["b", "a"]]
    replays = [Replay(Kind("int4"), 2, [COUNTS[n] for n in unit]) for unit in names]
    for plan, _ in ranks:
        assert [unit["parameters"] for unit in plan] == [*names, ["scale", "bias"]]
    for step in range(3):
        for index, unit in enumerate(names):
            inputs = [joined(gradients_of(r, step), unit) for r in range(2)]
            expected = replays[index].step(inputs, 3 * step + index)
            for _, results in ranks:
                got = np.concatenate([results[step][n].reshape(-1) for n in unit])
                assert got.tobytes() == expected.tobytes()


# ---- Steps that do not count ----

BAD = {"inf": math.inf, "nan": math.nan, "-inf": -math.inf}
WHAT = ["int8", "fp16", "two_way", "power_sgd", "top_k", "random_k", "exempt"]


def one_bad_bucket(rank, w):
    results = {}
    for what in WHAT:
        run, twin = Run(**options_of(what)), Run(**options_of(what))
        for step in range(3):
            run.step(gradients_of(rank, step))
            twin.step(gradients_of(rank, step))
        before = run.state.state_dict()
        bad = []
        for value in BAD.values():
            gradients = gradients_of(rank, 3)
            if rank == 1:
                place = gradients["bias"] if what == "exempt" else gradients["b"]
                place.view(-1)[1000 % place.numel()] = value
            bad.append(arrays(run.step(gradients)))
        after = run.state.state_dict()
        assert after.pop("step") == before.pop("step") + 3
        assert after.pop("history") != before.pop("history")
        # What follows is as if the bad steps had not been, but for their numbers.
        twin.state._step += 3
        same = equal(run.step(gradients_of(rank, 4)), twin.step(gradients_of(rank, 4)))
        results[what] = (arrays(before), arrays(after), bad, same)
    return results


def test_one_bad_bucket_rolls_every_residual_back():
    ranks = [r.value for r in ranks_of(2, one_bad_bucket)]
    for what in WHAT:
        for before, after, bad, same in (rank[what] for rank in ranks):
            assert len(before["residuals"]) == 3
            assert any(x.any() for x in before["residuals"].values())
            assert equal(before, after), what
            assert same, what
            name = "bias" if what == "exempt" else "b"
            for means, theirs in zip(bad, ranks[0][what][2], strict=True):
                assert not np.isfinite(means[name]).all(), what
                assert all(means[n].tobytes() == theirs[n].tobytes() for n in means), what
                assert np.isfinite(means["a"]).all() == (what != "random_k"), what


def scaled_run(rank, w, scaled):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=scaled)
    results = []
    state = pycoll.CompressionState(None, "int4", scaler=scaler if scaled else None)
    ddp.register_comm_hook(state, pycoll.compress_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(14):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 64, generator=generator)
        if step in (4, 9) and rank == 1:
            x[3, 5] = math.inf
        optimizer.zero_grad()
        scaler.scale(ddp(x).square().mean()).backward()
        if scaled or all(p.grad.isfinite().all() for p in model.parameters()):
            scaler.step(optimizer)
        scaler.update()
        results.append(scaler.get_scale())
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return arrays(weights), arrays(state.state_dict()["residuals"]), results


def test_a_scaler_changes_no_bit():
    """Scales are powers of two, so the run without one is the same: residuals too, unscaled."""
    plain = [r.value for r in ranks_of(2, scaled_run, False)]
    scaled = [r.value for r in ranks_of(2, scaled_run, True)]
    for (weights, residuals, _), (with_scaler, theirs, scales) in zip(plain, scaled, strict=True):
        assert equal(weights, plain[0][0])
        assert max(scales) > 2**10
        assert sum(b < a for a, b in itertools.pairwise(scales)) == 2
        assert equal(weights, with_scaler)
        assert equal(residuals, theirs)
        assert all(x.any() for x in residuals.values())


class Scale:
    """As much of a scaler as a state asks for."""

    def __init__(self):
        self.value = 4.0

    def get_scale(self):
        return self.value


def scales_that_fall(rank, w):
    """A scale may fall for other reasons than this model's gradients, and not on every rank."""
    scaler, finite = Scale(), Run("int4")
    run = Run("int4", scaler=scaler)
    for step, scale in enumerate((3.0, 4.0 - 2 * rank, 1.0, 8.0)):
        run.step(gradients_of(rank, step), factor=scaler.value)
        finite.step(gradients_of(rank, step))
        scaler.value = scale  # as update(new_scale), or after an overflow of another optimizer
        assert run.state.commit()
        assert equal(run.residuals(), finite.residuals())
        scaler.value = 4.0  # ranks must go on with one scale
    # What is not finite does not count, though the scale may rise.
    before = run.residuals()
    bad = gradients_of(rank, 4)
    bad["b"][0, 0] = math.inf if rank == 1 else 0
    run.step(bad, factor=scaler.value)
    scaler.value = 8.0
    assert not run.state.commit()
    assert equal(run.residuals(), before)


def rolled_back(rank, w):
    run, replayed = Run("int4"), Run("int4")
    for this in (run, replayed):
        this.step(gradients_of(rank, 0))
    before = run.residuals()
    run.step(gradients_of(rank, 1))
    run.state.roll_back()
    assert equal(run.residuals(), before)
    for this in (run, replayed):
        this.step(gradients_of(rank, 2))
    assert run.state.commit()
    assert not equal(run.residuals(), before)
    with pytest.raises(pycoll.Error, match="settled"):
        run.state.roll_back()
    # As if the step that was forgotten had not been.
    assert equal(run.residuals(), replayed.residuals())


# ---- Passes that are not ours ----


def accumulate(rank, w):
    run = Run("int4")
    run.step(gradients_of(rank, 0))
    before = run.residuals()
    halves = [gradients_of(rank, step) for step in (1, 2)]
    run.step(halves[0], sync=False)
    assert equal(run.residuals(), before)
    assert run.state.step == 1
    got = run.step(halves[1])
    together = Run("int4")
    together.step(gradients_of(rank, 0))
    # In the order of accumulation.
    expected = together.step({n: halves[0][n] + halves[1][n] for n in halves[0]})
    assert equal(got, expected)
    assert equal(run.residuals(), together.residuals())


def unused(rank, w):
    """b's last block is not full, and there are others before and behind it in the unit."""
    for codec, two_way in sorted(CASES):
        run = Run(codec, error_feedback=True, two_way=two_way, ddp={"find_unused_parameters": True})
        run.step(gradients_of(rank, 0))
        before = run.residuals()
        for step in range(1, 4):
            gradients = gradients_of(rank, step)
            del gradients["b"]
            got = run.step(gradients)
        after = run.residuals()
        assert "b" not in got or not got["b"].any()
        assert equal(after["b"], before["b"]), codec
        assert not torch.equal(after["a"], before["a"])
        # On one rank alone: the others' gradients arrive, and this rank's residual stays.
        if rank == 0:
            gradients["b"] = gradients_of(rank, 3)["b"]
        got = run.step(gradients)
        assert got["b"].any()
        assert equal(run.residuals()["b"], after["b"]) == (rank != 0), codec


def small_parameters(rank, w):
    """Padding changes no scale: with one magnitude a parameter signs have no error."""
    rows = {"a": 1, "b": 21, "c": 100, "d": 2500, "e": 7}
    shapes = {name: (count, 3) for name, count in rows.items()}
    run = Run("sign", shapes=shapes)
    signs = gradients_of(0, 0, shapes)
    given = {n: x.sign() * 10.0**k for k, (n, x) in enumerate(sorted(signs.items()))}
    for name, mean in run.step(given).items():
        torch.testing.assert_close(mean, given[name], rtol=1e-6, atol=0)


def uneven(rank, w):
    run = Run("int4", two_way=True)
    with run.ddp.join():
        for step in range(3 + 2 * (rank == 0)):
            run.step(gradients_of(rank, step))
            if step == 2:
                before = run.residuals()
    after = run.residuals()
    assert run.state.step == 5
    # Rank 1 had run out of data: whole blocks of zeros have no errors.
    assert equal(before, after) == (rank == 1)


OPTIONS_OF_DDP = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
]


def ddp_options(rank, w):
    results = []
    for options in OPTIONS_OF_DDP:
        run = Run("int4", ddp=options)
        steps = [run.step(gradients_of(rank, step)) for step in range(3)]
        results.append(arrays(steps))
    return results


def test_options_of_ddp_change_nothing():
    for result in ranks_of(2, ddp_options):
        for steps in result.value[1:]:
            for step, expected in zip(steps, result.value[0], strict=True):
                assert all(step[n].tobytes() == expected[n].tobytes() for n in expected)


# ---- Settings ----


def choose_exempt(rank, w):
    by_name = Run("sign", exempt=["a", "bias"])
    by_name.step(gradients_of(rank, 0))
    assert sorted(by_name.residuals()) == ["b", "c", "scale"]
    function = Run("sign", exempt=lambda name, p: name == "b" or p.dim() < 2)
    got = function.step(gradients_of(rank, 0))
    assert sorted(function.residuals()) == ["a", "c"]
    mean = torch.stack([gradients_of(r, 0)["b"] for r in range(w)]).sum(0) / w
    assert torch.equal(got["b"], mean)
    unknown = Run("sign", exempt=["d"])
    with pytest.raises(pycoll.InvalidArgumentError, match="no parameters d"):
        unknown.step(gradients_of(rank, 0))
    everything = Run("sign", exempt=lambda name, p: True)
    with pytest.warns(UserWarning, match="compresses nothing"):
        everything.step(gradients_of(rank, 0))
    nothing = Run("sign", exempt=[])
    nothing.step(gradients_of(rank, 0))
    assert sorted(nothing.residuals()) == sorted(SHAPES)
    plain = Run("sign", error_feedback=False)
    first = plain.step(gradients_of(rank, 0))
    assert equal(first, plain.step(gradients_of(rank, 0)))
    assert plain.residuals() == {}


def predivide(rank, w):
    plain, by_four, by_three = (Run("int8", predivide_factor=f) for f in (1, 4, 3))
    for step in range(3):
        gradients = gradients_of(rank, step)
        expected = plain.step(gradients)
        assert equal(by_four.step(gradients), expected)
        got = by_three.step(gradients)
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=3e-2)
    assert equal(by_four.residuals(), plain.residuals())
    large = {n: torch.full(s, 3e38 if rank < 2 else 1e38) for n, s in SHAPES.items()}
    assert not torch.isfinite(Run("int8").step(large)["b"]).any()
    for name, mean in Run("int8", predivide_factor=8).step(large).items():
        torch.testing.assert_close(mean, torch.full(SHAPES[name], 7e38 / 3), rtol=1e-2, atol=0)


def test_predivision_keeps_means_and_avoids_overflow():
    ranks_of(3, predivide)


def other_dtypes(rank, w):
    half = Run("int8", dtype=torch.bfloat16)
    for step in range(2):
        gradients = gradients_of(rank, step, dtype=torch.bfloat16)
        means = half.step(gradients)
        assert {x.dtype for x in means.values()} == {torch.bfloat16}
        exact = torch.stack([gradients_of(r, step)["a"] for r in range(w)]).mean(0)
        assert (means["a"].float() - exact).norm() < 0.02 * exact.norm()
    assert {x.dtype for x in half.residuals().values()} == {torch.float32}
    double = Run("sign", dtype=torch.float64)
    with pytest.warns(UserWarning, match="other dtypes"):
        means = double.step(gradients_of(rank, 0, dtype=torch.float64))
    inputs = [gradients_of(r, 0, dtype=torch.float64)["a"] for r in range(w)]
    assert torch.equal(means["a"], torch.stack(inputs).sum(0) / w)


class Convolution(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Conv2d(32, 32, 3).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.layer(x)


def strides(rank, w):
    model = Convolution()
    assert not model.layer.weight.is_contiguous()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    state = pycoll.CompressionState(None, "int8")
    ddp.register_comm_hook(state, pycoll.compress_hook)
    x = torch.randn(2, 32, 8, 8, generator=torch.Generator().manual_seed(rank))
    exact = torch.autograd.grad(model(x).square().sum(), model.layer.weight)[0]
    ddp(x).square().sum().backward()
    residual = state.state_dict()["residuals"]["layer.weight"]
    assert residual.shape == model.layer.weight.shape
    # Element by element the residual is a rounding error of this rank's own gradient.
    blocks = exact.permute(0, 2, 3, 1).reshape(-1, 256)
    errors = residual.permute(0, 2, 3, 1).reshape(-1, 256)
    assert (errors.abs() <= blocks.abs().amax(1, keepdim=True) / 127 * 0.501).all()
    sent = [torch.zeros_like(exact) for _ in range(w)]
    dist.all_gather(sent, (exact - residual).contiguous())
    mean = torch.stack(sent).mean(0)
    assert (model.layer.weight.grad - mean).abs().max() <= mean.abs().max() / 127


def one_rank(rank, w):
    run = Run("sign")
    gradients = gradients_of(rank, 0)
    assert equal(run.step(gradients), dict(gradients))
    assert run.residuals() == {}


def test_one_rank_alone_is_exact():
    ranks_of(1, one_rank)


def among_other_calls(rank, w):
    run = Run("sign")
    hook = run._recording_hook()
    seen = []

    def between(state, bucket):
        future = hook(state, bucket)
        counts = torch.tensor([2**62 + rank])
        dist.all_reduce(counts, dist.ReduceOp.MAX)
        large = torch.arange(20_000.0) + rank
        dist.all_reduce(large)
        seen.append(
            counts.item() == 2**62 + 1 and torch.equal(large, torch.arange(20_000.0) * 2 + 1)
        )
        return future

    ddp = torch.nn.parallel.DistributedDataParallel(run.model, bucket_cap_mb=0.02)
    ddp.register_comm_hook(pycoll.CompressionState(None, "sign", model=ddp), between)
    for step in range(2):  # the first one has one bucket
        ddp(gradients_of(rank, step)).backward()
    assert len(seen) > 3
    assert all(seen)


SCENARIOS = [
    scales_that_fall,
    rolled_back,
    accumulate,
    unused,
    small_parameters,
    uneven,
    choose_exempt,
    other_dtypes,
    strides,
    among_other_calls,
]


def in_turn(rank, w):
    # One process for all: the first DDP of a process costs seconds of imports.
    for scenario in SCENARIOS:
        scenario(rank, w)


def test_scenarios():
    """Each asserts for itself; an error's traceback says which it was."""
    ranks_of(2, in_turn)
