"""torch.distributed on CUDA tensors, with all ranks on one GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import helpers_gpu
import helpers_gpu_codecs
from helpers_gpu import DONE
from pool import torch_ranks

DEVICE = "cuda:0"
WORLDS = [2, 4, 8]
DTYPES = ["float32", "bfloat16", "int64", "uint8"]
SIZES = [1, 7, 4099, 1 << 20]
START = 40  # seconds until 8 processes have a context each


def done(world_size, function, *arguments, timeout=60, **options):
    limits = {"timeout": START + timeout, "group_timeout": START}
    results = torch_ranks(world_size, function, DEVICE, *arguments, **limits, **options)
    assert [result.value for result in results] == [DONE] * world_size


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_collective_equals_a_reference(world_size):
    done(world_size, helpers_gpu.collectives, DTYPES, SIZES)


@pytest.mark.parametrize("world_size", WORLDS)
def test_sums_are_right_within_rounding(world_size):
    done(world_size, helpers_gpu.sums_of_fractions, 300_001)


def large(rank, w, device, n):
    mine = torch.full((n,), float(rank + 1), device=device)
    mine[::1000] = rank
    dist.all_reduce(mine)
    expected = torch.full((n,), w * (w + 1) / 2, device=device)
    expected[::1000] = w * (w - 1) / 2
    assert torch.equal(mine, expected)
    return DONE


def test_a_vector_of_a_gigabyte():
    done(2, large, 1 << 28)


def test_calls_in_flight_on_two_groups_and_streams():
    done(2, helpers_gpu.asynchronous, 100_000, 20)


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "fp16_hook"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_data_parallel_training_of_the_demo(world_size, hook):
    done(world_size, helpers_gpu.trains_as_one_process, hook)


def capture(calls):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph.replay


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_thousand_replays_of_a_graph_among_eager_calls(world_size):
    done(world_size, helpers_gpu.replayed, capture, 1000)


@pytest.mark.parametrize("world_size", [2, 4])
def test_calls_over_codecs_have_the_bits_of_the_cpu(world_size):
    done(world_size, helpers_gpu_codecs.over_codecs)
    done(world_size, helpers_gpu_codecs.replayed_over_codecs, capture)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_killed_rank_is_named(world_size):
    results = torch_ranks(
        world_size,
        helpers_gpu.last_rank_is_killed,
        DEVICE,
        timeout=START + 30,
        group_timeout=START,
        check=False,
    )
    for result in results[:-1]:
        assert result.error is None, result.report()
        took, message = result.value
        assert took < 2
        assert f"rank {world_size - 1}" in message
