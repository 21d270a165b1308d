"""Training steps of DistributedDataParallel over Gloo, pycoll, and pycoll with shareable buckets.

    python benchmarks/ddp.py                       # both models, about 4 minutes
    python benchmarks/ddp.py --model mlp --runs 1
    python benchmarks/ddp.py --json ddp.json

All variants train side by side in the same processes, a block of steps each in turn, from the same
weights on the same data. `nothing` is the step without communication: its all-reduce returns at
once. All have the same malloc settings (`--malloc`): by default freed memory is kept, because half
of what shareable buckets would gain otherwise is page faults that glibc spares as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pycoll
from pycoll.bench.calls import make_group
from pycoll.bench.machine import machine, machine_lines
from pycoll.bench.measure import over_ranks
from pycoll.bench.plan import Contender, Plan
from pycoll.cli.usage import output_file
from pycoll.demo.model import CharTransformer, ModelConfig
from pycoll.demo.text import Sampler, load_corpus
from pycoll.demo.train import TrainConfig, cross_entropy, make_optimizer

# Freed memory stays in the process, whoever allocates.
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
WARMUP = 4  # steps; DDP rebuilds its buckets in the second
VARIANTS = {"gloo": "gloo", "pycoll": "pycoll", "shareable": "pycoll", "nothing": "gloo"}


@dataclass(frozen=True)
class Job:
    """What every rank trains; steps are counted for each variant."""

    model: str
    variants: tuple[str, ...]
    blocks: int = 6
    block: int = 4  # steps a turn
    batch: int = 16  # a rank for the MLP, of all ranks for the transformer, as in `pycoll demo`
    threads: int = 1
    seed: int = 1


@dataclass
class Outcome:
    """A variant in one run. Times are of the slowest rank."""

    step_ms: list[float] = field(default_factory=list)  # by block, mean of its steps
    losses: list[float] = field(default_factory=list)  # by step, mean over ranks
    tokens: int = 0  # characters a step, of all ranks; 0: not a model of text
    # In the steps that are timed, of rank 0; None: this build does not count.
    zero_copy_bytes: int | None = None
    staged_bytes: int | None = None

    @property
    def step(self) -> float:
        return statistics.median(self.step_ms)


class Mlp:
    """25.2 million parameters, the largest of them 64 MiB."""

    def __init__(self, job: Job) -> None:
        self.module: nn.Module = nn.Sequential(
            nn.Linear(1024, 4096),
            nn.ReLU(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, 1024),
        )
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(1000 + dist.get_rank())
        self.given = torch.randn(job.batch, 1024, generator=generator)
        self.wanted = torch.randn(job.batch, 1024, generator=generator)
        self.tokens = 0

    def loss(self, forward: nn.Module, step: int) -> Tensor:
        return nn.functional.mse_loss(forward(self.given), self.wanted)


class Transformer:
    """The demo's model, text, batches and optimizer."""

    def __init__(self, job: Job) -> None:
        self.config = TrainConfig(batch=job.batch)
        self.corpus = load_corpus()
        config = self.config
        sizes = (config.width, config.layers, config.heads, config.length)
        self.module: nn.Module = CharTransformer(ModelConfig(len(self.corpus.vocabulary), *sizes))
        self.optimizer = make_optimizer(self.module, config)
        self.sampler = Sampler(self.corpus.train, config.batch, config.length, config.seed)
        self.tokens = config.batch * config.length

    def loss(self, forward: nn.Module, step: int) -> Tensor:
        rows = self.sampler.rows(step, dist.get_rank(), dist.get_world_size())
        return cross_entropy(forward, rows)


MODELS = {"mlp": Mlp, "transformer": Transformer}


