"""all_reduce on this machine: pycoll and Gloo side by side, through torch.distributed.

    python benchmarks/all_reduce.py                  # 2 and 4 ranks, 4 bytes to 256 MiB
    python benchmarks/all_reduce.py --quick          # fewer sizes, shorter rounds
    python benchmarks/all_reduce.py --algorithms     # every algorithm of pycoll, forced in turn

See benchmarks/README.md for what is compared and how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from common import format_size, machine, machine_lines, parse_size, sizes_between
from measure import Contender, Plan, Row, run_rank
from report import Run, footer, plot, table

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
# --quick changes these, unless they are given as well.
DEFAULTS = {"factor": 4, "end": "256M", "rounds": 21, "batch_ms": 25.0, "size_seconds": 4.0}
QUICK = {"factor": 16, "end": "64M", "rounds": 7, "batch_ms": 10.0, "size_seconds": 1.0}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = made.add_argument_group("what is measured (-b -e -f -n -w -d -c as in nccl-tests)")
    what.add_argument("-b", "--begin", type=size, default=4, help="smallest size (default 4)")
    what.add_argument("-e", "--end", type=size, help="largest size (default 256M)")
    what.add_argument("-f", "--factor", type=int, help="between sizes (default 4)")
    what.add_argument("--sizes", type=size_list, help="these sizes instead, e.g. 4,1K,64M")
    what.add_argument("-d", "--dtype", choices=DTYPES, default="float32", help="default float32")
    what.add_argument(
        "--ranks", type=rank_list, default="2,4", help="processes, one run each (default 2,4)"
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
    how = made.add_argument_group("how")
    how.add_argument("-n", "--iters", type=int, default=0, help="calls a batch (default: by time)")
    how.add_argument("-w", "--warmup", type=int, default=5, help="calls before (default 5)")
    how.add_argument("--rounds", type=int, help="batches of each, at most (default 21)")
    how.add_argument("--batch-ms", type=float, help="how long a batch takes (default 25)")
    how.add_argument("--size-seconds", type=float, help="for a size, at most (default 4)")
    how.add_argument("--seed", type=int, default=1, help="of the order in a round (default 1)")
    how.add_argument("--quick", action="store_true", help="sizes by 16 up to 64M, 7 short rounds")
    how.add_argument("-c", "--check", action="store_true", help="verify results: column #wrong")
    out = made.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="all figures, every round")
    out.add_argument("--plot", type=Path, metavar="FILE.png", help="time by size, log-log")
    out.add_argument(
        "--require-ahead",
        action="store_true",
        help="exit code 1 when pycoll is behind the first backend at any size",
    )
    return made


def size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size_list(text: str) -> list[int]:
    return [size(part) for part in text.split(",")]


def rank_list(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(counts) != text.count(",") + 1 or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of process counts, like 2,4")
    return counts


def choose_contenders(backends: str, algorithms: str | None) -> tuple[Contender, ...]:
    chosen = [Contender(name) for name in backends.split(",")]
    if algorithms:
        from pycoll import _core

        known = [info.name for info in _core.algorithms("all_reduce")]
        wanted = known if algorithms == "all" else algorithms.split(",")
        for name in wanted:
            if name not in known:
                raise SystemExit(f"--algorithms: no {name!r}; there are: {', '.join(known)}")
        chosen += [Contender("pycoll", name) for name in wanted]
    return tuple(chosen)


def make_plan(arguments: argparse.Namespace) -> Plan:
    for name, value in (QUICK if arguments.quick else DEFAULTS).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, size(value) if isinstance(value, str) else value)
    if arguments.factor < 2 or min(arguments.rounds, arguments.warmup) < 1 or arguments.iters < 0:
        raise SystemExit("--factor must be at least 2, --rounds and --warmup at least 1")
    sizes = arguments.sizes or sizes_between(arguments.begin, arguments.end, arguments.factor)
    if not sizes:
        raise SystemExit("--begin is larger than --end: there is nothing to measure")
    return Plan(
        contenders=choose_contenders(arguments.backends, arguments.algorithms),
        sizes=tuple(sizes),
        dtype=arguments.dtype,
        iterations=arguments.iters,
        batch_seconds=arguments.batch_ms / 1e3,
        warmup=arguments.warmup,
        rounds=arguments.rounds,
        size_seconds=arguments.size_seconds,
        check=arguments.check,
        seed=arguments.seed,
    )


def measure(plan: Plan, ranks: int) -> Iterator[Row]:
    """Runs `ranks` processes and yields each size's row as it comes.

    Raises torch.multiprocessing's ProcessException, with the rank's traceback where there is one,
    when a rank fails; the other ranks are ended then.
    """
    import torch.multiprocessing as mp

    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="pycoll-bench-") as directory, receiver:
        context = mp.spawn(
            run_rank, args=(ranks, directory, plan, sender), nprocs=ranks, join=False
        )
        sender.close()  # so that end-of-file says that rank 0 is gone
        with contextlib.suppress(EOFError):
            while True:
                if receiver.poll(0.2):
                    yield receiver.recv()
                else:
                    context.join(timeout=0)  # raises when a rank failed
        while not context.join():
            pass


def policy(plan: Plan) -> str:
    batch = f"{plan.iterations} calls" if plan.iterations else f"{plan.batch_seconds * 1e3:g} ms"
    return (
        f"policy    synchronous calls, in place, in batches of {batch}; "
        f"up to {plan.rounds} rounds, backends in random order in each (seed {plan.seed});\n"
        "          median over rounds of the slowest rank; 1 thread a rank, CPUs not pinned"
    )


def report_run(plan: Plan, ranks: int) -> Run:
    run = Run(ranks, [contender.name for contender in plan.contenders])
    print(f"\nall_reduce, {plan.dtype}, sum, {ranks} ranks", flush=True)
    lines = table(run, plan.check)
    print(lines.header(), flush=True)
    for row in measure(plan, ranks):
        run.rows.append(row)
        print(lines.line(row), flush=True)
    for line in footer(run):
        print(line, flush=True)
    return run


def behind(runs: list[Run]) -> list[str]:
    """Where pycoll is slower than the first backend."""
    return [
        f"{format_size(row.bytes)} on {run.ranks} ranks ({ratio:.2f})"
        for run in runs
        for row, ratio in zip(run.rows, run.ratios("pycoll"), strict=True)
        if ratio < 1
    ]


def main() -> int:
    arguments = parser().parse_args()
    plan = make_plan(arguments)
    names = [contender.name for contender in plan.contenders]
    if arguments.require_ahead and "pycoll" not in names[1:]:
        raise SystemExit("--require-ahead: --backends must name another backend, then pycoll")
    facts = machine()
    print("\n".join([*machine_lines(facts), policy(plan)]))
    started = time.monotonic()
    runs = [report_run(plan, ranks) for ranks in arguments.ranks]
    print(f"\n{time.monotonic() - started:.0f} s in all")

    if arguments.json:
        result = {"machine": facts, "plan": asdict(plan), "runs": [run.as_json() for run in runs]}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        plot(runs, arguments.plot, f"all_reduce, {plan.dtype}, {facts['cpu']}")
    if wrong := sum(run.wrong() for run in runs):
        print(f"{wrong} elements are wrong", file=sys.stderr)
        return 1
    slower = behind(runs) if arguments.require_ahead else []
    if slower:
        print(f"pycoll is behind {names[0]} at {', '.join(slower)}", file=sys.stderr)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
