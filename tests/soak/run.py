"""A soak from the command line: `python tests/soak/run.py --faults 1000 --seed 1`.

Prints one line a kind of fault, and everything that was not survived, with the seed to see it again
(`--seed S --faults 1`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from soak.faults import FAULTS
from soak.rounds import choose, complaints, play

TRANSPORTS = ["shm", "tcp"]


@dataclass
class Report:
    """What became of the faults."""

    injected: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    wrong_values: int = 0
    complaints: list[str] = field(default_factory=list)

    def add(self, seed: int) -> None:
        what = choose(seed, TRANSPORTS)
        found = complaints(what, play(what))
        name = what.kind.name
        self.injected[name] += 1
        self.survived[name] += not found
        self.wrong_values += any("WrongValue" in text for text in found)
        self.complaints += [f"seed {seed} ({what}): {text}" for text in found]

    def text(self) -> str:
        lines = [
            f"{name:<22} {self.injected[name]:>5} injected {self.survived[name]:>5} survived"
            for name in (fault.name for fault in FAULTS)
        ]
        total, well = self.injected.total(), self.survived.total()
        lines.append(f"{total} faults, {well} survived, {self.wrong_values} wrong values")
        return "\n".join(lines)


def soak(seeds: range, at_once: int = 2) -> Report:
    report = Report()
    before = set(os.listdir("/dev/shm"))
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(report.add, seeds))
    left = set(os.listdir("/dev/shm")) - before
    report.complaints += [f"left in /dev/shm: {name}" for name in left if "pycoll" in name]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2)
    arguments = parser.parse_args()
    start = time.monotonic()
    report = soak(range(arguments.seed, arguments.seed + arguments.faults), arguments.at_once)
    print("\n\n".join(report.complaints))
    print(report.text())
    print(f"{time.monotonic() - start:.0f} s")
    return 1 if report.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
