"""Trains with Hugging Face accelerate: `torchrun accelerate_script.py BACKEND DIRECTORY`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from job import EPOCHS, dataset, model, optimizer, report
from torch import nn
from torch.utils.data import DataLoader


def main(backend: str, directory: str) -> None:
    dist.init_process_group(backend)  # before the Accelerator, which takes it as it is
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert dist.get_backend() == backend
    rank = accelerator.process_index
    plain = model()
    # 24 rows in batches of 5: gather_for_metrics drops what pads the last one.
    wrapped, stepper, loader = accelerator.prepare(
        plain, optimizer(plain.parameters()), DataLoader(dataset(), batch_size=5)
    )
    losses, seen = [], []
    for epoch in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(wrapped):
                loss = nn.functional.mse_loss(wrapped(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), 0.5)
                stepper.step()
                stepper.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if epoch == 0:
                seen.append(accelerator.gather_for_metrics(y).sum().item())
        if epoch == 1:
            accelerator.save_state(f"{directory}/state")
    ragged = accelerator.pad_across_processes(torch.arange(2.0 + rank), dim=0)
    things = gather_object([rank, {"text": "x" * rank}])
    named = [{"from": rank}]
    broadcast_object_list(named, from_process=1)
    final = [p.detach().clone() for p in plain.parameters()]
    accelerator.load_state(f"{directory}/state")
    assert any(not torch.equal(p, q) for p, q in zip(plain.parameters(), final, strict=True))
    accelerator.wait_for_everyone()
    report(
        directory,
        rank,
        accelerator.unwrap_model(wrapped),
        losses=losses,
        final=[p.tolist() for p in final],
        gathered=[seen, accelerator.gather(ragged).tolist(), things, named],
    )
    accelerator.end_training()  # ends the group, too


if __name__ == "__main__":
    main(*sys.argv[1:])
