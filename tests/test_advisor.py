"""Whether a codec pays: the model of pycoll/advisor.py against closed forms, and `pycoll advise`.

Closed forms: on a link of B bytes a second between w hosts of one rank each, a ring all_reduce of
m bytes takes 2 (w-1)/w m / B; a compressed one (w-1)/w c / B for the exchange of c bytes of codes,
and as much again for gathering those of the sums.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

import pycoll
from pycoll import advisor
from pycoll.advisor import LEAST_GAIN, Link, OnWire, Speed, Workload
from pycoll.cli import main
from pycoll.codecs import codec_of
from test_codec_kernels import GAUSSIAN

# Seconds a value of a slow and a fast core: 1 and 20 GB/s of float32.
SLOW, FAST = 4e-9, 2e-10
ERRORS = {"fp16": 2e-4, "bf16": 0.0017, "int8": 0.007, "int4": 0.13, "sign": 0.6}


def speed(name, seconds=FAST, error=None):
    return Speed(codec_of(name), seconds, seconds, ERRORS[name] if error is None else error)


class StandIn:
    """A wire of known times: seconds of the exact call and of each codec's."""

    def __init__(self, exact, **compressed):
        self._exact = exact
        self._compressed = compressed

    def exact(self):
        return self._exact

    def compressed(self, codec):
        return OnWire(self._compressed[codec.kind], 0.0)


def advice_of(exact, speeds, compressed, **more):
    workload = Workload(25 << 20, **more)
    return advisor.advise(workload, Link.of("1gbit"), speeds, wire=StandIn(exact, **compressed))


# ---- The model ----


@pytest.mark.parametrize("world_size", [2, 4, 16])
@pytest.mark.parametrize("rate", ["100mbit", "1gbit"])
def test_the_wire_is_its_closed_form(rate, world_size):
    workload = Workload(64 << 20, world_size, world_size, 64 << 20)
    link = Link.of(rate)
    wire = advisor.Wire(workload, link)
    part = (world_size - 1) / world_size
    on_link = 2 * part * (64 << 20) / link.bytes_per_second
    assert wire.exact() == pytest.approx(on_link, rel=0.1)
    codes = codec_of("int8").code_bytes(workload.count)
    found = wire.compressed(codec_of("int8"))
    assert found.total == pytest.approx(2 * part * codes / link.bytes_per_second, rel=0.1)
    # A core copies at 5 GB/s at each end, far from these links.
    assert 0 < found.core < found.total / 5


def test_a_pipeline_is_its_longer_part_and_the_other_s_first_piece():
    assert advisor.overlapped(8.0, 2.0, 4) == 8.5
    assert advisor.overlapped(2.0, 8.0, 4) == 8.5
    assert advisor.overlapped(3.0, 3.0, 1) == 6.0


@pytest.mark.parametrize(
    ("count", "world_size", "pieces"),
    [
        (1, 2, 1),
        (2 << 16, 2, 1),  # a chunk of the least piece
        (4 << 16, 2, 2),
        (16 << 16, 2, 8),
        (8 << 20, 2, 8),
        (64 << 20, 2, 32),  # pieces of a million values
        (64 << 20, 64, 8),
    ],
)
def test_pieces_are_those_of_the_collective(count, world_size, pieces):
    assert advisor.pieces_of(count, world_size) == pieces


def test_time_in_a_codec_counts_every_pass():
    """Rank 0 of 4 encodes n + n/4 values, and decodes 4 times n/4 and then n."""
    found = Speed(codec_of("int8"), 3.0, 5.0, 0.01).seconds(1000, 4)
    assert found == 3.0 * 1250 + 5.0 * 2000
    assert Speed(codec_of("int8"), 0, 0, 0.03).sum_error == pytest.approx(0.0424, rel=0.01)


