"""torch.distributed on GPU tensors: the order of streams, futures, memory, blocking, graphs.

As test_simgpu.py does it, on the simulated device.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import native_build
import simgpu
from test_simgpu import DEVICE, numbers, on_gpu, same

# The first test compiles the device.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + 300)


def streams(rank, w):
    """Nothing here waits for the device but the last line of each part."""
    machine = torch.simgpu.machine
    n = 5000
    everyone = [numbers(r, (n,), "float32") for r in range(w)]
    total = sum(everyone)
    result, copy = (torch.zeros(n, device=DEVICE) for _ in range(2))
    source = on_gpu(everyone[rank])
    dist.all_reduce(result)  # the first call meets the others
    torch.accelerator.synchronize()

    mine = torch.Stream(device=DEVICE)
    for asynchronous in (False, True):
        result.zero_()
        copy.zero_()
        torch.accelerator.synchronize()
        machine.hold_stream(mine.stream_id)
        with mine:
            result.copy_(source)  # comes before the call
            work = dist.all_reduce(result, async_op=asynchronous)
            if asynchronous:
                assert not work.is_completed()
                work.wait()  # orders the streams, and returns
            copy.copy_(result)  # comes after it
            end = torch.Event(DEVICE)
            end.record(mine)
        # All of it was queued while the stream was held.
        assert not end.query()
        machine.release_stream(mine.stream_id)
        end.synchronize()
        same(copy, total)
        if asynchronous:
            assert work.is_completed()
            assert work.is_success()

    # Work on another stream goes on while a call waits for its own.
    machine.hold_stream(mine.stream_id)
    with mine:
        work = dist.all_reduce(source, async_op=True)
    other = on_gpu(torch.ones(3))
    assert (other + 1).tolist() == [2, 2, 2]
    assert not work.is_completed()
    machine.release_stream(mine.stream_id)
    work.wait()
    same(source, total)
    return "done"


@pytest.mark.parametrize("devices", [8, 1])
@pytest.mark.parametrize("world_size", [2, 4])
def test_calls_take_their_place_on_the_current_stream(world_size, devices):
    results = simgpu.ranks(world_size, streams, devices=devices, timeout=60)
    assert [r.value for r in results] == ["done"] * world_size


def memory_that_is_let_go(rank, w):
    """Tensors whose last reference goes while the call still runs. The device overwrites and unmaps
    what is freed as soon as the streams that the allocator was told of have come to that point."""
    for _ in range(3):
        everyone = [numbers(r, (40000,), "float32") for r in range(w)]
        if rank != 0:
            time.sleep(0.2)  # rank 0 has dropped everything by then, and waits for the others' data
        mine = on_gpu(everyone[rank])
        outputs = [torch.zeros(40000, device=DEVICE) for _ in range(w)]
        work = dist.all_gather(outputs, mine, async_op=True)
        if rank == 0:
            del mine, outputs, work
            fresh = [torch.full((40000,), 99.0, device=DEVICE) for _ in range(w + 1)]
            torch.accelerator.synchronize()
            for tensor in fresh:
                assert tensor.cpu().unique().tolist() == [99.0]
        else:
            work.wait()
            for r in range(w):
                same(outputs[r], everyone[r])
    return "done"


@pytest.mark.parametrize("devices", [8, 1])
def test_memory_lives_as_long_as_calls_use_it(devices):
    results = simgpu.ranks(2, memory_that_is_let_go, devices=devices, timeout=60)
    assert [r.value for r in results] == ["done"] * 2


def futures(rank, w):
    everyone = [numbers(r, (600,), "float32") for r in range(w)]
    mine = on_gpu(everyone[rank])
    work = dist.all_reduce(mine, async_op=True)
    future = work.get_future()
    assert future.done()  # its value is in the order of streams
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    same(doubled, 2 * sum(everyone))
    assert future.wait()[0].data_ptr() == mine.data_ptr()
    assert work.result()[0].data_ptr() == mine.data_ptr()
    # Several calls as one.
    parts = [on_gpu(numbers(rank, (n,), "float32")) for n in (2, 0, 500)]
    with _coalescing_manager(async_ops=True) as manager:
        for part in parts:
            dist.all_reduce(part)
    manager.wait()
    for part, n in zip(parts, (2, 0, 500), strict=True):
        same(part, sum(numbers(r, (n,), "float32") for r in range(w)))
    group = dist.group.WORLD
    group._start_coalescing(torch.device(DEVICE))
    dist.all_reduce(mine, async_op=True)
    dist.broadcast(parts[2], 0, async_op=True)
    combined = group._end_coalescing(torch.device(DEVICE)).get_future()
    values = combined.wait()
    same(values[0], w * sum(everyone))
    same(values[1], parts[2].cpu())
    return "done"


def test_futures_know_their_device():
    assert [r.value for r in simgpu.ranks(2, futures, timeout=60)] == ["done"] * 2


def captured(rank, w):
    """A graph with synchronous and asynchronous calls in it, replayed between ordinary calls."""
    machine = torch.simgpu.machine
    stream = torch.Stream(device=DEVICE)
    mine, gathered = torch.zeros(300, device=DEVICE), torch.zeros(w * 300, device=DEVICE)
    other = torch.zeros(70, device=DEVICE)
    dist.all_reduce(other)
    torch.accelerator.synchronize()
    with stream:
        machine.begin_capture(stream.stream_id)
        dist.all_reduce(mine)
        work = dist.all_gather_into_tensor(gathered, mine, async_op=True)
        work.wait()
        graph = machine.end_capture(stream.stream_id)
    for round_ in range(4):
        everyone = [numbers(r, (300,), "float32", round_) for r in range(w)]
        mine.copy_(everyone[rank])
        torch.accelerator.synchronize()
        machine.launch_graph(graph, stream.stream_id)
        if round_ % 2:  # on another stream: in order with the graph all the same
            other.copy_(everyone[rank][:70])
            dist.all_reduce(other)
            same(other, sum(everyone)[:70])
        stream.synchronize()
        same(mine, sum(everyone))
        same(gathered, sum(everyone).repeat(w))
    return "done"


@pytest.mark.parametrize("devices", [8, 1])
def test_calls_in_a_graph(devices):
    results = simgpu.ranks(2, captured, devices=devices, timeout=60)
    assert [r.value for r in results] == ["done"] * 2


def blocking(rank, w):
    mine = on_gpu(numbers(rank, (50,), "float32"))
    dist.all_reduce(mine)  # the group has met
    torch.accelerator.synchronize()
    if rank == w - 1:
        time.sleep(0.5)
    began = time.monotonic()
    work = dist.all_reduce(mine, async_op=True)
    work.wait()
    waited = time.monotonic() - began
    finished = work.is_completed()
    dist.all_reduce(mine)
    return waited, finished


@pytest.mark.parametrize("variable", ["PYCOLL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"])
def test_wait_blocks_when_it_is_told_to(variable):
    results = simgpu.ranks(2, blocking, timeout=60, env={variable: "1"})
    waited, finished = results[0].value
    assert waited > 0.3 and finished


def test_wait_does_not_block():
    results = simgpu.ranks(2, blocking, timeout=60)
    waited, finished = results[0].value
    assert waited < 0.3 and not finished


def barriers(rank, w):
    if rank == 1:
        time.sleep(0.5)
    began = time.monotonic()
    dist.barrier(device_ids=[torch.accelerator.current_device_index()])
    waited = time.monotonic() - began
    work = dist.barrier(device_ids=[torch.accelerator.current_device_index()], async_op=True)
    work.wait()
    assert work.is_completed()
    dist.barrier()
    return waited


def test_barriers_of_devices_wait_for_all_ranks():
    results = simgpu.ranks(2, barriers, timeout=60)
    assert results[0].value > 0.3


def priorities(rank, w, expected):
    machine = torch.simgpu.machine
    dist.all_reduce(torch.ones(3, device=DEVICE), async_op=True).wait()
    pool = [torch.Stream(device=DEVICE).stream_id for _ in range(4)]
    assert {machine.stream_priority(stream) for stream in pool} == {0}
    return machine.high_priority_streams() == expected


@pytest.mark.parametrize(("value", "expected"), [("1", 1), ("0", 0)])
def test_streams_of_high_priority(value, expected):
    results = simgpu.ranks(2, priorities, expected, timeout=60, env={"PYCOLL_HIGH_PRIORITY": value})
    assert [r.value for r in results] == [True] * 2
