"""codec="auto" in groups: who chooses, and that what was chosen is what calls then have."""

from __future__ import annotations

import functools
import logging
import threading
import time

import numpy as np
import pytest

import netns
import pycoll
from codec_model import all_reduced, values_of
from codec_reference import Kind
from helpers_threads import ThreadRanks
from pool import RanksFailed, run_ranks, torch_ranks
from pycoll import auto
from pycoll.auto import Auto, Choice

MIB = 1 << 20

# ---- Groups on one host ----


def test_a_group_that_shares_memory_stays_exact(caplog):
    group, n = ThreadRanks(2, pycoll.Options(codec="auto")), 100_003

    def use(communicator):
        assert communicator.codec_choice(dtype="float16") is None
        assert communicator.codec_choice().codec is None, "known from the start"
        array = values_of(communicator.rank, n)
        communicator.all_reduce(array)
        mine = values_of(communicator.rank, n)
        communicator.all_reduce(mine, codec="auto", residual=np.zeros(n, np.float32))
        choice = communicator.codec_choice()
        again = communicator.choose_codec()
        assert communicator.codec_choice() is again is not choice
        return array, mine, choice

    with caplog.at_level(logging.INFO, logger="pycoll"):
        for array, mine, choice in group.run(use):
            expected = values_of(0, n) + values_of(1, n)
            assert array.tobytes() == mine.tobytes() == expected.tobytes()
            assert choice.codec is None
            assert "share memory" in choice.why
    assert "codec auto, float32: none: all ranks share memory" in caplog.text
    group.close()


def test_calls_that_nobody_has_to_choose_for():
    group = ThreadRanks(2, {"PYCOLL_TRANSPORT": "tcp"})

    def use(communicator):
        communicator.all_reduce(np.ones(100, np.float32), codec="auto")  # small
        communicator.all_reduce(np.ones(100_000, np.int32), codec="auto")
        communicator.all_reduce(np.ones(100_000, np.float32), "max", codec="auto")
        for name, call in (
            ("broadcast", lambda a: communicator.broadcast(a, codec="auto")),
            ("all_to_all", lambda a: communicator.all_to_all(a.copy(), a, codec=Auto())),
        ):
            with pytest.raises(pycoll.InvalidArgumentError, match=f"{name}: a codec is chosen for"):
                call(np.ones((2, 50_000), np.float32))
        with pytest.raises(pycoll.InvalidArgumentError, match="'auto' or pycoll.Auto"):
            communicator.choose_codec("int8")
        with pytest.raises(pycoll.InvalidArgumentError, match="not 'int32'"):
            communicator.choose_codec(dtype="int32")
        return communicator.codec_choice()

    assert group.run(use) == [None, None]
    group.close()


def test_only_vectors_for_which_it_pays(monkeypatch):
    """From the chosen size on, and from that of the Options."""
    chosen = Choice(pycoll.Int8(), 65536, "a test")
    monkeypatch.setattr(auto, "choose", lambda *_: chosen)
    for least, first in ((None, 16384), (200_000, 50_000)):
        options = pycoll.Options(
            codec="auto", min_bytes=least, variables={"PYCOLL_TRANSPORT": "tcp"}
        )
        group = ThreadRanks(2, options)
        for n, kind in ((first - 1, None), (first, "int8")):
            for got in group.run(lambda c, n=n: reduced(c, 1, n)):
                assert got.tobytes() == summed(1, kind, n).tobytes(), n
        assert group.communicators[0].codec_choice() is chosen
        group.close()


def test_ranks_of_a_group_that_want_different_things():
    group = ThreadRanks(2, {"PYCOLL_TRANSPORT": "tcp"})

    def use(communicator):
        wanted = Auto(max_error=0.02 + communicator.rank)
        with pytest.raises(pycoll.MismatchError, match="gave other candidates"):
            communicator.all_reduce(np.ones(100_000, np.float32), codec=wanted)

    group.run(use)
    group.close()


# ---- Groups of two hosts ----

# 1 MiB, which takes an exact all_reduce 0.42 s: the largest size that is measured then. However
# busy the machine, some codec pays; which one is up to it.
RATE, COUNT = "20mbit", 1 << 18


@pytest.fixture
def cable():
    reason = netns.why_not()
    if reason:
        pytest.skip(reason)
    with netns.Hosts(2) as hosts:
        name = hosts.join(0, 1, "10.84.0.{}/24")
        hosts.shape(name, RATE)
        yield hosts, name


def on_a_host(rank, world_size, directory, paths, function, args, options):
    netns.enter(paths[rank])
    store = pycoll.FileStore(directory)
    with pycoll.Communicator(store, rank, world_size, timeout=60, options=options) as communicator:
        return function(communicator, *args)


def reduced(communicator, seed, n=COUNT, **how):
    array = values_of(communicator.rank, n, seed=seed)
    communicator.all_reduce(array, **how)
    return array


def summed(seed, kind=None, n=COUNT):
    """Through codes, or exact."""
    inputs = [values_of(rank, n, seed=seed) for rank in range(2)]
    return all_reduced(Kind(kind), inputs) if kind else inputs[0] + inputs[1]


