"""codec="auto": what groups choose, that ranks agree, and that a choice stays."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

import pycoll
from pycoll import auto
from pycoll.advisor import LEAST_GAIN, Speed
from pycoll.auto import Auto, Choice, Chooser
from pycoll.codecs import codec_of

MIB = 1 << 20
ERRORS = {"int8": 0.007, "bf16": 0.0017, "fp16": 0.0002, "int4": 0.13}


def speeds_of(names, seconds=1e-10):
    return [Speed(codec_of(name), seconds, seconds, ERRORS[name]) for name in names]


# ---- Deciding ----


def decided(rows, names=("int8", "bf16")):
    """By {size in KiB: [exact, *compressed]} in ms."""
    times = {kib * 1024: [ms * 1e-3 for ms in row] for kib, row in rows.items()}
    return auto.decide(times, speeds_of(names), "float32", 2)


@pytest.mark.parametrize(("factor", "kind"), [(1.001, "int8"), (0.999, None)])
def test_the_largest_size_decides(factor, kind):
    choice = decided({16: [1, 9, 9], 4096: [5 * LEAST_GAIN * factor, 5, 9]})
    assert (choice.codec and choice.codec.kind) == kind
    assert choice.min_bytes == (4 * MIB if kind else 0)


def test_smaller_vectors_stay_exact_up_to_where_a_codec_pays():
    rows = {16: [1, 2, 9], 64: [3, 1, 9], 256: [3, 3, 9], 1024: [9, 3, 9], 4096: [36, 9, 20]}
    choice = decided(rows)
    assert choice.min_bytes == MIB, "64k alone is an accident: 256k does not pay"
    assert choice.codec_for(MIB - 4) is None
    assert choice.codec_for(MIB) == pycoll.Int8()
    everywhere = {size: [4, 1, 2] for size in rows}
    assert decided(everywhere).min_bytes == 16 * 1024


def test_of_two_that_are_alike_one_that_is_twice_as_exact():
    assert decided({4096: [36, 10, 10.4]}).codec == pycoll.Bf16()
    assert decided({4096: [36, 10, 10.6]}).codec == pycoll.Int8()


def test_reasons_have_the_figures():
    assert decided({1024: [9, 3, 5], 4096: [36, 9, 20]}).why == (
        "int8: an all_reduce of 4M of float32 takes 9 ms instead of 36 ms, with 367 us of a core "
        "for codes and an error of 0.0099; it pays from 1M on"
    )
    assert decided({4096: [36, 40, 50]}).why == (
        "none: an all_reduce of 4M of float32 takes 36 ms, and 40 ms with int8, the fastest codec"
    )


# ---- Ranks that measure different things ----


def rank_of_thread():
    return int(threading.current_thread().name.removeprefix("rank"))


@pytest.fixture
def cores(monkeypatch):
    """Codecs take what this list has for each rank: seconds a value."""
    seconds = [1e-10] * 3

    def measured(codec, dtype, count):
        return speeds_of([codec.kind], seconds[rank_of_thread()])[0]

    monkeypatch.setattr(auto, "measure_speed", measured)
    return seconds


class Ranks:
    """Ranks as threads whose clocks are told what each call takes: gather() is all they share."""

    def __init__(self, world_size, milliseconds, shares=False):
        self.world_size = world_size
        self.shares = shares
        self.milliseconds = milliseconds  # (rank, codec's name or None) -> of a call of 4 MiB
        self.calls = [[] for _ in range(world_size)]
        self._barrier = threading.Barrier(world_size, timeout=20)
        self._rows = [None] * world_size

    def choose(self, wanted=None):
        found = [None] * self.world_size

        def run(rank):
            trial = self._rank(rank)
            try:
                given = wanted[rank] if wanted else Auto()
                found[rank] = auto.choose(trial, given, "float32", lambda: trial.now)
            except Exception as error:
                found[rank] = error

        threads = [
            threading.Thread(target=run, args=(rank,), name=f"rank{rank}")
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found

    def _rank(self, rank):
        ranks = self

        class Trial:
            world_size = ranks.world_size
            now = 0.0

            def shares_memory(self):
                return ranks.shares

            def all_reduce(self, values, dtype, codec):
                name = None if codec is None else codec.kind
                ranks.calls[rank].append((len(values), name))
                self.now += ranks.milliseconds(rank, name) * 1e-3 * len(values) / (4 * MIB)

            def gather(self, numbers):
                ranks._rows[rank] = list(numbers)
                ranks._barrier.wait()
                rows = [list(row) for row in ranks._rows]
                ranks._barrier.wait()
                return rows

        return Trial()


def test_all_ranks_decide_by_the_slowest(cores):
    """Rank 0 alone would take int8, rank 1 nothing: exact calls take both 20 ms at most."""
    table = {(0, None): 20, (0, "int8"): 5, (1, None): 10, (1, "int8"): 19}
    ranks = Ranks(2, lambda rank, name: table.get((rank, name), 50))
    choices = ranks.choose()
    assert choices[0] == choices[1]
    assert choices[0].codec is None
    assert "20 ms, and 19 ms with int8" in choices[0].why
    table[1, "int8"] = 17
    choices = Ranks(2, lambda rank, name: table.get((rank, name), 50)).choose()
    assert choices[0] == choices[1]
    assert choices[0].codec == pycoll.Int8()
    assert ranks.calls[0] == ranks.calls[1], "the same calls in the same order"


@pytest.mark.parametrize("seed", range(20))
def test_ranks_agree_whatever_they_measure(cores, seed):
    draws = np.random.default_rng(seed)
    noise = draws.lognormal(0, 1, (3, 4))
    names = [None, "int8", "bf16", "fp16"]
    base = dict(zip(names, (40, 15, 25, 25), strict=True))
    ranks = Ranks(3, lambda rank, name: base[name] * noise[rank, names.index(name)])
    choices = ranks.choose()
    assert isinstance(choices[0], Choice)
    assert choices[0] == choices[1] == choices[2]
    assert ranks.calls[0] == ranks.calls[1] == ranks.calls[2]
    exact, *compressed = (base[name] * noise[:, i].max() for i, name in enumerate(names))
    assert (choices[0].codec is not None) == (exact >= min(compressed) * LEAST_GAIN)


def test_codecs_that_cannot_pay_are_not_run(cores):
    """An exact call of 1 us: no codec takes so little of a core."""
    ranks = Ranks(2, lambda rank, name: 1e-3)
    choices = ranks.choose()
    assert choices[0].codec is None
    assert "takes 1 us, and " in choices[0].why
    assert {name for _, name in ranks.calls[0]} == {None}


def test_slow_networks_are_not_measured_for_long(cores):
    """4 s for 4 MiB: a size that takes 0.25 s is the last one."""
    ranks = Ranks(2, lambda rank, name: {None: 4000, "int8": 1000}.get(name, 2000))
    choice = ranks.choose()[0]
    assert choice.codec == pycoll.Int8()
    assert max(size for size, _ in ranks.calls[0]) == MIB
    assert "all_reduce of 1M of float32 takes 250 ms instead of 1 s" in choice.why


def test_an_error_bound_that_no_candidate_meets(cores):
    ranks = Ranks(2, lambda rank, name: 10)
    choices = ranks.choose([Auto(max_error=0.005, candidates=("int8", "int4"))] * 2)
    assert choices[0] == choices[1]
    assert "no candidate has an error of at most 0.005 (int8: 0.0099)" in choices[0].why
    assert not ranks.calls[0]


@pytest.mark.parametrize(("world_size", "shares"), [(1, False), (2, True)])
def test_where_nothing_crosses_a_wire_nothing_is_measured(world_size, shares):
    ranks = Ranks(world_size, lambda rank, name: 10, shares)
    assert all(choice.codec is None for choice in ranks.choose())
    assert not ranks.calls[0]


@pytest.mark.parametrize(
    "other",
    [
        Auto(max_error=0.03),
        Auto(candidates=("int8", "fp16")),
        Auto(candidates=(pycoll.Int8(block=64), "bf16", "fp16")),
    ],
)
def test_ranks_that_want_different_things_are_told(other):
    found = Ranks(2, lambda rank, name: 10).choose([Auto(), other])
    for error in found:
        assert isinstance(error, pycoll.MismatchError)
        assert "candidates" in str(error)


def test_one_rank_with_a_slow_core_speaks_for_all(cores):
    """Encoding and decoding 4 MiB takes rank 1 37 ms, rank 0 a third of one."""
    cores[1] = 1e-8
    ranks = Ranks(2, lambda rank, name: 30 if name is None else 1)
    choices = ranks.choose()
    assert choices[0] == choices[1]
    assert choices[0].codec is None
    assert "takes 30 ms, and int8, the fastest codec, 36.7 ms of a core" in choices[0].why


def test_a_choice_is_made_once_and_again_when_asked(monkeypatch):
    monkeypatch.setattr(auto, "measure_speed", lambda codec, *_, **__: speeds_of([codec.kind])[0])
    slow = {None: 40.0, "int8": 10.0}
    ranks = Ranks(1, lambda rank, name: slow.get(name, 20))
    trial = ranks._rank(0)
    ranks.world_size = trial.__class__.world_size = 2
    trial.gather = lambda numbers: [list(numbers)] * 2
    chooser = Chooser(trial, lambda: trial.now)
    assert chooser.known(Auto(), "float32") is None
    first = chooser.choice(Auto(), "float32")
    assert first.codec == pycoll.Int8()
    slow[None] = 5.0
    assert chooser.choice(Auto(), "float32") is first
    assert chooser.known(Auto(), "float32") is first
    assert chooser.known(Auto(), "float16") is None
    assert chooser.again(Auto(), "float32").codec is None
    assert chooser.choice(Auto(), "float32").codec is None


# ---- Arguments ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_error": 0}, "above 0, not 0"),
        ({"max_error": float("nan")}, "above 0, not nan"),
        ({"max_error": "low"}, "is a number above 0, not 'low'"),
        ({"candidates": ()}, "candidates are codecs"),
        ({"candidates": "int8"}, "candidates are codecs"),
        ({"candidates": ("int3",)}, "'int3' is no codec"),
    ],
)
def test_autos_that_cannot_be(arguments, words):
    with pytest.raises(pycoll.InvalidArgumentError, match=words):
        Auto(**arguments)


def test_who_takes_auto_says_so():
    with pytest.raises(
        pycoll.InvalidArgumentError, match="no codec; there are: .*'auto' or 'none'"
    ):
        pycoll.Options(codec="automatic")
    with pytest.raises(pycoll.InvalidArgumentError, match="'auto' is no codec"):
        pycoll.encode(np.ones(10, np.float32), "auto")


def test_equal_autos_are_one():
    assert Auto(candidates=["int8"]) == Auto(candidates=(pycoll.Int8(),))
    assert len({Auto(), Auto(0.02), auto.asked_for("auto")}) == 1


@pytest.mark.parametrize("level", ["run", "algorithm"])
def test_what_time_decides_is_not_repeatable(level, monkeypatch):
    for options in ({"determinism": level}, {"variables": {"PYCOLL_DETERMINISM": level}}):
        with pytest.raises(pycoll.InvalidArgumentError, match=f"determinism='{level}' cannot"):
            pycoll.Options(codec="auto", **options)
    pycoll.Options(codec="auto", determinism="ranks")
    monkeypatch.setenv("PYCOLL_DETERMINISM", level)
    with pytest.raises(pycoll.InvalidArgumentError, match="may differ from run to run"):
        pycoll.Options(codec=Auto())
    pycoll.Options(codec="auto", determinism="ranks")


def test_choices_are_values():
    choice = Choice(pycoll.Int8(), 65536, "why")
    with pytest.raises(dataclasses.FrozenInstanceError):
        choice.codec = None
    assert choice == Choice(pycoll.Int8(), 65536, "why")
