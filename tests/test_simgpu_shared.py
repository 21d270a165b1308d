"""What tests/gpu runs on a GPU, on the simulator: so short that it proves the tests' own code."""

from __future__ import annotations

import pytest
import torch

import helpers_gpu
import native_build
import simgpu
from helpers_gpu import DONE

DEADLINE_S = 240

# The first test of a build compiles it.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + DEADLINE_S)


def done(function, *arguments, devices=1, **options):
    results = simgpu.ranks(2, function, "simgpu", *arguments, devices=devices, **options)
    assert [result.value for result in results] == [DONE] * 2


@pytest.mark.parametrize("devices", [1, 8])
def test_collectives(devices):
    done(helpers_gpu.collectives, ["float32"], [1, 33], devices=devices, timeout=120)


def test_sums_of_fractions():
    done(helpers_gpu.sums_of_fractions, 300, timeout=60)


def test_calls_in_flight():
    done(helpers_gpu.asynchronous, 100, 3, timeout=60)


def capture(calls):
    machine = torch.simgpu.machine
    stream = torch.Stream(device="simgpu")
    with stream:
        machine.begin_capture(stream.stream_id)
        calls()
        graph = machine.end_capture(stream.stream_id)
    return lambda: machine.launch_graph(graph, torch.accelerator.current_stream().stream_id)


@pytest.mark.parametrize("devices", [1, 8])
def test_replays_of_a_graph(devices):
    done(helpers_gpu.replayed, capture, 5, devices=devices, timeout=60)


def test_training_of_the_demo():
    done(helpers_gpu.trains_as_one_process, False, 4, timeout=200)


def test_a_killed_rank_is_named():
    results = simgpu.ranks(
        2, helpers_gpu.last_rank_is_killed, "simgpu", devices=1, timeout=60, check=False
    )
    assert results[0].error is None, results[0].report()
    took, message = results[0].value
    assert took < 2 and "rank 1" in message
