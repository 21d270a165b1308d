"""Training that survives the death of a process: torchrun starts all ranks again, and they go on
from the last checkpoint.

    torchrun --nproc-per-node 3 --max-restarts 2 examples/elastic.py

`--kill-at 5` shows it: rank 1 kills itself in that step, as the kernel does to one that takes too
much memory. Its peers raise `pycoll.PeerError` within a second, torchrun ends them and starts the
next generation, which ends with the same line, to the bit, as without the accident. A run resumes
from whatever is at `--checkpoint`: remove it for a new one.

Fits a line to noisy points. What makes it resume exactly: the checkpoint has model, optimizer and
step, appears as a whole (a rename), and the points of a step depend on step and rank alone.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycoll  # noqa: F401  registers the backend


def points_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.rand(64, 1, generator=generator)
    return x, 3 * x - 1 + 0.1 * torch.randn(64, 1, generator=generator)


def save(path: Path, state: dict) -> None:
    """A rank may die at any moment: readers see the old checkpoint or the new one, no half."""
    new = path.with_suffix(".new")
    torch.save(state, new)
    os.replace(new, path)


def train(path: Path, steps: int, kill_at: int | None) -> None:
    dist.init_process_group("pycoll")
    rank = dist.get_rank()
    # The first generation is 0. Outside of torchrun there is just that.
    generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    first = 0
    if path.exists():  # on several hosts: a file system that all of them see
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    print(f"rank {rank}, generation {generation}: from step {first}", flush=True)

    ddp = DistributedDataParallel(model)
    for step in range(first, steps):
        x, y = points_of(step, rank)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(ddp(x), y)
        if step == kill_at and rank == 1 and generation == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(path, {**state, "step": step + 1})

    line = f"y = {model.weight.item():.9f} x {model.bias.item():+.9f}"
    print(f"rank {rank}, generation {generation}: {line}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path(tempfile.gettempdir()) / "pycoll-elastic.pt"
    parser.add_argument("--checkpoint", type=Path, default=default)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--kill-at", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    train(args.checkpoint, args.steps, args.kill_at)


if __name__ == "__main__":
    main()
