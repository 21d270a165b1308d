"""`pycoll explain`: shows an algorithm at work, from the very Program that the executor runs."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycoll.cli.usage import UsageError

if TYPE_CHECKING:
    from pycoll._core import Program, Trace

DESCRIPTION = """\
Runs an algorithm step by step on small vectors and prints what every rank holds after each step.
The steps come from the Program that the library itself runs. Without --algorithm it lists the
algorithms there are; without COLLECTIVE, the collectives."""

EPILOG = """\
example: pycoll explain all_reduce --algorithm recursive_doubling --ranks 4 --data "1,2;3,4;5,6;7,8"
"""

OPERATIONS = ("sum", "avg", "min", "max", "product")
MOST_RANKS = 64  # wider tables and pictures help nobody
CHECK_DEPTHS = (2, 4)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="show an algorithm step by step",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("collective", nargs="?", help="all_reduce, broadcast, ...")
    parser.add_argument("--algorithm", metavar="NAME", help="which one to show")
    parser.add_argument("--ranks", type=int, help="default: 4, or those of --hosts")
    parser.add_argument(
        "--hosts",
        metavar="SIZES",
        help='ranks on each host, as in "2x2" (2 hosts of 2) or "3,1" (default: one host)',
    )
    parser.add_argument(
        "--data",
        metavar="NUMBERS",
        help='the ranks\' vectors, as in "1,2;3,4" (default: small whole numbers)',
    )
    parser.add_argument("--op", choices=OPERATIONS, help="default: sum")
    parser.add_argument("--root", type=int, help="of rooted collectives (default: 0)")
    parser.add_argument("--steps", action="store_true", help="print each rank's program as well")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw who sends what to whom, when"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pycoll import _core

    if arguments.collective is None or arguments.algorithm is None:
        refuse_idle_options(arguments)
        print(catalogue(arguments.collective))
        return 0
    hosts = parse_hosts(arguments.hosts)
    fill_in_defaults(arguments, hosts)
    require_known(arguments)
    try:
        programs = _core.build_programs(
            arguments.collective,
            arguments.algorithm,
            arguments.ranks,
            root=arguments.root,
            hosts=hosts,
        )
        inputs = parse_data(arguments.data, arguments.ranks) or default_data(programs)
        trace = _core.trace(programs, inputs, op=arguments.op)
    except _core.Error as error:
        raise UsageError(str(error)) from error
    print(title(arguments))
    if arguments.steps:
        print(list_steps(programs) + "\n")
    if arguments.collective == "barrier":
        print("ranks that are known to have come:\n")
        print(format_table(arrivals(programs, trace)))
    else:
        print(format_table([(row.time, row.values) for row in trace.rows]))
    if arguments.plot:
        draw(trace, arguments)
        print(f"\nwrote {arguments.plot}")
    verdict, fine = check(programs)
    print("\n" + verdict)
    return 0 if fine else 1


def catalogue(collective: str | None) -> str:
    """The algorithms of one collective, or of all."""
    from pycoll import _core

    names = _core.collectives()
    if collective is not None and collective not in names:
        raise UsageError(f"no collective {collective!r}; there is: {', '.join(names)}")
    sections = []
    for name in names if collective is None else [collective]:
        lines = [f"  {a.name:<20} {a.summary}" for a in _core.algorithms(name)]
        sections.append("\n".join([name, *lines]))
    return "\n\n".join(sections) + "\n\nshow one: pycoll explain COLLECTIVE --algorithm NAME"


def refuse_idle_options(arguments: argparse.Namespace) -> None:
    """Without an algorithm there is nothing that the other options could change."""
    idle = [
        f"--{name}"
        for name in ("algorithm", "ranks", "hosts", "data", "op", "root", "steps", "plot")
        if getattr(arguments, name) not in (None, False)
    ]
    if idle:
        missing = "--algorithm NAME" if arguments.collective else "COLLECTIVE"
        raise UsageError(f"{', '.join(idle)} without {missing}: there is nothing to show")


def parse_hosts(text: str | None) -> list[int]:
    """The host of each rank, from "2x2" or "3,1"."""
    if text is None:
        return []
    try:
        if "x" in text:
            count, size = map(int, text.split("x"))
            sizes = [size] * count
        else:
            sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(f'--hosts must be like "2x2" (2 hosts of 2 ranks) or "3,1", not {text!r}')
    return [host for host, size in enumerate(sizes) for _ in range(size)]


def fill_in_defaults(arguments: argparse.Namespace, hosts: list[int]) -> None:
    if arguments.ranks is None:
        arguments.ranks = len(hosts) or 4
    if hosts and len(hosts) != arguments.ranks:
        raise UsageError(f"--hosts has {len(hosts)} ranks, --ranks says {arguments.ranks}")
    arguments.root = arguments.root or 0
    arguments.op = arguments.op or "sum"


def require_known(arguments: argparse.Namespace) -> None:
    from pycoll import _core

    if arguments.collective not in _core.collectives():
        catalogue(arguments.collective)  # raises with what there is
    names = [a.name for a in _core.algorithms(arguments.collective)]
    if arguments.algorithm not in names:
        raise UsageError(
            f"no algorithm {arguments.algorithm!r} for {arguments.collective}; "
            f"there is: {', '.join(names)}"
        )
    if not 1 <= arguments.ranks <= MOST_RANKS:
        raise UsageError(f"--ranks must be 1 to {MOST_RANKS}, not {arguments.ranks}")
    if not 0 <= arguments.root < arguments.ranks:
        raise UsageError(f"--root must be 0 to {arguments.ranks - 1}, not {arguments.root}")
    if arguments.plot and arguments.plot.suffix != ".png":
        raise UsageError(
            f"--plot writes a PNG: give a name that ends in .png, not {arguments.plot}"
        )


def parse_data(text: str | None, ranks: int) -> list[list[float]] | None:
    """The vectors of `--data`, one a rank, all of one length."""
    if text is None:
        return None
    try:
        rows = [[float(x) for x in row.split(",") if x.strip()] for row in text.split(";")]
    except ValueError as error:
        raise UsageError(f'--data: {error}; give numbers as in "1,2;3,4"') from error
    if len(rows) != ranks:
        raise UsageError(f"--data has {len(rows)} vectors for {ranks} ranks")
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise UsageError(f"--data: vectors of different lengths: {lengths}")
    return rows


def default_data(programs: list[Program]) -> list[list[float]]:
    """Consecutive whole numbers, an element a chunk: two elements at least where it may be so."""
    program = programs[0]
    chunks = program.input_chunks
    size = chunks if chunks != 1 else 2
    return [[float(rank * size + i + 1) for i in range(size)] for rank in range(len(programs))]


def title(arguments: argparse.Namespace) -> str:
    ranks = f"{arguments.ranks} rank{'s' if arguments.ranks > 1 else ''}"
    hosts = f", hosts of {arguments.hosts}" if arguments.hosts else ""
    return f"{arguments.collective}, {arguments.algorithm}, {ranks}{hosts}\n"


Rows = list[tuple[int, list[list[float]]]]  # (time, the vector of each rank)


def format_table(rows: Rows) -> str:
    """What each rank holds after each step; an element it does not have yet is a dot."""
    head = ["step", *(f"rank {rank}" for rank in range(len(rows[0][1])))]
    body = [[str(time) if time else "initial", *map(vector, values)] for time, values in rows]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(head), rule, *map(line, body)])


def arrivals(programs: list[Program], trace: Trace) -> Rows:
    """A barrier moves no data: its rows are the ranks of which each rank knows that they came.

    News travels with every message; a barrier step in shared memory tells of its whole group.
    """
    known = [{rank} for rank in range(len(programs))]
    rows = [[sorted(k) for k in known]]
    for time in range(1, max((t.time for t in trace.transfers), default=0) + 1):
        before = [set(k) for k in known]
        for transfer in trace.transfers:
            if transfer.time == time:
                known[transfer.destination] |= before[transfer.source]
        rows.append([sorted(k) for k in known])
    steps = [(r, p, s) for r, p in enumerate(programs) for s in p.steps(0) if s.kind == "barrier"]
    for rank, program, step in steps:
        known[rank] |= set(program.groups[step.group])
    if steps:
        rows.append([sorted(k) for k in known])
    return [(time, [list(map(float, v)) for v in values]) for time, values in enumerate(rows)]


def vector(values: list[float]) -> str:
    return f"[{', '.join('.' if math.isnan(v) else f'{v:g}' for v in values)}]"


def list_steps(programs: list[Program]) -> str:
    """Each rank's program, lane by lane."""
    lines = []
    for rank, program in enumerate(programs):
        for lane in range(len(program.lanes)):
            where = f"rank {rank}" + (f", lane {lane}" if len(program.lanes) > 1 else "")
            lines.append(where)
            lines += [f"  {i:>3}  {step}" for i, step in enumerate(program.steps(lane))]
    return "\n".join(lines)


