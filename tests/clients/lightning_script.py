"""Trains with Lightning: `lightning_script.py fabric|trainer BACKEND DIRECTORY`.

Lightning starts this script again for every other rank. That pycoll is known by its name there is
what torch's entry points are for: nothing here imports it.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import lightning
import torch
import torch.distributed as dist
from job import EPOCHS, dataset, model, optimizer, report
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

DEVICES = 2


def fabric(backend: str, directory: str) -> None:
    strategy = FabricDDP(process_group_backend=backend)
    runner = lightning.Fabric(accelerator="cpu", devices=DEVICES, strategy=strategy)
    runner.launch()
    plain = model()
    wrapped, stepper = runner.setup(plain, optimizer(plain.parameters()))
    loader = runner.setup_dataloaders(DataLoader(dataset(), batch_size=4))
    losses = []
    for _ in range(EPOCHS):
        for index, (x, y) in enumerate(loader):
            last = index % 2 == 1
            with runner.no_backward_sync(wrapped, enabled=not last):
                loss = nn.functional.mse_loss(wrapped(x), y)
                runner.backward(loss)
            if last:
                runner.clip_gradients(wrapped, stepper, max_norm=0.5)
                stepper.step()
                stepper.zero_grad()
            losses.append(runner.all_reduce(loss.detach(), reduce_op="mean").item())
    gathered = runner.all_gather(torch.arange(3) + runner.global_rank).tolist()
    text = runner.broadcast("from " + str(runner.global_rank), src=1)
    runner.barrier()
    runner.save(f"{directory}/fabric.ckpt", {"model": wrapped})
    report(directory, runner.global_rank, plain, losses=losses, gathered=[gathered, text])


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = model()
        self.losses: list[float] = []

    def step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.step(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation", self.step(batch), sync_dist=True)
        # A count: Lightning averages it over ranks as the integer that it is.
        self.log("rows", torch.tensor(len(batch[0])), sync_dist=True, reduce_fx="sum")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self.parameters())


def trainer(backend: str, directory: str) -> None:
    module = Module()
    runner = lightning.Trainer(
        accelerator="cpu",
        devices=DEVICES,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(dataset(), batch_size=4)
    runner.fit(module, loader, DataLoader(dataset(), batch_size=5))
    metrics = {name: float(value) for name, value in runner.callback_metrics.items()}
    fitted = [p.tolist() for p in module.parameters()]
    validated = runner.validate(module, DataLoader(dataset(), batch_size=5), verbose=False)
    report(
        directory,
        runner.global_rank,
        module.layers,
        losses=module.losses,
        gathered=[metrics, fitted, validated],
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"fabric": fabric, "trainer": trainer}[sys.argv[1]](*sys.argv[2:])
    # Lightning leaves its group to the interpreter's end, where Gloo's threads may abort it.
    if dist.get_backend() == "gloo":
        dist.destroy_process_group()