@pytest.mark.parametrize(("name", "stochastic"), sorted(GAUSSIAN))
def test_what_is_measured_of_a_codec(name, stochastic):
    codec = codec_of(name)
    codec = (
        dataclasses.replace(codec, stochastic=True) if stochastic and name != "ternary" else codec
    )
    found = advisor.measure_speed(codec, count=1 << 18, rounds=1)
    assert found.error == pytest.approx(GAUSSIAN[name, stochastic], rel=0.1)
    assert 0 < found.encode < 1e-6
    assert 0 < found.decode < 1e-6


def test_the_clock_is_read_around_each_half():
    """Rounds of 7 s of encoding and 2 s of decoding, after a first one of 50 s each."""
    ticks = iter([0, 50, 100, 200, 207, 209, 300, 307, 309])
    clock = lambda: next(ticks)  # noqa: E731
    found = advisor.measure_speed(codec_of("int8"), count=64, rounds=2, clock=clock)
    assert (found.encode, found.decode) == (7 / 64, 2 / 64)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_measured_as_what_they_are(dtype):
    found = advisor.measure_speed(codec_of("int8"), dtype, count=1 << 16, rounds=1)
    assert found.error == pytest.approx(0.007, rel=0.3)
    assert advisor.measure_speed(codec_of("bf16"), "bfloat16", count=4096, rounds=1).error == 0


# ---- What is recommended ----


@pytest.mark.parametrize(("rate", "best"), [("100mbit", "int8"), ("400gbit", "none")])
def test_slow_links_want_codecs_and_fast_ones_do_not(rate, best):
    speeds = [speed(name, SLOW) for name in ("fp16", "int8")]
    advice = advisor.advise(Workload(100 << 20), Link.of(rate), speeds)
    assert advice.best.name == best
    assert advice.reason.startswith(f"{best}: at {rate} ")


def test_the_choice_changes_once_between_slow_and_fast_links():
    speeds = [speed("int8", SLOW)]
    rates = [f"{10 * 1.5**k:.1f}mbit" for k in range(30)]
    found = [advisor.advise(Workload(100 << 20), Link.of(rate), speeds).best.name for rate in rates]
    changes = sum(a != b for a, b in itertools.pairwise(found))
    assert (found[0], found[-1], changes) == ("int8", "none", 1)


@pytest.mark.parametrize(("factor", "best"), [(1.001, "int8"), (0.999, "none")])
def test_the_least_gain_is_the_boundary(factor, best):
    workload = Workload(25 << 20)
    free = speed("int8", 0.0)
    exact = LEAST_GAIN * factor
    advice = advice_of(exact, [free], {"int8": 1.0})
    assert (advice.best.name, workload.buckets) == (best, 1.0)
    # As many seconds of codec as of wire: an eighth is not hidden.
    cost = speed("int8", 1.0 / (3.5 * workload.count))  # encode 1.5 n, decode 2 n
    advice = advice_of(exact * 1.125, [cost], {"int8": 1.0})
    assert advice.best.name == best


def test_of_two_that_are_alike_one_that_is_twice_as_exact():
    speeds = [speed("int8", 0.0), speed("bf16", 0.0)]
    assert advice_of(9.0, speeds, {"int8": 1.0, "bf16": 1.04}).best.name == "bf16"
    assert advice_of(9.0, speeds, {"int8": 1.0, "bf16": 1.06}).best.name == "int8"
    speeds = [speed("int8", 0.0), speed("bf16", 0.0, error=0.006)]
    assert advice_of(9.0, speeds, {"int8": 1.0, "bf16": 1.04}).best.name == "int8"


def test_an_exacter_one_must_pay_itself():
    seconds, errors = [1.0, 1.04], [0.007, 0.002]
    assert advisor.pick(1.2, seconds, errors) == (1, True)
    assert advisor.pick(LEAST_GAIN * 1.02, seconds, errors) == (0, True)
    assert advisor.pick(LEAST_GAIN * 0.99, seconds, errors) == (0, False)


