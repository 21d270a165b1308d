"""`pycoll tune`: measures which algorithm is the fastest where, and writes a selection table."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pycoll.cli.ranks import on_local_ranks
from pycoll.cli.usage import UsageError, output_file

if TYPE_CHECKING:
    from pycoll.cli.tune_measure import Found, Plan
    from pycoll.cli.tune_rules import Measured
    from pycoll.selection import Rule, Table

DESCRIPTION = """\
Times the algorithms of each collective by size on ranks of this machine, one after the other in
the same processes, and writes the table of those that won clearly. Under torchrun it measures the
ranks that torchrun started. A group uses the table with PYCOLL_TABLE=FILE or
pycoll.Options(table=FILE); the same one on every rank."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tune", help="measure algorithms, write a selection table", description=DESCRIPTION
    )
    parser.add_argument(
        "--ranks", default="2", metavar="N,...", help="sizes of the group (default: %(default)s)"
    )
    parser.add_argument(
        "--collectives",
        default=",".join(COLLECTIVES),
        metavar="NAME,...",
        help="default: %(default)s",
    )
    parser.add_argument("--begin", default="64", help="smallest vector (default: %(default)s)")
    parser.add_argument("--end", default="16M", help="largest vector (default: %(default)s)")
    parser.add_argument(
        "--factor", type=float, default=2.0, help="between sizes (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument(
        "--transport", choices=("shm", "tcp"), help="default: the one that a group would use"
    )
    parser.add_argument(
        "--base", metavar="FILE", help="a table whose other rules are kept (default: none)"
    )
    parser.add_argument(
        "--output",
        type=output_file,
        default="pycoll-table.json",
        metavar="FILE",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--no-cross-memory",
        action="store_true",
        help="do not compare staging with cross-memory attach",
    )
    parser.add_argument(
        "--check", metavar="FILE", help="measure nothing: show what a table would choose"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pycoll.selection import Table

    ranks = parse_counts(arguments.ranks)
    if arguments.check:
        table = load(arguments.check)
        for count in ranks:
            print(show_choices(table, count, arguments.transport or "shm"))
        return 0
    kept = load(arguments.base).rules if arguments.base else ()
    plan = make_plan(arguments)
    rules: list[Rule] = []
    for found in runs(plan, ranks, arguments.transport):
        for measured in found.measured:
            lines, new = decide(measured)
            rules += new
            print(lines, flush=True)
        print(cross_memory_report(found), flush=True)
    if "RANK" in os.environ and os.environ["RANK"] != "0":
        return 0
    table = Table((*kept_beside(rules, kept), *rules), machine())
    table.save(arguments.output)
    print(f"wrote {arguments.output}: use it with PYCOLL_TABLE={os.path.abspath(arguments.output)}")
    return 0


def kept_beside(new: Sequence[Rule], kept: Sequence[Rule]) -> list[Rule]:
    """The rules of the old table that the new ones leave alone. Those that differ in sizes alone
    stay or go together: some of them would leave a gap."""
    gone = {rule.where for rule in kept if any(rule.meets(other) for other in new)}
    measured = {rule.where for rule in new}
    for rule in kept:
        if rule.where in gone - measured:
            print(f"not kept, because it covers calls that were measured too: {rule}")
    return [rule for rule in kept if rule.where not in gone | measured]


def load(file: str) -> Table:
    from pycoll import _core
    from pycoll.selection import Table

    try:
        return Table.load(file)
    except _core.InvalidArgumentError as error:
        raise UsageError(str(error)) from error


def parse_counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(counts) != text.count(",") + 1 or min(counts) < 2:
        raise UsageError(f"--ranks is a list of numbers from 2 on, like 2,4, and not {text!r}")
    return list(dict.fromkeys(counts))


def make_plan(arguments: argparse.Namespace) -> Plan:
    from pycoll import _core
    from pycoll.cli.tune_measure import Plan
    from pycoll.selection import parse_bytes

    names = list(dict.fromkeys(arguments.collectives.split(",")))
    tunable = [n for n in _core.collectives() if len(_core.algorithms(n)) > 1]
    for name in names:
        if name not in tunable:
            raise UsageError(f"--collectives: no {name!r}; there are: {', '.join(tunable)}")
    try:
        begin = parse_bytes(arguments.begin, "--begin")
        end = parse_bytes(arguments.end, "--end")
    except _core.InvalidArgumentError as error:
        raise UsageError(str(error)) from error
    # NaN is not at least anything.
    enough = arguments.factor >= 1.1 and arguments.rounds >= 1
    if not 4 <= begin <= end <= 1 << 32 or not enough:
        raise UsageError(
            "--begin must be at least 4 and not above --end, which is 4G at most; --factor must be "
            "at least 1.1, --rounds at least 1"
        )
    sizes = sizes_between(begin, end, arguments.factor)
    attached = () if arguments.no_cross_memory else sizes_between(max(begin, 1024), end, 4.0)
    return Plan(tuple(names), sizes, arguments.rounds, cross_memory=attached)


def sizes_between(begin: int, end: int, factor: float) -> tuple[int, ...]:
    """Multiples of 4 bytes from `begin` up to `end`."""
    count = math.floor(math.log(end / begin, factor) + 1e-9) + 1 if begin <= end else 0
    return tuple(sorted({round(begin * factor**i) // 4 * 4 for i in range(count)}))


def runs(plan: Plan, ranks: Sequence[int], transport: str | None) -> Iterator[Found]:
    """One run for each size of the group; under torchrun one, on its ranks."""
    from pycoll.cli.tune_measure import measure

    variables = {"PYCOLL_TRANSPORT": transport} if transport else {}
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        yield measure_under_torchrun(plan, variables)
        return
    for count in ranks:
        yield on_local_ranks(count, measure, plan, variables=variables)


def measure_under_torchrun(plan: Plan, variables: dict[str, str]) -> Found:
    import torch.distributed as dist

    import pycoll
    from pycoll.cli.tune_measure import measure

    store, rank, world_size = next(iter(dist.rendezvous("env://")))
    # What is measured are algorithms, not the table and rules that happen to be in force.
    options = pycoll.Options(algo="", table="builtin", variables=variables)
    with pycoll.Communicator(store, rank, world_size, name="tune", options=options) as group:
        found = measure(group, plan)
    if rank != 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  one report is enough
    return found


def decide(measured: Measured) -> tuple[str, list[Any]]:
    """The table of times for people, and the rules."""
    from pycoll.cli.tune_rules import choose, rules_of

    path = choose(measured)
    names = sorted(measured.times, key=lambda name: (name not in path, name))
    hosts = "several hosts" if measured.several_hosts else "one host"
    lines = [
        f"\n{measured.collective}, {measured.ranks} ranks, {measured.transport}, {hosts}: "
        "microseconds a call (median over rounds of the slowest rank)",
        f"{'bytes':>10}" + "".join(f"{name:>20}" for name in names),
    ]
    for i, size in enumerate(measured.sizes):
        cells = "".join(cell(measured.times[name][i], name == path[i]) for name in names)
        lines.append(f"{size:>10}{cells}{change(measured, i, path[i])}")
    rules = rules_of(measured, path)
    lines += [f"  {rule}" for rule in rules]
    return "\n".join(lines), rules


def cell(time: float, chosen: bool) -> str:
    text = "-" if math.isinf(time) else f"{time:.4g}"
    return f"{text + ('*' if chosen else ' '):>20}"


def change(measured: Measured, i: int, name: str) -> str:
    builtin = measured.builtin[i]
    if name == builtin:
        return ""
    gain = measured.times[builtin][i] / measured.times[name][i]
    return f"  instead of {builtin} ({gain:.2f} times as fast)"


def cross_memory_report(found: Found) -> str:
    if found.cross_memory_problem:
        return f"\ncross-memory attach cannot be used here: {found.cross_memory_problem}"
    if not found.cross_memory:
        return ""
    lines = [
        "\ntwo_shot between 2 ranks, microseconds: staged by pycoll, and over cross-memory attach",
        f"{'':>10}{'median':>24}{'fastest round':>24}{'staged / attached':>24}",
        f"{'bytes':>10}" + f"{'staged':>12}{'attached':>12}" * 2 + f"{'median':>12}{'fastest':>12}",
    ]
    for row in found.cross_memory:
        times = (row.staged, row.attached, row.fastest_staged, row.fastest_attached)
        ratios = (row.staged / row.attached, row.fastest_staged / row.fastest_attached)
        lines.append(
            f"{row.bytes:>10}"
            + "".join(f"{time:>12.4g}" for time in times)
            + "".join(f"{ratio:>12.2f}" for ratio in ratios)
        )
    ahead = [str(row.bytes) for row in found.cross_memory if row.ahead]
    lines.append(
        f"cross-memory attach is ahead at {', '.join(ahead)} bytes"
        if ahead
        else "cross-memory attach is ahead nowhere: staging it is"
    )
    return "\n".join(lines)


def show_choices(table: Table, ranks: int, transport: str) -> str:
    """What a group would use, where the table or the built-in rules change their mind."""
    from pycoll import _core
    from pycoll.selection import MAX_BYTES, format_bytes

    lines = [f"{ranks} ranks, {transport}, one host (*: because of the table)"]
    # The built-in rules change at powers of two.
    bounds = {0, *(1 << n for n in range(41))} | {
        b for r in table.rules for b in (r.begin, r.end) if b < MAX_BYTES
    }

    def chosen(collective: str, size: int, rows: Any) -> str:
        return _core.select_algorithm(
            collective,
            size,
            has_window=transport == "shm",
            several_hosts=False,
            table=rows,
            ranks=ranks,
            transport=transport,
        )

    for collective in _core.collectives():
        parts: list[str] = []
        before = ""
        for size in sorted(bounds):
            name = chosen(collective, size, table.as_rows())
            if name != chosen(collective, size, []):
                name += "*"
            if name != before:
                parts.append(f"from {format_bytes(size)} {name}")
            before = name
        lines.append(f"  {collective:<16}{', '.join(parts)}")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    import pycoll
    from pycoll import _core
    from pycoll.cli.machine import cpu_model

    return {
        "cpu": cpu_model(),
        "cores": _core.available_cpus(),
        "kernel": os.uname().release,
        "pycoll": pycoll.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
