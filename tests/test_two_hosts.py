"""Groups of two hosts with two ranks each: shared memory inside a host, TCP between them.

The hosts are network namespaces joined by a cable, so what goes between them can be counted.
"""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import netns
import pycoll
from matrix import SLICES, covering, sampled, seeded_part
from matrix_run import rank_cases
from pool import run_ranks
from pycoll import _core
from reference import data
from test_faults import PROMPTLY, error_of

MIB = 1 << 20


@pytest.fixture(scope="module")
def cable():
    """Two hosts and the name of the interface that joins them."""
    reason = netns.why_not()
    if reason:
        pytest.skip(reason)
    with netns.Hosts(2) as hosts:
        yield hosts, hosts.join(0, 1, "10.83.0.{}/24")


def on_a_host(rank, world_size, directory, paths, function, args, options):
    netns.enter(paths[rank])
    store = pycoll.FileStore(directory)
    communicator = pycoll.Communicator(store, rank, world_size, timeout=30, options=options)
    alone = paths.count(paths[rank]) == 1
    assert communicator.transport == ("tcp" if alone else "shm+tcp")
    result = function(communicator, *args)
    communicator.close()
    return result


def run_on_hosts(cable, split, function, *args, options=None, **how):
    """`function(communicator, *args)` on one rank for each letter of `split`, its host."""
    paths = [cable[0].paths["ab".index(letter)] for letter in split]
    return run_ranks(len(split), on_a_host, paths, function, args, options or {}, **how)


def run_alone(case, split):
    """What is wrong after this case, for matrix_run.py."""
    with netns.Hosts(2) as hosts:
        cable = hosts, hosts.join(0, 1, "10.83.0.{}/24")
        split = split[: case.world_size]
        results = run_on_hosts(cable, split, rank_cases, [case], options=case.options)
    return [text for result in results for text in result.value]


# ---- Results ----


@pytest.mark.parametrize("slices", SLICES)
def test_pairs(cable, slices):
    # Everything but the largest, of which there is a third: four processes compute references.
    cases = [case for case in covering("shm,tcp", 4) if case.slices == slices]
    large = [case for case in cases if case.size == "largest"]
    cases = [case for case in cases if case.size != "largest"] + seeded_part(large, 3)
    results = run_on_hosts(cable, "aabb", rank_cases, cases, options=cases[0].options, timeout=120)
    assert [result.value for result in results] == [[]] * 4


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("split", ["abab", "abba", "aab", "abbbaab"])
def test_a_part_with_hosts_in_any_order(cable, split, slices):
    cases = [case for case in covering("shm,tcp", len(split)) if case.slices == slices]
    cases = seeded_part([case for case in cases if case.size != "largest"], 10)
    results = run_on_hosts(cable, split, rank_cases, cases, options=cases[0].options, timeout=90)
    assert [result.value for result in results] == [[]] * len(split)


def bytes_of_sums(communicator):
    """By every algorithm of all_reduce, of values whose sum depends on its order."""
    results = {}
    ranks = range(communicator.world_size)
    for name in [row.name for row in _core.algorithms("all_reduce") if not row.needs_window]:
        for dtype, epsilon in (("float16", 2**-10), ("float32", 2**-22), ("float64", 2**-51)):
            given = [data(rank, dtype, "sum", 5003, "normal") for rank in ranks]
            array = given[communicator.rank].copy()
            communicator.all_reduce(array, algorithm=name)
            wide = [part.astype(np.float64) for part in given]
            bound = epsilon * len(wide) * np.abs(wide).sum(0)
            assert (np.abs(array - np.sum(wide, 0)) <= bound).all(), (name, dtype)
            results[name, dtype] = array.tobytes()
    return results


@pytest.mark.parametrize("split", ["aabb", "aabab"])
def test_all_ranks_have_the_same_bits(cable, split):
    results = [result.value for result in run_on_hosts(cable, split, bytes_of_sums)]
    for case, value in results[0].items():
        assert all(result[case] == value for result in results), case


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slices", SLICES)
def test_random_points(cable, slices, seed):
    cases = [case for case in sampled("shm,tcp", 4, 800, seed) if case.slices == slices]
    results = run_on_hosts(cable, "aabb", rank_cases, cases, options=cases[0].options, timeout=120)
    assert [result.value for result in results] == [[]] * 4


# ---- Bytes between the hosts ----


def sent_and_received(interface):
    """Bytes by the counters of this thread's host."""
    with open("/proc/thread-self/net/dev") as file:
        rows = dict(line.split(":") for line in file if ":" in line)
    numbers = {name.strip(): row.split() for name, row in rows.items()}[interface]
    return int(numbers[8]), int(numbers[0])


