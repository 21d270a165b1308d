"""`pycoll status`: what running jobs on this machine are doing, rank by rank."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from pycoll.cli.usage import UsageError

DESCRIPTION = """\
Shows every group of every process on this machine that uses pycoll: which collective each rank is
in and for how long, which messages wait, who comes late, and, where ranks do not fit together, the
first one that went astray. It reads what processes record all the time, so it also works for one
that hangs or is stopped, and disturbs none."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "status", help="show what running jobs are doing", description=DESCRIPTION
    )
    parser.add_argument("pids", nargs="*", type=int, metavar="PID", help="only these processes")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="again and again")
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="write dumps for `pycoll doctor --dump`, too"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.watch is not None and not arguments.watch > 0:
        raise UsageError(f"--watch is a number of seconds above 0, not {arguments.watch}")
    while True:
        code = show(arguments)
        if arguments.watch is None:
            return code
        sys.stdout.flush()
        time.sleep(arguments.watch)
        print()


def show(arguments: argparse.Namespace) -> int:
    from pycoll.cli.flight_report import as_json, report
    from pycoll.flight import live

    found = live.find(arguments.pids)
    processes = live.read(found)
    if arguments.save is not None:
        try:
            for path in live.save(found, arguments.save):
                print(path, file=sys.stderr)
        except OSError as error:
            raise UsageError(f"--save: {error}") from error
    if arguments.json:
        print(json.dumps(as_json(processes), indent=1))
        return 0
    if not processes:
        print("no process with a group of pycoll" + _others(found.forbidden))
        return 1
    print(report(processes, closed=False))
    if note := _others(found.forbidden):
        print(note.strip(" ()"))
    return 0


def _others(forbidden: int) -> str:
    return f" ({forbidden} processes of other users were not looked at)" if forbidden else ""
