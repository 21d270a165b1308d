"""Whether sending few gradients pays: the model of pycoll/sparse_advice.py against closed forms.

On a link of B bytes a second between w hosts of one rank each, a rank receives 8 r n (w-1) bytes of
n values, of which each rank sends a share r.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest

from pycoll import advisor, sparse_advice
from pycoll.advisor import Advice, Estimate, Link, Wire, Workload
from pycoll.sparse_advice import Cost

pytest.importorskip("torch")

MODEL = 100 << 20


def free(ratio, workload):
    return Cost(ratio, 0.0, 0.0, 0.9)


def estimates(rate="1gbit", cost=free, max_error=0.02, **sizes):
    workload = Workload(MODEL, **sizes)
    wire = Wire(workload, Link.of(rate))
    return sparse_advice.estimates(workload, wire, cost=cost, max_error=max_error)


@pytest.mark.parametrize("world_size", [2, 4, 16])
def test_the_wire_is_its_closed_form(world_size):
    found = estimates(world_size=world_size, hosts=world_size)
    for estimate, ratio in zip(found, sparse_advice.RATIOS, strict=True):
        received = 8 * ratio * MODEL / 4 * (world_size - 1)
        expected = received / Link.of("1gbit").bytes_per_second
        # Four buckets of six units, and up to 0.1 ms a message beside its bytes.
        latency = 4 * 6 * (world_size - 1) * 1e-4
        assert expected * 0.999 < estimate.wire < expected + latency
        assert estimate.bits == pytest.approx(64 * ratio, rel=1e-3)


def test_only_shares_that_move_less_than_an_exact_call():
    for ranks, shares in ((2, [0.01, 0.001]), (99, [0.01, 0.001]), (100, [0.001]), (1000, [])):
        found = estimates(world_size=ranks, hosts=ranks)
        assert [e.name for e in found] == [f"top_k {share}" for share in shares]
    assert estimates(world_size=2, hosts=1) == []


def test_a_core_counts_for_every_value():
    """Seconds on a core longer than any wire: that of a step is all of them."""
    cost = lambda ratio, workload: Cost(ratio, 3e-3, 5e-3, 0.9)  # noqa: E731
    workload = Workload(MODEL)
    (first, _) = estimates(cost=cost)
    assert first.codec == pytest.approx(8e-3 * workload.count * workload.buckets)
    assert first.seconds == pytest.approx(first.codec, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ratio", sparse_advice.RATIOS)
def test_what_a_step_lacks_of_gaussian_values(ratio, dtype):
    """Of the energy, values beyond the quantile t have 2 (t pdf(t) + cdf(-t))."""
    normal = NormalDist()
    t = normal.inv_cdf(1 - ratio / 2)
    kept = 2 * (t * normal.pdf(t) + normal.cdf(-t))
    found = sparse_advice.measure_cost(ratio, Workload(1 << 20, 3, 3, dtype=dtype), rounds=1)
    assert found.error == pytest.approx(math.sqrt(1 - kept), rel=2e-3)
    assert 0 < found.choose < 1e-6 and 0 < found.add < 1e-6


def test_the_clock_is_read_around_each_half():
    """Rounds of 7 s of choosing and 2 s of adding, after a first one of 50 s each."""
    ticks = iter([0, 50, 100, 200, 207, 209, 300, 307, 309])
    clock = lambda: next(ticks)  # noqa: E731
    found = sparse_advice.measure_cost(0.01, Workload(4000), rounds=2, clock=clock)
    assert (found.choose, found.add) == (7 / 1000, 2 / 1000)


def test_it_is_proposed_where_it_is_faster_than_what_is_advised():
    exact = Estimate("none", 32.0, 0.0, 8.0, 0.0, 8.0)
    int8 = Estimate("int8", 8.125, 0.01, 2.0, 0.1, 2.0)
    slow, fast = (
        Estimate(f"top_k {ratio}", 0.64, 0.957, x, 0.1, x, "error above 0.02")
        for ratio, x in ((0.01, 1.9), (0.001, 0.5))
    )
    text = sparse_advice.proposal(Advice([exact, int8, slow, fast], int8, ""))
    assert text.startswith("or top_k 0.001: 4 times faster than int8, if training")
    assert "a step lacks 0.96" in text and "pycoll.TopK(0.001)" in text
    # 1.9 of 2 seconds is no gain worth a word; what is chosen anyway needs none.
    assert sparse_advice.proposal(Advice([exact, int8, slow], int8, "")) == ""
    assert sparse_advice.proposal(Advice([exact, int8], int8, "")) == ""


def test_who_allows_its_error_gets_it_recommended():
    workload, link = Workload(MODEL), Link.of("100mbit")
    wire = Wire(workload, link)
    for limit, best in ((0.02, "none"), (1.0, "top_k 0.001")):
        few = sparse_advice.estimates(workload, wire, cost=free, max_error=limit)
        advice = advisor.advise(workload, link, [], max_error=limit, wire=wire, others=few)
        assert advice.best.name == best
        assert bool(sparse_advice.proposal(advice)) == (best == "none")
