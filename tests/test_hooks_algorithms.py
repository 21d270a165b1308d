"""PowerSGD, top-k, random-k and 1-bit Adam against NumPy, and their identities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import pycoll
from codec_reference import Kind
from helpers_hooks import (
    COUNTS,
    MATRICES,
    SHAPES,
    Given,
    Replay,
    Run,
    arrays,
    equal,
    gradients_of,
    joined,
    ranks_of,
)
from pycoll.hooks import reduction
from pycoll.hooks.power_sgd import orthonormalise, product
from pycoll.hooks.sparse import random_places, top_places

TOTAL = sum(COUNTS[name] for name in MATRICES)
STEPS = 5
FLOOR = 0.5  # of variances in 1-bit Adam: many are below


def telescoping(run, rank, w, steps=STEPS, atol=1e-3):
    """What was sent and what is kept, over all ranks, is what was given."""
    given, got = np.zeros(TOTAL), np.zeros(TOTAL)
    for step in range(steps):
        gradients = gradients_of(rank, step)
        given += joined(gradients)
        got += joined(run.step(gradients))
    kept = joined(run.residuals(), MATRICES).astype(np.float64)
    total = torch.from_numpy(given - kept)
    torch.distributed.all_reduce(total)
    np.testing.assert_allclose(got, total.numpy() / w, atol=atol)
    assert np.linalg.norm(kept) > 1


# ---- PowerSGD ----


def power_sgd_replay(inputs, columns, first_q):
    """One step in float64, with as many columns as asked for, from the last step's Q."""
    p = np.mean([m @ np.linalg.qr(first_q)[0] for m in inputs], 0)
    p = np.linalg.qr(p)[0]
    q = np.mean([m.T @ p for m in inputs], 0)
    return p @ q.T, q


def power_sgd_steps(rank, w):
    calls = []
    average = reduction.Group.average
    reduction.Group.average = lambda group, x: calls.append(len(x)) or average(group, x)
    run = Run(pycoll.PowerSGD(rank=2, start_step=2, min_compression_rate=0, seed=3))
    steps = []
    for step in range(2 + STEPS):
        del calls[:]
        means = run.step(gradients_of(rank, step))
        state = run.state.state_dict()
        steps.append((arrays(means), arrays(state["residuals"]), arrays(state["others"]), [*calls]))
    reduction.Group.average = average
    return steps


def matrix(values, name):
    return np.asarray(values[name], np.float64).reshape(SHAPES[name][0], -1)


def test_power_sgd_equals_numpy():
    world_size = 2
    ranks = [r.value for r in ranks_of(world_size, power_sgd_steps)]
    residuals = [{n: np.zeros(SHAPES[n]) for n in MATRICES} for _ in range(world_size)]
    last_q = {}
    for step in range(2 + STEPS):
        given = [arrays(gradients_of(r, step)) for r in range(world_size)]
        for means, kept, qs, calls in (rank[step] for rank in ranks):
            assert equal(means, ranks[0][step][0])
            if step < 2:
                assert not kept
                expected = np.mean([matrix(g, "b") for g in given], 0)
                np.testing.assert_allclose(matrix(means, "b"), expected, rtol=1e-6, atol=1e-6)
            else:
                # One call for what is exempt, and two for all matrices.
                assert calls == [65, (3 + 50 + 70) * 2, (2600 + 130 + 100) * 2]
                assert sorted(qs) == ["q/a", "q/b", "q/c"]
        for name in MATRICES if step >= 2 else ():
            pairs = zip(given, residuals, strict=True)
            sent = [matrix(g, name) + matrix(e, name) for g, e in pairs]
            means, _, qs, _ = ranks[0][step]
            q = qs[f"q/{name}"].reshape(-1, 2).astype(np.float64)
            if name in last_q:
                expected, expected_q = power_sgd_replay(sent, 2, last_q[name])
                scale = np.abs(expected).max()
                np.testing.assert_allclose(matrix(means, name), expected, atol=2e-5 * scale)
                # Signs of columns are free.
                np.testing.assert_allclose(
                    np.abs(q), np.abs(expected_q), atol=1e-4 * np.abs(expected_q).max()
                )
            last_q[name] = q
            for rank in range(world_size):
                kept = matrix(ranks[rank][step][1], name)
                np.testing.assert_allclose(kept, sent[rank] - matrix(means, name), atol=1e-4)
                residuals[rank][name] = kept.reshape(SHAPES[name])


