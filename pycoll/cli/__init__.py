"""The `pycoll` command: `demo`, `explain`, `simulate`, `advise`, `bench`, `tune`, `doctor`,
`status`, one module each.

A module has `add_parser(subparsers)`, which sets `run` to a function from the parsed arguments to
an exit code. Heavy imports (torch, matplotlib) stand inside those functions, so that the command
answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pycoll.cli import advise, bench, demo, doctor, explain, simulate, status, tune
from pycoll.cli.usage import UsageError

USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit code (2: wrong usage, with the reason on stderr)."""
    parser = argparse.ArgumentParser(
        prog="pycoll", description="Collective communication for training."
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (demo, explain, simulate, advise, bench, tune, doctor, status):
        module.add_parser(subparsers)
    chosen = parser.parse_args(arguments)
    try:
        code: int = chosen.run(chosen)
        sys.stdout.flush()
    except UsageError as error:
        print(f"pycoll: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except ImportError as error:
        # The native core or torch: a traceback would not say what to do.
        print(f"pycoll: error: {error}; `pycoll doctor` says what is missing", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # `pycoll explain | head`: the reader has what it wanted. The interpreter would flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("pycoll: interrupted", file=sys.stderr)
        return 130  # as a shell reports a program that SIGINT ended
    return code
