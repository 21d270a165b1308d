"""Compressed all_reduce between hosts of several ranks: what crosses the network is quantised."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

import pycoll
from codec_model import all_reduced, round_up, values_of
from codec_reference import Kind
from test_hosts import pytestmark, run_on_two_hosts  # noqa: F401 (skips without TCP)

SEGMENT = 1 << 19


def parts(kind, n, ranks_a_host):
    """(place, begin, end): who of a host sends what over the network."""
    unit = max(kind.block, 64)
    segment = round_up(max(n // 4, SEGMENT), unit * ranks_a_host)
    for at in range(0, n, segment):
        length = min(segment, n - at)
        part = round_up(math.ceil(length / ranks_a_host), unit)
        for place in range(ranks_a_host):
            begin, end = min(place * part, length), min((place + 1) * part, length)
            yield place, at + begin, at + end


def model(kind, inputs, hosts, op):
    """Sums inside of hosts are exact; then an all_reduce over the codec, of one rank a host."""
    ranks_a_host = len(inputs) // len(hosts)
    sums = []
    for members in hosts:
        total = inputs[members[0]]
        for member in members[1:]:
            total = total + inputs[member]
        sums.append(total / np.float32(ranks_a_host) if op == "avg" else total)
    result = np.zeros_like(sums[0])
    for _, begin, end in parts(kind, len(result), ranks_a_host):
        result[begin:end] = all_reduced(kind, [s[begin:end] for s in sums], op)
    return result


LENGTHS = (4099, 100_003, 1_300_001)


def reduce_all(rank, world_size, store):
    results = []
    with pycoll.Communicator(store, rank, world_size, timeout=60) as group:
        for n in LENGTHS:
            for op in ("sum", "avg"):
                x = values_of(rank, n)
                group.all_reduce(x, op, codec="int8")
                results.append(x)
        works = []
        for seed, name in ((1, "int4"), (2, None), (3, "sign")):
            results.append(values_of(rank, 50_000, seed=seed))
            works.append(group.all_reduce(results[-1], codec=name, async_op=True))
        # On memory that is still in use.
        works.append(group.all_reduce(results[-1], codec="fp16", async_op=True))
        assert all(work.wait(60) for work in works)
        gathered = np.zeros((world_size, 5000), np.float32)
        group.all_gather(gathered, values_of(rank, 5000), codec="fp16")
        results.append(gathered)
    return results


@pytest.mark.parametrize("split", ["abab", "aabb"])
def test_what_stays_inside_of_a_host_is_exact(split):
    hosts = [[r for r, host in enumerate(split) if host == name] for name in "ab"]
    inputs = [[values_of(r, n) for r in range(4)] for n in LENGTHS]
    expected = [
        model(Kind("int8"), of_length, hosts, op) for of_length in inputs for op in ("sum", "avg")
    ]
    seeded = [[values_of(r, 50_000, seed=seed) for r in range(4)] for seed in (1, 2, 3)]
    expected.append(model(Kind("int4"), seeded[0], hosts, "sum"))
    expected.append(None)  # exact sums in some order
    signs = model(Kind("sign"), seeded[2], hosts, "sum")
    expected.append(model(Kind("fp16"), [signs] * 4, hosts, "sum"))
    results = [r.value for r in run_on_two_hosts(split, reduce_all, timeout=120)]
    for got in results:
        for x, same, want in zip(got, results[0], expected, strict=False):
            assert x.tobytes() == same.tobytes()
            if want is not None:
                assert x.tobytes() == want.tobytes()
        np.testing.assert_allclose(got[7], np.sum(seeded[1], axis=0), rtol=1e-4, atol=1e-5)
        for r in range(4):
            np.testing.assert_allclose(got[-1][r], values_of(r, 5000), rtol=1e-3)


def many_at_once(rank, world_size, store):
    wrong = []
    with pycoll.Communicator(store, rank, world_size, timeout=60) as group:
        for turn in range(20):
            arrays = [np.full(4096, 1.0 + k, np.float32) for k in range(48)]
            works = [group.all_reduce(x, codec="fp16", async_op=True) for x in arrays]
            assert all(work.wait(60) for work in works)
            wrong += [(turn, k) for k, x in enumerate(arrays) if not (x == 4 * (1 + k)).all()]
    return wrong


@pytest.mark.parametrize("split", ["aabb", "abab"])
def test_many_calls_of_one_length_at_once(split):
    """Nothing that ranks compare tells them apart: only their order in every group does."""
    for result in run_on_two_hosts(split, many_at_once, timeout=60):
        assert result.value == []


def uneven(rank, world_size, store):
    with pycoll.Communicator(store, rank, world_size, timeout=60) as group:
        x = values_of(rank, 100_003)
        group.all_reduce(x, codec="int8")
    return x


def test_hosts_with_different_numbers_of_ranks_quantise_everywhere():
    expected = all_reduced(Kind("int8"), [values_of(r, 100_003) for r in range(3)])
    for result in run_on_two_hosts("aab", uneven, timeout=60):
        assert result.value.tobytes() == expected.tobytes()


def fed_back(rank, world_size, store):
    n, steps = 60_000, 20
    residual, of_sum = np.zeros(n, np.float32), np.zeros(n, np.float32)
    given, got = np.zeros(n), np.zeros(n)
    with pycoll.Communicator(store, rank, world_size, timeout=60) as group:
        for step in range(steps):
            x = values_of(rank, n, seed=step)
            given += x
            group.all_reduce(x, codec="int4", residual=residual, sum_residual=of_sum)
            got += x
    return given, got, residual, of_sum


def test_residuals_of_hosts_telescope():
    """What all gave is what all got, and what all residuals hold."""
    results = [r.value for r in run_on_two_hosts("abab", fed_back, timeout=60)]
    given = sum(value[0] for value in results)
    lacks = sum(value[2].astype(np.float64) + value[3] for value in results)
    for _, got, residual, _ in results:
        assert np.abs(got + lacks - given).max() < 1e-3 * np.abs(given).max()
        assert 0.4 < (residual != 0).mean() < 0.55  # its part of its host's sums


def dies(rank, world_size, store):
    with pycoll.Communicator(store, rank, world_size, timeout=30) as group:
        x = values_of(rank, 2_000_000)
        group.all_reduce(x, codec="int8")
        if rank == 3:
            group.barrier()
            group.all_reduce(x, codec="int8", async_op=True)
            group.abort("enough of this")
            return "aborted"
        with pytest.raises(pycoll.Error) as caught:
            group.barrier()  # which the abort may overtake
            for _ in range(100):
                group.all_reduce(x, codec="int8")
    return str(caught.value)


def test_an_abort_reaches_all_ranks_of_all_hosts():
    for result in run_on_two_hosts("abab", dies, timeout=60):
        assert result.value == "aborted" or "enough of this" in result.value


def with_codec_by_rank(rank, world_size, store, odd, theirs, first):
    with pycoll.Communicator(store, rank, world_size, timeout=30) as group:
        group.barrier()  # who still joins a group is told another way that it has failed
        if not first:
            group.all_reduce(values_of(rank, 100_003), codec="int8")
        x, start = values_of(rank, 100_003), time.monotonic()
        with pytest.raises(pycoll.Error) as caught:
            group.all_reduce(x, codec=theirs if rank in odd else "int8")
        return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ("int4", ["codecs differ", "int4 in blocks of 256"]),
        (None, ["one call has a codec, the other has none", "(sum, 100003 x float32)"]),
    ],
    ids=["int4", "none"],
)
# Ranks of one place on both hosts, who talk to each other over codes; a host; one rank.
@pytest.mark.parametrize("odd", [(1, 3), (2, 3), (2,)])
def test_all_ranks_of_all_hosts_compare_codecs(odd, theirs, words, first):
    ranks = run_on_two_hosts("aabb", with_codec_by_rank, odd, theirs, first, timeout=60)
    for text, seconds in (result.value for result in ranks):
        for word in ("int8 in blocks of 256", *words):
            assert word in text, text
        assert seconds < 10, (seconds, text)