def low_rank(rank, w):
    run = Run(pycoll.PowerSGD(rank=3, start_step=0, min_compression_rate=0), error_feedback=False)
    generator = torch.Generator().manual_seed(5)
    thin = {}
    for name, shape in SHAPES.items():
        n = shape[0] if len(shape) > 1 else 1
        left = torch.randn(n, 3, generator=generator)
        right = torch.randn(3, COUNTS[name] // n, generator=generator)
        thin[name] = (left @ right).reshape(shape)
    given = {name: x * (rank + 1) for name, x in thin.items()}
    run.step(given)
    means = run.step(given)
    for name in MATRICES:
        expected = thin[name] * (w + 1) / 2
        assert (means[name] - expected).norm() < 1e-5 * expected.norm(), name
    # As many columns as rows: any matrix, from the first step.
    full = Run(pycoll.PowerSGD(rank=70, start_step=0, min_compression_rate=0))
    means = full.step(gradients_of(rank, 0))
    for name in MATRICES:
        expected = torch.stack([gradients_of(r, 0)[name] for r in range(w)]).mean(0)
        assert (means[name] - expected).norm() < 1e-5 * expected.norm(), name
    # A gradient that was zero for a while comes back.
    run = Run(pycoll.PowerSGD(rank=3, start_step=0, min_compression_rate=0))
    for _ in range(2):
        assert not any(x.any() for x in run.step({n: x * 0 for n, x in thin.items()}).values())
    run.step(given)
    means = run.step(given)
    assert (means["b"] - thin["b"] * (w + 1) / 2).norm() < 1e-4 * thin["b"].norm()
    # Columns that one of lower rank had no use for come back, too.
    run = Run(pycoll.PowerSGD(rank=3, start_step=0, min_compression_rate=0), error_feedback=False)
    for _ in range(2):
        run.step({**given, "a": torch.outer(thin["a"][:, 0], thin["a"][0])})
    for _ in range(2):
        means = run.step(given)
    assert (means["a"] - thin["a"] * (w + 1) / 2).norm() < 1e-4 * thin["a"].norm()
    # Only what becomes small is compressed.
    run = Run(pycoll.PowerSGD(rank=40, start_step=0))
    with pytest.warns(UserWarning, match="compresses nothing"):
        run.step(given)
    run = Run(pycoll.PowerSGD(rank=2, start_step=0), min_bytes=0)
    run.step(given)
    assert sorted(run.residuals()) == ["a", "b"]
    telescoping(Run(pycoll.PowerSGD(start_step=0, min_compression_rate=0)), rank, w)


def test_orthonormal_columns():
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(n, 4, generator=generator) for n in (101, 4))
    c = torch.randn(101, 1, generator=generator) * torch.tensor([[1.0, 2.0, 0.0, 1e-30]])
    d = a.clone()
    d[7, 2] = math.nan
    e = a.clone()
    e[7, 2] = math.inf
    nearly = a[:, :1] + 1e-4 * a
    inputs = [a, b, c, d, e, nearly]
    before = [x.clone() for x in inputs]
    gone = orthonormalise(inputs)
    for x, old in ((a, before[0]), (b, before[1]), (nearly, before[5])):
        torch.testing.assert_close(x.T @ x, torch.eye(4), atol=1e-6, rtol=0)
        # The span is the same.
        q = np.linalg.qr(old.double().numpy())[0]
        np.testing.assert_allclose(q @ (q.T @ x.double().numpy()), x.numpy(), atol=2e-3)
    assert [x.tolist() for x in gone[:2]] == [[False] * 4] * 2
    assert gone[2].tolist() == [False, True, True, True]
    assert not c[:, 1:].any()
    assert d.isnan().any() and e.isnan().any()
    torch.testing.assert_close(product(a, before[0]), a @ before[0].T, atol=1e-5, rtol=1e-5)


