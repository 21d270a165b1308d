"""`pycoll simulate`: how long a collective would take on a machine that is described in a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycoll.cli.usage import UsageError, output_file, require_matplotlib, size, size_list

if TYPE_CHECKING:
    from pycoll.simulator.sweep import Curve, Plan

DESCRIPTION = """\
Runs the Programs that the library itself runs as a discrete-event simulation, on hosts and a
network that a topology file describes, for up to 65,536 ranks. Prints the time of each algorithm
by size, and the sizes at which one overtakes another."""

EPILOG = """\
topology files: pycoll/simulator/topology.py says what may stand in one; `host` and `cluster` come
with pycoll. benchmarks/simulator.py fits one to the machine at hand.

example: pycoll simulate all_reduce --ranks 4096 --topology cluster --bytes 64M
"""

MOST_RANKS = 65536
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
SWEEP = 8  # ratio of two sizes
SMALLEST = 1024
DTYPE = "float32"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="what a collective would take on another machine",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("collective", help="all_reduce, broadcast, ...")
    parser.add_argument("--ranks", type=int, default=4096, help=f"at most {MOST_RANKS}")
    parser.add_argument("--topology", default="cluster", metavar="FILE", help="or host, cluster")
    parser.add_argument(
        "--ranks-per-host", type=int, metavar="N", help="instead of the topology's (0: one host)"
    )
    parser.add_argument(
        "--bytes",
        type=size,
        default=64 << 20,
        metavar="SIZE",
        help="of the longest vector of a rank; smaller ones are simulated too (default 64M)",
    )
    parser.add_argument("--sizes", type=size_list, metavar="A,B,...", help="these sizes instead")
    parser.add_argument("--algorithms", metavar="A,B,...", help="default: all")
    parser.add_argument("--dtype", default=DTYPE, help=f"default {DTYPE}")
    parser.add_argument("--root", type=int, default=0, help="of rooted collectives (default 0)")
    parser.add_argument(
        "--budget",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="of CPU: an algorithm that has taken so long is not simulated at larger sizes "
        "(default 120)",
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="time by size, log-log")
    parser.set_defaults(run=run)


def format_size(count: float) -> str:
    for unit in "GMK":
        if count >= UNITS[unit]:
            return f"{count / UNITS[unit]:.3g}{unit}"
    return f"{count:.0f}"


def format_time(seconds: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def run(arguments: argparse.Namespace) -> int:
    from pycoll.simulator import sweep

    plan = make_plan(arguments)
    check_plot(arguments.plot)
    curves = sweep.run(plan, progress)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print("\n".join(report(plan, curves)))
    if arguments.json:
        write_json(plan, curves, arguments.json)
        print(f"wrote {arguments.json}")
    if arguments.plot:
        draw(plan, curves, arguments.plot)
        print(f"wrote {arguments.plot}")
    return 0 if any(curve.seconds for curve in curves) else 1


def make_plan(arguments: argparse.Namespace) -> Plan:
    from dataclasses import replace

    from pycoll import _core
    from pycoll.simulator import topology
    from pycoll.simulator.sweep import Plan

    if arguments.collective not in _core.collectives():
        raise UsageError(
            f"no collective {arguments.collective!r}; there is: {', '.join(_core.collectives())}"
        )
    known = [info.name for info in _core.algorithms(arguments.collective)]
    wanted = arguments.algorithms.split(",") if arguments.algorithms else known
    for name in wanted:
        if name not in known:
            raise UsageError(f"no algorithm {name!r}; there is: {', '.join(known)}")
    if not 1 <= arguments.ranks <= MOST_RANKS:
        raise UsageError(f"--ranks must be 1 to {MOST_RANKS}, not {arguments.ranks}")
    if not 0 <= arguments.root < arguments.ranks:
        raise UsageError(f"--root must be 0 to {arguments.ranks - 1}, not {arguments.root}")
    if arguments.dtype not in _core.dtypes():
        raise UsageError(f"no dtype {arguments.dtype!r}; there is: {', '.join(_core.dtypes())}")
    try:
        machine = topology.load(arguments.topology)
        if arguments.ranks_per_host is not None:
            changed = machine.as_json() | {"ranks_per_host": arguments.ranks_per_host}
            where = f"{arguments.topology} with --ranks-per-host"
            machine = replace(topology.parse(changed, where), name=machine.name)
    except topology.TopologyError as error:
        raise UsageError(str(error)) from error
    options = {"dtype": arguments.dtype, "root": arguments.root}
    sizes = arguments.sizes or sizes_up_to(arguments.bytes)
    if arguments.collective == "barrier":
        sizes = [1]  # it moves nothing
    return Plan(
        collective=arguments.collective,
        algorithms=wanted,
        ranks=arguments.ranks,
        sizes=sorted(set(sizes)),
        topology=machine,
        budget=arguments.budget,
        options=options,
    )


def sizes_up_to(largest: int) -> list[int]:
    """From the largest one down, so that it is among them."""
    sizes = [largest]
    while sizes[-1] // SWEEP >= SMALLEST:
        sizes.append(sizes[-1] // SWEEP)
    return sizes


def check_plot(file: Path | None) -> None:
    if file is None:
        return
    if file.suffix != ".png":
        raise UsageError(f"--plot writes a PNG: give a name that ends in .png, not {file}")
    require_matplotlib("--plot")


def progress(algorithm: str, count: int) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{algorithm}, {format_size(count)} ...", end="", file=sys.stderr, flush=True)


def report(plan: Plan, curves: list[Curve]) -> list[str]:
    from pycoll.simulator.sweep import crossovers

    per_host = plan.topology.ranks_per_host or plan.ranks
    hosts = -(-plan.ranks // per_host)
    lines = [
        f"{plan.collective}, {plan.options['dtype']}, {plan.ranks} ranks on {hosts} "
        f"host{'s' if hosts > 1 else ''} ({plan.topology.name})",
        "",
        *table(plan, curves),
        "",
    ]
    changes = crossovers(curves, plan.sizes)
    lines += [
        f"from about {format_size(change.bytes)} on {change.after} is faster than {change.before}"
        for change in changes
    ]
    if not changes and len(plan.sizes) > 1:
        lines.append("one algorithm is the fastest at all of these sizes")
    if any(curve.seconds and curve.refusals for curve in curves):
        lines.append("some sizes were left out: the fastest is that of what was simulated")
    for curve in curves:
        lines += notes(plan, curve)
    return lines


def table(plan: Plan, curves: list[Curve]) -> list[str]:
    from pycoll.simulator.sweep import best

    shown = [curve for curve in curves if curve.seconds]
    head = ["bytes", *(curve.algorithm for curve in shown), "fastest"]
    rows = [head]
    for count in plan.sizes:
        fastest = best(curves, count)
        times = [format_time(c.seconds[count]) if count in c.seconds else "-" for c in shown]
        rows.append([format_size(count), *times, fastest.algorithm if fastest else "-"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def notes(plan: Plan, curve: Curve) -> list[str]:
    """How a curve came about, and the reasons of what it lacks."""
    lines = []
    if curve.seconds:
        alike = (
            f", {curve.simulated_ranks} of {plan.ranks} ranks: all hosts see the same"
            if curve.simulated_ranks < plan.ranks
            else ""
        )
        lines.append(f"{curve.algorithm}: {curve.events} events in {curve.cpu:.1f} s{alike}")
    for reason in dict.fromkeys(curve.refusals.values()):
        sizes = [format_size(s) for s, text in curve.refusals.items() if text == reason]
        where = "" if len(sizes) == len(plan.sizes) else f" at {', '.join(sizes)}"
        lines.append(f"{curve.algorithm}: not simulated{where}: {reason}")
    return lines


def write_json(plan: Plan, curves: list[Curve], file: Path) -> None:
    import json
    from dataclasses import asdict

    content = {
        "collective": plan.collective,
        "ranks": plan.ranks,
        "topology": plan.topology.as_json(),
        "options": plan.options,
        "curves": [asdict(curve) for curve in curves],
    }
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def draw(plan: Plan, curves: list[Curve], file: Path) -> None:
    from pycoll.cli.curves import draw_curves

    file.parent.mkdir(parents=True, exist_ok=True)
    title = f"simulated {plan.collective}, {plan.ranks} ranks, {plan.topology.name}"
    draw_curves(curves, title, file)