def leave_alone(state, bucket):  # DDP would compare annotations with its own
    """What DDP's own hook does, except for communication."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer().div_(dist.get_world_size()))
    return done


class Trainee:
    """One variant: its own group, weights, buckets and optimizer."""

    def __init__(self, job: Job, variant: str) -> None:
        self.variant = variant
        contender = Contender(VARIANTS[variant])
        self.group = make_group(contender, Plan((contender,), (4,)))
        torch.manual_seed(job.seed)
        self.model = MODELS[job.model](job)
        scope = pycoll.shareable() if variant == "shareable" else nullcontext()
        with scope:
            self.forward = DistributedDataParallel(
                self.model.module, process_group=self.group, gradient_as_bucket_view=True
            )
        if variant == "nothing":
            self.forward.register_comm_hook(None, leave_alone)
        self.steps = 0
        self.losses: list[Tensor] = []
        self.outcome = Outcome(tokens=self.model.tokens)

    def train(self, steps: int) -> float:
        """Seconds a step."""
        start = time.perf_counter()
        for _ in range(steps):
            loss = self.model.loss(self.forward, self.steps)
            loss.backward()
            self.model.optimizer.step()
            self.model.optimizer.zero_grad()
            self.losses.append(loss.detach())
            self.steps += 1
        return (time.perf_counter() - start) / steps

    def counted(self) -> dict[str, int] | None:
        if VARIANTS[self.variant] != "pycoll" or not hasattr(pycoll, "statistics"):
            return None
        counts: dict[str, int] = pycoll.statistics(self.group)
        return counts


def run_rank(rank: int, ranks: int, directory: str, job: Job, results: Connection) -> None:
    torch.set_num_threads(job.threads)
    store = dist.FileStore(str(Path(directory) / "store"), ranks)
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    try:
        outcomes = train_in_turn(job)
        if rank == 0:
            results.send(outcomes)
    finally:
        dist.destroy_process_group()


def train_in_turn(job: Job) -> dict[str, Outcome]:
    trainees = [Trainee(job, variant) for variant in job.variants]
    for trainee in trainees:
        trainee.train(WARMUP)
    before = [trainee.counted() for trainee in trainees]
    shuffle = random.Random(job.seed)  # the same on every rank
    order = list(trainees)
    for _ in range(job.blocks):
        shuffle.shuffle(order)
        for trainee in order:
            dist.barrier()
            trainee.outcome.step_ms.append(trainee.train(job.block) * 1e3)
    ranks = dist.get_world_size()
    for trainee, counts in zip(trainees, before, strict=True):
        outcome = trainee.outcome
        outcome.step_ms = over_ranks(outcome.step_ms, dist.ReduceOp.MAX)
        local = [loss.item() for loss in trainee.losses]
        outcome.losses = [total / ranks for total in over_ranks(local, dist.ReduceOp.SUM)]
        after = trainee.counted()
        if counts is not None and after is not None:
            outcome.zero_copy_bytes = after["zero_copy_bytes"] - counts["zero_copy_bytes"]
            outcome.staged_bytes = after["staged_bytes"] - counts["staged_bytes"]
    return {trainee.variant: trainee.outcome for trainee in trainees}


def run(job: Job, ranks: int) -> dict[str, Outcome]:
    """One run in fresh processes. Raises torch.multiprocessing's ProcessException."""
    context = get_context("spawn")  # so that they begin with the malloc settings
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="pycoll-ddp-") as directory, receiver:
        mp.spawn(run_rank, args=(ranks, directory, job, sender), nprocs=ranks)
        outcomes: dict[str, Outcome] = receiver.recv()
        return outcomes


@contextmanager
def environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def differing(outcomes: dict[str, Outcome], variant: str) -> float:
    """The largest relative difference of a loss from Gloo's at the same step."""
    pairs = zip(outcomes[variant].losses, outcomes["gloo"].losses, strict=True)
    return max(abs(own - gloo) / abs(gloo) for own, gloo in pairs)


@dataclass(frozen=True)
class Target:
    """`above` over `below`, in time of a step, and what it must be at least."""

    what: str
    above: str
    below: str
    wanted: float


TARGETS = {
    "mlp": (
        Target("pycoll, shareable buckets, over Gloo", "gloo", "shareable", 1.3),
        Target("pycoll, ordinary memory, over Gloo", "gloo", "pycoll", 1.15),
    ),
    "transformer": (
        Target("pycoll over no communication", "nothing", "pycoll", 0.95),
        Target("pycoll, shareable, over no communication", "nothing", "shareable", 0.95),
    ),
}