# ---- Top-k ----


def test_top_places():
    x = torch.tensor([1.0, -3.0, 3.0, 0.5, -3.0, 0.0])
    assert top_places(x, 1).tolist() == [1]  # of equal magnitudes the lowest place
    assert top_places(x, 2).tolist() == [1, 2]
    assert top_places(x, 4).tolist() == [0, 1, 2, 4]
    bad = torch.tensor([1e38, math.inf, -2.0, -math.nan, math.nan, -math.inf])
    assert set(top_places(bad, 2).tolist()) == {3, 4}
    assert set(top_places(bad, 4).tolist()) == {1, 3, 4, 5}
    assert top_places(torch.zeros(5), 3).tolist() == [0, 1, 2]
    y = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    expected = np.sort(np.argsort(-np.abs(y.numpy()), kind="stable")[:137])
    assert top_places(y, 137).tolist() == expected.tolist()


def sparse_steps(rank, w):
    results = {}
    for name, codec in (("top", pycoll.TopK(0.03)), ("random", pycoll.RandomK(0.03, seed=7))):
        run = Run(codec)
        steps = []
        for step in range(STEPS):
            means = run.step(gradients_of(rank, step))
            steps.append((joined(means), joined(run.residuals())))
        results[name] = steps
        telescoping(Run(codec), rank, w)
    return results


def top_k_replay(sent, k):
    total = np.zeros(TOTAL, np.float32)
    kept = []
    for x in sent:
        chosen = np.argsort(-np.abs(x), kind="stable")[:k]
        total[chosen] += x[chosen]
        kept.append(x.copy())
        kept[-1][chosen] = 0
    return total / np.float32(len(sent)), kept


def random_k_replay(sent, places):
    mean = np.zeros(TOTAL, np.float32)
    total = sent[0][places]
    for x in sent[1:]:
        total = total + x[places]
    mean[places] = total / np.float32(len(sent))
    kept = [x.copy() for x in sent]
    for x in kept:
        x[places] = 0
    return mean, kept


@pytest.mark.parametrize("world_size", [2, 3])
def test_top_k_and_random_k_equal_numpy(world_size):
    ranks = [r.value for r in ranks_of(world_size, sparse_steps)]
    k = math.ceil(0.03 * TOTAL)
    for name in ("top", "random"):
        residuals = [np.zeros(TOTAL, np.float32)] * world_size
        for step in range(STEPS):
            given = [joined(gradients_of(r, step)) for r in range(world_size)]
            sent = [g + e for g, e in zip(given, residuals, strict=True)]
            if name == "top":
                expected, residuals = top_k_replay(sent, k)
            else:
                places, _ = random_places(7, 2 * step, TOTAL, k)
                expected, residuals = random_k_replay(sent, places.numpy())
            for rank in range(world_size):
                got, kept = ranks[rank][name][step]
                assert kept.tobytes() == residuals[rank].tobytes(), (name, step, rank)
                assert got.tobytes() == ranks[0][name][step][0].tobytes()
                if name == "top" or world_size == 2:
                    assert got.tobytes() == expected.tobytes(), (name, step, rank)
                else:  # an exact all_reduce has an order of its own
                    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_random_places_are_uniform_and_repeat():
    n, k, draws = 1003, 50, 4000
    counts = np.zeros(n)
    for number in range(draws):
        places, lengths = random_places(11, number, n, k)
        assert len(set(places.tolist())) == k
        assert places.min() >= 0 and places.max() < n
        assert lengths.sum() == n
        counts[places] += 1
    # Each place has a chance of 1 / 20 or 1 / 21; 5 standard deviations.
    assert np.abs(counts - draws / 20.06).max() < 5 * math.sqrt(draws / 20) + draws / 400
    assert torch.equal(random_places(11, 5, n, k)[0], random_places(11, 5, n, k)[0])
    assert not torch.equal(random_places(11, 5, n, k)[0], random_places(12, 5, n, k)[0])
    # The same on every machine, whatever the versions of its libraries.
    expected = [157486025, 328769406, 611336888, 1025561200]
    assert random_places(11, 5, 1 << 30, 4)[0].tolist() == expected


