"""`with pycoll.codec(...)` and codec="none": which codec a call has."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading

import numpy as np
import pytest

import codec_reference as reference
import pycoll
from codec_model import all_reduced, values_of
from codec_reference import Kind
from helpers_threads import ThreadRanks
from pool import torch_ranks
from pycoll import _regions

N = 10_000
INT8, INT4 = Kind("int8"), Kind("int4")


def sums(world_size, kind=None, op="sum", n=N):
    inputs = [values_of(r, n) for r in range(world_size)]
    return sum(inputs) if kind is None else all_reduced(kind, inputs, op)


def decoded(kind, x):
    return reference.decode(kind, [reference.encode(kind, x)], len(x))


# ---- Communicators ----


@pytest.fixture(scope="module")
def group():
    group = ThreadRanks(2)
    yield group
    group.close()


@pytest.fixture(scope="module")
def group_with_a_codec():
    group = ThreadRanks(2, pycoll.Options(codec="int8"))
    yield group
    group.close()


def reduced(communicator, **arguments):
    x = values_of(communicator.rank, N)
    communicator.all_reduce(x, **arguments)
    return x.tobytes()


def every_collective(communicator, **arguments):
    rank, w = communicator.rank, communicator.world_size
    mine = values_of(rank, N)
    reduced_array, sent = mine.copy(), mine.copy()
    communicator.all_reduce(reduced_array, "avg", **arguments)
    part = np.empty(N // 2, np.float32)
    communicator.reduce_scatter(part, mine.reshape(2, -1), **arguments)
    gathered = np.empty((w, N), np.float32)
    communicator.all_gather(gathered, mine, **arguments)
    communicator.broadcast(sent, 1, **arguments)
    exchanged = np.empty((2, N // 2), np.float32)
    communicator.all_to_all(exchanged, mine.reshape(2, -1), **arguments)
    return [x.tobytes() for x in (reduced_array, part, gathered, sent, exchanged)]


def test_a_region_is_the_codec_of_each_call_in_it(group):
    def use(communicator):
        given = every_collective(communicator, codec="int8")
        with pycoll.codec("int8"):
            inside = every_collective(communicator)
        exact = every_collective(communicator)
        with pycoll.codec("int8"):
            none = every_collective(communicator, codec="none")
        assert inside == given
        assert none == exact
        assert all(a != b for a, b in zip(given, exact, strict=True))
        assert given[0] == sums(2, INT8, "avg").tobytes()

    group.run(use)


def test_the_innermost_region_counts_and_a_call_comes_before_it(group):
    def use(communicator):
        with pycoll.codec("int8"):
            assert reduced(communicator) == sums(2, INT8).tobytes()
            with pycoll.codec(pycoll.Int4()):
                assert reduced(communicator) == sums(2, INT4).tobytes()
                assert reduced(communicator, codec="int8") == sums(2, INT8).tobytes()
                for exact in (None, "none"):
                    with pycoll.codec(exact):
                        assert reduced(communicator) == sums(2).tobytes()
            assert reduced(communicator) == sums(2, INT8).tobytes()
            with pytest.raises(ZeroDivisionError), pycoll.codec("int4"):
                raise ZeroDivisionError
            assert reduced(communicator) == sums(2, INT8).tobytes()
            # Exempt as ever.
            x = np.full(N, communicator.rank + 1)
            communicator.all_reduce(x)
            assert (x == 3).all()
            assert reduced(communicator, algorithm="ring") == sums(2).tobytes()
        assert reduced(communicator) == sums(2).tobytes()

    group.run(use)


def test_a_group_with_a_codec(group_with_a_codec):
    def use(communicator):
        assert reduced(communicator) == sums(2, INT8).tobytes()
        assert reduced(communicator, codec="none") == sums(2).tobytes()
        with pycoll.codec("none"):
            assert reduced(communicator) == sums(2).tobytes()
        with pycoll.codec("int4"):
            assert reduced(communicator) == sums(2, INT4).tobytes()

    group_with_a_codec.run(use)


def test_residuals_are_those_of_the_region(group):
    def use(communicator):
        residual = np.zeros(N, np.float32)
        x = values_of(communicator.rank, N)
        with pycoll.codec("int8"):
            communicator.all_reduce(x, residual=residual)
        own = values_of(communicator.rank, N)
        lacking = own - decoded(INT8, own)
        # Its chunks are encoded apart, but their blocks are those of the whole.
        chunk = -(-N // 2 // 256) * 256
        lacking[chunk:] = own[chunk:] - decoded(INT8, own[chunk:])
        assert residual.tobytes() == lacking.tobytes()
        before = residual.copy()
        communicator.all_reduce(x, residual=residual, codec="none")
        assert residual.tobytes() == before.tobytes()
        with pytest.raises(pycoll.InvalidArgumentError, match="without a codec"):
            communicator.all_reduce(x, residual=residual)

    group.run(use)


def test_a_region_may_be_entered_again(group):
    region = pycoll.codec("int8")  # by both ranks' threads, too

    @region
    def decorated(communicator):
        return reduced(communicator)

    def in_parts(communicator):
        with region:
            yield reduced(communicator)

    def use(communicator):
        compressed, exact = sums(2, INT8).tobytes(), sums(2).tobytes()
        for _ in range(2):
            with region:
                with region, pycoll.codec(None), region:
                    assert reduced(communicator) == compressed
                assert reduced(communicator) == compressed
            assert reduced(communicator) == exact
        assert decorated(communicator) == compressed
        parts = in_parts(communicator)
        assert contextvars.copy_context().run(next, parts) == compressed
        # Closed in another context than it was begun in, whose region stays what it is.
        with pycoll.codec("int4"):
            parts.close()
            assert reduced(communicator) == sums(2, INT4).tobytes()

    group.run(use)


def test_tasks_and_threads_have_regions_of_their_own(group):
    """Tasks that take turns in one thread keep their codecs, a new thread begins without one."""
    turns = threading.Barrier(2)

    def use(communicator):
        async def task(codec, results):
            with pycoll.codec(codec):
                for _ in range(3):
                    results.append(reduced(communicator))
                    await asyncio.sleep(0)

        async def together():
            results = [[], []]
            await asyncio.gather(task("int8", results[0]), task(None, results[1]))
            return results

        compressed, exact = asyncio.run(together())
        assert compressed == [sums(2, INT8).tobytes()] * 3
        assert exact == [sums(2).tobytes()] * 3
        found = []
        with pycoll.codec("int8"):
            turns.wait(20)
            thread = threading.Thread(target=lambda: found.append(reduced(communicator)))
            thread.start()
            thread.join()
        assert found == [sums(2).tobytes()]

    group.run(use)


def stay(codec):
    with pycoll.codec(codec):
        yield


def test_a_region_is_over_where_its_block_ends(group):
    """For copies of its context too, and out of turn; whatever regions there are elsewhere."""

    def use(communicator):
        narrow, exact = sums(2, INT4).tobytes(), sums(2).tobytes()
        elsewhere = stay("sign")
        contextvars.Context().run(next, elsewhere)
        with pycoll.codec("int4"):
            with pycoll.codec("int8"):
                copy = contextvars.copy_context()
                assert copy.run(reduced, communicator) == sums(2, INT8).tobytes()
            assert copy.run(reduced, communicator) == narrow
        assert copy.run(reduced, communicator) == exact
        outer = stay("int8")
        next(outer)
        with pycoll.codec("int4"):
            outer.close()
            assert reduced(communicator) == narrow
        assert reduced(communicator) == exact
        outer = stay("int8")
        next(outer)
        contextvars.Context().run(outer.close)
        assert reduced(communicator) == exact
        elsewhere.close()
        assert reduced(communicator) == exact

    group.run(use)


def ends_amid(region, other, line):
    """`other`, a generator, ends before that line of what counts `region` in."""
    lines = []

    def step(frame, event, argument):
        if frame.f_code is not counting:
            return step
        lines.append(event)
        if len(lines) == line:
            other.close()
        return step

    counting = type(_regions.open_regions).add.__code__
    sys.settrace(step)
    with region:
        pass
    sys.settrace(None)
    return len(lines) >= line


def test_a_region_may_end_while_another_is_entered():
    """As when the collector finds a generator just then."""
    done = []

    def enter():
        for line in range(1, 6):
            other = stay("int8")
            next(other)
            done.append(ends_amid(pycoll.codec("int4"), other, line))

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(20)
    assert done == [True] * 5


def test_asynchronous_calls_have_the_codec_of_when_they_were_made(group):
    def use(communicator):
        first, second = values_of(communicator.rank, N), values_of(communicator.rank, N)
        with pycoll.codec("int8"):
            inside = communicator.all_reduce(first, async_op=True)
        outside = communicator.all_reduce(second, async_op=True)
        with pycoll.codec("int4"):
            assert inside.wait()
            assert outside.wait()
        assert first.tobytes() == sums(2, INT8).tobytes()
        assert second.tobytes() == sums(2).tobytes()

    group.run(use)


def test_what_a_region_cannot_decorate():
    """Their code would run outside of the region, and be exact."""

    async def coroutine():
        pass

    def generator():
        yield

    async def asynchronous_generator():
        yield

    for function in (coroutine, generator, asynchronous_generator):
        with pytest.raises(pycoll.InvalidArgumentError, match="coroutines and generators"):
            pycoll.codec("int8")(function)
    with pytest.raises(pycoll.InvalidArgumentError, match=r"needs one: @pycoll\.codec\('int8'\)"):
        pycoll.codec(reduced)


@pytest.mark.parametrize("wrong", ["auto", "int3", 8])
def test_what_is_no_codec_of_a_region(wrong):
    with pytest.raises(pycoll.InvalidArgumentError, match=r"is no codec.*; there are: .*or None"):
        pycoll.codec(wrong)  # already before it is entered


def test_regions_that_differ_are_named():
    group = ThreadRanks(2)

    def use(communicator):
        reduced(communicator, codec="int8")
        with (
            pycoll.codec(("int8", "int4")[communicator.rank]),
            pytest.raises(pycoll.Error) as caught,
        ):
            reduced(communicator)
        return str(caught.value), isinstance(caught.value, pycoll.MismatchError)

    results = group.run(use)
    group.close()
    assert any(found for _, found in results)
    for text, found in results:
        if found:
            assert "codecs differ: rank" in text
            assert "rank 0 called all_reduce over codes (int8 in blocks of 256, sum" in text
            assert "rank 1 called all_reduce over codes (int4 in blocks of 256, sum" in text


# ---- torch.distributed ----


def regions_of_torch(rank, world_size):
    import torch
    import torch.distributed as dist

    def tensor():
        return torch.from_numpy(values_of(rank, N))

    def call(function=dist.all_reduce, **arguments):
        x = tensor()
        function(x, **arguments)
        return x.numpy().tobytes()

    compressed, narrow = sums(2, INT8).tobytes(), sums(2, INT4).tobytes()
    exact = sums(2).tobytes()
    group = dist.new_group(pg_options=pycoll.Options(codec="int8"))
    for function in (dist.all_reduce, pycoll.all_reduce):
        assert call(function) == exact
        with pycoll.codec("int8"):
            assert call(function) == compressed
            with pycoll.codec("int4"):
                assert call(function) == narrow
                assert call(function, group=group) == narrow
            with pycoll.codec(None):
                assert call(function) == exact
                assert call(function, group=group) == exact
            assert call(function) == compressed
        assert call(function) == exact
        assert call(function, group=group) == compressed
    assert call(pycoll.all_reduce, group=group, codec="none") == exact
    with pycoll.codec("int8"):
        assert call(pycoll.all_reduce, codec="none") == exact
        assert call(pycoll.all_reduce, codec="int4") == narrow
        # Its members share memory: it has chosen none.
        assert call(pycoll.all_reduce, codec="auto") == exact
        residual = torch.zeros(N)
        assert call(pycoll.all_reduce, residual=residual) == compressed
        assert residual.abs().max() > 0

    # Where a region is over, also in copies of its context.
    with pycoll.codec("int8"):
        copy = contextvars.copy_context()
        assert copy.run(call) == compressed
    with pycoll.codec("int4"):
        assert copy.run(call) == exact

    # The other collectives, and the forms that torch makes of them.
    inputs = [values_of(r, N) for r in range(world_size)]
    blocks = np.concatenate([decoded(INT8, x) for x in inputs]).tobytes()
    gathered, lists = torch.zeros(2 * N), [torch.zeros(N) for _ in range(2)]
    sent, scattered = tensor(), torch.zeros(N // 2)
    with pycoll.codec("int8"):
        dist.all_gather_into_tensor(gathered, tensor())
        dist.all_gather(lists, tensor())
        dist.broadcast(sent, 1)
        dist.reduce_scatter_tensor(scattered, tensor())
        work = dist.all_reduce(late := tensor(), async_op=True)
        objects = [None, None]
        dist.all_gather_object(objects, "x" * 100_000)
        dist.barrier()
    assert work.wait()
    assert gathered.numpy().tobytes() == torch.cat(lists).numpy().tobytes() == blocks
    assert sent.numpy().tobytes() == decoded(INT8, inputs[1]).tobytes()
    half = slice(rank * N // 2, (rank + 1) * N // 2)
    expected = sum(decoded(INT8, x[half]) for x in inputs)
    assert scattered.numpy().tobytes() == expected.tobytes()
    assert late.numpy().tobytes() == compressed
    assert objects == ["x" * 100_000] * 2

    # A block in which torch collects calls runs them at its end.
    first, second = tensor(), tensor()
    with pycoll.codec("int8"), dist._coalescing_manager():
        dist.all_reduce(first)
        dist.all_reduce(second)
    assert first.numpy().tobytes() == second.numpy().tobytes() == compressed

    # Gradients on the CPU are reduced by the thread that calls backward().
    model = torch.nn.Linear(1, N, bias=False)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    gradients = []
    for codec in ("none", "int8"):
        model.weight.grad = None
        with pycoll.codec(codec):
            (ddp(torch.ones(1, 1)) @ tensor()).sum().backward()
        gradients.append(model.weight.grad.numpy().tobytes())
    assert gradients[0] == (sum(x / 2 for x in inputs)).tobytes()
    assert gradients[1] == all_reduced(INT8, [x / np.float32(2) for x in inputs]).tobytes()

    # A thread in a region does not touch the calls of another.
    other = dist.new_group()
    entered, leave = threading.Event(), threading.Event()

    def stay():
        with pycoll.codec("int8"):
            entered.set()
            assert leave.wait(20)
            return call(group=other)

    found = []
    thread = threading.Thread(target=lambda: found.append(stay()))
    thread.start()
    assert entered.wait(20)
    assert call() == exact
    leave.set()
    thread.join()
    assert found == [compressed]


def test_regions_of_torch():
    torch_ranks(2, regions_of_torch, timeout=120)


def entered_before_there_is_a_group(rank, world_size):
    import torch
    import torch.distributed as dist

    with pycoll.codec("int8"):
        group = dist.new_group()
        x = torch.from_numpy(values_of(rank, N))
        dist.all_reduce(x, group=group)
    assert x.numpy().tobytes() == sums(2, INT8).tobytes()
    with (
        pycoll.codec(("int8", "fp8_e4m3")[rank]),
        pytest.raises(dist.DistBackendError) as caught,
    ):
        dist.all_reduce(x, group=group)
    return str(caught.value)


def test_torch_ranks_in_different_regions():
    texts = [r.value for r in torch_ranks(2, entered_before_there_is_a_group, timeout=60)]
    named = [text for text in texts if "codecs differ: rank" in text]
    assert named
    for text in named:
        assert "rank 0 called all_reduce over codes (int8 in blocks of 256, sum" in text
        assert "rank 1 called all_reduce over codes (fp8_e4m3 in blocks of 256, sum" in text
