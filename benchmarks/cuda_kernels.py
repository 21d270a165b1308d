"""The kernels of the GPU path against what the GPU's memory allows, torch, CuPy and Gloo.

    python benchmarks/cuda_kernels.py                 # about 5 minutes
    python benchmarks/cuda_kernels.py --quick --json figures.json

Needs a GPU, the source tree and a build with the CUDA part (`make test-gpu`, docs/gpu.md). What did
not run is listed with the reason. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pycoll import _core
from pycoll.bench.launch import PRELOAD
from pycoll.bench.machine import machine, machine_lines
from pycoll.bench.units import format_size
from pycoll.cli.usage import output_file

sys.path.append(str(Path(__file__).parents[1] / "tests"))

MB = 1 << 20
FLOAT = 4
SCALE = 0.5
# Passes over a chunk of a vector that a step makes: reads and writes of it and of messages.
PASSES = {
    "send": 2,
    "recv": 2,
    "recv_send": 2,
    "copy": 2,
    "recv_copy_send": 3,
    "recv_reduce": 3,
    "recv_reduce_send": 3,
    "recv_reduce_copy_send": 4,
}


@dataclass(frozen=True)
class Row:
    """One operation at one size. `bytes` are those of a rank's vector (elementwise: of the input),
    `traffic` the bytes that all ranks must read and write at least the way the operation works."""

    what: str
    ranks: int
    bytes: int
    traffic: float
    seconds: list[float]  # of a call, a round each
    wanted: float = 0.0  # least share of the copy bandwidth; 0: only shown

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def share(self, bandwidth: float) -> float:
        return self.traffic / self.median / bandwidth


@dataclass
class Figures:
    """What has been measured so far, printed as it comes."""

    bandwidth: float  # bytes a second that a copy of 1 GB reads and writes
    rows: list[Row] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # what did not run, and why

    def add(self, *rows: Row) -> None:
        for row in rows:
            self.rows.append(row)
            print(line(row, self.bandwidth), flush=True)

    def miss(self, what: str, why: object) -> None:
        self.missing[what] = str(why)
        print(f"did not run: {what}: {why}", flush=True)


# ---- Floors: passes over a vector, of all ranks together ----


def message_passes(algorithm: str, ranks: int) -> float:
    """Of the all_reduce that a Program with messages describes: counted step by step."""
    total = 0.0
    for program in _core.build_programs("all_reduce", algorithm, ranks):
        steps = [step for lane in program.lanes for step in lane.steps]
        total += sum(PASSES[step.kind] for step in steps) / program.input_chunks
    return total


INT8 = (8 + 32 / 256) / 32  # of a vector of float32

# By operation of tests/gpu/kernels.cpp; kernels by hand as their comments describe them.
FLOORS: dict[str, Callable[[int], float]] = {
    "copy": lambda ranks: 2,
    "scale": lambda ranks: 2,
    "cast_float16": lambda ranks: 1.5,
    "cast_check_float16": lambda ranks: 1.5,
    "cast_check_bfloat16": lambda ranks: 1.5,
    # Values are float32; blocks of 256 values have a scale.
    "encode_int8": lambda ranks: 1 + INT8,
    "encode_int8_random": lambda ranks: 1 + INT8,
    "encode_int4": lambda ranks: 1 + INT8 - 4 / 32,
    "encode_sign": lambda ranks: 1 + INT8 - 7 / 32,
    "encode_fp16": lambda ranks: 1.5,
    "decode_int8": lambda ranks: 1 + INT8,
    "decode_int8_sum": lambda ranks: 1 + 8 * INT8,
    "decode_int4": lambda ranks: 1 + INT8 - 4 / 32,
    # All inputs are read once, all outputs written once: what no all_reduce can go below.
    "reduce_many": lambda ranks: 2 * ranks,
    # Into the window, then everybody reads everything.
    "one_shot_kernel": lambda ranks: ranks * (ranks + 3),
    # All but its own part into the window; a part of all ranks summed, to window and output; the
    # other parts out of their windows.
    "two_shot_kernel": lambda ranks: 5 * ranks - 2,
    "ring": lambda ranks: message_passes("ring", ranks),
    "tree": lambda ranks: message_passes("tree", ranks),
    "halving_doubling": lambda ranks: message_passes("halving_doubling", ranks),
}
ELEMENTWISE = [
    name for name in FLOORS if name == "scale" or name.startswith(("cast_", "encode_", "decode_"))
]
COLLECTIVE = [name for name in FLOORS if name != "copy" and name not in ELEMENTWISE]


def wanted_of(what: str, size: int) -> float:
    """The share of the copy bandwidth that an operation is to reach at that size."""
    if what.startswith("cast_check_") and size >= 64 * MB:
        return 0.9
    if what in ("ring", "tree", "two_shot_kernel") and size >= 256 * MB:
        return 0.7
    if what == "processes: pycoll" and size >= 64 * MB:
        return 0.8
    return 0.0


# ---- The table ----

HEADER = f"{'what':<34}{'ranks':>6}{'size':>7}{'time/us':>10}{'GB/s':>8}{'of copy':>9}  wanted"


def line(row: Row, bandwidth: float) -> str:
    share = row.share(bandwidth)
    verdict = ""
    if row.wanted:
        verdict = f"{row.wanted:.0%} {'reached' if share >= row.wanted else 'NOT reached'}"
    rate = row.traffic / row.median / 1e9
    return (
        f"{row.what:<34}{row.ranks:>6}{format_size(row.bytes):>7}{row.median * 1e6:>10.1f}"
        f"{rate:>8.1f}{share:>9.1%}  {verdict}"
    ).rstrip()


def ratios(rows: Sequence[Row]) -> list[str]:
    """How much faster pycoll was than others among the same processes, at the same size."""
    ours = {(row.ranks, row.bytes): row for row in rows if row.what == "processes: pycoll"}
    others = [
        row for row in rows if row.what.startswith("processes: ") and row not in ours.values()
    ]
    return [
        f"{row.ranks} processes, {format_size(row.bytes)}: pycoll takes "
        f"{ours[row.ranks, row.bytes].median / row.median:.3f} of the time of "
        f"{row.what.removeprefix('processes: ')}"
        for row in others
        if (row.ranks, row.bytes) in ours
    ]


def summary(figures: Figures) -> list[str]:
    judged = [row for row in figures.rows if row.wanted]
    reached = sum(row.share(figures.bandwidth) >= row.wanted for row in judged)
    return [
        *ratios(figures.rows),
        f"{reached} of {len(judged)} reached, {len(figures.missing)} did not run",
    ]


def as_json(figures: Figures, facts: dict[str, object]) -> dict[str, Any]:
    rows = [
        {**asdict(row), "median": row.median, "share": row.share(figures.bandwidth)}
        for row in figures.rows
    ]
    return {
        "machine": facts,
        "copy_bandwidth": figures.bandwidth,
        "rows": rows,
        "did_not_run": figures.missing,
    }


# ---- Kernels alone: the native program ----


def time_kernel(program: Path, what: str, ranks: int, size: int, rounds: int) -> Row:
    """Raises RuntimeError with what the program said."""
    command = [str(part) for part in (program, "time", what, ranks, size, rounds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError("not done after 120 s") from None
    if done.returncode != 0:
        raise RuntimeError((done.stdout + done.stderr).strip()[-300:])
    seconds = json.loads(done.stdout)["seconds"]
    return Row(what, ranks, size, FLOORS[what](ranks) * size, seconds, wanted_of(what, size))


def time_kernels(figures: Figures, program: Path, plan: argparse.Namespace) -> None:
    cases = [(what, 1, size) for size in plan.sizes for what in ELEMENTWISE]
    cases += [(what, r, size) for size in plan.sizes for r in plan.ranks for what in COLLECTIVE]
    for what, ranks, size in cases:
        try:
            figures.add(time_kernel(program, what, ranks, size, plan.rounds))
        except RuntimeError as error:
            figures.miss(f"{what}, {ranks} ranks, {format_size(size)}", error)


# ---- Others' elementwise kernels ----


def seconds_by_events(
    event: Callable[[], Any], call: Callable[[], Any], rounds: int
) -> list[float]:
    """`event()` makes and records one; torch and CuPy differ in how."""
    calls = 20
    for _ in range(3):
        call()
    seconds = []
    for _ in range(rounds):
        begin = event()
        for _ in range(calls):
            call()
        end = event()
        end.synchronize()
        seconds.append(elapsed(begin, end) / calls)
    return seconds


def elapsed(begin: Any, end: Any) -> float:
    if hasattr(begin, "elapsed_time"):
        return begin.elapsed_time(end) / 1e3
    import cupy

    return cupy.cuda.get_elapsed_time(begin, end) / 1e3


def time_torch(figures: Figures, plan: argparse.Namespace) -> None:
    import torch

    def event() -> Any:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    for size in plan.sizes:
        x = torch.ones(size // FLOAT, device="cuda")
        half = torch.empty_like(x, dtype=torch.float16)
        found, one = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
        unscale = torch._amp_foreach_non_finite_check_and_unscale_
        calls: dict[str, tuple[float, Callable[[], Any]]] = {
            "torch: copy_ to float16": (1.5, lambda: half.copy_(x)),  # noqa: B023
            "torch: mul to float16": (1.5, lambda: torch.mul(x, SCALE, out=half)),  # noqa: B023
            "torch: unscale_ and check": (2, lambda: unscale([x], found, one)),  # noqa: B023
        }
        for what, (passes, call) in calls.items():
            try:
                seconds = seconds_by_events(event, call, plan.rounds)
                figures.add(Row(what, 1, size, passes * size, seconds))
            except RuntimeError as error:
                figures.miss(what, str(error).splitlines()[0])


def time_cupy(figures: Figures, plan: argparse.Namespace) -> None:
    try:
        import cupy
    except ImportError:
        figures.miss("CuPy", "not installed")
        return

    def event() -> Any:
        made = cupy.cuda.Event()
        made.record()
        return made

    body = "float v = x * scale; y = v; if (!isfinite(v)) found[0] = 1.0f"
    fused = cupy.ElementwiseKernel(
        "float32 x, float32 scale", "float16 y, raw float32 found", body, "cast_scale_check"
    )
    for size in plan.sizes:
        x = cupy.ones(size // FLOAT, dtype=cupy.float32)
        half, found = cupy.empty_like(x, dtype=cupy.float16), cupy.zeros(1, dtype=cupy.float32)
        calls: dict[str, Callable[[], Any]] = {
            "cupy: copyto float16": lambda: cupy.copyto(half, x),  # noqa: B023
            "cupy: one fused kernel": lambda: fused(x, SCALE, half, found),  # noqa: B023
        }
        for what, call in calls.items():
            try:
                seconds = seconds_by_events(event, call, plan.rounds)
            except Exception as error:  # it compiles its kernels here, and has classes for that
                figures.miss(what, str(error).splitlines()[0])
            else:
                figures.add(Row(what, 1, size, 1.5 * size, seconds))


# ---- Processes that share the GPU ----


def all_reduce(tensor: Any) -> None:
    import torch.distributed as dist

    dist.all_reduce(tensor)


def symmetric_memory(name: str, device: str, count: int) -> tuple[Any, Callable[[Any], None]]:
    """A tensor in torch's symmetric memory, and one of the kernels that torch has for it."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as memory

    group = dist.group.WORLD.group_name
    tensor = memory.empty(count, dtype=torch.float32, device=torch.device(device))
    memory.rendezvous(tensor, group)
    kernel = getattr(torch.ops.symm_mem, name)
    return tensor, lambda t: kernel(t, "sum", group)


