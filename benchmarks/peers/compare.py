"""pycoll against Open MPI and Intel MPI on this machine: C against C, Python against Python.

    python benchmarks/peers/compare.py                  # all goals; about 2 minutes
    python benchmarks/peers/compare.py --goals c,python # some of them; --help lists all
    python benchmarks/peers/compare.py --quick          # one run, few rounds
    python benchmarks/peers/compare.py --require        # exit code 1 when a goal is not reached

Makes the peers' environments when they are missing (environments.py). See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from environments import (
    HERE,
    PEERS,
    Environment,
    Unavailable,
    build_core_driver,
    build_mpi_driver,
    default_cache,
    ensure,
)
from goals import GOALS, OURS, Goal, Outcome, format_size
from jobs import Command, Job, JobFailed, Launch, Unsupported

from pycoll.cli.usage import output_file

MOST_ITERATIONS = 20_000


@dataclass(frozen=True)
class Plan:
    runs: int = 5
    rounds: int = 5  # of each run, at each size
    batch_seconds: float = 0.004
    seed: int = 1
    realtime: bool = False


def core_launch(ranks: int, cache: Path) -> Launch:
    driver = build_core_driver(cache)
    return Launch(OURS["c"], [str(driver)], ranks, launcher=False)


def pycoll_launch(ranks: int, how: str) -> Launch:
    command = [sys.executable, str(HERE / "pycoll_driver.py"), how]
    return Launch(OURS[how], command, ranks, launcher=False)


def launches_for(
    language: str, ranks: int, peers: Sequence[Environment], cache: Path
) -> list[Launch]:
    """Ours first, then each peer with each of its settings."""
    if language == "c":
        found = [core_launch(ranks, cache)]
        for peer in peers:
            found += peer.launches(ranks, [str(build_mpi_driver(peer))])
        return found
    found = [pycoll_launch(ranks, "direct"), pycoll_launch(ranks, "array")]
    for peer in peers:
        found += peer.launches(ranks, [str(peer.python), str(HERE / "mpi4py_driver.py")])
    return found


def in_real_time(launch: Launch) -> Launch:
    return replace(launch, command=["chrt", "--rr", "1", *launch.command])


def calibrate(job: Job, size: int, shareable: bool, seconds: float) -> int:
    """Calls that take about `seconds`, after a warm-up."""
    job.run(Command(size, 2, 3, shareable=shareable))
    count = 1
    while True:
        call = float(job.run(Command(size, count, 1, shareable=shareable)).seconds[0])
        if call * count >= seconds / 5 or count >= MOST_ITERATIONS:
            return min(MOST_ITERATIONS, max(1, round(seconds / call)))
        count = min(MOST_ITERATIONS, max(2 * count, int(seconds / 5 / call)))


class Contestant:
    """A job, and the memory it works on: a job of pycoll stands for two."""

    def __init__(self, job: Job, shareable: bool = False) -> None:
        self.name = f"{job.name}, shareable" if shareable else job.name
        self._job = job
        self._shareable = shareable
        self._iterations = 0

    def prepare(self, plan: Plan, size: int) -> bool:
        """Verifies a call and finds out how many make a batch; False when there is no such call."""
        try:
            check = Command(size, 1, check=True, shareable=self._shareable)
            wrong = self._job.run(check).wrong
        except Unsupported:
            return False
        if wrong:
            raise JobFailed(f"{self.name}: {wrong} wrong elements at {size} bytes")
        self._iterations = calibrate(self._job, size, self._shareable, plan.batch_seconds)
        return True

    def batch(self, size: int) -> float:
        warmup = 1 + self._iterations // 20
        command = Command(size, self._iterations, warmup, shareable=self._shareable)
        return float(self._job.run(command).seconds[0])


def measure_size(
    plan: Plan, contestants: list[Contestant], size: int, shuffle: random.Random
) -> list[dict[str, float]]:
    """For each run: seconds a call by contestant, median over rounds in which all take turns."""
    able = [contestant for contestant in contestants if contestant.prepare(plan, size)]
    runs = []
    for _ in range(plan.runs):
        rounds: dict[str, list[float]] = {contestant.name: [] for contestant in able}
        for _ in range(plan.rounds):
            shuffle.shuffle(able)
            for contestant in able:
                rounds[contestant.name].append(contestant.batch(size))
        runs.append({name: statistics.median(times) for name, times in rounds.items()})
    return runs


def measure_section(
    plan: Plan, goals: list[Goal], launches: list[Launch], shuffle: random.Random
) -> list[Outcome]:
    """Goals with the same jobs, which live side by side; all but one are idle at any time."""
    sizes = sorted({size for goal in goals for size in goal.sizes})
    shareable = {size for goal in goals if goal.shareable for size in goal.sizes}
    measured = {}
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(Job(launch, max(sizes))) for launch in launches]
        for size in sizes:
            contestants = [Contestant(job) for job in jobs]
            if size in shareable:
                contestants += [Contestant(job, True) for job in jobs if job.name in OURS.values()]
            measured[size] = measure_size(plan, contestants, size, shuffle)
            print_times(goals[0], size, measured[size])
    return [goal.judge(measured) for goal in goals]


def print_times(goal: Goal, size: int, runs: list[dict[str, float]]) -> None:
    """A line by size, microseconds: medians over runs."""
    times = {name: statistics.median(run[name] for run in runs) for name in sorted(runs[0])}
    shown = "  ".join(f"{name} {1e6 * seconds:.2f}" for name, seconds in times.items())
    print(f"  {goal.language} {goal.ranks} ranks {format_size(size):>5}  {shown}", flush=True)


def measure(plan: Plan, goals: list[Goal], peers: list[Environment], cache: Path) -> list[Outcome]:
    shuffle = random.Random(plan.seed)
    outcomes = []
    for section in sorted({(goal.ranks, goal.language) for goal in goals}):
        ranks, language = section
        if plan.realtime and ranks > len(os.sched_getaffinity(0)):
            print(f"  {ranks} ranks: without real-time priority, there are fewer CPUs")
        launches = launches_for(language, ranks, peers, cache)
        if plan.realtime and ranks <= len(os.sched_getaffinity(0)):
            launches = [in_real_time(launch) for launch in launches]
        mine = [goal for goal in goals if (goal.ranks, goal.language) == section]
        outcomes += measure_section(plan, mine, launches, shuffle)
    return outcomes


def available_peers(names: str, cache: Path) -> list[Environment]:
    """Those that can be had; says why not of the others."""
    found = []
    for peer in PEERS:
        if peer.name not in names.split(","):
            continue
        try:
            found.append(ensure(peer, cache))
        except Unavailable as error:
            print(f"{peer.name} is left out: {error}", file=sys.stderr)
    if not found:
        raise SystemExit("there is no peer to compare with")
    return found


def chosen_goals(names: str) -> list[Goal]:
    known = [goal.name for goal in GOALS]
    for name in names.split(","):
        if not any(known_name.startswith(name) for known_name in known):
            raise SystemExit(f"--goals: no {name!r}; there are: {', '.join(known)}")
    return [goal for goal in GOALS if any(goal.name.startswith(n) for n in names.split(","))]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="goals:\n" + "\n".join(f"  {goal.name:15} {goal.describe()}" for goal in GOALS),
    )
    names = ",".join(peer.name for peer in PEERS)
    made.add_argument("--goals", default="c,python", help="goals, or what their names begin with")
    made.add_argument("--peers", default=names, help=f"default {names}")
    made.add_argument("--sizes", help="only these of the goals' sizes, in bytes: 4,1024")
    made.add_argument("--runs", type=int, default=5, help="a ratio is the median of so many")
    made.add_argument("--rounds", type=int, default=5, help="batches of each, in a run")
    made.add_argument("--batch-ms", type=float, default=4.0, help="how long a batch takes")
    made.add_argument("--seed", type=int, default=1, help="of the order in a round")
    made.add_argument("--quick", action="store_true", help="1 run, 3 rounds")
    made.add_argument(
        "--realtime",
        action="store_true",
        help="all jobs under chrt --rr 1, where there is a CPU for each rank: other work on the "
        "machine then disturbs little (needs root)",
    )
    made.add_argument("--cache", type=Path, default=default_cache(), help="of the environments")
    made.add_argument("--json", type=output_file, metavar="FILE", help="all figures")
    made.add_argument("--require", action="store_true", help="exit code 1 when a goal is missed")
    return made


def make_plan(arguments: argparse.Namespace) -> Plan:
    runs, rounds = (1, 3) if arguments.quick else (arguments.runs, arguments.rounds)
    if min(runs, rounds) < 1:
        raise SystemExit("--runs and --rounds must be at least 1")
    return Plan(runs, rounds, arguments.batch_ms / 1e3, arguments.seed, arguments.realtime)


def main() -> int:
    arguments = parser().parse_args()
    # Whoever ends the comparison ends its jobs, and leaves no files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    plan = make_plan(arguments)
    goals = chosen_goals(arguments.goals)
    if arguments.sizes:
        wanted = {int(size) for size in arguments.sizes.split(",")}
        goals = [goal.only(wanted) for goal in goals if wanted & set(goal.sizes)]
    peers = available_peers(arguments.peers, arguments.cache)
    versions = {peer.peer.name: peer.versions() for peer in peers}
    print(f"{versions}\nload {os.getloadavg()[0]:.1f}; medians of {plan.runs} runs, us a call:")
    try:
        outcomes = measure(plan, goals, peers, arguments.cache)
    except (JobFailed, Unavailable) as error:
        print(error, file=sys.stderr)
        return 2
    print()
    for outcome in outcomes:
        print("\n".join(outcome.lines()))
    if arguments.json:
        facts = {"versions": versions, "plan": asdict(plan)}
        facts["goals"] = [outcome.as_json() for outcome in outcomes]
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")
    missed = [outcome.goal.name for outcome in outcomes if not outcome.reached()]
    print(f"\n{len(outcomes) - len(missed)} of {len(outcomes)} goals reached"
          + (f"; missed: {', '.join(missed)}" if missed else ""))  # fmt: skip
    return 1 if missed and arguments.require else 0


if __name__ == "__main__":
    sys.exit(main())
