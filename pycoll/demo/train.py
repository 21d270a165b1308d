"""Training of the demo: one function, `run`, the same for one process and for many ranks.

Run in each rank of an initialised process group it trains with torch's own
DistributedDataParallel; without a process group it trains alone. The global batch of a step does
not depend on the number of ranks, so neither does the loss curve (to rounding).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pycoll.demo import checkpoint
from pycoll.demo.communication import BackwardWait
from pycoll.demo.model import CharTransformer, ModelConfig
from pycoll.demo.text import Corpus, Sampler, load_corpus


@dataclass(frozen=True)
class TrainConfig:
    """What is trained, and how. Times are seconds, lengths characters, losses nats a character."""

    steps: int = 600  # the learning-rate schedule ends here
    batch: int = 16  # sequences a step, over all ranks
    length: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    learning_rate: float = 4e-3
    warmup: int = 40
    weight_decay: float = 0.1
    gradient_norm: float = 1.0
    seed: int = 1
    dtype: str = "float32"
    report_every: int = 10
    validate_every: int = 50  # 0: never
    until: float | None = None  # stop once the validation loss is below this
    stop_after: int | None = None  # stop (and save) after this many steps, as if interrupted
    time_limit: float | None = None  # stop (and save) after so long
    checkpoint: Path | None = None  # the file to save to
    checkpoint_every: int = 100
    resume: bool = False

    # Fields that may differ between a run and the run that resumes it.
    FREE = frozenset(
        {
            "report_every",
            "validate_every",
            "until",
            "stop_after",
            "time_limit",
            "checkpoint",
            "checkpoint_every",
            "resume",
        }
    )

    def fixed(self) -> dict[str, Any]:
        """The fields that a resumed run must share with the run it continues."""
        return {name: value for name, value in asdict(self).items() if name not in self.FREE}


@dataclass
class History:
    """What happened. Losses are nats a character, means over all ranks."""

    backend: str = "one process"
    ranks: int = 1
    parameters: int = 0
    train: list[float] = field(default_factory=list)  # one loss a step
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    tokens: int = 0
    seconds: float = 0.0  # of training steps, without validation and checkpoints
    communication: float = 0.0  # of these, waiting for gradients (mean over ranks)
    reached: bool = False

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def communication_share(self) -> float:
        return self.communication / self.seconds if self.seconds else 0.0


Report = Callable[[History], None]


def run(
    config: TrainConfig, corpus: Corpus | None = None, report: Report | None = None
) -> tuple[History, CharTransformer]:
    """Trains and returns the history and the trained model; call it in every rank.

    `report` is called in each rank after every `report_every` steps and every validation. Raises
    ValueError when the ranks cannot share the batch equally or a checkpoint belongs to another
    run, FileNotFoundError when there is nothing to resume.
    """
    trainer = Trainer(config, corpus or load_corpus())
    if config.resume:
        trainer.load()
    trainer.train(report or (lambda _: None))
    return trainer.history, trainer.model


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then linear decay to a twentieth at the last step."""
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    return config.learning_rate * warm * (1 - 0.95 * step / config.steps)


