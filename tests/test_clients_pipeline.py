"""torch.distributed.pipelining on pycoll: each schedule equals one process, and Gloo."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from helpers_clients import EXACT, WORLD, Block, alike, batch, compare, plain

MICROBATCHES = 5  # of one row each: more than there are stages
STEPS = 4


def stage_module(index, stages):
    """One block a stage; the last one has the head, too."""
    with torch.random.fork_rng():
        torch.manual_seed(20 + index)
        block = Block(7, 13)
        if index < stages - 1:
            return block
        return nn.Sequential(block, nn.Linear(7, 3, dtype=torch.float64))


SCHEDULES = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero bubble": (ScheduleInterleavedZeroBubble, 2),
}


def microbatches(name, w):
    """Interleaved schedules take them in rounds of one a rank."""
    return 2 * w if SCHEDULES[name][1] > 1 else MICROBATCHES


def pipeline(rank, w, name):
    schedule_class, stages_a_rank = SCHEDULES[name]
    stages, count = w * stages_a_rank, microbatches(name, w)
    mine = range(rank, stages, w)
    modules = [stage_module(index, stages) for index in mine]
    placed = [
        PipelineStage(module, index, stages, torch.device("cpu"))
        for module, index in zip(modules, mine, strict=True)
    ]
    chain = placed if stages_a_rank > 1 else placed[0]
    # Each loss is a part of the mean over all rows: nothing is left to scale.
    schedule = schedule_class(chain, count, loss_fn=loss_over(count), scale_grads=False)
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], 0.05, momentum=0.9)
    losses = []
    x, y = rows(count)
    for _ in range(STEPS):
        optimizer.zero_grad()
        found = []
        arguments = (x,) if rank == 0 else ()
        target = y if rank == w - 1 else None
        schedule.step(*arguments, target=target, losses=found)
        optimizer.step()
        losses += [sum(loss.item() for loss in found)] if rank == w - 1 else []
    states = {str(index): plain(m.state_dict()) for index, m in zip(mine, modules, strict=True)}
    return {"losses": losses, "states": states}


def loss_over(count):
    return lambda output, target: nn.functional.mse_loss(output, target) / count


def rows(count):
    x, y = (torch.cat(tensors) for tensors in zip(*(batch(0, p) for p in range(2)), strict=True))
    return x[:count], y[:count]


def one_process(stages, count):
    modules = [stage_module(index, stages) for index in range(stages)]
    model = nn.Sequential(*modules)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    x, y = rows(count)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {str(index): plain(m.state_dict()) for index, m in enumerate(modules)}


def all_schedules(rank, w):
    return {name: pipeline(rank, w, name) for name in SCHEDULES}


def test_pipelines():
    results = compare(WORLD, all_schedules)
    for name, (_, stages_a_rank) in SCHEDULES.items():
        losses, states = one_process(WORLD * stages_a_rank, microbatches(name, WORLD))
        assert losses[-1] < losses[0]
        alike(results[-1][name]["losses"], losses, EXACT, name)
        found = {}
        for result in results:
            found.update(result[name]["states"])
        alike(dict(sorted(found.items())), dict(sorted(states.items())), EXACT, name)