def report(model: str, runs: list[dict[str, Outcome]]) -> list[dict[str, Any]]:
    """Prints the variants and the targets; the targets as data."""
    for variant in runs[0]:
        print(variant_line(variant, [outcomes[variant] for outcomes in runs]))
    verdicts = []
    for target in TARGETS[model]:
        if not {target.above, target.below} <= runs[0].keys():
            continue
        ratios = [outcomes[target.above].step / outcomes[target.below].step for outcomes in runs]
        figure = statistics.median(ratios)
        verdict = {"reached": figure >= target.wanted, "figure": figure, "runs": ratios}
        verdicts.append(asdict(target) | verdict)
    for variant in ("pycoll", "shareable"):
        if {variant, "gloo"} <= runs[0].keys():
            verdicts.append(losses_as_gloo(variant, runs))
    if "shareable" in runs[0] and runs[0]["shareable"].staged_bytes is not None:
        staged = max(outcomes["shareable"].staged_bytes or 0 for outcomes in runs)
        what = "bytes of shareable buckets that were staged"
        verdicts.append({"what": what, "figure": staged, "wanted": 0, "reached": staged == 0})
    for verdict in verdicts:
        reached = "reached" if verdict["reached"] else "NOT reached"
        print(
            f"  {verdict['what']:<48} {verdict['figure']:>9.4g}  {verdict['wanted']:>6g}  {reached}"
        )
    return verdicts


def losses_as_gloo(variant: str, runs: list[dict[str, Outcome]]) -> dict[str, Any]:
    most = max(differing(outcomes, variant) for outcomes in runs)
    what = f"largest relative difference of a loss, {variant}"
    # Rounding of fp32 sums over many steps; on two ranks the losses are the same bits.
    return {"what": what, "figure": most, "wanted": 1e-3, "reached": most <= 1e-3}


def variant_line(variant: str, outcomes: list[Outcome]) -> str:
    steps = [outcome.step for outcome in outcomes]
    middle = statistics.median(steps)
    line = f"  {variant:<10} {middle:8.2f} ms a step ({min(steps):.2f}..{max(steps):.2f})"
    if outcomes[0].tokens:
        line += f"  {outcomes[0].tokens / middle * 1e3:8,.0f} characters/s"
    if outcomes[0].staged_bytes is not None:
        staged, direct = outcomes[0].staged_bytes, outcomes[0].zero_copy_bytes or 0
        line += f"  {staged / 1e6:,.1f} MB staged, {direct / 1e6:,.1f} MB in place"
    return f"{line}  last loss {outcomes[0].losses[-1]:.6f}"


def main() -> int:
    arguments = parse()
    if "shareable" in arguments.variants and not hasattr(pycoll, "shareable"):
        print("this build has no pycoll.shareable(): left out")
        arguments.variants.remove("shareable")
    facts = machine()
    print("\n".join(machine_lines(facts)))
    kept = arguments.malloc == "keep"
    print(f"malloc    {' '.join(f'{k}={v}' for k, v in KEPT.items()) if kept else 'as it is'}")
    threads = max(1, len(os.sched_getaffinity(0)) // arguments.ranks)
    result: dict[str, Any] = {"machine": facts, "malloc": KEPT if kept else {}, "models": {}}
    missed = False
    for model in arguments.model or MODELS:
        batch = arguments.batch
        print(
            f"\n{model}, batch {batch}, {arguments.ranks} ranks, {arguments.runs} runs", flush=True
        )
        runs = []
        for seed in range(1, arguments.runs + 1):
            blocks, block = arguments.blocks, arguments.steps
            job = Job(model, tuple(arguments.variants), blocks, block, batch, threads, seed)
            with environment(KEPT if kept else {}):
                runs.append(run(job, arguments.ranks))
        verdicts = report(model, runs)
        missed = missed or not all(verdict["reached"] for verdict in verdicts)
        figures = [{v: asdict(outcome) for v, outcome in outcomes.items()} for outcomes in runs]
        result["models"][model] = {"targets": verdicts, "runs": figures}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if missed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument(
        "--variants",
        type=lambda text: text.split(","),
        default=list(VARIANTS),
        help=f"default {','.join(VARIANTS)}",
    )
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--batch", type=int, default=16, help="default 16")
    parser.add_argument("--runs", type=int, default=5, help="in fresh processes (default 5)")
    parser.add_argument("--blocks", type=int, default=6, help="turns of a variant (default 6)")
    parser.add_argument("--steps", type=int, default=4, help="in a turn (default 4)")
    parser.add_argument("--malloc", choices=("keep", "default"), default="keep")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    arguments = parser.parse_args()
    for variant in arguments.variants:
        if variant not in VARIANTS:
            parser.error(f"--variants: no {variant!r}; there are: {', '.join(VARIANTS)}")
    if min(arguments.ranks, arguments.runs, arguments.blocks, arguments.steps) < 1:
        parser.error("--ranks, --runs, --blocks and --steps must be at least 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