def unbiased(rank, w):
    with pytest.warns(UserWarning, match="moves no more bytes"):
        Run(pycoll.TopK(0.5)).step(gradients_of(rank, 0))
    run = Run(pycoll.RandomK(0.05), error_feedback=False)
    gradients = gradients_of(rank, 0)
    steps = 300
    mean = sum(joined(run.step(gradients)).astype(np.float64) for _ in range(steps)) / steps
    exact = np.mean([joined(gradients_of(r, 0)) for r in range(w)], 0)
    # A value arrives with a chance of 1 / 20, 20 times as large: a variance of 19 squares.
    error = np.linalg.norm(mean - exact) / np.linalg.norm(exact)
    assert 0.8 < error / math.sqrt(19 / steps) < 1.2
    with_feedback = Run(pycoll.RandomK(0.05))
    got = joined(with_feedback.step(gradients))
    # Contraction: what is left of a vector is 1 - k / n of its square.
    left = joined(with_feedback.residuals())
    whole = joined(gradients)
    assert 0.93 < np.sum(left**2) / np.sum(whole**2) < 0.97
    assert (got != 0).sum() == math.ceil(0.05 * TOTAL)


# ---- 1-bit Adam ----


def adam_run(rank, w, freeze_step, steps, options):
    model = Given()
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    optimizer = pycoll.OneBitAdam(
        ddp.parameters(), lr=0.01, weight_decay=0.1, freeze_step=freeze_step, variance_floor=FLOOR
    )
    ddp.register_comm_hook(optimizer.compression(**options), pycoll.compress_hook)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        ddp(gradients_of(rank, step)).backward()
        optimizer.step()
        history.append(arrays(dict(model.named_parameters())))
    return history


def one_bit_adam(rank, w):
    history = adam_run(rank, w, 4, 9, {})
    # What torch has, on exact gradients, is the same until v is frozen.
    model = Given()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(4):
        optimizer.zero_grad()
        ddp(gradients_of(rank, step)).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            np.testing.assert_allclose(
                history[step][name], p.detach().numpy(), rtol=1e-4, atol=1e-6
            )
    moments = {
        name: arrays([optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]])
        for name, p in model.named_parameters()
    }
    return history, moments


def test_one_bit_adam_equals_numpy():
    world_size, freeze, beta1, beta2 = 2, 4, 0.9, 0.999
    ranks = [r.value for r in ranks_of(world_size, one_bit_adam)]
    assert equal(ranks[0][0][-1], ranks[1][0][-1])
    history, moments = ranks[0]
    x = {name: np.asarray(history[freeze - 1][name], np.float64) for name in SHAPES}
    m, v = {}, {}
    for name, (first, second) in moments.items():
        m[name] = np.asarray(first, np.float64)
        corrected = np.asarray(second, np.float64) / (1 - beta2**freeze)
        v[name] = np.maximum(corrected, FLOOR * corrected.mean())
    replay = Replay(Kind("sign"), world_size, [COUNTS[n] for n in MATRICES], two_way=True)
    for step in range(freeze, 9):
        given = [arrays(gradients_of(r, step)) for r in range(world_size)]
        local = [{n: beta1 * m[n] + (1 - beta1) * g[n] for n in SHAPES} for g in given]
        vectors = [
            np.concatenate([g[n].reshape(-1) for n in MATRICES]).astype(np.float32) for g in local
        ]
        joint, first = replay.step(vectors, 2 * step), 0
        for name in SHAPES:
            m[name] = np.mean([g[name] for g in local], 0)
        for name in MATRICES:
            m[name] = joint[first : first + COUNTS[name]].reshape(SHAPES[name]).astype(np.float64)
            first += COUNTS[name]
        for name in SHAPES:
            x[name] *= 1 - 0.01 * 0.1
            correction = 1 - beta1 ** (step + 1)
            x[name] -= 0.01 * m[name] / correction / (np.sqrt(v[name]) + 1e-8)
            got = history[step][name]
            # A few signs of values near zero may differ from those of this float64 replay.
            far = np.abs(got - x[name]) > 1e-4 * np.abs(x[name]) + 1e-5
            assert far.mean() < 1e-3, (step, name)


