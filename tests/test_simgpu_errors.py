"""torch.distributed on GPU tensors: what goes wrong, and what it says.

As test_simgpu.py does it, on the simulated device.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import native_build
import simgpu
from test_simgpu import DEVICE, same

# The first test compiles the device.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + 300)


def raised(call):
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as caught:
        call()
    return str(caught.value)


def wrong_calls(rank, w):
    gpu, cpu = torch.ones(3, device=DEVICE), torch.ones(3)
    message = raised(lambda: dist.all_gather([gpu.clone(), cpu], gpu))
    assert "one device" in message and "cpu" in message and f"{DEVICE}:{rank}" in message
    if torch.accelerator.device_count() > 1:
        other = torch.ones(3, device=f"{DEVICE}:{(rank + 1) % 2}")
        assert "one device" in raised(lambda: dist.all_gather_into_tensor(other.repeat(w), gpu))
    assert "overlapping" in raised(lambda: dist.all_reduce(gpu[:1].expand(4)))
    # Nothing of this has hurt the group.
    dist.all_reduce(gpu)
    same(gpu, torch.full((3,), float(w)))
    return "done"


def test_wrong_calls_are_refused():
    assert [r.value for r in simgpu.ranks(2, wrong_calls, timeout=60)] == ["done"] * 2


def no_library(rank, w):
    gpu = torch.ones(3, device=DEVICE)
    calls = [
        lambda: dist.all_reduce(gpu),
        lambda: dist.all_reduce(gpu, async_op=True),
        lambda: dist.isend(gpu, 1 - rank),
        lambda: dist.irecv(gpu, 1 - rank),
    ]
    for call in calls:
        message = raised(call)
        assert "'simgpu'" in message and "pycoll doctor" in message
    cpu = torch.ones(3)
    dist.all_reduce(cpu)
    return cpu.tolist()


def test_devices_without_a_library_are_an_error_that_says_so():
    results = simgpu.ranks(
        2, no_library, library=None, backend="cpu:pycoll,simgpu:pycoll", timeout=60
    )
    assert [r.value for r in results] == [[2.0] * 3] * 2


def wrong_libraries(rank, w, directory):
    from pycoll import _native

    assert "cannot open" in raised(lambda: _native.load_device_library(f"{directory}/none.so"))
    core = native_build.core_library()
    assert "no GPU library" in raised(lambda: _native.load_device_library(core))
    known = f"{directory}/{simgpu.LIBRARY}"
    assert "open already" in raised(lambda: _native.load_device_library(known))
    return _native.load().device_libraries()


def test_what_is_no_library_is_refused():
    results = simgpu.ranks(1, wrong_libraries, str(simgpu.require()), timeout=60)
    assert results[0].value == ["simgpu"]


def late_peer(rank, w):
    gpu = torch.ones(3, device=DEVICE)
    dist.all_reduce(gpu)
    torch.accelerator.synchronize()
    if rank == 1:
        time.sleep(4)
        return "late", ""
    began = time.monotonic()
    work = dist.all_reduce(gpu, async_op=True)
    message = raised(lambda: work.wait(datetime.timedelta(milliseconds=200)))
    assert "goes on" in message and time.monotonic() - began < 1
    # The group's own limit: whoever waits for the GPU is let go.
    with contextlib.suppress(RuntimeError):
        torch.accelerator.synchronize()
    took = time.monotonic() - began
    message = raised(work.wait)
    assert not work.is_success()
    return took, message, raised(lambda: dist.all_reduce(gpu))


def test_a_peer_that_does_not_come_is_an_error():
    results = simgpu.ranks(2, late_peer, group_timeout=1.5, timeout=60)
    took, message, later = results[0].value
    assert took < 3.5
    assert "rank 1" in message and later == message


def late_where_a_gpu_is_shared(rank, w):
    gpu = torch.ones(3, device=DEVICE)
    dist.all_reduce(gpu)
    torch.accelerator.synchronize()
    if rank == 1:
        time.sleep(5)
        return "late"
    began = time.monotonic()
    dist.all_reduce(gpu)
    with contextlib.suppress(RuntimeError):
        torch.accelerator.synchronize()  # nothing that runs there looks at a clock
    took = time.monotonic() - began
    return took, raised(lambda: dist.all_reduce(gpu))


def test_whoever_waits_for_a_shared_gpu_is_let_go():
    results = simgpu.ranks(
        2, late_where_a_gpu_is_shared, devices=1, group_timeout=1.5, timeout=60, check=False
    )
    assert results[0].error is None, results[0].report()
    took, message = results[0].value
    assert took < 4 and "waiting for rank 1" in message


def mismatched(rank, w):
    gpu = torch.ones(3 + rank, device=DEVICE)
    dist.all_reduce(torch.ones(3, device=DEVICE))
    torch.accelerator.synchronize()
    work = dist.all_reduce(gpu, async_op=True)
    message = raised(lambda: work.wait(datetime.timedelta(seconds=10)))
    assert not work.is_success() and work.is_completed()
    return message, gpu.cpu().tolist()


def test_sizes_that_differ_where_a_gpu_is_shared():
    results = simgpu.ranks(2, mismatched, devices=1, timeout=60)
    for rank, result in enumerate(results):
        message, values = result.value
        assert "sizes differ" in message
        assert "3 x float32" in message and "4 x float32" in message
        assert values == [1.0] * (3 + rank)  # nothing was written


def failed_gpu(rank, w, before_the_first_call):
    machine = torch.simgpu.machine
    gpu = torch.ones(3, device=DEVICE)
    if not before_the_first_call:
        dist.all_reduce(gpu)
        torch.accelerator.synchronize()
    began = time.monotonic()
    if rank == 1:
        machine.poison_device(torch.accelerator.current_device_index(), 700)
    message = raised(lambda: [dist.all_reduce(gpu), time.sleep(1), dist.all_reduce(gpu)])
    return time.monotonic() - began, message


@pytest.mark.parametrize("before_the_first_call", [True, False])
@pytest.mark.parametrize("devices", [8, 1])
def test_a_failed_gpu_is_named_on_all_ranks(devices, before_the_first_call):
    results = simgpu.ranks(2, failed_gpu, before_the_first_call, devices=devices, timeout=60)
    took, message = results[0].value
    assert took < 5
    assert "rank 1" in message and "cudaErrorIllegalAddress" in message


def failed_gpu_in_a_message(rank, w):
    gpu = torch.ones(3, device=DEVICE)
    if rank == 1:
        torch.simgpu.machine.poison_device(torch.accelerator.current_device_index(), 700)
    return raised(lambda: dist.send(gpu, 0) if rank == 1 else dist.recv(gpu, 1))


def test_a_gpu_that_fails_before_it_sends_is_named():
    results = simgpu.ranks(2, failed_gpu_in_a_message, timeout=60)
    assert "rank 1" in results[0].value and "cudaErrorIllegalAddress" in results[0].value


def forked(rank, w):
    gpu = torch.ones(3, device=DEVICE)
    work = dist.all_reduce(gpu, async_op=True)
    work.wait()
    torch.accelerator.synchronize()
    time.sleep(0.3)  # the watchdog waits for its next look
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            work.is_completed()
        with contextlib.suppress(BaseException):
            dist.destroy_process_group()
        del work
        gc.collect()
        os._exit(0)
    deadline = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "the child hangs"
        time.sleep(0.01)
    dist.all_reduce(gpu)
    same(gpu, torch.full((3,), float(w * w)))
    return "done"


@pytest.mark.parametrize("devices", [8, 1])
def test_a_forked_child_can_drop_its_copy_of_the_group(devices):
    results = simgpu.ranks(2, forked, devices=devices, timeout=60)
    assert [r.value for r in results] == ["done"] * 2


def closed_while_the_first_meeting_waits(rank, w):
    if rank == 1:
        time.sleep(4)
        return 0.0
    errors = []

    def call():
        try:
            dist.all_reduce(torch.ones(3, device=DEVICE))
        except RuntimeError as error:
            errors.append(str(error))

    caller = threading.Thread(target=call)
    caller.start()
    time.sleep(0.5)
    began = time.monotonic()
    dist.distributed_c10d._get_default_group()._get_backend(torch.device(DEVICE)).shutdown()
    took = time.monotonic() - began
    caller.join()
    assert errors and "destroyed" in errors[0]
    return took


def test_a_group_can_be_closed_while_its_first_call_waits_for_a_peer():
    results = simgpu.ranks(2, closed_while_the_first_meeting_waits, timeout=60, check=False)
    assert results[0].error is None, results[0].report()
    assert results[0].value < 3


class Alarm(Exception):
    pass


def interrupted(rank, w):
    if rank == 1:
        time.sleep(3)
        return 0

    def ring(*_):
        raise Alarm

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    began = time.monotonic()
    with pytest.raises(Alarm):
        dist.all_reduce(torch.ones(3, device=DEVICE))
    return time.monotonic() - began


def test_a_signal_ends_the_wait_for_the_first_meeting():
    results = simgpu.ranks(2, interrupted, timeout=60, check=False)
    assert results[0].error is None, results[0].report()
    assert results[0].value < 2


def dead_peer(rank, w):
    gpu = torch.ones(3, device=DEVICE)
    dist.all_reduce(gpu)
    torch.accelerator.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    work = dist.all_reduce(gpu, async_op=True)
    while not work.is_completed() and time.monotonic() < began + 10:
        time.sleep(0.01)
    took = time.monotonic() - began
    assert not work.is_success()
    return took, raised(work.wait), raised(lambda: dist.all_reduce(gpu))


@pytest.mark.parametrize("devices", [8, 1])
def test_a_dead_peer_is_named(devices):
    results = simgpu.ranks(2, dead_peer, devices=devices, timeout=60, check=False)
    assert results[0].error is None, results[0].report()
    took, at_wait, later = results[0].value
    assert took < 2
    assert "rank 1" in at_wait and "rank 1" in later
