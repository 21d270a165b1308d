"""`pycoll doctor`: what this machine and this build can do, and what to do about the rest."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pycoll.cli.checks import CHECKS, Finding, State
from pycoll.cli.usage import UsageError

DESCRIPTION = """\
Shows what this machine and this build of pycoll can do: native modules, transports, processors,
instruction sets, CUDA, network interfaces, and the environment variables in force. Each thing is
tried, not guessed. A missing piece is a line that says what to do; the exit code is 0."""

MARKS = {State.ok: "ok", State.info: "", State.missing: "!!"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor", help="show what this machine and build can do", description=DESCRIPTION
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--dump",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="instead: read flight records, those of all ranks of a job together, and say which "
        "rank and operation went astray first",
    )
    parser.set_defaults(run=run)


def examine() -> dict[str, list[Finding]]:
    """The findings of every section. A check that breaks is a finding too."""
    report = {}
    for section, check in CHECKS.items():
        try:
            report[section] = check()
        except Exception as error:  # the doctor must not fall ill
            text = f"this check failed: {type(error).__name__}: {error}"
            report[section] = [Finding(section, State.missing, text, "please report it")]
    return report


def run(arguments: argparse.Namespace) -> int:
    if arguments.dump:
        return read_dumps(arguments.dump, as_json=arguments.json)
    report = examine()
    if arguments.json:
        content = {section: [asdict(f) for f in findings] for section, findings in report.items()}
        json.dump(content, sys.stdout, indent=1)
        print()
    else:
        print("\n\n".join(show(section, findings) for section, findings in report.items()))
    return 0


def read_dumps(files: list[Path], *, as_json: bool) -> int:
    from pycoll.cli import flight_report
    from pycoll.flight import parse

    processes = []
    for file in files:
        try:
            processes.append(parse(file.read_bytes()))
        except (OSError, ValueError) as error:
            raise UsageError(f"--dump {file}: {error}") from error
    if as_json:
        print(json.dumps(flight_report.as_json(processes), indent=1))
    else:
        print(flight_report.report(processes, closed=True))
    return 0


def show(section: str, findings: list[Finding]) -> str:
    lines = [section]
    for finding in findings:
        head = f"  {MARKS[finding.state]:<2} {finding.name:<24} "
        lines.append(wrap(head, finding.text))
        if finding.advice:
            lines.append(wrap(" " * len(head) + "-> ", finding.advice))
    return "\n".join(lines)


def wrap(head: str, text: str) -> str:
    indent = " " * len(head)
    return textwrap.fill(
        text, 100, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    ).rstrip()