def adam_rules(rank, w):
    with pytest.raises(ValueError, match="freeze_step"):
        pycoll.OneBitAdam(Given().parameters(), freeze_step=0)
    with pytest.raises(ValueError, match="float32"):
        pycoll.OneBitAdam(Given(dtype=torch.bfloat16).parameters(), freeze_step=1)
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "freeze_step": k} for k in (1, 2)]
    with pytest.raises(ValueError, match="one freeze_step"):
        pycoll.OneBitAdam(groups, freeze_step=1)
    # Without the hook gradients would be taken for momenta.
    model = Given()
    optimizer = pycoll.OneBitAdam(model.parameters(), freeze_step=1)
    model(gradients_of(rank, 0)).backward()
    optimizer.step()
    with pytest.raises(pycoll.Error, match="register_comm_hook"):
        optimizer.step()
    # A step that a scaler skips changes nothing that is kept.
    model = Given()
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    optimizer = pycoll.OneBitAdam(ddp.parameters(), lr=0.01, freeze_step=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    state = optimizer.compression(scaler=scaler)
    ddp.register_comm_hook(state, pycoll.compress_hook)
    for step in range(6):
        gradients = gradients_of(rank, step)
        before = (arrays(optimizer.state_dict()["state"]), arrays(state.state_dict()))
        if step == 4 and rank == 1:
            gradients["b"][3, 4] = math.inf
        optimizer.zero_grad()
        scaler.scale(ddp(gradients)).backward()
        scaler.step(optimizer)
        scaler.update()
        after = (arrays(optimizer.state_dict()["state"]), arrays(state.state_dict()))
        before[1].pop("step"), after[1].pop("step")
        same = equal(list(before[0].values()), list(after[0].values())) and equal(
            before[1]["residuals"], after[1]["residuals"]
        )
        assert same == (step == 4), step
    assert optimizer.frozen
    unscaled = adam_run(rank, w, 2, 4, {})
    scaled = Given()
    ddp = torch.nn.parallel.DistributedDataParallel(scaled, bucket_cap_mb=0.02)
    optimizer = pycoll.OneBitAdam(
        ddp.parameters(), lr=0.01, weight_decay=0.1, freeze_step=2, variance_floor=FLOOR
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    ddp.register_comm_hook(optimizer.compression(scaler=scaler), pycoll.compress_hook)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(ddp(gradients_of(rank, step))).backward()
        scaler.step(optimizer)
        scaler.update()
        assert equal(arrays(dict(scaled.named_parameters())), unscaled[step])


def exact_whatever_others_want(rank, w):
    """Codecs of a group or a region are not for what the hook sends."""
    group = torch.distributed.new_group(pg_options=pycoll.Options(codec="sign", min_bytes=0))
    for codec in ("int4", pycoll.PowerSGD(start_step=1, min_compression_rate=0), pycoll.TopK()):
        run, region, coded = (Run(codec, exempt=["a", "bias"]) for _ in range(3))
        coded.ddp = torch.nn.parallel.DistributedDataParallel(coded.model, process_group=group)
        coded.state = pycoll.CompressionState(group, codec, exempt=["a", "bias"])
        coded.ddp.register_comm_hook(coded.state, pycoll.compress_hook)
        for step in range(3):
            expected = run.step(gradients_of(rank, step))
            with pycoll.codec("sign"):
                assert equal(region.step(gradients_of(rank, step)), expected)
            assert equal(coded.step(gradients_of(rank, step)), expected)


def algorithms(rank, w):
    for scenario in (low_rank, unbiased, adam_rules, exact_whatever_others_want):
        scenario(rank, w)


def test_scenarios():
    """Each asserts for itself; an error's traceback says which it was."""
    ranks_of(2, algorithms)
