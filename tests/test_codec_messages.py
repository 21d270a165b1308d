"""Messages over codecs: send and recv with codec=, or in a region."""

from __future__ import annotations

import numpy as np
import pytest

import codec_reference as reference
import pycoll
from codec_model import RANDOM, to_dtype, to_f32, values_of
from codec_reference import BITS, Kind
from helpers_threads import ThreadRanks
from pool import torch_ranks

N = 20_000
OF_MESSAGES = 0x40000000


@pytest.fixture(scope="module", params=["shm", "tcp"])
def group(request):
    group = ThreadRanks(3, pycoll.Options(variables={"PYCOLL_TRANSPORT": request.param}))
    yield group
    group.close()


def received(x, kind, sender=0, step=0, seed=0):
    """What a message of `x` decodes to."""
    u = None
    if kind.name in RANDOM:
        u = reference.uniform(x.size, seed=seed, step=step, rank=sender | OF_MESSAGES, first=0)
    code = reference.encode(kind, to_f32(x.reshape(-1)), u)
    return to_dtype(reference.decode(kind, [code], x.size), x.dtype.name)


def exchange(communicator, array, source=0, destination=1, **arguments):
    """What the destination gets, of the dtype and shape of `array`; None elsewhere."""
    if communicator.rank == source:
        before = array.copy()
        communicator.send(array, destination, **arguments)
        assert array.tobytes() == before.tobytes()
    if communicator.rank != destination:
        return None
    out = np.zeros_like(array)
    arguments.pop("step", None)
    assert communicator.recv(out, source, **arguments) == source
    return out


@pytest.mark.parametrize("name", BITS)
def test_what_is_received_is_what_the_code_decodes_to(group, name):
    """Small and large ones, in one slot and in slices."""

    def use(communicator):
        for n in (4096, N, 1_000_001):
            x = values_of(0, n)
            out = exchange(communicator, x, codec=name, step=n)
            if out is not None:
                assert out.tobytes() == received(x, Kind(name), step=n).tobytes(), n

    group.run(use)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_floats_and_blocks(group, dtype):
    def use(communicator):
        x = values_of(2, N, dtype)
        out = exchange(communicator, x, 2, 0, codec=pycoll.Int4(block=64))
        if out is not None:
            assert out.tobytes() == received(x, Kind("int4", 64), 2).tobytes()

    group.run(use)


def test_strided_arrays(group):
    def use(communicator):
        x = values_of(0, 6 * N).reshape(2, 3, N)[::-1, 1:, ::2]
        if communicator.rank == 0:
            communicator.send(x, 1, codec="int8")
        if communicator.rank == 1:
            memory = np.full((N, 4), 7.0, np.float32)
            out = memory[:, ::2][: x.size // 2]
            communicator.recv(out, 0, codec="int8")
            expected = received(np.ascontiguousarray(x), Kind("int8"))
            assert np.array_equal(out.reshape(-1), expected)
            assert (memory[:, 1::2] == 7).all()

    group.run(use)


def test_exempt_are_the_same_as_of_calls(group):
    def use(communicator):
        for x in (
            values_of(0, 4095),  # 4 bytes too small
            np.arange(N),
            values_of(0, N).astype(np.float64),
            values_of(0, 2 * N).view(np.complex64),
            np.zeros(0, np.float32),
        ):
            out = exchange(communicator, x, codec="sign")
            if out is not None:
                assert out.tobytes() == x.tobytes()
        for arguments in ({}, {"codec": "none"}):
            with pycoll.codec("int4") if arguments else pycoll.codec(None):
                out = exchange(communicator, values_of(0, N), **arguments)
            if out is not None:
                assert out.tobytes() == values_of(0, N).tobytes()

    group.run(use)


def test_regions_and_options():
    """A region is codec= of each message; a group's codec is for its sums."""
    group = ThreadRanks(2, pycoll.Options(codec="int8", min_bytes=100))

    def use(communicator):
        x = values_of(0, 25)
        out = exchange(communicator, x)
        with pycoll.codec("int4"):
            inside = exchange(communicator, x)
        small = exchange(communicator, x[:24].copy(), codec="int4")
        if communicator.rank == 1:
            assert out.tobytes() == x.tobytes()
            assert inside.tobytes() == received(x, Kind("int4")).tobytes()
            assert small.tobytes() == x[:24].tobytes()

    group.run(use)
    group.close()


def test_any_source_tags_and_many_under_way(group):
    """Both ways at once, in another order than they were sent, each with its own codec."""
    names = ["int8", "fp16", "none", "sign", "int4"]

    def use(communicator):
        rank = communicator.rank
        peers = [peer for peer in range(3) if peer != rank]
        sent, works, outs = [], [], {}
        for tag, name in enumerate(names):
            for peer in peers:
                x = values_of(rank, N + 100_000 * (tag % 2), seed=tag)
                sent.append(x)
                works.append(communicator.send(x, peer, tag, codec=name, async_op=True))
        for tag in reversed(range(len(names))):
            for _ in peers:
                out = np.zeros(N + 100_000 * (tag % 2), np.float32)
                work = communicator.recv(out, None, tag, codec=names[tag], async_op=True)
                outs.setdefault(tag, []).append((out, work))
        for tag, pairs in outs.items():
            for out, work in pairs:
                assert work.wait(20)
                x = values_of(work.source, out.size, seed=tag)
                if names[tag] != "none":
                    x = received(x, Kind(names[tag]), work.source)
                assert out.tobytes() == x.tobytes()
            assert sorted(work.source for _, work in pairs) == peers
        assert all(work.wait(20) for work in works)

    group.run(use)


def test_stochastic_messages_have_numbers_of_their_own():
    group = ThreadRanks(2)
    codec = pycoll.Ternary(seed=3)

    def use(communicator):
        x = values_of(1, N)
        got = []
        for step in (None, None, 7, None):
            got.append(exchange(communicator, x, 1, 0, codec=codec, step=step))
        if communicator.rank == 0:
            for out, step in zip(got, (0, 1, 7, 3), strict=True):
                assert out.tobytes() == received(x, Kind("ternary"), 1, step, 3).tobytes(), step

    group.run(use)
    group.close()


@pytest.mark.parametrize("n", [N, 1_000_000], ids=["small", "large"])
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [("int8", "int4"), ("int8", "none"), (None, "fp16"), (pycoll.Int8(block=64), "int8")],
)
def test_codecs_that_differ(n, mine, theirs):
    """Both are named, nothing is written, and the next message comes through."""
    group = ThreadRanks(2, pycoll.Options(variables={"PYCOLL_SLOT_BYTES": "65536"}))
    words = {"int8": "int8 in blocks of 256", "int4": "int4 in blocks of 256", "fp16": "fp16"}
    words |= {pycoll.Int8(block=64): "int8 in blocks of 64", "none": f"{n} x float32"}
    words[None] = words["none"]

    def use(communicator):
        x = values_of(0, n)
        if communicator.rank == 0:
            # A small one has gone before it is seen.
            try:
                communicator.send(x, 1, 5, codec=mine, timeout=20)
                text = ""
            except pycoll.MismatchError as error:
                text = str(error)
        else:
            out = np.full(n, 7, np.float32)
            with pytest.raises(pycoll.MismatchError) as caught:
                communicator.recv(out, 0, 5, codec=theirs, timeout=20)
            assert (out == 7).all()
            text = str(caught.value)
        after = exchange(communicator, x, codec="int8")
        if after is not None:
            assert after.tobytes() == received(x, Kind("int8")).tobytes()
        return text

    sender, receiver = group.run(use)
    group.close()
    for text in (receiver, sender) if n > N else (receiver,):
        assert words[mine] in text
        assert words[theirs] in text
        assert "rank 0" in text
        assert "rank 1" in text


