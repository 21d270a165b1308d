"""The simulator: against closed forms, against itself without symmetry, and from the command line.

Closed forms are those of the alpha-beta-gamma model (a message of m bytes takes alpha + m beta,
summing m bytes takes m gamma), with a rank on each host and a vector that fits the slots:

* ring (Patarasuk and Yuan 2009): 2 (n-1) alpha + 2 (n-1)/n m beta + (n-1)/n m gamma
* binomial tree (Thakur, Rabenseifner and Gropp 2005): log2(n) (alpha + m beta)
* recursive doubling (there): log2(n) (alpha + m beta + m gamma)
* two binary trees (Sanders, Speck and Traeff 2009): 2 h alpha for a vector of nothing, h the height
  of the higher tree; for a long one 2 m beta, since inner ranks send and receive 2 m bytes
"""

from __future__ import annotations

import json
import math
import struct
import time

import pytest

from pycoll import _core
from pycoll.cli import main
from pycoll.simulator import sweep, topology

ALPHA, BETA, GAMMA = 3e-5, 1e-9, 2e-10
EVERY = [(c, a.name) for c in _core.collectives() for a in _core.algorithms(c)]
MESSAGES = [a.name for a in _core.algorithms("all_reduce") if not a.needs_window]


def machine(alpha=ALPHA, beta=BETA, gamma=0.0, per_host=1):
    """Hosts that cost nothing but messages between them and sums."""
    made = _core.MachineModel()
    made.ranks_per_host = per_host
    made.network.latency = alpha
    made.network.bandwidth = 1 / beta if beta else math.inf
    made.host.cores = max(1, per_host)
    made.host.reduce_bandwidth = 1 / gamma if gamma else math.inf
    return made


def real(per_host=0):
    """A machine on which everything costs something."""
    known = topology.load("cluster").as_json() | {"ranks_per_host": per_host}
    return topology.parse(known).machine()


def seconds(algorithm, ranks, count, on, collective="all_reduce", **options):
    return _core.simulate(collective, algorithm, ranks, count, on, **options).seconds


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16, 33, 64])
@pytest.mark.parametrize("slices", [0.25, 1])
def test_ring_is_its_closed_form(ranks, slices):
    slot = 1 << 14
    count = int(ranks * slot * slices)
    hops, part = ranks - 1, count / ranks
    want = 2 * hops * (ALPHA + part * BETA) + hops * part * GAMMA
    on = machine(gamma=GAMMA)
    got = _core.simulate("all_reduce", "ring", ranks, count, on, slot_bytes=slot)
    assert got.rounds == 1
    assert got.seconds == pytest.approx(want, rel=0.01)
    assert got.network_bytes == 2 * hops * count
    assert got.network_messages == 2 * hops * ranks


@pytest.mark.parametrize("rounds", [1, 3, 4, 8, 40])
def test_four_rounds_of_a_ring_are_under_way_at_a_time_over_a_network(rounds):
    slot, ranks = 1 << 14, 8
    count, hops = ranks * slot * rounds, ranks - 1
    latency = seconds("ring", ranks, count, machine(beta=0), slot_bytes=slot)
    assert latency == pytest.approx(math.ceil(rounds / 4) * 2 * hops * ALPHA, rel=0.01)
    bandwidth = seconds("ring", ranks, count, machine(alpha=0), slot_bytes=slot)
    assert bandwidth == pytest.approx(2 * hops * slot * rounds * BETA, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64, 256])
@pytest.mark.parametrize("count", [4096, 1 << 17])
def test_binomial_tree_and_recursive_doubling_are_their_closed_forms(ranks, count):
    levels = math.log2(ranks)
    tree = seconds("tree", ranks, count, machine(), "broadcast")
    assert tree == pytest.approx(levels * (ALPHA + count * BETA), rel=0.01)
    doubling = seconds("recursive_doubling", ranks, count, machine(gamma=GAMMA))
    assert doubling == pytest.approx(levels * (ALPHA + count * (BETA + GAMMA)), rel=0.01)