def chosen_once(communicator):
    before = reduced(communicator, 1)
    choice = communicator.codec_choice()
    small = reduced(communicator, 2, n=4095)
    scattered = np.empty(COUNT // 2, np.float32)
    halves = values_of(communicator.rank, COUNT, seed=3).reshape(2, -1)
    communicator.reduce_scatter(scattered, halves)
    after = reduced(communicator, 4)
    assert communicator.codec_choice() is choice
    # Another candidate set is another choice, and leaves the first as it is.
    strict = Auto(max_error=1e-9)
    exact = reduced(communicator, 5, codec=strict)
    assert communicator.codec_choice(strict).codec is None
    assert communicator.codec_choice() is choice
    return choice, before, small, scattered, after, exact


def test_a_slow_network_gets_a_codec_and_keeps_it(cable):
    options = pycoll.Options(codec="auto")
    results = run_ranks(2, on_a_host, cable[0].paths, chosen_once, (), options, timeout=120)
    choice = results[0].value[0]
    kind = choice.codec.kind
    assert kind in ("int8", "bf16", "fp16")
    assert f"{kind}: an all_reduce of 1M of float32 takes" in choice.why
    assert 16384 <= choice.min_bytes <= MIB
    for rank, result in enumerate(results):
        mine, before, small, scattered, after, exact = result.value
        assert mine == choice
        assert before.tobytes() == summed(1, kind).tobytes()
        assert small.tobytes() == summed(2, n=4095).tobytes()
        wanted = summed(3).reshape(2, -1)[rank]
        error = np.linalg.norm(scattered - wanted) / np.linalg.norm(wanted)
        assert 1e-5 < error < 0.02, "compressed"
        assert after.tobytes() == summed(4, kind).tobytes()
        assert exact.tobytes() == summed(5).tobytes()


def reduced_by_torch(rank, world_size, hosts_group):
    import torch
    import torch.distributed as dist

    group = dist.new_group(pg_options=pycoll.Options(codec="auto")) if hosts_group else None
    chosen = pycoll.codec_choice(group)
    assert (chosen is not None) == hosts_group

    def result(seed, n=COUNT):
        tensor = torch.from_numpy(values_of(rank, n, seed=seed))
        if hosts_group:
            dist.all_reduce(tensor, group=group)
        else:
            pycoll.all_reduce(tensor, codec="auto")
        return tensor.numpy()

    large = result(1)
    choice = pycoll.codec_choice(group)
    large_again, small = result(2), result(3, 4095)
    assert pycoll.codec_choice(group) is choice
    if hosts_group:
        assert choice is chosen
        tensor = torch.from_numpy(values_of(rank, COUNT, seed=4))
        pycoll.all_reduce(tensor, group=group, codec="auto")  # the group's own
        large_again = tensor.numpy()
        with pytest.raises(pycoll.UnsupportedError, match="for life: make a new group"):
            pycoll.choose_codec(group)
    return choice, large, large_again, small


def enter_of(paths, rank):
    netns.enter(paths[rank])


@pytest.mark.parametrize("hosts_group", [False, True], ids=["call", "Options"])
def test_torch_groups_on_a_slow_network(cable, hosts_group):
    prepare = functools.partial(enter_of, cable[0].paths)
    results = torch_ranks(
        2, reduced_by_torch, hosts_group, prepare=prepare, group_timeout=60, timeout=120
    )
    for result in results:
        choice, large, again, small = result.value
        assert choice == results[0].value[0]
        kind = choice.codec.kind
        assert large.tobytes() == summed(1, kind).tobytes()
        assert again.tobytes() == summed(4 if hosts_group else 2, kind).tobytes()
        assert small.tobytes() == summed(3, n=4095).tobytes()


def torch_on_one_host(rank, world_size):
    import torch
    import torch.distributed as dist

    tensor = torch.from_numpy(values_of(rank, 100_003))
    pycoll.all_reduce(tensor, codec="auto")
    group = dist.new_group(pg_options=pycoll.Options(codec="auto"))
    other = torch.from_numpy(values_of(rank, 100_003))
    dist.all_reduce(other, group=group)
    named = dist.new_group(pg_options=pycoll.Options(codec="int4", min_bytes=100))
    plain = dist.new_group()
    choices = [pycoll.codec_choice(g) for g in (None, group, named, plain)]
    assert pycoll.codec_choice() is choices[0]
    again = pycoll.choose_codec()
    assert pycoll.codec_choice() is again is not choices[0]
    with pytest.raises(ValueError, match="does not belong to that group"):
        pycoll.codec_choice(dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match="is not pycoll's"):
        pycoll.choose_codec(dist.new_group(backend="gloo"))
    # A name that is used again is another group's.
    dist.destroy_process_group(named)
    assert pycoll.codec_choice(dist.new_group()) is None
    return tensor.numpy(), other.numpy(), choices


def test_torch_groups_that_share_memory():
    exact = values_of(0, 100_003) + values_of(1, 100_003)
    for result in torch_ranks(2, torch_on_one_host):
        tensor, other, (called, of_options, named, plain) = result.value
        assert tensor.tobytes() == other.tobytes() == exact.tobytes()
        for choice in (called, of_options):
            assert choice.codec is None
            assert "share memory" in choice.why
        assert (named.codec, named.min_bytes) == (pycoll.Int4(), 100)
        assert plain is None


def with_a_late_death(rank, world_size, directory, paths):
    netns.enter(paths[rank])
    communicator = pycoll.Communicator(pycoll.FileStore(directory), rank, world_size, timeout=30)
    if rank == 1:
        threading.Timer(1.0, lambda: communicator.abort("a test")).start()
    started = time.monotonic()
    with pytest.raises(pycoll.Error, match="a test"):
        communicator.all_reduce(np.ones(MIB, np.float32), codec="auto")
    assert communicator.codec_choice() is None
    return time.monotonic() - started


def test_a_group_that_dies_while_it_measures(cable):
    try:
        results = run_ranks(2, with_a_late_death, cable[0].paths, timeout=60)
    except RanksFailed as failed:
        pytest.fail(str(failed))
    assert all(result.value < 10 for result in results)
