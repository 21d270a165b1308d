"""The simulator against this machine: fits a topology file, then compares what it was not shown.

    python benchmarks/simulator.py                          # measures 2 and 4 ranks, a few minutes
    python benchmarks/simulator.py --from figures.json      # what `pycoll bench --json` has written
    python benchmarks/simulator.py --write mine.json --plot errors.png

Fitted on 2 ranks, every other size, and the algorithms of FITTED. Compared with the other sizes,
the other algorithms, and 4 ranks. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pycoll import _core
from pycoll.bench.units import format_size, parse_size, sizes_between
from pycoll.cli.usage import output_file
from pycoll.simulator import topology
from pycoll.simulator.topology import Topology

FITTED = ("ring", "two_shot", "recursive_doubling")
FITTED_RANKS = 2
LARGE = 1 << 20  # from here on the errors are judged
# What 2 ranks can tell. The rest (cores, switch_us) stays as it is in the starting point.
PARAMETERS = ("cache_gb_s", "peer_gb_s", "core_gb_s", "memory_gb_s", "cache_mb", "call_us",
              "step_us", "flag_us")  # fmt: skip
# How far from the starting point, in e-folds, weighs as much as an error of e at one size: holds
# what the measurement does not determine.
PRIOR = 0.05
ITERATIONS = 25


@dataclass(frozen=True)
class Point:
    """One measured time."""

    ranks: int
    algorithm: str
    bytes: int
    seconds: float
    fitted: bool = False

    @property
    def group(self) -> str:
        if self.ranks != FITTED_RANKS:
            return f"{self.ranks} ranks"
        if self.algorithm not in FITTED:
            return "other algorithms"
        return "fitted" if self.fitted else "other sizes"


def points_of(content: Any, fastest: bool = False) -> list[Point]:
    """From the JSON of `pycoll bench all_reduce --algorithms all`; every other size is for the fit.

    `fastest`: the fastest round instead of the median, where other work disturbed most rounds.

    Raises SystemExit when it is another collective's.
    """
    if content["plan"]["collective"] != "all_reduce":
        raise SystemExit("the figures must be of all_reduce")
    known = {info.name for info in _core.algorithms("all_reduce")}
    points = []
    for run in content["runs"]:
        for at, row in enumerate(sorted(run["rows"], key=lambda row: row["bytes"])):
            for sample, facts in row["samples"].items():
                name = sample.split(".")[0]
                if name not in known:
                    continue
                fitted = run["ranks"] == FITTED_RANKS and name in FITTED and at % 2 == 0
                micros = min(facts["rounds"]) if fastest else facts["us"]
                points.append(Point(run["ranks"], name, row["bytes"], micros / 1e6, fitted))
    return points


def simulated(point: Point, machine: _core.MachineModel) -> float:
    return _core.simulate("all_reduce", point.algorithm, point.ranks, point.bytes, machine).seconds


def with_parameters(start: Topology, logarithms: np.ndarray) -> Topology:
    values = {name: math.exp(value) for name, value in zip(PARAMETERS, logarithms, strict=True)}
    return topology.parse(start.as_json() | {"host": start.host | values}, start.name)


def residuals(
    points: list[Point], start: Topology, at: np.ndarray, origin: np.ndarray
) -> np.ndarray:
    """Logarithms of simulated over measured times, and what leaving the starting point costs."""
    machine = with_parameters(start, at).machine()
    errors = [math.log(simulated(point, machine) / point.seconds) for point in points]
    return np.array([*errors, *(PRIOR * (at - origin))])


def fit(points: list[Point], start: Topology) -> Topology:
    """Levenberg and Marquardt's least squares over the logarithms of the parameters."""
    origin = np.array([math.log(start.host[name] or 1e3) for name in PARAMETERS])
    best, damping = origin, 1.0
    errors = residuals(points, start, best, origin)
    for _ in range(ITERATIONS):
        step = 0.02
        slopes = [
            (residuals(points, start, best + step * unit, origin) - errors) / step
            for unit in np.eye(len(best))
        ]
        jacobian = np.array(slopes).T
        normal = jacobian.T @ jacobian + damping * np.eye(len(best))
        move = np.clip(np.linalg.solve(normal, -jacobian.T @ errors), -0.7, 0.7)
        tried = residuals(points, start, best + move, origin)
        if tried @ tried < errors @ errors:
            gained = 1 - (tried @ tried) / (errors @ errors)
            best, errors, damping = best + move, tried, damping / 3
            if gained < 1e-4:
                break
        else:
            damping *= 4
    return with_parameters(start, best)


def measured(arguments: argparse.Namespace) -> Any:
    from dataclasses import asdict

    from pycoll.bench import launch
    from pycoll.bench.plan import Contender, Plan
    from pycoll.bench.report import Run

    names = [info.name for info in _core.algorithms("all_reduce")]
    plan = Plan(
        contenders=tuple(Contender("pycoll", name) for name in names),
        sizes=tuple(sizes_between(arguments.begin, arguments.end, 2)),
        rounds=arguments.rounds,
        batch_seconds=0.005,
        size_seconds=arguments.size_seconds,
    )
    runs = []
    for ranks in (FITTED_RANKS, 4):
        print(f"measuring {ranks} ranks ...", file=sys.stderr, flush=True)
        runs.append(Run(plan, ranks, list(launch.measure(plan, ranks))))
    return {"plan": asdict(plan), "runs": [run.as_json() for run in runs]}


