"""torch.distributed on GPU tensors of several hosts, on the simulated device.

What ranks do is that of the tests on one host. Two to four ranks, on one GPU a host or a GPU each;
messages so small that most calls are summed inside of hosts first (docs/architecture.md).
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import helpers_gpu
import native_build
import simgpu
from helpers_gpu import DONE
from test_simgpu import DEVICE, every_collective
from test_simgpu_shared import capture
from test_simgpu_streams import memory_that_is_let_go, streams

# The first test compiles the device.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + 300)

SMALL = {"PYCOLL_WINDOW_BYTES": "4096", "PYCOLL_SLOT_BYTES": "1024"}


def on_hosts(hosts, function, *arguments, devices=1, env=SMALL, expected=DONE, **options):
    results = simgpu.ranks(
        len(hosts), function, *arguments, devices=devices, hosts=hosts, env=env, **options
    )
    assert [result.value for result in results] == [expected] * len(hosts)


@pytest.mark.parametrize(("hosts", "devices"), [("aabb", 1), ("abab", 8)])
def test_every_collective(hosts, devices):
    on_hosts(
        hosts,
        every_collective,
        ["float32", "bfloat16"],
        [(0,), (7,), (1501,)],
        devices=devices,
        expected="done",
        timeout=200,
    )


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_sums_of_fractions(hosts):
    on_hosts(hosts, helpers_gpu.sums_of_fractions, DEVICE, 1501, timeout=120)


def test_calls_in_flight_on_two_groups():
    on_hosts("aab", helpers_gpu.asynchronous, DEVICE, 900, 3, timeout=120)


# Small calls go through host memory as a whole, and their order is that of streams, too.
@pytest.mark.parametrize("env", [SMALL, {}])
def test_calls_take_their_place_on_the_current_stream(env):
    on_hosts("aab", streams, env=env, expected="done", timeout=120)


def test_memory_that_is_let_go():
    on_hosts("ab", memory_that_is_let_go, expected="done", timeout=120)


def test_replays_of_a_graph():
    on_hosts("aab", helpers_gpu.replayed, DEVICE, capture, 5, timeout=120)


@pytest.mark.parametrize("hook", [False, pytest.param(True, marks=pytest.mark.full)])
def test_training_of_the_demo(hook):
    on_hosts("ab", helpers_gpu.trains_as_one_process, DEVICE, hook, 4, timeout=250)


def calls_ahead_of_a_late_rank(rank, w):
    tensors = [torch.full((2000,), float(rank), device=DEVICE) for _ in range(20)]
    dist.all_reduce(tensors[0])
    torch.accelerator.synchronize()
    if rank == w - 1:
        time.sleep(1)
    began = time.monotonic()
    for tensor in tensors[1:]:
        dist.all_reduce(tensor)
    took = time.monotonic() - began
    totals = {tensor.cpu().unique().item() for tensor in tensors}
    assert totals == {w * (w - 1) / 2}
    return took


def test_calls_do_not_wait_for_a_late_rank():
    results = simgpu.ranks(
        3, calls_ahead_of_a_late_rank, devices=1, hosts="aab", env=SMALL, timeout=60
    )
    assert all(result.value < 0.8 for result in results), [r.value for r in results]


@pytest.mark.parametrize("env", [SMALL, {}])
def test_a_killed_rank_is_named_on_both_hosts(env):
    results = simgpu.ranks(
        3,
        helpers_gpu.last_rank_is_killed,
        DEVICE,
        devices=1,
        hosts="aab",
        env=env,
        timeout=60,
        check=False,
    )
    for result in results[:2]:
        assert result.error is None, result.report()
        took, message = result.value
        assert took < 3 and "rank 2" in message, message
