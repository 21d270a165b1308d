"""Groups that are made of others on GPUs: split_group(), device meshes, groups bound to a device.

As test_simgpu.py does it, on the simulated device.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import native_build
import simgpu
from pool import run_ranks
from test_simgpu import DEVICE, same

# The first test compiles the device.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + 300)


def bound(rank, w, directory, libraries, function):
    """`function(rank, w)` in a default group that is bound to the rank's device."""
    torch.set_num_threads(1)
    simgpu.load(Path(libraries))
    device = torch.device(DEVICE, rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(
        "pycoll",
        store=dist.FileStore(f"{directory}/store", w),
        rank=rank,
        world_size=w,
        timeout=datetime.timedelta(seconds=30),
        device_id=device,
    )
    try:
        return function(rank, w)
    finally:
        dist.destroy_process_group()


def bound_ranks(world_size, function, devices=8):
    env = {"PYCOLL_SIM_DEVICES": str(devices)}
    libraries = str(simgpu.require())
    results = run_ranks(world_size, bound, libraries, function, env=env, timeout=120)
    return [result.value for result in results]


def sum_of(ranks, group, device):
    """The sum of the ranks' numbers, on the device and on the CPU."""
    mine = torch.full((5,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(mine, group=group)
    assert mine.tolist() == [float(sum(r + 1 for r in ranks))] * 5


def split(rank, w):
    pairs = [[0, 1], [2, 3]]
    mine = pairs[rank // 2]
    group = dist.split_group(split_ranks=pairs)
    assert dist.get_process_group_ranks(group) == mine
    assert dist.get_backend(group) == "pycoll"
    sum_of(mine, group, DEVICE)
    sum_of(mine, group, "cpu")
    # Only some ranks are in a group; and the same ranks once more, in a group of its own.
    some = dist.split_group(split_ranks=[[1, 3]])
    if rank in (1, 3):
        again = dist.split_group(split_ranks=[[0, 1]], parent_pg=some)
        for one in (some, again):
            sum_of((1, 3), one, DEVICE)
    else:
        assert some is None
    timed = dist.split_group(split_ranks=pairs, timeout=datetime.timedelta(seconds=7))
    backend = timed._get_backend(torch.device(DEVICE))
    assert backend.options._timeout == datetime.timedelta(seconds=7)
    sum_of(mine, timed, DEVICE)
    # The parent is as it was, and groups made the ordinary way are too.
    sum_of(range(w), None, DEVICE)
    ordinary = dist.new_group([0, 2])
    if rank in (0, 2):
        sum_of((0, 2), ordinary, DEVICE)
    return "done"


@pytest.mark.parametrize("devices", [8, 1])
def test_split_group(devices):
    assert bound_ranks(4, split, devices) == ["done"] * 4


def mesh(rank, w):
    grid = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("rows", "columns"))
    row, column = divmod(rank, 2)
    sum_of((column, column + 2), grid.get_group("rows"), DEVICE)
    sum_of((2 * row, 2 * row + 1), grid.get_group("columns"), DEVICE)
    return "done"


def test_a_device_mesh_of_a_bound_group():
    assert bound_ranks(4, mesh) == ["done"] * 4


def connected(rank, w):
    """The first call of a bound group finds everything made."""
    machine = torch.simgpu.machine
    before = machine.counters()
    mine = torch.ones(3, device=DEVICE)
    dist.all_reduce(mine)
    same(mine, torch.full((3,), float(w)))
    after = machine.counters()
    return before["imports"] > 0 and before["imports"] == after["imports"]


def test_a_bound_group_has_met_before_its_first_call():
    assert bound_ranks(2, connected) == [True] * 2