def draw(trace: Trace, arguments: argparse.Namespace) -> None:
    try:
        from pycoll.cli.picture import draw_transfers
    except ImportError as error:
        raise UsageError(
            f"--plot needs matplotlib ({error}): pip install 'pycoll[demo]'"
        ) from error
    arguments.plot.parent.mkdir(parents=True, exist_ok=True)
    draw_transfers(trace, title(arguments).strip(), arguments.plot)


def check(programs: list[Program]) -> tuple[str, bool]:
    """The prover's verdict on these programs, in one line."""
    from pycoll import _core

    info = next(
        a for a in _core.algorithms(programs[0].collective) if a.name == programs[0].algorithm
    )
    for in_place in (False, True):
        result = _core.check(programs, depth=info.min_depth, rounds=3, in_place=in_place)
        if not result.ok:
            return f"REFUSED ({result.kind}): {result.message}", False
    ranks = len(programs)
    return (
        f"{promise(programs[0].collective, ranks)}; no deadlock at FIFO depth {info.min_depth}+",
        True,
    )


def promise(collective: str, ranks: int) -> str:
    if collective == "barrier":
        return f"checked: no rank leaves before all {ranks} have come"
    if collective == "reduce":
        return f"checked: the root's output holds each of {ranks} contributions once"
    if collective in ("all_reduce", "reduce_scatter"):
        return f"checked: every output holds each of {ranks} contributions once"
    return "checked: every output holds what it should"
