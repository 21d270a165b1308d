"""Trains with Ray Train: `ray_script.py BACKEND DIRECTORY`. Nothing imports pycoll by name."""

from __future__ import annotations

import sys
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

WORKERS = 2


def train(config: dict[str, Any]) -> None:
    """One worker, in a process that Ray has started."""
    sys.path.insert(0, config["scripts"])
    import torch.distributed as dist
    from job import EPOCHS, dataset, model, optimizer, report
    from torch import nn
    from torch.utils.data import DataLoader

    assert dist.get_backend() == config["backend"]
    rank = ray.train.get_context().get_world_rank()
    wrapped = ray.train.torch.prepare_model(model())
    loader = ray.train.torch.prepare_data_loader(DataLoader(dataset(), batch_size=4))
    stepper = optimizer(wrapped.parameters())
    losses = []
    for epoch in range(EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            stepper.zero_grad()
            loss = nn.functional.mse_loss(wrapped(x), y)
            loss.backward()
            stepper.step()
            losses.append(loss.item())
        ray.train.report({"loss": losses[-1]})
    report(config["directory"], rank, wrapped.module, losses=losses)


def main(backend: str, directory: str) -> None:
    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, object_store_memory=100 << 20)
    trainer = TorchTrainer(
        train,
        train_loop_config={"backend": backend, "directory": directory, "scripts": sys.path[0]},
        torch_config=TorchConfig(backend=backend),
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=False),
        run_config=RunConfig(storage_path=f"{directory}/ray"),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
