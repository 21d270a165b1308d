"""Collectives over codecs on arrays of GPUs, which are simulated: the bits are those of the same
calls on NumPy arrays, by the same group.

Ranks share one device, have one each, or are on two hosts, in mount namespaces. What the CPU's
calls compute is compared with a model in NumPy by test_codec_collectives.py, test_codec_hosts.py;
here one call is, too.
"""

from __future__ import annotations

import os
import socket
import time

import numpy as np
import pytest

import native_build
import pycoll
import simulated_arrays
from codec_model import all_reduced, values_of
from codec_reference import BITS, Kind
from pool import run_ranks
from simulated_arrays import Gpu
from test_hosts import REASONS, run_on_two_hosts

TIMEOUT_S = 180
# Devices that there are, and portions so small that a vector takes many.
PLACES = {"shared": 1, "apart": 4}
SMALL = {"PYCOLL_WINDOW_BYTES": "4096", "PYCOLL_SLOT_BYTES": "1024"}

# The first test compiles the simulator.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + TIMEOUT_S)


def run_here(rank, world_size, directory, function, *rest):
    return on_gpu(rank, world_size, pycoll.FileStore(directory), function, *rest)


def on_gpu(rank, world_size, store, function, simulator, devices, options, *args):
    gpu = Gpu(simulator, rank % devices)
    with pycoll.Communicator(store, rank, world_size, timeout=60, options=options) as communicator:
        return function(communicator, gpu, *args)


def gpu_ranks(place, function, *args, world_size=2, options=None, env=None):
    """`function(communicator, gpu, *args)`; `place`: of PLACES, or a letter a rank, its host."""
    devices = PLACES.get(place, 1)
    variables = {"PYCOLL_SIM_DEVICES": str(devices), "PYCOLL_SIM_TIMEOUT_S": "60", **(env or {})}
    rest = (function, simulated_arrays.require(), devices, options, *args)
    how = {"env": variables, "timeout": TIMEOUT_S}
    if place in PLACES:
        results = run_ranks(world_size, run_here, *rest, **how)
    elif REASONS.get("tcp", "not built"):
        pytest.skip(f"no TCP: {REASONS.get('tcp')}")
    else:
        results = run_on_two_hosts(place, on_gpu, *rest, **how)
    return [result.value for result in results]


class Pair:
    """Calls made twice, on arrays of the GPU and on NumPy's."""

    def __init__(self, communicator, gpu):
        self.communicator = communicator
        self.gpu = gpu

    def reduced(self, x, op="sum", residuals=(), **options):
        here, cpu = self.gpu.array(x), x.copy()
        names = ("residual", "sum_residual")[: len(residuals)]
        ours = {name: self.gpu.array(r) for name, r in zip(names, residuals, strict=True)}
        assert self.communicator.all_reduce(here, op, **options, **ours) is None
        theirs = dict(zip(names, residuals, strict=True))
        self.communicator.all_reduce(cpu, op, **options, **theirs)
        same(here, cpu, op, options)
        for name, residual in ours.items():
            same(residual, theirs[name], name, options)
        return cpu

    def out(self, name, arrays, shape, *args, **options):
        """A collective that has an output."""
        call = getattr(self.communicator, name)
        cpu = np.full(shape, -1, np.float32)
        here = self.gpu.array(cpu)
        call(here, self.gpu.array(arrays), *args, **options)
        call(cpu, arrays, *args, **options)
        same(here, cpu, name, options)


def same(array, expected, *what):
    assert array.get().tobytes() == expected.tobytes(), what


# ---- The bits of the CPU. ----


def every_codec(communicator, gpu, n):
    pair = Pair(communicator, gpu)
    rank = communicator.rank
    for name in BITS:
        pair.reduced(values_of(rank, n), "avg", codec=name, step=7)
    large = values_of(rank, n) * np.float32(1e6)  # fp16 has an exponent for that
    large[100] = np.nan
    for codec in ("fp16", pycoll.Int8(block=64, stochastic=True, seed=3)):
        pair.reduced(large, codec=codec, step=2)
    for dtype in (np.float16, np.float32):
        for op in ("sum", "avg"):
            pair.reduced(values_of(rank, n).astype(dtype), op, codec="int4", step=1)


