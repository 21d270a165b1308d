"""Programs: what the builders build, how vectors are cut, and what a trace shows.

The oracle of every trace is NumPy on the whole vectors; it knows nothing of chunks or steps.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycoll import _core

ROWS = [(c, a) for c in _core.collectives() for a in _core.algorithms(c)]
ROW_IDS = [f"{c}-{a.name}" for c, a in ROWS]
NAMES = {c: [a.name for a in _core.algorithms(c)] for c in _core.collectives()}
OPS = {
    "sum": lambda x: x.sum(0),
    "avg": lambda x: x.mean(0),
    "product": lambda x: x.prod(0),
    "min": lambda x: x.min(0),
    "max": lambda x: x.max(0),
}


def final(programs: list[_core.Program], inputs: np.ndarray, op: str = "sum") -> np.ndarray:
    return np.array(_core.trace(programs, inputs.tolist(), op).rows[-1].values)


def random_inputs(seed: int, world_size: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-2, 2, (world_size, count))


# ---- chunks ----------------------------------------------------------------------------------


@given(
    count=st.integers(0, 2**40) | st.integers(0, 200),
    chunks=st.integers(1, 70),
    align=st.sampled_from([1, 2, 16, 64]),
)
def test_chunks_cut_a_vector_without_gap_or_overlap(count: int, chunks: int, align: int) -> None:
    ranges = [_core.chunk_range(count, chunks, k, align) for k in range(chunks)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == count
    for (_, end), (begin, _) in itertools.pairwise(ranges):
        assert begin == end
    sizes = [end - begin for begin, end in ranges]
    assert sizes == sorted(sizes, reverse=True), "only the last chunks may be shorter"
    assert all(begin % align == 0 for begin, end in ranges if begin < end)
    # As small as equal aligned parts can be.
    assert sizes[0] < count / chunks + align


def test_chunks_of_a_multiple_are_equal() -> None:
    assert [_core.chunk_range(21, 7, k) for k in range(7)] == [(3 * k, 3 * k + 3) for k in range(7)]


@pytest.mark.parametrize("arguments", [(5, 0, 0, 1), (5, 2, 2, 1), (5, 2, -1, 1), (5, 2, 0, 0)])
def test_no_such_chunk(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(_core.InvalidArgumentError):
        _core.chunk_range(*arguments)


# ---- builders --------------------------------------------------------------------------------


def test_the_algorithms_that_exist() -> None:
    names = {c: [a.name for a in _core.algorithms(c)] for c in _core.collectives()}
    assert names == {
        "all_reduce": [
            *("ring", "tree", "recursive_doubling", "halving_doubling", "hierarchical"),
            *("one_shot", "two_shot", "chain", "zero_copy"),
        ],
        "all_gather": ["ring", "recursive_doubling", "direct", "one_shot", "zero_copy"],
        "reduce_scatter": [
            *("ring", "recursive_halving", "direct", "one_shot", "chain", "zero_copy"),
        ],
        "broadcast": ["tree", "ring", "direct", "one_shot", "zero_copy"],
        "barrier": ["recursive_doubling", "ring", "direct", "one_shot"],
        "reduce": ["tree", "ring", "direct", "one_shot", "chain", "zero_copy"],
        "gather": ["direct", "ring", "one_shot", "zero_copy"],
        "scatter": ["direct", "ring", "one_shot", "zero_copy"],
        "all_to_all": ["direct"],
    }


@pytest.mark.parametrize(("collective", "row"), ROWS, ids=ROW_IDS)
def test_only_algorithms_of_shared_memory_use_direct_steps(
    collective: str, row: _core.AlgorithmInfo
) -> None:
    direct = {"reduce_from", "copy_from", "reduce_to", "barrier"}
    for world_size in (2, 3, 8):
        for program in _core.build_programs(collective, row.name, world_size):
            kinds = {step.kind for lane in program.lanes for step in lane.steps}
            assert bool(kinds & direct) == row.needs_window
            assert row.needs_window or program.window_chunks == 0
            assert program.needs_lease == row.needs_lease
            assert row.needs_lease == any(
                step.remote == "input" for lane in program.lanes for step in lane.steps
            ) or (row.needs_lease and (program.lends_input or program.lends_output))


@pytest.mark.parametrize("world_size", range(2, 65))
def test_double_tree_has_each_rank_inside_one_tree_at_most(world_size: int) -> None:
    heights = []
    for program in _core.build_programs("all_reduce", "tree", world_size):
        inside = set()
        for lane in program.lanes:
            for step in lane.steps:
                if step.kind.startswith("recv_reduce"):
                    inside.add(step.channel)
        assert len(inside) <= 1
        heights.append(sum(len(lane.steps) for lane in program.lanes))
    # Traffic is spread: nobody has more than two children and a parent, in two trees.
    assert max(heights) <= 8
    inputs = [[1.0, 2.0]] * world_size
    rows = _core.trace(_core.build_programs("all_reduce", "tree", world_size), inputs).rows
    assert rows[-1].time <= 4 * np.ceil(np.log2(world_size)), "up and down are logarithmic"


@pytest.mark.parametrize(("collective", "row"), ROWS, ids=ROW_IDS)
def test_one_rank_copies(collective: str, row: _core.AlgorithmInfo) -> None:
    (program,) = _core.build_programs(collective, row.name, 1)
    assert [str(s) for s in program.steps(0)] == ["copy output[0] = input[0]"]


def test_bad_requests_name_what_is_wrong() -> None:
    with pytest.raises(_core.InvalidArgumentError, match='no algorithm "circle".*ring, tree'):
        _core.build_programs("all_reduce", "circle", 4)
    with pytest.raises(ValueError, match='no collective "all_reduced".*all_gather'):
        _core.build_programs("all_reduced", "ring", 4)
    with pytest.raises(_core.InvalidArgumentError, match="world_size must be at least 1, not 0"):
        _core.build_programs("all_reduce", "ring", 0)
    with pytest.raises(_core.InvalidArgumentError, match=r"root 4 is not in 0\.\.3"):
        _core.build_programs("broadcast", "tree", 4, root=4)
    with pytest.raises(_core.InvalidArgumentError, match='no kind of step "jump".*recv_reduce'):
        _core.Step("jump")  # type: ignore[arg-type]


def test_error_classes_are_builtin_ones_too() -> None:
    expected = {
        "InvalidArgumentError": ValueError,
        "TimeoutError": TimeoutError,
        "UnsupportedError": NotImplementedError,
        "OperatingSystemError": OSError,
        "MismatchError": RuntimeError,
        "PeerError": RuntimeError,
        "AbortedError": RuntimeError,
    }
    for name, builtin in expected.items():
        cls = getattr(_core, name)
        assert issubclass(cls, _core.Error)
        assert issubclass(cls, builtin)


# ---- trace -----------------------------------------------------------------------------------


def test_the_table_of_recursive_doubling() -> None:
    programs = _core.build_programs("all_reduce", "recursive_doubling", 4)
    trace = _core.trace(programs, [[1, 2], [3, 4], [5, 6], [7, 8]])
    assert [(row.time, row.values) for row in trace.rows] == [
        (0, [[1, 2], [3, 4], [5, 6], [7, 8]]),
        (1, [[4, 6], [4, 6], [12, 14], [12, 14]]),
        (2, [[16, 20], [16, 20], [16, 20], [16, 20]]),
    ]
    assert sorted((t.time, t.source, t.destination) for t in trace.transfers) == [
        (1, 0, 1), (1, 1, 0), (1, 2, 3), (1, 3, 2),
        (2, 0, 2), (2, 1, 3), (2, 2, 0), (2, 3, 1),
    ]  # fmt: skip


def test_a_ring_takes_two_times_w_less_one_hops() -> None:
    programs = _core.build_programs("all_reduce", "ring", 3)
    trace = _core.trace(programs, [[1, 2, 3], [10, 20, 30], [100, 200, 300]])
    assert [row.values for row in trace.rows] == [
        [[1, 2, 3], [10, 20, 30], [100, 200, 300]],
        # Chunk k starts at rank k+1 and is complete at rank k.
        [[1, 202, 3], [10, 20, 33], [110, 200, 300]],
        [[111, 202, 3], [10, 222, 33], [110, 200, 333]],
        [[111, 202, 333], [111, 222, 33], [110, 222, 333]],
        [[111, 222, 333], [111, 222, 333], [111, 222, 333]],
    ]


@settings(max_examples=150)
@given(
    algorithm=st.sampled_from(NAMES["all_reduce"]),
    world_size=st.integers(1, 12),
    count=st.integers(0, 30),
    op=st.sampled_from(sorted(OPS)),
    seed=st.integers(0, 2**32),
)
def test_all_reduce(algorithm: str, world_size: int, count: int, op: str, seed: int) -> None:
    inputs = random_inputs(seed, world_size, count)
    programs = _core.build_programs("all_reduce", algorithm, world_size)
    got = final(programs, inputs, op)
    assert got.shape == (world_size, count)
    np.testing.assert_allclose(
        got, np.tile(OPS[op](inputs), (world_size, 1)), rtol=1e-12, atol=1e-14
    )
    # The same bits on every rank.
    assert all(row.tobytes() == got[0].tobytes() for row in got)


@given(
    algorithm=st.sampled_from(NAMES["reduce_scatter"]),
    world_size=st.integers(1, 9),
    count=st.integers(0, 7),
    op=st.sampled_from(sorted(OPS)),
)
def test_reduce_scatter(algorithm: str, world_size: int, count: int, op: str) -> None:
    inputs = random_inputs(count, world_size, world_size * count)
    programs = _core.build_programs("reduce_scatter", algorithm, world_size)
    got = final(programs, inputs, op).reshape(world_size, world_size, count)
    expected = OPS[op](inputs).reshape(world_size, count)
    for rank in range(world_size):
        np.testing.assert_allclose(got[rank, rank], expected[rank], rtol=1e-12)


@given(
    algorithm=st.sampled_from(NAMES["all_gather"]),
    world_size=st.integers(1, 9),
    count=st.integers(0, 7),
)
def test_all_gather(algorithm: str, world_size: int, count: int) -> None:
    inputs = random_inputs(count, world_size, count)
    programs = _core.build_programs("all_gather", algorithm, world_size)
    first = np.array(_core.trace(programs, inputs.tolist()).rows[0].values)
    assert np.isnan(first).sum() == world_size * (world_size - 1) * count
    expected = np.tile(inputs.reshape(-1), (world_size, 1))
    np.testing.assert_array_equal(final(programs, inputs), expected)


@given(
    algorithm=st.sampled_from(NAMES["broadcast"]),
    world_size=st.integers(1, 17),
    count=st.integers(0, 7),
    data=st.data(),
)
def test_broadcast(algorithm: str, world_size: int, count: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, world_size - 1))
    inputs = random_inputs(count, world_size, count)
    programs = _core.build_programs("broadcast", algorithm, world_size, root)
    np.testing.assert_array_equal(final(programs, inputs), np.tile(inputs[root], (world_size, 1)))


@given(
    algorithm=st.sampled_from(NAMES["reduce"]),
    world_size=st.integers(1, 17),
    count=st.integers(0, 7),
    op=st.sampled_from(sorted(OPS)),
    data=st.data(),
)
def test_reduce(algorithm: str, world_size: int, count: int, op: str, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, world_size - 1))
    inputs = random_inputs(count, world_size, count)
    programs = _core.build_programs("reduce", algorithm, world_size, root)
    np.testing.assert_allclose(final(programs, inputs, op)[root], OPS[op](inputs), rtol=1e-12)


@given(world_size=st.integers(1, 9), count=st.integers(0, 5), data=st.data())
def test_gather_and_scatter(world_size: int, count: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, world_size - 1))
    parts = random_inputs(count, world_size, count)
    algorithm = data.draw(st.sampled_from(NAMES["gather"]))
    programs = _core.build_programs("gather", algorithm, world_size, root)
    np.testing.assert_array_equal(final(programs, parts)[root], parts.reshape(-1))

    whole = random_inputs(count + 1, world_size, world_size * count)
    algorithm = data.draw(st.sampled_from(NAMES["scatter"]))
    programs = _core.build_programs("scatter", algorithm, world_size, root)
    first = np.array(_core.trace(programs, whole.tolist()).rows[0].values)
    assert np.isnan(np.delete(first, root, axis=0)).all(), "only the root has an input"
    got = final(programs, whole).reshape(world_size, world_size, count)
    for rank in range(world_size):
        np.testing.assert_array_equal(got[rank, rank], whole[root].reshape(world_size, -1)[rank])


@given(world_size=st.integers(1, 9), count=st.integers(0, 5))
def test_all_to_all(world_size: int, count: int) -> None:
    inputs = random_inputs(count, world_size, world_size * count)
    programs = _core.build_programs("all_to_all", "direct", world_size)
    blocks = inputs.reshape(world_size, world_size, count)
    expected = blocks.transpose(1, 0, 2).reshape(world_size, world_size * count)
    np.testing.assert_array_equal(final(programs, inputs), expected)


# ---- hosts -----------------------------------------------------------------------------------


def hosts_of(sizes: tuple[int, ...], interleaved: bool) -> list[int]:
    """Hosts of these sizes, their ranks in a row or by turns."""
    if not interleaved:
        return [host for host, size in enumerate(sizes) for _ in range(size)]
    return [h for turn in range(max(sizes)) for h, size in enumerate(sizes) if turn < size]


TOPOLOGIES = [
    hosts_of(sizes, interleaved)
    for sizes in ((2, 2), (3, 1), (1, 3), (1, 1), (4,), (2, 3, 2), (1, 4, 2), (3, 3, 3))
    for interleaved in (False, True)
]


@pytest.mark.parametrize("hosts", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_hierarchical_on_any_hosts(hosts: list[int], op: str) -> None:
    w = len(hosts)
    programs = _core.build_programs("all_reduce", "hierarchical", w, hosts=hosts)
    inputs = random_inputs(w, w, 2 * programs[0].input_chunks + 1)
    got = final(programs, inputs, op)
    np.testing.assert_allclose(got, np.tile(OPS[op](inputs), (w, 1)), rtol=1e-12, atol=1e-14)
    assert all(row.tobytes() == got[0].tobytes() for row in got)


@pytest.mark.parametrize(
    "sizes", [(2, 2), (4, 4), (3, 1), (1, 3), (2, 3), (1, 1), (2, 2, 2), (1, 4, 2)], ids=str
)
def test_hierarchical_traffic_between_hosts(sizes: tuple[int, ...]) -> None:
    """With h hosts each sends 2 (h-1)/h vectors to the next, however many ranks it has."""
    hosts = hosts_of(sizes, interleaved=True)
    programs = _core.build_programs("all_reduce", "hierarchical", len(hosts), hosts=hosts)
    chunks = programs[0].input_chunks
    trace = _core.trace(programs, [[1.0] * chunks] * len(hosts))
    sent = np.zeros((len(sizes), len(sizes)))
    for transfer in trace.transfers:
        sent[hosts[transfer.source], hosts[transfer.destination]] += 1 / chunks
    h = len(sizes)
    for host in range(h):
        out = {other: sent[host, other] for other in range(h) if other != host}
        following = (host + 1) % h
        assert out.pop(following) == pytest.approx(2 * (h - 1) / h)
        assert not any(out.values())


@pytest.mark.parametrize("hosts", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("collective", [c for c in NAMES if "ring" in NAMES[c]])
def test_rings_leave_each_host_once(collective: str, hosts: list[int]) -> None:
    w = len(hosts)
    programs = _core.build_programs(collective, "ring", w, root=w - 1, hosts=hosts)
    routes = {
        (program.rank, step.to_rank)
        for program in programs
        for step in program.steps()
        if step.kind.endswith("send")
    }
    crossings = [(a, b) for a, b in routes if hosts[a] != hosts[b]]
    assert len(crossings) <= (max(hosts) + 1 if max(hosts) else 0)
    assert len({hosts[a] for a, _ in crossings}) == len(crossings)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ([0, 0, 1], "3 hosts for 4 ranks"),
        ([0, 2, 1, 0], "host 2 comes before host 1"),
        ([1, 0, 0, 0], "numbered by first appearance"),
        ([0, -1, 0, 0], "host -1"),
    ],
)
def test_bad_hosts(hosts: list[int], text: str) -> None:
    with pytest.raises(_core.InvalidArgumentError, match=text):
        _core.build_programs("all_reduce", "hierarchical", 4, hosts=hosts)


def test_barrier_moves_nothing_but_takes_time() -> None:
    trace = _core.trace(_core.build_programs("barrier", "recursive_doubling", 5), [[]] * 5)
    assert [row.time for row in trace.rows] == [0, 1, 2, 3]
    assert trace.rows[-1].values == [[]] * 5
    assert len(trace.transfers) == 15


def test_trace_refuses_bad_inputs() -> None:
    programs = _core.build_programs("all_reduce", "ring", 2)
    with pytest.raises(_core.InvalidArgumentError, match="1 inputs for 2 ranks"):
        _core.trace(programs, [[1.0]])
    with pytest.raises(_core.InvalidArgumentError, match="rank 1 has 2 elements, rank 0 has 1"):
        _core.trace(programs, [[1.0], [1.0, 2.0]])
    with pytest.raises(_core.InvalidArgumentError, match="cannot trace op band"):
        _core.trace(programs, [[1.0], [1.0]], op="band")
    with pytest.raises(_core.InvalidArgumentError, match='no reduce op "mean"'):
        _core.trace(programs, [[1.0], [1.0]], op="mean")
    scatter = _core.build_programs("reduce_scatter", "ring", 2)
    with pytest.raises(_core.InvalidArgumentError, match="3 elements on 2 ranks"):
        _core.trace(scatter, [[1.0] * 3] * 2)
    with pytest.raises(_core.InvalidArgumentError, match=r"wrong Programs: invalid: .*rank 1"):
        _core.trace([programs[1], programs[0]], [[1.0], [1.0]])