class Trainer:
    """The state of a run in one rank."""

    def __init__(self, config: TrainConfig, corpus: Corpus) -> None:
        self.config = config
        self.corpus = corpus
        self.together = dist.is_initialized()
        self.rank = dist.get_rank() if self.together else 0
        self.ranks = dist.get_world_size() if self.together else 1
        if config.batch % self.ranks:
            raise ValueError(
                f"a global batch of {config.batch} sequences cannot be shared equally by "
                f"{self.ranks} ranks: choose a multiple of {self.ranks}"
            )
        self.sampler = Sampler(corpus.train, config.batch, config.length, config.seed)
        torch.manual_seed(config.seed)
        sizes = (config.width, config.layers, config.heads, config.length)
        self.model = CharTransformer(ModelConfig(len(corpus.vocabulary), *sizes))
        self.model.to(getattr(torch, config.dtype))
        self.wait = BackwardWait()
        self.forward: nn.Module = self.model
        if self.together:
            self.forward = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
            self.forward.register_comm_hook(None, self.wait.hook)
        self.optimizer = make_optimizer(self.model, config)
        self.history = History(
            backend=dist.get_backend() if self.together else "one process",
            ranks=self.ranks,
            parameters=sum(p.numel() for p in self.model.parameters()),
        )
        self.pending: list[Tensor] = []  # local losses that the ranks have not averaged yet
        self.pending_seconds = 0.0

    @property
    def step(self) -> int:
        return len(self.history.train) + len(self.pending)

    def train(self, report: Report) -> None:
        config = self.config
        last = min(config.steps, config.stop_after or config.steps)
        while self.step < last and not self.history.reached:
            self._train_step()
            step = self.step
            validate = bool(config.validate_every) and (
                step % config.validate_every == 0 or step == config.steps
            )
            if not (validate or step % config.report_every == 0 or step == last):
                continue
            self._average()
            if validate:
                self._validate()
            report(self.history)
            # Averaged over the ranks like everything in the history, so all of them agree to stop.
            if config.time_limit is not None and self.history.seconds > config.time_limit:
                last = step
            if step % config.checkpoint_every == 0 or step == last or self.history.reached:
                self.save()

    def _train_step(self) -> None:
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step)
        rows = self.sampler.rows(self.step, self.rank, self.ranks)
        loss = cross_entropy(self.forward, rows)
        self.wait.start()
        loss.backward()
        self.wait.stop()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.gradient_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.pending.append(loss.detach())
        self.pending_seconds += time.perf_counter() - start

    def _average(self) -> None:
        """Moves what is pending into the history, averaged over the ranks in one all-reduce."""
        local = [loss.item() for loss in self.pending]
        local += [self.pending_seconds, self.wait.seconds]
        values = torch.tensor(local, dtype=torch.float64)
        if self.together:
            dist.all_reduce(values)
            values /= self.ranks
        *losses, seconds, communication = values.tolist()
        history = self.history
        history.train += losses
        history.tokens += len(losses) * self.config.batch * self.config.length
        history.seconds += seconds
        history.communication += communication
        self.pending, self.pending_seconds, self.wait.seconds = [], 0.0, 0.0

    @torch.no_grad()
    def _validate(self) -> None:
        """Loss of all of the validation text in windows of `length`, shared out over the ranks."""
        text, length = self.corpus.validation, self.config.length
        count = (len(text) - 1) // length
        starts = torch.arange(self.rank, count, self.ranks) * length
        total = torch.zeros(2, dtype=torch.float64)
        for some in starts.split(16):
            rows = text[some[:, None] + torch.arange(length + 1)]
            total[0] += cross_entropy(self.model, rows).item() * len(rows)
            total[1] += len(rows)
        if self.together:
            dist.all_reduce(total)
        loss = (total[0] / total[1]).item()
        self.history.validation.append((self.step, loss))
        self.history.reached = self._below_target()

    def _below_target(self) -> bool:
        until, validation = self.config.until, self.history.validation
        return until is not None and bool(validation) and validation[-1][1] < until

    def save(self) -> None:
        """Rank 0 writes the checkpoint; the state is the same on all ranks."""
        if self.config.checkpoint is None or self.rank != 0:
            return
        state = {
            "config": self.config.fixed(),
            "text": self.corpus.sha256,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "history": asdict(self.history),
        }
        checkpoint.save(self.config.checkpoint, state)

    def load(self) -> None:
        """Continues from `config.checkpoint`."""
        if self.config.checkpoint is None:
            raise ValueError("resume needs the path of a checkpoint")
        state = checkpoint.load(self.config.checkpoint)
        theirs = state["config"] | {"text": state["text"]}
        checkpoint.must_match(theirs, self.config.fixed() | {"text": self.corpus.sha256})
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        here = {"backend": self.history.backend, "ranks": self.ranks}
        self.history = History(**(state["history"] | here))
        self.history.reached = self._below_target()


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; gains and other vectors are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def cross_entropy(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean loss of predicting each character of `rows` (n, length + 1) but the first."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