def every_collective(communicator, gpu, n):
    pair, rank, world = Pair(communicator, gpu), communicator.rank, communicator.world_size
    wide = values_of(rank, world * n, seed=1).reshape(world, n)
    for codec in ("int8", "fp16", pycoll.UInt4(block=32, stochastic=True, seed=9)):
        options = {"codec": codec, "step": 5}
        pair.out("reduce_scatter", wide, (n,), **options)
        pair.out("reduce_scatter", wide, (n,), "avg", **options)
        pair.out("all_gather", wide[0], (world, n), **options)
        pair.out("all_to_all", wide, (world, n), **options)
        here, cpu = gpu.array(wide[0]), wide[0].copy()
        communicator.broadcast(here, world - 1, **options)
        communicator.broadcast(cpu, world - 1, **options)
        same(here, cpu, "broadcast")
    # Blocks of different lengths, some of them empty.
    lengths = [n + 100 * r if r else 0 for r in range(world)]
    mine = values_of(rank, lengths[rank], seed=2)
    outputs = [np.zeros(length, np.float32) for length in lengths]
    on_device = [gpu.array(block) for block in outputs]
    communicator.all_gather(on_device, gpu.array(mine), codec="int4")
    communicator.all_gather(outputs, mine, codec="int4")
    for here, cpu in zip(on_device, outputs, strict=True):
        same(here, cpu, "blocks")


def fed_back(communicator, gpu, n):
    """Residuals, and the number of the call as the step."""
    pair, rank = Pair(communicator, gpu), communicator.rank
    residuals = [values_of(rank, n, seed=11), values_of(rank, n, seed=12)]
    for step in range(3):
        x = values_of(rank, n, seed=step)
        pair.reduced(x, "avg", residuals, codec="ternary")
        pair.reduced(x, "sum", residuals[:1], codec="fp16")


def many_pieces(communicator, gpu, n):
    """A chunk of several pieces, whose fp16 exponents differ; the model says the same."""
    pair, rank, world = Pair(communicator, gpu), communicator.rank, communicator.world_size
    x = values_of(rank, n)
    x[: 1 << 16] *= np.float32(1e7)
    pair.reduced(x, codec="fp16")
    got = pair.reduced(values_of(rank, n), "avg", codec="int4")
    return got.tobytes() if world == 2 else None


def mixed(communicator, gpu):
    """Calls in flight, exact ones among them, on two streams."""
    rank, n, world = communicator.rank, 20_000, communicator.world_size
    streams, names = [gpu.stream(), gpu.stream()], ["int8", None, "sign", "fp16", None, "uint4"]
    every = [[values_of(r, n, seed=k) for r in range(world)] for k in range(len(names))]
    arrays = [gpu.array(inputs[rank]) for inputs in every]
    works = [
        communicator.all_reduce(array, codec=name, step=k, stream=streams[k % 2], async_op=True)
        for k, (array, name) in enumerate(zip(arrays, names, strict=True))
    ]
    assert all(work.wait(60) for work in works)
    for k, name in enumerate(names):
        cpu = every[k][rank].copy()
        communicator.all_reduce(cpu, codec=name, step=k)
        if name:
            same(arrays[k], cpu, name)
        else:
            np.testing.assert_allclose(arrays[k].get(), cpu, rtol=1e-5, atol=1e-5)
    # What is exempt: integers, small vectors, other operations.
    for x, op in ((np.arange(9000, dtype=np.int64), "sum"), (values_of(rank, 9000), "max")):
        exact, compressed = gpu.array(x), gpu.array(x)
        communicator.all_reduce(exact, op)
        communicator.all_reduce(compressed, op, codec="sign")
        assert compressed.get().tobytes() == exact.get().tobytes()


def all_of_it(communicator, gpu, n):
    every_codec(communicator, gpu, n)
    every_collective(communicator, gpu, n)
    fed_back(communicator, gpu, n)
    mixed(communicator, gpu)


@pytest.mark.parametrize("place", ["shared", "apart"])
def test_calls_on_one_host(place):
    gpu_ranks(place, all_of_it, 5001)


@pytest.mark.parametrize("place", ["ab", "aabb"])
def test_calls_between_hosts(place):
    gpu_ranks(place, all_of_it, 5001)


