"""The smallest DistributedDataParallel script: only the backend's name is pycoll's.

    torchrun --nproc-per-node 2 examples/ddp.py

Fits a line to noisy points; each rank sees its own points, all ranks end with the same line.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycoll  # noqa: F401  registers the backend


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("pycoll")
    rank = dist.get_rank()

    generator = torch.Generator().manual_seed(rank)
    x = torch.rand(256, 1, generator=generator)
    y = 3 * x - 1 + 0.1 * torch.randn(256, 1, generator=generator)

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    line = model.module
    print(f"rank {rank}: y = {line.weight.item():.6f} x {line.bias.item():+.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