def test_a_core_that_feeds_the_network_has_less_time_for_codes():
    workload = Workload(25 << 20)
    cost = speed("int8", 1.0 / (3.5 * workload.count))
    wire = StandIn(9.0)
    wire.compressed = lambda codec: OnWire(1.5, 1.0)
    found = advisor.advise(workload, Link.of("1gbit"), [cost], wire=wire).estimates[1]
    assert found.seconds == pytest.approx(2.0 + 1.5 / 8)


def test_what_is_not_exact_enough_is_shown_and_not_recommended():
    speeds = [speed(name, 0.0) for name in ("int8", "int4", "sign")]
    times = {"int8": 4.0, "int4": 2.0, "sign": 1.0}
    workload, link = Workload(25 << 20), Link.of("1gbit")
    for limit, best in ((0.001, "none"), (0.02, "int8"), (0.2, "int4"), (1.0, "sign")):
        advice = advisor.advise(
            workload, link, speeds, max_error=limit, wire=StandIn(16.0, **times)
        )
        assert advice.best.name == best
        assert [e.name for e in advice.estimates] == ["none", "int8", "int4", "sign"]
    advice = advisor.advise(workload, link, speeds, max_error=0.001, wire=StandIn(16.0, **times))
    assert advice.reason == "none: no codec has an error of at most 0.001"


def test_reasons_have_the_figures():
    cost = speed("int8", 1e-3 / (3.5 * Workload(25 << 20).count))
    text = advice_of(10e-3, [cost], {"int8": 2.5e-3}).reason
    assert (
        text
        == "int8: at 1gbit it saves 7.5 ms of wire a step and costs 1 ms of codec: 3.8 times faster"
    )
    text = advice_of(1.2e-3, [cost], {"int8": 0.9e-3}).reason
    assert (
        text == "none: at 1gbit int8, the best, saves 300 us of wire a step and costs 1 ms of codec"
    )
    text = advice_of(1.2e-3, [cost], {"int8": 1.5e-3}).reason
    assert text == "none: at 1gbit int8, the best, saves no wire: 1.5 ms instead of 1.2 ms"


def test_all_buckets_of_a_step_count():
    one = advice_of(10e-3, [speed("int8")], {"int8": 2.5e-3}).estimates[1]
    workload = Workload(100 << 20)
    four = advisor.advise(
        workload, Link.of("1gbit"), [speed("int8")], wire=StandIn(10e-3, int8=2.5e-3)
    ).estimates[1]
    assert four.seconds == pytest.approx(4 * one.seconds)
    assert four.codec == pytest.approx(4 * one.codec)


def test_ranks_that_share_a_host_sum_inside_of_it():
    """Only where hosts have as many ranks, as collectives do."""
    speeds = [speed("int8")]
    spread = advisor.advise(Workload(100 << 20, 16, 16), Link.of("1gbit"), speeds)
    packed = advisor.advise(Workload(100 << 20, 16, 2), Link.of("1gbit"), speeds)
    uneven = advisor.advise(Workload(100 << 20, 15, 2), Link.of("1gbit"), speeds)
    assert (spread.best.name, packed.best.name, uneven.best.name) == ("int8", "int8", "none")
    assert "all have as many ranks" in uneven.reason
    # A host's port sends the vector's codes once, in two halves; sums inside come on top.
    codes = (100 << 20) / 4 * 8.125 / 8
    assert 1 <= packed.best.wire / (codes / Link.of("1gbit").bytes_per_second) < 1.5
    alone = advisor.advise(Workload(100 << 20, 16, 1), Link.of("1gbit"), speeds)
    assert (alone.best.name, len(alone.estimates)) == ("none", 1)
    assert "share memory" in alone.reason


# ---- Arguments ----


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("100mbit", 12.5e6 * 1448 / 1538),
        ("1gbit", 125e6 * 1448 / 1538),
        ("2.5 Gbit/s", 312.5e6 * 1448 / 1538),
        ("10Gbits", 1.25e9 * 1448 / 1538),
        ("110MB/s", 110e6),
        ("1.1GB/s", 1.1e9),
    ],
)
def test_links(text, bytes_per_second):
    assert Link.of(text).bytes_per_second == pytest.approx(bytes_per_second)


