"""`pycoll demo`: trains a character transformer on several ranks of this machine."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycoll.cli.usage import UsageError

if TYPE_CHECKING:
    from pycoll.demo.worker import Job

DESCRIPTION = """\
Trains a character transformer (0.8 million parameters) on the text of CPython's language reference
with torch's own DistributedDataParallel and elastic launcher, until its loss on held-out text is
below the trigram entropy of that text and below 1.4 nats a character. Two cores need one to two
minutes. The exit code is 1 when the target was not reached."""

MOST_NATS = 1.4


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo", help="train a small transformer on several ranks", description=DESCRIPTION
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument(
        "--backend",
        default="pycoll",
        choices=("pycoll", "gloo"),
        help="torch.distributed backend (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=600, help="length of the schedule (default: %(default)s)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=16,
        help="sequences a step over all ranks, rounded up to a multiple of them "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--until",
        type=float,
        metavar="NATS",
        help="stop when the validation loss is below this (default: the trigram entropy of the "
        f"validation text, {MOST_NATS} at most; 0: train to the end of the schedule)",
    )
    parser.add_argument(
        "--stop-after", type=int, metavar="STEP", help="stop there, to resume later"
    )
    parser.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="stop after so much training"
    )
    parser.add_argument("--threads", type=int, help="compute threads a rank (default: cores/ranks)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        help="folder for loss.png, history.json and checkpoint.pt (default: %(default)s)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the checkpoint in the output folder"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    started = time.time()
    for name in ("ranks", "steps", "batch", "stop_after", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} must be at least 1, not {value}")
    for module in ("torch", "tqdm", "matplotlib"):
        require(module)
    job = make_job(arguments, started)
    if arguments.resume and not (job.output / "checkpoint.pt").exists():
        raise UsageError(f"--resume: there is no checkpoint.pt in {job.output}")
    job.output.mkdir(parents=True, exist_ok=True)
    reached = launch(job, arguments.ranks)
    if reached is None:
        return 1
    print(f"\n  written: {', '.join(sorted(str(p) for p in job.output.iterdir()))}")
    if not reached:
        print("pycoll demo: the target was not reached", file=sys.stderr)
    return 0 if reached else 1


def require(module: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        hint = "see pytorch.org" if module == "torch" else "pip install 'pycoll[demo]'"
        raise UsageError(f"the demo needs {module}, which is not installed: {hint}")


def make_job(arguments: argparse.Namespace, started: float) -> Job:
    """Says what will be trained on what, and returns it."""
    from pycoll.demo.report import Yardsticks
    from pycoll.demo.text import load_corpus
    from pycoll.demo.train import TrainConfig
    from pycoll.demo.worker import Job, default_threads

    corpus = load_corpus()
    yardsticks = Yardsticks.of(corpus)
    target = min(MOST_NATS, yardsticks.entropy) if arguments.until is None else arguments.until
    aim = f"validation loss below {target:.4f}" if target else "the end of the schedule"
    batch = -(-arguments.batch // arguments.ranks) * arguments.ranks
    threads = arguments.threads or default_threads(arguments.ranks)
    print(
        f"  text       pydoc_data.topics: {len(corpus.train):,} characters to train on, "
        f"{len(corpus.validation):,} held out (sha256 {corpus.sha256[:12]})\n"
        f"  trigrams   entropy of the held-out text {yardsticks.entropy:.4f} nats a character; "
        f"a trigram model of the training text reaches {yardsticks.fitted:.4f}\n"
        f"  target     {aim}\n"
        f"  ranks      {arguments.ranks} over {arguments.backend}, {threads} "
        f"thread{'s' if threads > 1 else ''} each, {batch} sequences a step in all",
        flush=True,
    )
    config = TrainConfig(
        steps=arguments.steps,
        batch=batch,
        warmup=min(40, arguments.steps),
        seed=arguments.seed,
        until=target or None,
        stop_after=arguments.stop_after,
        time_limit=arguments.time_limit,
        checkpoint=arguments.output / "checkpoint.pt",
        resume=arguments.resume,
    )
    return Job(config, arguments.backend, threads, arguments.output, started, arguments.quiet)


def launch(job: Job, ranks: int) -> bool | None:
    """Runs `job` in `ranks` processes; whether rank 0 reached the target.

    None when a rank failed; its exception and traceback, or its signal, are on standard error.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from pycoll.demo.worker import work

    # It logs a failure three times over; the failure is printed below.
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    with temporary_files() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            results: dict[int, bool] = elastic_launch(config, work)(job)
        except ChildFailedError as error:
            for rank, failure in sorted(error.failures.items()):
                print(f"pycoll demo: rank {rank} failed: {describe(failure)}", file=sys.stderr)
            return None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from error
            raise
    return results[0]


@contextlib.contextmanager
def temporary_files() -> Iterator[str]:
    """A folder for all temporary files: the launcher leaves its logs and error files behind."""
    before = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="pycoll-demo-") as folder:
        tempfile.tempdir = folder
        try:
            yield folder
        finally:
            tempfile.tempdir = before


def describe(failure: Any) -> str:
    """The exception and traceback of a rank, or the signal that ended it."""
    message = failure.message
    if isinstance(message, dict):
        message = message.get("extraInfo", {}).get("py_callstack") or message.get("message")
    return str(message).strip()
