"""pycoll.Communicator on arrays of GPUs, without torch: on the simulated runtime, in processes.

Ranks share one device, or have one each. Results are compared with NumPy's, of the same whole
numbers, which are exact in every type and order.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

import native_build
import pycoll
import simulated_arrays
from pool import communicator_ranks
from pycoll import _native
from simulated_arrays import Gpu

TIMEOUT_S = 120
# Devices that there are: rank r has device r modulo that.
PLACES = {"shared": 1, "apart": 4}
DTYPES = ["float32", "float16", "float64", "int32", "int64", "uint8"]
SHAPES = [(), (0,), (1,), (33, 5), (3001,)]

# The first test compiles the simulator.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + TIMEOUT_S)


def gpu_ranks(world_size, function, *args, devices=4, **options):
    """`function(communicator, gpu, *args)` on every rank."""
    env = {"PYCOLL_SIM_DEVICES": str(devices), "PYCOLL_SIM_TIMEOUT_S": "60"}
    directory = simulated_arrays.require()
    return communicator_ranks(
        world_size,
        _with_gpu,
        function,
        directory,
        devices,
        args,
        env=env,
        timeout=TIMEOUT_S,
        **options,
    )


def _with_gpu(communicator, function, directory, devices, args):
    return function(communicator, Gpu(directory, communicator.rank % devices), *args)


def numbers(rank, shape, dtype, salt=0):
    rng = np.random.default_rng(1000 * salt + rank)
    return rng.integers(0, 9, shape).astype(dtype)


def same(array, expected, dtype):
    found = array.get()
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.asarray(expected).astype(dtype))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_collectives(place, world_size):
    gpu_ranks(world_size, every_collective, devices=PLACES[place])


def every_collective(communicator, gpu):
    for dtype in DTYPES:
        for shape in SHAPES if dtype == "float32" else [(33, 5)]:
            reductions(communicator, gpu, shape, dtype)
            movements(communicator, gpu, shape, dtype)
    unequal_blocks(communicator, gpu)
    messages(communicator, gpu)


def reductions(communicator, gpu, shape, dtype):
    rank, world = communicator.rank, communicator.world_size
    every = [numbers(r, shape, dtype) for r in range(world)]
    array = gpu.array(every[rank])
    assert communicator.all_reduce(array) is None
    same(array, sum(every), dtype)
    array = gpu.array(every[rank])
    communicator.all_reduce(array, "max")
    same(array, np.maximum.reduce(every), dtype)
    if np.dtype(dtype).kind == "f":
        array = gpu.array(every[rank])
        communicator.all_reduce(array, "premul_sum", factor=2.0)
        same(array, 2 * sum(every), dtype)

    root = world - 1
    array = gpu.array(every[rank])
    out = gpu.empty(shape, dtype) if rank == root else None
    communicator.reduce(array, root, "min", out=out)
    same(array, every[rank], dtype)
    if out is not None:
        same(out, np.minimum.reduce(every), dtype)

    wide = [numbers(r, (world, *shape), dtype, salt=1) for r in range(world)]
    output = gpu.empty(shape, dtype)
    communicator.reduce_scatter(output, gpu.array(wide[rank]))
    same(output, sum(wide)[rank], dtype)


def movements(communicator, gpu, shape, dtype):
    rank, world = communicator.rank, communicator.world_size
    every = [numbers(r, shape, dtype) for r in range(world)]
    wide = [numbers(r, (world, *shape), dtype, salt=1) for r in range(world)]
    mine = gpu.array(every[rank])
    output = gpu.empty((world, *shape), dtype)
    communicator.all_gather(output, mine)
    same(output, np.stack(every), dtype)

    array = gpu.array(every[rank])
    communicator.broadcast(array, world - 1)
    same(array, every[world - 1], dtype)

    output = gpu.empty((world, *shape), dtype) if rank == 1 else None
    communicator.gather(output, mine, 1)
    if output is not None:
        same(output, np.stack(every), dtype)

    output = gpu.empty(shape, dtype)
    communicator.scatter(output, gpu.array(wide[0]) if rank == 0 else None, 0)
    same(output, wide[0][rank], dtype)

    output = gpu.empty((world, *shape), dtype)
    communicator.all_to_all(output, gpu.array(wide[rank]))
    same(output, np.stack([wide[r][rank] for r in range(world)]), dtype)


def unequal_blocks(communicator, gpu):
    """Lists of arrays; and a type that NumPy has no name for, which travels as raw bytes."""
    rank, world = communicator.rank, communicator.world_size
    every = [numbers(r, (5 + 100 * r,), "float32") for r in range(world)]
    outputs = [gpu.empty(values.shape) for values in every]
    communicator.all_gather(outputs, gpu.array(every[rank]))
    for output, values in zip(outputs, every, strict=True):
        same(output, values, "float32")

    raw = [numbers(r, (77,), "uint16", salt=2) + np.uint16(0x3F80) for r in range(world)]
    array = gpu.array(raw[rank]).but(typestr="<V2")
    array.dtype = "bfloat16"
    communicator.broadcast(array, 1)
    np.testing.assert_array_equal(array.get(), raw[1])


def messages(communicator, gpu):
    """Around the ring; every second rank receives first. Nobody but the two takes part."""
    rank, world = communicator.rank, communicator.world_size
    after, before = (rank + 1) % world, (rank - 1) % world
    array, got = gpu.array(numbers(rank, (500,), "int32")), gpu.empty((500,), "int32")
    if rank == 0:
        communicator.send(array, after)
    assert communicator.recv(got, before) == before
    if rank != 0:
        communicator.send(array, after)
    same(got, numbers(before, (500,), "int32"), "int32")
    if rank < 2:
        work = (communicator.send, communicator.recv)[rank](array, 1 - rank, async_op=True)
        assert work.wait() and work.is_completed()
        assert work.source == (0 if rank == 1 else None)
        same(array, numbers(0, (500,), "int32"), "int32")


@pytest.mark.parametrize("place", PLACES)
def test_calls_are_ordered_on_streams(place):
    gpu_ranks(2, streams, devices=PLACES[place])


class NamedStream:
    def __init__(self, ptr):
        self.ptr = ptr  # as CuPy calls it


def streams(communicator, gpu):
    """All is queued before anything is waited for."""
    one, other = gpu.stream(), gpu.stream()
    shape = 10_000
    ours = gpu.array(np.zeros(shape, np.uint8), stream=one)  # exports it
    for _ in range(3):
        ours.fill(1 + communicator.rank, one)
        communicator.all_reduce(ours)  # 3, on the exported stream
        ours.fill(5, one)
        communicator.all_reduce(ours, stream=NamedStream(other))  # 10, after what is on `one`
        communicator.all_reduce(ours.but(stream=None), "product", stream=other)  # 100
        assert (ours.get(other) == 100).all()
    plain = gpu.array(np.zeros(shape, np.uint8))
    plain.fill(7, 1)
    communicator.all_reduce(plain)  # on the legacy default stream
    assert (plain.get(1) == 14).all()
    per_thread = plain.but(stream=2)
    per_thread.fill(4, 2)
    communicator.all_reduce(per_thread)
    assert (plain.get(2) == 8).all()


@pytest.mark.parametrize("place", PLACES)
def test_the_host_goes_on(place, tmp_path):
    gpu_ranks(2, goes_on, str(tmp_path / "called"), devices=PLACES[place])


def goes_on(communicator, gpu, called):
    """Rank 1 calls only after rank 0 has come back from its call."""
    stream = gpu.stream()
    array = gpu.array(np.full(1000, 1.0 + communicator.rank))
    communicator.all_reduce(array, stream=stream)  # the first meets its peers
    array.get(stream)
    if communicator.rank == 0:
        work = communicator.all_reduce(array, stream=stream, async_op=True)
        assert not work.wait(0.05) and not work.is_completed()
        Path(called).touch()
    else:
        deadline = time.monotonic() + 30
        while not Path(called).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        work = communicator.all_reduce(array, stream=stream, async_op=True)
    assert work.wait() and work.is_completed() and work.source is None
    assert (array.get(stream) == 6).all()


def test_what_is_refused():
    gpu_ranks(2, refusals)


def refusals(communicator, gpu):
    array = gpu.array(np.ones((4, 6), np.float32))
    there = {0: 2, 1: 3}[communicator.rank]
    gpu.call("cudaSetDevice", there)
    elsewhere, foreign_stream = gpu.array(np.ones((4, 6), np.float32)), gpu.stream()
    gpu.call("cudaSetDevice", communicator.rank)
    host = np.ones((4, 6), np.float32)
    all_reduce = communicator.all_reduce
    ask = communicator.all_to_all
    cases = [
        (lambda: all_reduce(array.but(strides=(4, 16))), "not contiguous in C order"),
        (lambda: all_reduce(array.but(stream=0)), "the protocol has None, 1"),
        (lambda: all_reduce(array.but(data=(array.pointer, True))), "array is read-only"),
        (lambda: all_reduce(array.but(typestr=">f4")), "not in this machine's byte order"),
        (lambda: all_reduce(array.but(typestr="<V4")), "which pycoll does not know"),
        (lambda: all_reduce(array.but(mask=array)), "has a mask"),
        (lambda: all_reduce(array.but(data=(host.ctypes.data, False))), "none that a GPU reaches"),
        (lambda: all_reduce(array, stream=foreign_stream), "is not one of GPU"),
        (lambda: all_reduce(array, stream="1"), "stream is a str"),
        (lambda: all_reduce(host, stream=1), "the arrays are not on a GPU"),
        (lambda: all_reduce(array, factor=2.0), "factor=2.0 is for"),
        (lambda: ask([array, host], [host, host]), "some are NumPy arrays"),
        (lambda: ask([array, elsewhere], [array, array]), "all arrays of a call must be on one"),
        (lambda: ask(array, array), "its first dimension must be the world size 2"),
        (lambda: communicator.send(array, communicator.rank), "the same as the rank"),
    ]
    for call, reason in cases:
        with pytest.raises(pycoll.InvalidArgumentError, match=reason):
            call()
    with pytest.raises(pycoll.UnsupportedError, match="needs the rank that it is received from"):
        communicator.recv(array)
    # Nothing has happened, and another device is as good as the first; so is the CPU.
    communicator.all_reduce(array.but(strides=(24, 4)))
    communicator.all_reduce(elsewhere)
    communicator.all_reduce(host)
    same(array, np.full((4, 6), 2), "float32")
    gpu.call("cudaSetDevice", there)
    same(elsewhere, np.full((4, 6), 2), "float32")
    assert (host == 2).all()
    communicator.close()
    with pytest.raises(pycoll.AbortedError):
        communicator.all_reduce(array)


@pytest.mark.parametrize("place", PLACES)
def test_a_peer_that_dies_is_named(place):
    results = gpu_ranks(2, dies, devices=PLACES[place], check=False)
    assert results[0].error is None, results[0].report()
    assert results[0].value < 10


def dies(communicator, gpu):
    stream = gpu.stream()
    array = gpu.array(np.ones(1000))
    communicator.all_reduce(array, stream=stream)
    array.get(stream)
    if communicator.rank == 1:
        os._exit(3)
    began = time.monotonic()
    work = communicator.all_reduce(array, stream=stream, async_op=True)
    gpu.synchronize(stream)  # comes back though nobody asks pycoll
    with pytest.raises(pycoll.PeerError, match="rank 1"):
        work.wait()
    with pytest.raises(pycoll.PeerError, match="rank 1"):
        communicator.all_reduce(array)
    return time.monotonic() - began


def test_leaving_by_an_error_ends_what_is_queued():
    results = gpu_ranks(2, leaves, devices=1)
    assert results[0].value < 4.5  # a group in good order is given 5 s


def leaves(communicator, gpu):
    stream = gpu.stream()
    array = gpu.array(np.ones(1000))
    communicator.all_reduce(array, stream=stream)
    array.get(stream)
    began = time.monotonic()
    if communicator.rank == 0:
        with pytest.raises(KeyError), communicator:
            communicator.all_reduce(array, stream=stream)  # alone
            raise KeyError("on purpose")
        gpu.synchronize(stream)
    else:
        with pytest.raises(pycoll.AbortedError, match="on purpose"):
            communicator.barrier()
    return time.monotonic() - began


class Described:
    """An array that nobody reads."""

    __cuda_array_interface__ = {  # noqa: RUF012
        "shape": (4,),
        "typestr": "<f4",
        "data": (0x1000, False),
        "version": 3,
    }


def test_without_the_cuda_part():
    communicator_ranks(1, without)


def without(communicator):
    _native.gpu_library = lambda: None
    for call in (communicator.all_reduce, communicator.broadcast):
        with pytest.raises(pycoll.UnsupportedError, match=r"CUDA part .*PYCOLL_CUDA=1 pip install"):
            call(Described())