@pytest.mark.parametrize(
    "text",
    [
        *("10", "gbit", "1 furlong", "0gbit", "-1gbit", "1e3gbit", "1mb/s", "", "nangbit"),
        *("infgbit", "9" * 310 + "gbit", "0." + "0" * 330 + "1gbit"),
    ],
)
def test_other_links_say_what_is_allowed(text):
    with pytest.raises(pycoll.InvalidArgumentError, match=r"is no link.*100mbit.*1.1GB/s"):
        Link.of(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"world_size": 1, "hosts": 1}, "at least 2 ranks"),
        ({"world_size": 2, "hosts": 3}, "2 ranks on 3 hosts"),
        ({"world_size": 2, "hosts": 0}, "2 ranks on 0 hosts"),
        ({"bucket_bytes": 3}, "buckets of 3 has no float32"),
        ({"dtype": "int8"}, "float32, float16, bfloat16, not 'int8'"),
    ],
)
def test_workloads_that_cannot_be(arguments, words):
    with pytest.raises(pycoll.InvalidArgumentError, match=words):
        Workload(1 << 20, **arguments)


def test_the_command(capsys):
    arguments = ("advise", "--model-bytes", "100M", "--link", "100mbit", "--world-size", "4")
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "4 ranks on 4 hosts, 100mbit" in text
    rows = {line.split()[0]: line for line in text.splitlines()[2:-3] if line}
    assert {*(name for name, _ in GAUSSIAN), "none", "codec", "top_k"} == set(rows)
    assert rows["int8"].endswith("recommended")
    assert rows["sign"].endswith("error above 0.02, needs error feedback")
    assert rows["top_k"].endswith("error above 0.02, needs error feedback")
    assert text.splitlines()[-2].startswith("int8: at 100mbit it saves ")
    assert text.splitlines()[-1].startswith("or top_k 0.001: ")
    assert main([*arguments, "--json", "--error", "1e-6"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"] == "none"
    assert found["proposal"].startswith("or top_k 0.001: ")
    assert found["workload"]["hosts"] == 4
    by_name = {row["name"]: row for row in found["estimates"]}
    exact = by_name["none"]["seconds"]
    assert exact == pytest.approx(
        2 * 0.75 * (100 << 20) / Link.of("100mbit").bytes_per_second, rel=0.1
    )
    assert np.isclose(by_name["int8"]["bits"], 8.125, rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model-bytes", "1M", "--link", "fast"], ["'fast'", "100mbit"]),
        (["--model-bytes", "1M", "--link", "1gbit", "--hosts", "3"], ["2 ranks on 3 hosts"]),
        (["--model-bytes", "1M", "--link", "1gbit", "--dtype", "int8"], ["'int8'", "bfloat16"]),
        (["--model-bytes", "1M", "--link=-1gbit"], ["'-1gbit' is no link"]),
        (["--model-bytes", "1M", "--link", "1gbit", "--world-size", "-2"], ["-2 ranks"]),
        (["--model-bytes", "1M", "--link", "1gbit", "--hosts", "-1"], ["-1 hosts"]),
    ],
)
def test_wrong_arguments_of_the_command(capsys, arguments, words):
    assert main(["advise", *arguments]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words)


@pytest.mark.parametrize(
    "option", ["--model-bytes", "--world-size", "--hosts", "--bucket", "--error"]
)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "x", "", "-5"])
def test_numbers_of_the_command_are_finite_and_not_negative(capsys, option, value):
    arguments = {"--model-bytes": "1M", "--link": "1gbit", option: value}
    try:
        assert main(["advise", *(f"{key}={x}" for key, x in arguments.items())]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    error = capsys.readouterr().err
    assert option in error or "ranks on" in error


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.01])
def test_errors_that_cannot_be_accepted(value):
    with pytest.raises(pycoll.InvalidArgumentError, match="max_error is a number from 0 on"):
        advisor.advise(Workload(1 << 20), Link.of("1gbit"), [], max_error=value)