@pytest.mark.parametrize("ranks", [3, 7, 15, 31, 127])
def test_two_trees_are_their_closed_forms(ranks):
    height = round(math.log2(ranks + 1)) - 1  # perfect trees, of 2^k - 1 ranks
    on = machine(beta=0)
    assert seconds("tree", ranks, 8, on) == pytest.approx(2 * height * ALPHA, rel=0.01)
    # Inner ranks but the roots: two children and a parent in one tree, a parent in the other. On 3
    # ranks there are only roots.
    moved = 1.5 if ranks == 3 else 2
    count, slices = 64 << 20, 256 * (height + 1)
    pipelined = seconds("tree", ranks, count, machine(alpha=0), slot_bytes=count // 2 // slices)
    assert pipelined == pytest.approx(moved * count * BETA, rel=0.01)


@pytest.mark.parametrize("on", [machine(gamma=GAMMA), machine(per_host=4), real(1), real(4)])
@pytest.mark.parametrize("algorithm", MESSAGES)
@pytest.mark.parametrize("count", [1 << 16, 3 << 20])
def test_symmetry_is_exact(monkeypatch, algorithm, on, count):
    ranks = 64
    full = _core.simulate("all_reduce", algorithm, ranks, count, on, use_symmetry=False)
    # 0: look for a symmetry however few steps there are.
    reduced = _core.simulate("all_reduce", algorithm, ranks, count, on, symmetry_from=0)
    assert full.simulated_ranks == ranks
    spread = {"ring", "hierarchical", "recursive_doubling", "halving_doubling"}
    alike = count % (64 * ranks) == 0
    per_host = on.ranks_per_host
    assert reduced.simulated_ranks == (per_host if algorithm in spread and alike else ranks)
    assert reduced.seconds == full.seconds
    assert reduced.network_bytes == full.network_bytes
    copies = ranks // reduced.simulated_ranks
    assert reduced.finished * copies == full.finished


def test_chunks_that_differ_are_not_taken_to_be_alike():
    on = machine(per_host=1)
    some = _core.simulate("all_reduce", "ring", 64, 64 * 64 - 100, on, symmetry_from=0)
    assert some.simulated_ranks == 64


@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 12])
def test_everything_ends_and_longer_vectors_take_longer(collective, algorithm, ranks):
    info = next(a for a in _core.algorithms(collective) if a.name == algorithm)
    for per_host in (0,) if info.needs_window else (0, 1, 3):
        for depth in (info.min_depth, 4):
            times = [
                seconds(algorithm, ranks, count, real(per_host), collective, fifo_depth=depth)
                for count in (1, 100_000, 5_000_000)
            ]
            assert 0 < times[0] <= times[1] <= times[2]
            assert times[0] < times[2] or collective == "barrier"


def test_a_ring_without_a_second_slot_deadlocks():
    with pytest.raises(_core.InvalidArgumentError, match=r"deadlock.*4 ranks wait.*1 slots"):
        seconds("ring", 4, 1 << 20, machine(), fifo_depth=1)


def test_deeper_fifos_hide_latency():
    """A sender must hear of each receive: so many messages take 2 alpha as its FIFOs have slots."""
    slot, count = 4096, 4 << 20
    on = machine(alpha=1e-3, beta=1e-12)
    shallow, deep = (
        seconds("direct", 2, count, on, "broadcast", slot_bytes=slot, fifo_depth=depth)
        for depth in (2, 16)
    )
    trips = count / slot / 4  # four rounds are under way, each with a FIFO of its own
    assert shallow == pytest.approx(trips / 2 * 2 * 1e-3, rel=0.01)
    assert deep == pytest.approx(trips / 16 * 2 * 1e-3, rel=0.05)