def bytes_between(communicator, interface, algorithm, elements):
    """Sent and received by this rank's host during one all_reduce and the barriers around it."""
    rank, world_size = communicator.rank, communicator.world_size
    array = np.arange(elements, dtype=np.float32) % 1021 + rank
    communicator.all_reduce(np.ones(10, np.float32), algorithm=algorithm)
    communicator.barrier()
    time.sleep(0.3)  # acknowledgements
    before = sent_and_received(interface)
    communicator.barrier()
    communicator.all_reduce(array, algorithm=algorithm)
    communicator.barrier()
    time.sleep(0.3)
    after = sent_and_received(interface)
    total = (np.arange(elements, dtype=np.float32) % 1021) * world_size + sum(range(world_size))
    assert (array == total).all()
    return [now - then for now, then in zip(after, before, strict=True)]


@pytest.mark.parametrize("split", ["aabb", "abab"])
@pytest.mark.parametrize(("algorithm", "vectors"), [("hierarchical", 1.0), ("ring", 1.5)])
def test_bytes_between_hosts(cable, algorithm, vectors, split, record_property):
    """`vectors` a direction: one if hierarchical; 2 (w - 1) / w of the ring, which leaves each host
    once, whatever the order of the ranks. All headers and acknowledgements are counted."""
    elements = 4 * MIB
    results = run_on_hosts(cable, split, bytes_between, cable[1], algorithm, elements, timeout=90)
    for result in results:
        for moved in result.value:
            record_property("vectors", moved / (4 * elements))
            assert vectors <= moved / (4 * elements) <= 1.05 * vectors, (split, moved)


# ---- Errors ----


def disagree(communicator, odd_one, what):
    communicator.barrier()
    odd = communicator.rank == odd_one
    array = np.zeros(12 if odd and what == "size" else 10, np.int32)
    array = array.view(np.float32) if odd and what == "dtype" else array
    op = "max" if odd and what == "op" else "sum"
    collective = communicator.all_reduce
    if odd and what == "collective":

        def collective(array, op):
            communicator.broadcast(array)

    start = time.monotonic()
    kind, text, when = error_of(lambda: collective(array, op))
    return kind, text, when - start


@pytest.mark.parametrize(
    ("what", "odd_one", "words"),
    [
        ("size", 3, ["sizes differ", "10 x int32", "12 x int32"]),
        ("dtype", 1, ["int32", "float32"]),
        ("op", 3, ["sum", "max"]),
        ("collective", 1, ["all_reduce", "broadcast"]),
    ],
)
def test_ranks_that_disagree(cable, what, odd_one, words):
    results = [r.value for r in run_on_hosts(cable, "aabb", disagree, odd_one, what, timeout=40)]
    assert "MismatchError" in [kind for kind, _, _ in results], results
    for kind, text, waited in results:
        assert kind in ("MismatchError", "AbortedError")
        assert waited < PROMPTLY
        assert f"rank {odd_one}" in text, text
        for word in words:
            assert word in text, text


def killed(communicator, victim, algorithm):
    communicator.barrier()
    # The clock is the same on both hosts.
    moment = np.array([time.monotonic() + 0.3])
    communicator.broadcast(moment, victim)
    if communicator.rank == victim:
        if os.fork() == 0:  # a worker that holds copies of its sockets
            time.sleep(2)
            os._exit(0)
        time.sleep(max(0.0, moment[0] - time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def loop():
        while True:
            communicator.all_reduce(np.zeros(300_000, np.float32), algorithm=algorithm)

    kind, text, when = error_of(loop)
    return kind, text, when - moment[0]


@pytest.mark.parametrize(
    ("algorithm", "victim"), [("hierarchical", 0), ("ring", 3), ("recursive_doubling", 1)]
)
def test_a_death_is_named_on_both_hosts(cable, algorithm, victim):
    results = run_on_hosts(cable, "aabb", killed, victim, algorithm, timeout=40, check=False)
    for result in results:
        if result.rank == victim:
            continue
        assert not result.failed, result.report()
        kind, text, after = result.value
        assert kind in ("PeerError", "AbortedError")
        assert f"rank {victim} died" in text, text
        assert after < PROMPTLY


def late(communicator, late_one):
    communicator.barrier()
    if communicator.rank == late_one:
        time.sleep(2.5)
    start = time.monotonic()
    array = np.zeros(100)
    kind, text, when = error_of(lambda: communicator.all_reduce(array, timeout=1.0))
    return kind, text, when - start


@pytest.mark.parametrize("late_one", [0, 3])
def test_a_timeout_says_who_is_late(cable, late_one):
    results = run_on_hosts(cable, "abba", late, late_one, timeout=40)
    for result in results:
        kind, text, waited = result.value
        if result.rank == late_one:
            assert kind == "AbortedError", text
            continue
        assert kind in ("TimeoutError", "AbortedError")
        for word in ("Timed out", "all_reduce #2", f"rank {late_one}", "barrier #1"):
            assert word in text, text
        assert 0.9 < waited < 1.0 + PROMPTLY
