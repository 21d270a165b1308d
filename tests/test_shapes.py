"""Any shape, strides and length (hypothesis): results right, neighbours untouched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_threads import ThreadGroups
from reference import (
    ALGORITHMS,
    MOVABLE,
    OPS,
    REDUCIBLE,
    SMALL_SLICES,
    Array,
    check_all_reduce,
    data,
    dtype_of,
    reduced,
)

GROUP_OF_THREE = ThreadGroups()


@pytest.fixture(scope="module", autouse=True)
def close_group_of_three() -> Iterator[None]:
    yield
    GROUP_OF_THREE.close()


@st.composite
def views(draw) -> Any:
    """How to cut a view out of an array: shape, steps (also negative), offsets, axis order."""
    ndim = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(0, 5)) for _ in range(ndim))
    steps = tuple(draw(st.sampled_from([1, 1, 2, 3, -1, -2])) for _ in range(ndim))
    offsets = tuple(draw(st.integers(0, 2)) for _ in range(ndim))
    order = tuple(draw(st.permutations(range(ndim))))
    return shape, steps, offsets, order


def cut(spec: Any, dtype: str, fill: int) -> tuple[Array, Array]:
    """(base, view): the view's elements are distinct in the base and lie `steps` apart."""
    shape, steps, offsets, order = spec
    extent = [o + max(n, 1) * abs(s) for n, s, o in zip(shape, steps, offsets, strict=True)]
    base = np.full(extent, fill, dtype_of(dtype))
    index = []
    for n, step, offset in zip(shape, steps, offsets, strict=True):
        part = slice(offset, offset + n * abs(step), abs(step))
        index.append(part)
    view = base[(*index, ...)]
    view = view[(*[slice(None, None, -1 if s < 0 else 1) for s in steps], ...)]
    return base, view.transpose(order)


def values_for(rank: int, shape: tuple[int, ...], dtype: str) -> Array:
    size = int(np.prod(shape))
    return data(rank, dtype, "sum", size, "small").reshape(shape)


def view_all_reduce(communicator, spec, dtype, op, algorithm):
    base, view = cut(spec, dtype, 77)
    view[...] = values_for(communicator.rank, view.shape, dtype)
    communicator.all_reduce(view, op, algorithm=algorithm)
    result = view.copy()
    view[...] = 77
    return result, bool((base == dtype_of(dtype).type(77)).all())


@settings(max_examples=150)
@given(
    spec=views(),
    dtype=st.sampled_from(REDUCIBLE),
    op=st.sampled_from(["sum", "min", "max", "avg"]),
    algorithm=st.sampled_from(["auto", *ALGORITHMS["all_reduce"]]),
)
def test_all_reduce_of_any_view_leaves_its_neighbours_alone(spec, dtype, op, algorithm):
    results = GROUP_OF_THREE(3).run(view_all_reduce, spec, dtype, op, algorithm)
    shape = results[0][0].shape
    expected = reduced([values_for(rank, shape, dtype) for rank in range(3)], op)
    for result, untouched in results:
        np.testing.assert_array_equal(result, expected)
        assert untouched


def view_moves(communicator, spec, dtype, root, asynchronous):
    w, rank = communicator.world_size, communicator.rank

    def finish(work):
        if asynchronous:
            work.wait()

    shape, steps, offsets, order = spec
    stacked = ((w, *shape), (2, *steps), (1, *offsets), (0, *[i + 1 for i in order]))
    _, source = cut(spec, dtype, 5)
    source[...] = values_for(rank, source.shape, dtype)
    gathered_base, gathered = cut(stacked, dtype, 77)
    finish(communicator.all_gather(gathered, source, async_op=asynchronous))
    gather_result = gathered.copy()
    gathered[...] = 77
    one_base, one = cut(spec, dtype, 77)
    one[...] = values_for(rank, one.shape, dtype)
    finish(communicator.broadcast(one, root, async_op=asynchronous))
    broadcast_result = one.copy()
    one[...] = 77
    kept = (source == values_for(rank, source.shape, dtype)).all()
    untouched = all((b == dtype_of(dtype).type(77)).all() for b in (gathered_base, one_base))
    return gather_result, broadcast_result, bool(kept), untouched