# Backend of the group, and the kernel of torch's symmetric memory.
CONTENDERS = {
    "pycoll": ("pycoll", ""),
    "gloo": ("gloo", ""),
    "symm_mem two_shot": ("gloo", "two_shot_all_reduce_"),
}


def run_rank(
    rank: int, ranks: int, directory: str, who: str, device: str, sizes: Sequence[int], rounds: int
) -> None:
    import torch
    import torch.distributed as dist

    backend, kernel = CONTENDERS[who]
    if backend == "pycoll":
        import pycoll  # noqa: F401  registers the backend
    torch.set_num_threads(1)
    synchronize = (lambda: None) if device == "cpu" else torch.cuda.synchronize
    store = dist.FileStore(str(Path(directory) / "store"), ranks)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    # Ranks meet on the CPU, whatever the contender does.
    meeting = dist.new_group(list(range(ranks)), backend="gloo")
    seconds: list[list[float]] = []
    for size in sizes:
        if kernel:
            tensor, call = symmetric_memory(kernel, device, size // FLOAT)
        else:
            tensor, call = torch.empty(size // FLOAT, device=device), all_reduce
        tensor.fill_(rank + 1)
        call(tensor)
        synchronize()
        if not bool((tensor == ranks * (ranks + 1) / 2).all()):
            raise RuntimeError(f"wrong sums at {size} bytes")
        calls = max(1, min(50, (1 << 30) // (size * ranks)))
        seconds.append([])
        for _ in range(rounds + 1):
            tensor.zero_()
            synchronize()
            dist.barrier(group=meeting)
            began = time.perf_counter()
            for _ in range(calls):
                call(tensor)
            synchronize()
            seconds[-1].append((time.perf_counter() - began) / calls)
    (Path(directory) / f"rank{rank}.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def time_processes(
    who: str, ranks: int, device: str, sizes: Sequence[int], rounds: int, limit: float = 120
) -> list[Row]:
    """all_reduce of `ranks` processes on one device; a round's time is its slowest rank's.

    Raises RuntimeError with the reason.
    """
    import torch.multiprocessing as mp
    from torch.multiprocessing.spawn import ProcessException

    multiprocessing.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="pycoll-bench-") as directory:
        arguments = (ranks, directory, who, device, tuple(sizes), rounds)
        running = mp.start_processes(
            run_rank, arguments, nprocs=ranks, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + limit
        try:
            while not running.join(timeout=1):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not done after {limit:g} s")
        except ProcessException as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from None
        finally:
            for process in running.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        files = [Path(directory) / f"rank{rank}.json" for rank in range(ranks)]
        by_rank = [json.loads(file.read_text()) for file in files]
    rows = []
    for i, size in enumerate(sizes):
        slowest = [max(times) for times in zip(*(rank[i] for rank in by_rank), strict=True)]
        what = f"processes: {who}"
        # The first round warms up.
        traffic = 2 * ranks * size
        rows.append(Row(what, ranks, size, traffic, slowest[1:], wanted_of(what, size)))
    return rows


def time_contenders(figures: Figures, plan: argparse.Namespace) -> None:
    for ranks in plan.ranks:
        for who in CONTENDERS:
            try:
                figures.add(*time_processes(who, ranks, "cuda:0", plan.sizes, plan.rounds))
            except RuntimeError as error:
                figures.miss(f"processes: {who}, {ranks} ranks", error)


# ---- All of it ----


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="64M and 256M, 2 and 4 ranks")
    parser.add_argument("--rounds", type=int, default=0, help="default: 11, with --quick 5")
    parser.add_argument("--require", action="store_true", help="exit code 1 where one is missed")
    parser.add_argument("--json", type=output_file, help="the file to write everything to")
    plan = parser.parse_args(arguments)
    plan.sizes = [64 * MB, 256 * MB] if plan.quick else [s * MB for s in (1, 16, 64, 256)]
    plan.ranks = [2, 4] if plan.quick else [2, 4, 8]
    plan.rounds = plan.rounds or (5 if plan.quick else 11)
    return plan


def why_no_gpu() -> str:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU"


def measure(plan: argparse.Namespace) -> Figures:
    """Raises RuntimeError where the program that times kernels cannot be made or run."""
    import helpers_gpu_program

    program = helpers_gpu_program.build()
    if not isinstance(program, Path):
        raise RuntimeError(program)
    copy = time_kernel(program, "copy", 1, 1 << 30, plan.rounds)
    print(HEADER)
    figures = Figures(copy.traffic / copy.median)
    figures.add(copy)
    time_kernels(figures, program, plan)
    time_torch(figures, plan)
    time_cupy(figures, plan)
    time_contenders(figures, plan)
    return figures


def main() -> int:
    plan = parse()
    if reason := why_no_gpu():
        print(f"nothing was measured: {reason}")
        return 1
    import torch

    facts = {**machine(), "gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    print("\n".join([*machine_lines(facts), f"gpu       {facts['gpu']}, CUDA {facts['cuda']}"]))
    try:
        figures = measure(plan)
    except RuntimeError as error:
        print(f"nothing was measured: {error}")
        return 1
    print("\n".join(summary(figures)))
    if plan.json:
        plan.json.write_text(json.dumps(as_json(figures, facts), indent=1) + "\n")
    missed = [row for row in figures.rows if row.share(figures.bandwidth) < row.wanted]
    return 1 if plan.require and missed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