def test_many_portions_and_pieces():
    """Codes of a call take turns in the same memory, and in the pinned memory of several hosts."""
    n = (1 << 18) + 77
    expected = all_reduced(Kind("int4"), [values_of(r, n) for r in range(2)], "avg", step=1)
    for place in ("shared", "ab"):
        got = gpu_ranks(place, many_pieces, n, env=SMALL)
        assert got == [expected.tobytes()] * 2, place


@pytest.mark.full
@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("place", PLACES)
def test_calls_of_more_ranks(place, world_size):
    gpu_ranks(place, all_of_it, 5001, world_size=world_size)
    gpu_ranks(place, all_of_it, 4099, world_size=world_size, env=SMALL)


@pytest.mark.full
@pytest.mark.parametrize("place", ["abab", "aab", "abb"])
def test_calls_between_more_hosts(place):
    gpu_ranks(place, all_of_it, 5001, env=SMALL)


@pytest.mark.full
@pytest.mark.parametrize("place", ["shared", "apart", "ab", "aabb"])
def test_many_pieces_of_more_places(place):
    gpu_ranks(place, many_pieces, 1_300_001)
    gpu_ranks(place, many_pieces, 1_300_001, env=SMALL)


# ---- What crosses between hosts. ----

BYTES_SENT = slice(200, 208)  # tcpi_bytes_sent of struct tcp_info, Linux 4.19