def test_lengths_and_dtypes_that_differ(group):
    """Their codes have the same length."""

    def use(communicator):
        for out, word in (
            (np.zeros(N - 1, np.float32), f"{N - 1} x float32"),
            (np.zeros(N, np.float16), f"{N} x float16"),
        ):
            if communicator.rank == 0:
                communicator.send(values_of(0, N), 1, codec="int4")
            if communicator.rank == 1:
                with pytest.raises(pycoll.MismatchError, match=word):
                    communicator.recv(out, codec="int4")
                assert not out.any()

    group.run(use)


def test_wrong_arguments(group):
    communicator, x = group.communicators[0], values_of(0, N)
    for arguments, text in (
        ({"codec": "auto"}, "a message needs the name of one"),
        ({"codec": "int3"}, "'int3' is no codec"),
        ({"codec": "int8", "step": -1}, "step is"),
    ):
        with pytest.raises(pycoll.InvalidArgumentError, match=text):
            communicator.send(x, 1, **arguments)
    with pytest.raises(pycoll.InvalidArgumentError, match="same as the rank"):
        communicator.send(x, 0, codec="int8")


def messages_of_torch(rank, world_size):
    import torch
    import torch.distributed as dist

    kind, peer = Kind("int8"), 1 - rank
    mine, theirs = (torch.from_numpy(values_of(r, N)) for r in (rank, peer))
    expected = received(theirs.numpy(), kind, peer).tobytes()
    out = torch.zeros(2 * N)[::2]
    with pycoll.codec("int8"):
        operations = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, out, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    assert out.numpy().tobytes() == expected
    with pycoll.codec("int8"):
        sent = dist.isend(mine, peer, tag=3)
        assert dist.recv(out.zero_(), tag=3) == peer
    sent.wait()
    assert out.numpy().tobytes() == expected
    count = torch.tensor([rank] * N)
    with pycoll.codec("int8"):
        sent = dist.isend(count, peer)
        received_count = torch.zeros_like(count)
        dist.recv(received_count, peer)
    sent.wait()
    assert (received_count == peer).all()
    dist.barrier()
    # Above 64 KiB, so both hear of it.
    with pytest.raises(dist.DistBackendError, match="over codes: int8 in blocks of 256") as caught:
        if rank == 0:
            dist.send(mine, 1)
        else:
            with pycoll.codec("int8"):
                dist.recv(out, 0)
    assert out.numpy().tobytes() == expected
    return str(caught.value)


def test_messages_of_torch():
    sender, receiver = (r.value for r in torch_ranks(2, messages_of_torch, timeout=60))
    assert "send to rank 1" in sender
    assert "from rank 0" in receiver