@settings(max_examples=100)
@given(
    spec=views(),
    dtype=st.sampled_from(MOVABLE),
    root=st.integers(0, 2),
    asynchronous=st.booleans(),
)
def test_all_gather_and_broadcast_of_any_view(spec, dtype, root, asynchronous):
    for gathered, sent, kept, untouched in GROUP_OF_THREE(3).run(
        view_moves, spec, dtype, root, asynchronous
    ):
        expected = [values_for(rank, sent.shape, dtype) for rank in range(3)]
        np.testing.assert_array_equal(gathered, np.stack(expected))
        np.testing.assert_array_equal(sent, expected[root])
        assert kept
        assert untouched


def view_rooted(communicator, spec, dtype, root, asynchronous):
    """reduce, gather, scatter and all_to_all of one kind of view; what came out, and whether all
    else stayed as it was."""
    w, rank = communicator.world_size, communicator.rank

    def finish(work):
        if asynchronous:
            work.wait()

    shape, steps, offsets, order = spec
    stack = ((w, *shape), (2, *steps), (1, *offsets), (0, *[i + 1 for i in order]))
    source_base, source = cut(spec, dtype, 5)
    source[...] = values_for(rank, source.shape, dtype)
    stack_base, stacked = cut(stack, dtype, 5)
    for r in range(w):
        stacked[r] = values_for(rank + r, source.shape, dtype)
    kept = [source_base.copy(), stack_base.copy()]
    results, untouched = [], True

    def output(spec):
        base, view = cut(spec, dtype, 77)
        return base, view

    def keep(base, view):
        nonlocal untouched
        results.append(view.copy())
        view[...] = 77
        untouched &= bool((base == dtype_of(dtype).type(77)).all())

    for kind, call in (
        (spec, lambda out: communicator.reduce(source, root, out=out, async_op=asynchronous)),
        (stack, lambda out: communicator.gather(out, source, root, async_op=asynchronous)),
    ):
        base, view = output(kind)
        finish(call(view if rank == root else None))
        if rank == root:
            keep(base, view)
    base, view = output(spec)
    finish(
        communicator.scatter(view, stacked if rank == root else None, root, async_op=asynchronous)
    )
    keep(base, view)
    base, view = output(stack)
    finish(communicator.all_to_all(view, stacked, async_op=asynchronous))
    keep(base, view)
    untouched &= source_base.tobytes() == kept[0].tobytes()
    untouched &= stack_base.tobytes() == kept[1].tobytes()
    return results, untouched


@settings(max_examples=100)
@given(
    spec=views(),
    dtype=st.sampled_from(REDUCIBLE),
    root=st.integers(0, 2),
    asynchronous=st.booleans(),
)
def test_rooted_collectives_and_all_to_all_of_any_view(spec, dtype, root, asynchronous):
    by_rank = GROUP_OF_THREE(3).run(view_rooted, spec, dtype, root, asynchronous)
    shape = by_rank[0][0][-2].shape
    parts = [values_for(rank, shape, dtype) for rank in range(5)]
    for rank, (results, untouched) in enumerate(by_rank):
        expected = [parts[root + rank], np.stack(parts[rank : rank + 3])]
        if rank == root:
            expected = [reduced(parts[:3], "sum"), np.stack(parts[:3]), *expected]
        assert untouched
        for result, right in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, right)


@settings(max_examples=150)
@given(
    world_size=st.integers(1, 7),
    n=st.integers(0, 3000),
    dtype=st.sampled_from(REDUCIBLE),
    op=st.sampled_from(OPS),
    algorithm=st.sampled_from(ALGORITHMS["all_reduce"]),
    small=st.booleans(),
)
def test_all_reduce_of_any_length(world_size, n, dtype, op, algorithm, small):
    group = GROUP_OF_THREE(world_size, **(SMALL_SLICES if small else {}))
    check_all_reduce(group, algorithm, [(dtype, op, n)])