def sent_over_tcp():
    """Bytes that this process's connections have sent."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += int.from_bytes(info[BYTES_SENT], "little")
        except OSError:
            continue  # no socket, or a listening one
    return total


def crossing(communicator, gpu, n):
    """Bytes sent by an exact all_reduce and by one over fp16, and whether both are right."""
    rank, world = communicator.rank, communicator.world_size
    exact = sum(values_of(r, n).astype(np.float64) for r in range(world))
    sizes, results = [], []
    for codec in (None, "fp16"):
        communicator.all_reduce(gpu.array(values_of(rank, n)), codec=codec)  # all is made
        gpu.synchronize()
        communicator.barrier()
        array = gpu.array(values_of(rank, n))
        before = sent_over_tcp()
        communicator.all_reduce(array, codec=codec)
        results.append(array.get())
        communicator.barrier()
        sizes.append(sent_over_tcp() - before)
    # Two roundings to 11 bits.
    largest = np.maximum(np.abs(exact), sum(np.abs(values_of(r, n)) for r in range(world)))
    assert (np.abs(results[1] - exact) <= 2**-10 * largest).all()
    assert not np.array_equal(results[0], results[1])
    return sizes, results[1].tobytes()


def test_casts_before_the_wire_halve_what_crosses():
    n = 400_000
    results = gpu_ranks("aabb", crossing, n)
    exact, halved = (sum(sizes[i] for sizes, _ in results) for i in range(2))
    assert 0.9 < exact / (4 * 2 * n) < 1.1, "each host sends a vector's worth"
    assert 0.45 < halved / exact < 0.55
    assert len({result for _, result in results}) == 1


# ---- Memory. ----


def taking_memory(communicator, gpu, n):
    """Bytes of the device that a group takes for calls over a codec, after one."""
    array = gpu.array(values_of(communicator.rank, n))
    communicator.all_reduce(array)  # the group is made
    gpu.synchronize()
    before = gpu.free_memory()
    for codec in ("sign", "int8"):
        communicator.all_reduce(array, codec=codec)
    gpu.synchronize()
    return before - gpu.free_memory()


def test_memory_is_bounded_by_the_portion():
    """Of few bits, sums in float32 are many times as long as codes."""
    for taken in gpu_ranks("shared", taking_memory, 1 << 20, env=SMALL):
        assert 0 < taken <= 2 << 20, "half of the vector's own"


# ---- Groups with a codec; what is refused. ----


def by_options(communicator, gpu):
    rank, world, n = communicator.rank, communicator.world_size, 9000
    pair = Pair(communicator, gpu)
    got = pair.reduced(values_of(rank, n), step=0)
    assert not np.array_equal(got, sum(values_of(r, n) for r in range(world)))
    small = pair.reduced(values_of(rank, 100))
    np.testing.assert_array_equal(small, sum(values_of(r, 100) for r in range(world)))
    gathered = gpu.empty((world, n))
    communicator.all_gather(gathered, gpu.array(values_of(rank, n)))
    same(gathered, np.array([values_of(r, n) for r in range(world)]))


def refused(communicator, gpu):
    rank, n = communicator.rank, 9000
    array, on_cpu = gpu.array(values_of(rank, n)), np.zeros(n, np.float32)
    with pytest.raises(pycoll.UnsupportedError, match="'auto' measures what pays for arrays in"):
        communicator.all_reduce(array, codec="auto")
    with pytest.raises(pycoll.InvalidArgumentError, match="residual must be where the array is"):
        communicator.all_reduce(array, codec="int8", residual=on_cpu)
    with pytest.raises(pycoll.InvalidArgumentError, match="residual must be where the array is"):
        communicator.all_reduce(on_cpu, codec="int8", residual=array)
    with pytest.raises(pycoll.InvalidArgumentError, match="shares memory with the vector"):
        communicator.all_reduce(array, codec="int8", residual=array)
    with pytest.raises(pycoll.InvalidArgumentError, match="of 9000 elements is needed"):
        communicator.all_reduce(array, codec="int8", residual=gpu.empty((10,)))
    Pair(communicator, gpu).reduced(values_of(rank, n), codec="int8")


def refused_messages(communicator, gpu):
    """A message is not silently exact where a codec was asked for."""
    peer = 1 - communicator.rank
    here = gpu.array(values_of(communicator.rank, 9000))
    for codec in ("int8", pycoll.Fp16()):
        with pytest.raises(pycoll.UnsupportedError, match="of arrays on GPUs have no codecs"):
            communicator.send(here, peer, codec=codec)
        with pycoll.codec(codec):
            with pytest.raises(pycoll.UnsupportedError, match="codec='none'"):
                communicator.recv(here, peer)
            if communicator.rank == 0:
                communicator.send(here, peer, codec="none")
            else:
                communicator.recv(here, peer, codec="none")
                same(here, values_of(0, 9000))


def test_messages_with_a_codec_are_refused():
    gpu_ranks("shared", refused_messages)


def test_groups_with_a_codec_and_refusals():
    gpu_ranks("shared", by_options, options=pycoll.Options(codec="int8"))
    gpu_ranks("shared", refused)


def ranks_that_differ(communicator, gpu, other):
    """Codes of as many bytes, of another codec or for another operation."""
    array = gpu.array(values_of(communicator.rank, 9000))
    communicator.all_reduce(array, codec="int8")
    gpu.synchronize()
    codec, op = other if communicator.rank == 1 else ("int8", "sum")
    with pytest.raises(pycoll.Error) as caught:
        communicator.all_reduce(array, op, codec=codec, async_op=True).wait()
        end = time.monotonic() + 20
        while time.monotonic() < end:  # until it hears of it
            communicator.all_reduce(array, codec="int8", async_op=True).wait()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("place", ["shared", "apart", "ab"])
@pytest.mark.parametrize("other", [("fp8_e4m3", "sum"), ("int8", "avg")])
def test_ranks_that_differ(place, other):
    said = gpu_ranks(place, ranks_that_differ, other)
    kinds = [kind for kind, _ in said]
    assert "MismatchError" in kinds, said
    assert set(kinds) <= {"MismatchError", "AbortedError", "PeerError"}, said


def without_a_codec(communicator, gpu):
    array = gpu.array(values_of(communicator.rank, 9000))
    communicator.all_reduce(array)
    codec = "int8" if communicator.rank == 0 else None
    with pytest.raises(pycoll.Error) as caught:
        communicator.all_reduce(array, codec=codec, timeout=2, async_op=True).wait()
        communicator.all_reduce(array, codec=codec, timeout=2, async_op=True).wait()
    return str(caught.value)


@pytest.mark.parametrize("place", ["shared", "apart"])
def test_a_rank_without_the_codec_is_named(place):
    for said in gpu_ranks(place, without_a_codec):
        assert "all_reduce over codes" in said or "in all_reduce #2" in said, said
        assert "rank 0" in said and "rank 1" in said, said