def test_ranks_of_a_host_share_its_port():
    """all_to_all: a host of k ranks sends k (n - k) blocks through one port."""
    ranks, block = 16, 1 << 16
    for per_host in (1, 2, 4):
        on = machine(alpha=0, per_host=per_host)
        got = _core.simulate("all_to_all", "direct", ranks, ranks * block, on)
        least = per_host * (ranks - per_host) * block
        assert got.network_bytes == least * (ranks // per_host)
        assert least * BETA <= got.seconds * 1.0001
        assert got.seconds <= 1.5 * least * BETA


@pytest.mark.parametrize(("collective", "ways"), [("gather", "in"), ("scatter", "out")])
def test_a_port_takes_one_message_at_a_time(collective, ways):
    """The root's port is what all others share, for what comes in and for what goes out."""
    ranks, block = 9, 1 << 16
    got = _core.simulate(collective, "direct", ranks, ranks * block, machine(alpha=0))
    assert got.seconds == pytest.approx((ranks - 1) * block * BETA, rel=0.01), ways


def test_cores_and_memory_are_shared():
    count = 1 << 24
    on = real()
    on.host.cores, on.host.switch_overhead = 8, 0
    on.host.memory_bandwidth = math.inf
    alone = seconds("two_shot", 8, count, on)
    on.host.cores = 2
    crowded = seconds("two_shot", 8, count, on)
    assert crowded == pytest.approx(4 * alone, rel=0.05)
    on.host.cores, on.host.cache_bytes = 8, 0
    fast = seconds("two_shot", 8, count, on)
    on.host.memory_bandwidth = on.host.core_bandwidth
    slow = seconds("two_shot", 8, count, on)
    assert fast < slow <= 8 * fast


def test_partial_sums_of_narrow_types_are_wide_on_the_wire():
    on = machine()
    narrow, wide = (
        _core.simulate("all_reduce", "recursive_doubling", 8, 4096 * size, on, dtype=dtype)
        for dtype, size in (("bfloat16", 2), ("float32", 4))
    )
    # 8 ranks; the first of three exchanges sends elements, the others sums.
    assert wide.network_bytes == 8 * 3 * 4096 * 4
    assert narrow.network_bytes == 8 * 4096 * (2 + 4 + 4)


@pytest.mark.parametrize(
    ("collective", "algorithm", "ranks", "reason"),
    [
        ("all_reduce", "one_shot", 8, "one_shot reads peers' memory"),
        ("all_reduce", "nosuch", 8, "no algorithm"),
        ("all_reduce", "ring", 0, "world_size must be at least 1"),
        ("all_to_all", "direct", 4096, "4096 ranks has .* steps, about 8191 a rank; at most 1000"),
    ],
)
def test_what_cannot_be_simulated_says_why(collective, algorithm, ranks, reason):
    with pytest.raises(_core.InvalidArgumentError, match=reason):
        seconds(
            algorithm,
            ranks,
            1000 * max(ranks, 1),
            machine(),
            collective,
            most_steps=1000,
            use_symmetry=False,
        )


@pytest.mark.parametrize("name", topology.shipped())
def test_shipped_topologies_are_right(name):
    loaded = topology.load(name)
    assert loaded.description
    assert topology.parse(loaded.as_json(), name) == loaded
    assert seconds("ring", 4, 1 << 20, loaded.machine()) > 0


@pytest.mark.parametrize(
    ("content", "reasons"),
    [
        ("{", ["is no JSON"]),
        ("[]", ["must be an object"]),
        ('{"host": {"cores": 2}, "hosts": 3}', ['no entry "hosts"', "ranks_per_host"]),
        ("{}", ['"host"', "must be an object with cores"]),
        ('{"host": {}}', ['"cores" is missing']),
        ('{"host": {"cores": 0}}', ['"cores"', "above 0", "not 0"]),
        ('{"host": {"cores": true}}', ['"cores"', "not true"]),
        ('{"host": {"cores": 1, "step_us": -1}}', ['"step_us"', "0 or more"]),
        ('{"host": {"cores": 1, "core_gb_s": 0}}', ['"core_gb_s"', "above 0 or null"]),
        ('{"host": {"cores": 1, "step_us": NaN}}', ['"step_us"', "NaN"]),
        ('{"host": {"cores": 1, "speed": 1}}', ['no entry "speed"', "cache_gb_s"]),
        ('{"host": {"cores": 1}, "ranks_per_host": 2}', ['need a "network"']),
        ('{"host": {"cores": 1}, "ranks_per_host": 2, "network": {}}', ['"network" with gb_s']),
        ('{"host": {"cores": 1}, "ranks_per_host": 1e3}', ["whole number"]),
        ('{"host": {"cores": 1}, "ranks_per_host": 3000000000}', ["2147483647 at most"]),
        ('{"host": {"cores": 1}, "ranks_per_host": -2}', ["ranks_per_host", "or more"]),
        ('{"host": {"cores": 1}, "ranks_per_host": 2.5}', ["whole number"]),
        ('{"host": {"cores": 1}, "description": 1}', ["must be a text"]),
    ],
)
def test_bad_topologies_are_errors_that_say_what_may_stand_there(
    capsys, tmp_path, content, reasons
):
    file = tmp_path / "mine.json"
    file.write_text(content)
    assert main(["simulate", "all_reduce", "--topology", str(file)]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    for reason in [str(file), *reasons]:
        assert reason in captured.err


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        (["all_redcue"], ["all_redcue", "all_reduce"]),
        (["all_reduce", "--algorithms", "rign"], ["rign", "ring"]),
        (["all_reduce", "--ranks", "0"], ["--ranks", "65536"]),
        (["all_reduce", "--ranks", "100000"], ["--ranks", "65536"]),
        (["broadcast", "--ranks", "4", "--root", "4"], ["--root", "0 to 3"]),
        (["all_reduce", "--topology", "nosuch"], ["nosuch", "cluster, host"]),
        (["all_reduce", "--plot", "a.pdf"], [".png"]),
        (["all_reduce", "--dtype", "float"], ["float", "bfloat16"]),
        (["all_reduce", "--ranks-per-host", "-1"], ["--ranks-per-host", "or more"]),
        # The host alone says nothing of a network, and one that takes no time is none.
        (["all_reduce", "--topology", "host", "--ranks-per-host", "2"], ["host", '"network"']),
    ],
)
def test_wrong_arguments_are_errors_that_say_what_there_is(capsys, arguments, reasons):
    assert main(["simulate", *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    for reason in reasons:
        assert reason in captured.err


def test_the_command_prints_times_crossovers_reasons_and_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    figures, picture = tmp_path / "figures.json", tmp_path / "new" / "picture.png"
    arguments = ["--ranks", "32", "--topology", "cluster", "--bytes", "4M"]
    files = ["--json", str(figures), "--plot", str(picture)]
    assert main(["simulate", "all_reduce", *arguments, *files]) == 0
    text = capsys.readouterr().out
    assert text.startswith("all_reduce, float32, 32 ranks on 4 hosts (cluster)\n")
    rows = [line.split("  ") for line in text.splitlines() if line.strip().endswith("fastest")]
    assert len(rows) == 1
    for size in ("1K", "8K", "64K", "512K", "4M"):
        assert any(line.split()[:1] == [size] for line in text.splitlines())
    assert "one_shot: not simulated: one_shot reads peers' memory" in text
    assert "is faster than" in text
    content = json.loads(figures.read_text())
    assert topology.parse(content["topology"]).ranks_per_host == 8
    ring = next(c for c in content["curves"] if c["algorithm"] == "ring")
    assert ring["seconds"]["4194304"] == seconds("ring", 32, 4 << 20, real(8))
    header = picture.read_bytes()
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    assert 400 < width < 3000
    assert 300 < height < 3000


def test_crossovers_lie_where_the_curves_meet():
    first = sweep.Curve("low", seconds={1: 1.0, 100: 10.0, 10000: 100.0})
    second = sweep.Curve("high", seconds={1: 4.0, 100: 4.0, 10000: 4.0})
    (change,) = sweep.crossovers([first, second], [1, 100, 10000])
    assert (change.before, change.after) == ("low", "high")
    assert change.bytes == pytest.approx(16)  # sqrt(16) is 4
    unknown = sweep.Curve("late", seconds={10000: 1.0})
    late = sweep.crossovers([first, unknown], [1, 100, 10000])
    assert [c.bytes for c in late] == [10000]


def test_a_budget_leaves_larger_sizes_out(capsys):
    arguments = ["--ranks", "8", "--sizes", "1K,1M", "--algorithms", "ring", "--budget", "0"]
    assert main(["simulate", "all_reduce", *arguments]) == 0
    text = capsys.readouterr().out
    assert "ring: not simulated at 1M: left out after" in text
    assert "some sizes were left out" in text


def test_an_interrupt_is_no_traceback(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "run", interrupted)
    assert main(["simulate", "all_reduce", "--ranks", "8"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("algorithm", "ranks", "count", "limit"),
    [
        ("ring", 4096, 64 << 20, 60),
        ("tree", 4096, 64 << 20, 120),
        ("recursive_doubling", 65536, 1 << 20, 120),
        ("tree", 65536, 8 << 20, 240),
        ("hierarchical", 65536, 64 << 20, 240),
        ("ring", 65536, 64 << 20, 240),
    ],
)
def test_many_ranks_take_no_longer_than_promised(algorithm, ranks, count, limit):
    """Limits are four times what an idle core needs, since test machines are busy."""
    started = time.monotonic()
    assert seconds(algorithm, ranks, count, real(8)) > 0
    assert time.monotonic() - started < limit
