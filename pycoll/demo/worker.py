"""One rank of the demo, as torch's elastic launcher starts it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from pycoll.demo import report
from pycoll.demo.text import load_corpus
from pycoll.demo.train import TrainConfig, run


@dataclass(frozen=True)
class Job:
    """What the launcher hands to every rank."""

    config: TrainConfig
    backend: str
    threads: int  # compute threads of this rank
    output: Path
    started: float  # time.time() at the start of the command
    quiet: bool = False


def work(job: Job) -> bool:
    """Trains in this rank; rank 0 also shows and writes the results.

    Returns whether the target was reached, True when none was set.
    """
    torch.set_num_threads(job.threads)
    if job.backend == "pycoll":
        import pycoll  # noqa: F401  registers the backend
    dist.init_process_group(job.backend)
    try:
        return _train(job, first=dist.get_rank() == 0)
    finally:
        dist.destroy_process_group()


def _train(job: Job, first: bool) -> bool:
    corpus = load_corpus()
    bar = report.ProgressBar(job.config.steps, quiet=job.quiet or not first)
    try:
        history, model = run(job.config, corpus, bar)
    finally:
        bar.close()
    if first:
        target = job.config.until
        yardsticks = report.Yardsticks.of(corpus)
        report.write_history(history, yardsticks, target, job.output / "history.json")
        report.plot(history, yardsticks, job.output / "loss.png")
        seconds = time.time() - job.started
        print(f"\n{report.summary(history, yardsticks, target, seconds)}\n", flush=True)
        print("  what it writes:\n", flush=True)
        lines = report.sample(model, corpus).splitlines()
        print("\n".join(f"  | {line}" for line in lines), flush=True)
    return history.reached or job.config.until is None


def default_threads(ranks: int) -> int:
    """Shares the CPUs this process may use among the ranks, one each at least."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)
