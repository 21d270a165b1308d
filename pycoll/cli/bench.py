"""`pycoll bench`: times collectives of several backends side by side, checked."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pycoll.bench.collectives import COLLECTIVES
from pycoll.bench.plan import APIS, DTYPES, MEMORY, OPERATIONS, Contender, Plan
from pycoll.bench.units import format_size, sizes_between
from pycoll.cli.usage import UsageError, output_file, require_matplotlib, size, size_list

if TYPE_CHECKING:
    from pycoll.bench.report import Run

DESCRIPTION = """\
Times a collective on this machine: torch.distributed backends side by side, in turn, in the same
processes. Flags and columns are nccl-tests' where it has them. It starts its own ranks; under
torchrun it runs on torchrun's. benchmarks/README.md says how to read the figures."""

EPILOG = """\
examples:
  pycoll bench all_reduce
  pycoll bench all_gather -b 1K -e 64M -f 4 -g 2,4 --plot figures.png
  pycoll bench all_reduce --backends fake,pycoll,gloo --sizes 4
  pycoll bench all_reduce --memory shareable --limit --sizes 4M,64M
  torchrun --nproc-per-node 2 -m pycoll bench broadcast --backends pycoll
"""

# --quick changes these, unless they are given as well.
DEFAULTS = {"factor": 4, "end": "256M", "rounds": 21, "batch_ms": 25.0, "size_seconds": 4.0}
QUICK = {"factor": 16, "end": "64M", "rounds": 7, "batch_ms": 10.0, "size_seconds": 1.0}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time collectives, side by side with other backends",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("collective", choices=list(COLLECTIVES), metavar="COLLECTIVE")
    parser.usage = "%(prog)s COLLECTIVE [options]; COLLECTIVE: " + ", ".join(COLLECTIVES)
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """All options but the collective; benchmarks/all_reduce.py has them too."""
    what = parser.add_argument_group("what is measured")
    what.add_argument("-b", "--begin", type=size, default=4, help="smallest size (default 4)")
    what.add_argument("-e", "--end", type=size, help="largest size (default 256M)")
    what.add_argument("-f", "--factor", type=int, help="between sizes (default 4)")
    what.add_argument("--sizes", type=size_list, help="these sizes instead, e.g. 4,1K,64M")
    what.add_argument(
        "-d", "--dtype", choices=sorted(DTYPES), default="float", help="default float"
    )
    what.add_argument("-o", "--op", choices=OPERATIONS, default="sum", help="default sum")
    what.add_argument("-r", "--root", type=int, default=0, help="of rooted ones (default 0)")
    what.add_argument(
        "-g",
        "--ranks",
        type=rank_list,
        default=[2],
        help="processes, one run each (default 2), e.g. 2,4",
    )
    what.add_argument(
        "--backends", default="gloo,pycoll", help="the first is the base of the ratios"
    )
    what.add_argument(
        "--algorithms",
        nargs="?",
        const="all",
        metavar="NAMES",
        help="pycoll's algorithms too, each forced: all of them, or ring,tree,...",
    )
    what.add_argument(
        "--api",
        default="dist",
        help="of pycoll: dist (torch.distributed), direct (pycoll.all_reduce), or dist,direct",
    )
    what.add_argument(
        "--memory",
        choices=MEMORY,
        default="ordinary",
        help="of all tensors: torch's own, or pycoll.empty's",
    )
    what.add_argument("--cold", action="store_true", help="each call on vectors out of the caches")
    what.add_argument(
        "--rewrite", action="store_true", help="write the input anew before each call (untimed)"
    )
    what.add_argument(
        "--limit",
        action="store_true",
        help="the hand-written read-both-write-both loop too: the physical limit of all_reduce "
        "on 2 ranks (implies --rewrite, needs a C compiler)",
    )
    what.add_argument(
        "--async", action="store_true", dest="asynchronous", help="async_op=True, then wait()"
    )
    how = parser.add_argument_group("how")
    how.add_argument("-n", "--iters", type=int, default=0, help="calls a batch (default: by time)")
    how.add_argument("-w", "--warmup", type=int, default=5, help="calls before (default 5)")
    how.add_argument("--rounds", type=int, help="batches of each, at most (default 21)")
    how.add_argument("--batch-ms", type=float, help="how long a batch takes (default 25)")
    how.add_argument("--size-seconds", type=float, help="for a size, at most (default 4)")
    how.add_argument("--seed", type=int, default=1, help="of the order in a round (default 1)")
    how.add_argument("--quick", action="store_true", help="sizes by 16 up to 64M, 7 short rounds")
    how.add_argument(
        "-c",
        "--check",
        type=int,
        choices=(0, 1),
        nargs="?",
        const=1,
        default=1,
        help="verify results: column #wrong (default %(default)s)",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--compare", action="store_true", help="a line a size, backends side by side")
    out.add_argument("--json", type=output_file, metavar="FILE", help="all figures, every round")
    out.add_argument(
        "--plot", type=output_file, metavar="FILE.png", help="time and bandwidth, log-log"
    )
    out.add_argument(
        "--require-ahead",
        action="store_true",
        help="exit code 1 when pycoll is behind the first backend at any size",
    )


def rank_list(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(counts) != text.count(",") + 1 or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of process counts, like 2,4")
    return counts


def choose_contenders(arguments: argparse.Namespace) -> tuple[Contender, ...]:
    apis = arguments.api.split(",")
    for api in apis:
        if api not in APIS:
            raise UsageError(f"--api: no {api!r}; there are: {', '.join(APIS)}")
    if arguments.asynchronous and apis != ["dist"]:
        raise UsageError("--async is torch.distributed's: it does not go with --api direct")
    chosen = []
    for name in arguments.backends.split(","):
        require_backend(name)
        own = apis if name == "pycoll" else ["dist"]
        chosen += [Contender(name, api=api) for api in own]
    for name in forced_algorithms(arguments):
        chosen += [Contender("pycoll", name, api) for api in apis]
    if arguments.limit:
        chosen.append(Contender("limit"))
    if len(set(chosen)) < len(chosen):
        raise UsageError("--backends names one of them twice")
    return tuple(chosen)


def require_backend(name: str) -> None:
    import torch.distributed as dist

    # torch's backend without communication is registered by who uses it.
    if name != "fake" and not dist.is_backend_available(name):
        raise UsageError(f"--backends: torch.distributed has no {name!r} here")


def forced_algorithms(arguments: argparse.Namespace) -> list[str]:
    if not arguments.algorithms:
        return []
    from pycoll import _core

    if arguments.collective not in _core.collectives():
        raise UsageError(f"--algorithms: {arguments.collective} has none to choose from")
    known = [info.name for info in _core.algorithms(arguments.collective)]
    wanted = known if arguments.algorithms == "all" else arguments.algorithms.split(",")
    for name in wanted:
        if name not in known:
            raise UsageError(f"--algorithms: no {name!r}; there are: {', '.join(known)}")
    return wanted


def require_usable(arguments: argparse.Namespace) -> None:
    if arguments.plot:
        require_matplotlib("--plot")
    if arguments.factor < 2 or min(arguments.rounds, arguments.warmup) < 1 or arguments.iters < 0:
        raise UsageError("--factor must be at least 2, --rounds and --warmup at least 1")
    if arguments.limit:
        asked = (arguments.collective, DTYPES[arguments.dtype], arguments.op)
        if asked != ("all_reduce", "float32", "sum"):
            raise UsageError("--limit: the hand-written loop is an all_reduce of float, sum")
        if arguments.ranks != [2]:
            raise UsageError("--limit: the hand-written loop is for 2 ranks")
    if arguments.memory == "shareable":
        import pycoll

        if not hasattr(pycoll, "empty"):
            raise UsageError("--memory shareable: this build of pycoll has no pycoll.empty")
    if arguments.require_ahead and "pycoll" not in arguments.backends.split(",")[1:]:
        raise UsageError("--require-ahead: --backends must name another backend, then pycoll")
    if arguments.require_ahead and "dist" not in arguments.api.split(","):
        raise UsageError("--require-ahead is about pycoll through torch.distributed (--api dist)")


def make_plan(arguments: argparse.Namespace) -> Plan:
    for name, value in (QUICK if arguments.quick else DEFAULTS).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, size(value) if isinstance(value, str) else value)
    require_usable(arguments)
    sizes = arguments.sizes or sizes_between(arguments.begin, arguments.end, arguments.factor)
    if not sizes:
        raise UsageError("--begin is larger than --end: there is nothing to measure")
    return Plan(
        contenders=choose_contenders(arguments),
        # A barrier has no size.
        sizes=tuple(sizes[:1] if arguments.collective == "barrier" else sizes),
        collective=arguments.collective,
        dtype=DTYPES[arguments.dtype],
        op=arguments.op,
        root=arguments.root,
        memory=arguments.memory,
        cold=arguments.cold,
        rewrite=arguments.rewrite or arguments.limit,
        asynchronous=arguments.asynchronous,
        iterations=arguments.iters,
        batch_seconds=arguments.batch_ms / 1e3,
        warmup=arguments.warmup,
        rounds=arguments.rounds,
        size_seconds=arguments.size_seconds,
        check=bool(arguments.check),
        seed=arguments.seed,
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes; exit code 1 when results are wrong or pycoll must be ahead and
    is not."""
    from pycoll.bench import launch

    plan = make_plan(arguments)
    if launch.under_torchrun():
        return run_in_group(plan, arguments)
    facts = announce(plan)
    started = time.monotonic()
    try:
        runs = [report_run(plan, ranks, arguments.compare) for ranks in arguments.ranks]
    except launch.RankFailed as error:
        print(f"pycoll bench: {error}", file=sys.stderr)
        return 1
    print(f"\n{time.monotonic() - started:.0f} s in all")
    return conclude(runs, arguments, facts)


def run_in_group(plan: Plan, arguments: argparse.Namespace) -> int:
    """As a rank that torchrun started; rank 0 speaks for all."""
    from pycoll.bench import launch
    from pycoll.bench.report import Run, footer, table

    first = os.environ["RANK"] == "0"
    facts = announce(plan) if first else {}
    run = Run(plan, int(os.environ["WORLD_SIZE"]))
    run.rows = launch.take_part(plan)
    if not first:
        return 0
    lines = table(run, arguments.compare)
    print("\n".join([heading(run), lines.header(), *map(lines.line, run.rows)]))
    print("\n".join(footer(run, arguments.compare)))
    return conclude([run], arguments, facts)


def announce(plan: Plan) -> dict[str, object]:
    from pycoll.bench.machine import machine, machine_lines
    from pycoll.bench.report import policy

    facts = machine()
    print("\n".join([*machine_lines(facts), policy(plan)]), flush=True)
    return facts


def heading(run: Run) -> str:
    from pycoll.bench.report import operation

    parts = [run.plan.collective, run.plan.dtype]
    if operation(run) != "none":
        parts.append(run.plan.op)
    return f"\n{', '.join(parts)}, {run.ranks} ranks"


def report_run(plan: Plan, ranks: int, compare: bool) -> Run:
    from pycoll.bench import launch
    from pycoll.bench.report import Run, footer, table

    run = Run(plan, ranks)
    print(heading(run), flush=True)
    lines = table(run, compare)
    print(lines.header(), flush=True)
    for row in launch.measure(plan, ranks):
        run.rows.append(row)
        print(lines.line(row), flush=True)
    for line in footer(run, compare):
        print(line, flush=True)
    return run


def conclude(runs: list[Run], arguments: argparse.Namespace, facts: dict[str, object]) -> int:
    """Writes what was asked for; the exit code."""
    plan = runs[0].plan
    if arguments.json:
        result = {"machine": facts, "plan": asdict(plan), "runs": [run.as_json() for run in runs]}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        from pycoll.bench.plot import plot

        plot(runs, arguments.plot, f"{plan.collective}, {plan.dtype}, {facts['cpu']}")
    if wrong := sum(run.wrong() for run in runs):
        print(f"{wrong} elements are wrong", file=sys.stderr)
        return 1
    slower = behind(runs) if arguments.require_ahead else []
    if slower:
        first = runs[0].contenders[0]
        print(f"pycoll is behind {first} at {', '.join(slower)}", file=sys.stderr)
    return 1 if slower else 0


def behind(runs: list[Run]) -> list[str]:
    """Where pycoll is slower than the first backend."""
    return [
        f"{format_size(row.bytes)} on {run.ranks} ranks ({ratio:.2f})"
        for run in runs
        for row, ratio in zip(run.rows, run.ratios("pycoll"), strict=True)
        if ratio < 1
    ]