def comparison(points: list[Point], fitted: Topology) -> list[tuple[Point, float]]:
    """Each point with simulated over measured time."""
    machine = fitted.machine()
    return [(point, simulated(point, machine) / point.seconds) for point in points]


def table(compared: list[tuple[Point, float]]) -> Iterator[str]:
    """A line a size, a column an algorithm: simulated over measured time; * was fitted."""
    for ranks in sorted({point.ranks for point, _ in compared}):
        rows = [(point, ratio) for point, ratio in compared if point.ranks == ranks]
        names = list(dict.fromkeys(point.algorithm for point, _ in rows))
        yield f"\nsimulated / measured, {ranks} ranks (* was shown to the fit)"
        yield "  ".join(["bytes".rjust(6), *(name.rjust(len(name) + 1) for name in names)])
        for count in sorted({point.bytes for point, _ in rows}):
            cells = {
                point.algorithm: f"{ratio:.2f}{'*' if point.fitted else ' '}"
                for point, ratio in rows
                if point.bytes == count
            }
            line = [cells.get(name, "-").rjust(len(name) + 1) for name in names]
            yield "  ".join([format_size(count).rjust(6), *line])


def summary(compared: list[tuple[Point, float]]) -> Iterator[str]:
    yield f"\nfrom {format_size(LARGE)} on"
    for group in dict.fromkeys(point.group for point, _ in compared):
        errors = [
            abs(ratio - 1)
            for point, ratio in compared
            if point.group == group and point.bytes >= LARGE
        ]
        if errors:
            within = sum(error <= 0.3 for error in errors)
            yield (
                f"{group:>18}: median error {statistics.median(errors):.0%}, largest "
                f"{max(errors):.0%}, {within} of {len(errors)} within 30 %"
            )


def plot(compared: list[tuple[Point, float]], file: Path) -> None:
    """Measured (dots) and simulated (lines) times by size, a panel a number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    counts = sorted({point.ranks for point, _ in compared})
    figure, panels = plt.subplots(
        1, len(counts), figsize=(6.2 * len(counts), 5), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for ranks, axes in zip(counts, panels[0], strict=True):
        rows = sorted((p.bytes, p.algorithm, p.seconds, r) for p, r in compared if p.ranks == ranks)
        for at, name in enumerate(sorted({row[1] for row in rows})):
            own = [row for row in rows if row[1] == name]
            sizes, colour = [row[0] for row in own], f"C{at}"
            axes.plot(sizes, [row[2] * 1e6 for row in own], "o", markersize=4, color=colour)
            axes.plot(sizes, [row[2] * row[3] * 1e6 for row in own], color=colour, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(round(size))))
        axes.set(xlabel="bytes", title=f"{ranks} ranks: measured (dots), simulated (lines)")
        axes.grid(True, which="major", alpha=0.3)
    panels[0][0].set_ylabel("microseconds a call")
    panels[0][0].legend(frameon=False)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--from", dest="figures", type=Path, metavar="FILE", help="figures to use")
    made.add_argument("-b", "--begin", type=parse_size, default=1 << 16, help="default 64K")
    made.add_argument("-e", "--end", type=parse_size, default=1 << 26, help="default 64M")
    made.add_argument("--rounds", type=int, default=9, help="of each size, at most (default 9)")
    made.add_argument("--size-seconds", type=float, default=2.0, help="for a size (default 2)")
    made.add_argument(
        "--fastest", action="store_true", help="fastest rounds, not medians: on a busy machine"
    )
    made.add_argument("--start", default="host", help="topology to start from (default host)")
    made.add_argument(
        "--save", type=output_file, metavar="FILE", help="keep the figures, for --from"
    )
    made.add_argument(
        "--write", type=output_file, metavar="FILE", help="the topology that was fitted"
    )
    made.add_argument("--plot", type=output_file, metavar="FILE.png")
    made.add_argument(
        "--require",
        type=float,
        metavar="ERROR",
        help="exit code 1 when the median error of a held-out group is larger, e.g. 0.3",
    )
    return made


def main() -> int:
    arguments = parser().parse_args()
    content = (
        json.loads(arguments.figures.read_text()) if arguments.figures else measured(arguments)
    )
    if arguments.save:
        arguments.save.write_text(json.dumps(content) + "\n")
    points = points_of(content, arguments.fastest)
    shown = [point for point in points if point.fitted]
    if not shown:
        raise SystemExit(f"no figures of {FITTED_RANKS} ranks and {', '.join(FITTED)} to fit")
    fitted = fit(shown, topology.load(arguments.start))
    rounded = {name: float(f"{value:.3g}") for name, value in fitted.host.items() if value}
    print(json.dumps(rounded))
    compared = comparison(points, fitted)
    print("\n".join([*table(compared), *summary(compared)]))
    if arguments.write:
        written = fitted.as_json() | {"host": rounded}
        arguments.write.write_text(json.dumps(written, indent=2) + "\n")
    if arguments.plot:
        plot(compared, arguments.plot)
    return 1 if arguments.require and worst(compared) > arguments.require else 0


def worst(compared: list[tuple[Point, float]]) -> float:
    """The largest median error of a group that the fit was not shown, of large sizes."""
    groups: dict[str, list[float]] = {}
    for point, ratio in compared:
        if point.bytes >= LARGE and point.group != "fitted":
            groups.setdefault(point.group, []).append(abs(ratio - 1))
    return max(map(statistics.median, groups.values()), default=math.inf)


if __name__ == "__main__":
    sys.exit(main())
