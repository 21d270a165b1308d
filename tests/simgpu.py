"""The torch device "simgpu": GPU tensors on a machine without a GPU, for tests.

Its code is tests/sim/torch, on the simulated CUDA runtime (csrc/sim/cuda). In the test process:

    simgpu.require()                       # builds it, or skips the test
    simgpu.ranks(2, function, ...)         # `function(rank, world_size, ...)`, its device is set

The ranks get the devices in turn: rank r has device r % `devices`, so one device is shared by all.
"""

from __future__ import annotations

import functools
import importlib.util
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mounts
import native_build
from pool import RankResult, torch_ranks
from pool import alone as alone_in_the_pool

LIBRARY = "libpycoll_simgpu.so"


def require() -> Path:
    """Builds what is missing and returns where it is; skips the test where it cannot be built."""
    built = native_build.simulated("simgpu_device", "pycoll_simgpu")
    if isinstance(built, str):
        pytest.skip(built)
    return built


def alone(function: Callable[[], Any], **options: Any) -> Any:
    """`function()` in one process with the device and its library, without a group."""
    return alone_in_the_pool(_alone, function, str(require()), **options)


def _alone(function: Callable[[], Any], directory: str) -> Any:
    from pycoll import _native

    load(Path(directory), None)
    library = Path(directory) / LIBRARY
    _native.gpu_library = lambda: library
    return function()


def load(directory: Path, library: str | None = LIBRARY) -> Any:
    """Gives this process the device, and pycoll the library that serves it. Returns the device's
    module, which has what a test may do to the simulated machine (tests/sim/torch/module.cpp).
    """
    import torch

    file = next(Path(directory).glob("simgpu_device*.so"))
    spec = importlib.util.spec_from_file_location("simgpu_device", file)
    assert spec is not None and spec.loader is not None
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    torch.utils.rename_privateuse1_backend("simgpu")
    module = types.ModuleType("torch.simgpu")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=device.device_count,
        current_device=device.current_device,
        set_device=device.set_device,
        synchronize=torch.accelerator.synchronize,
        current_stream=torch.accelerator.current_stream,
        manual_seed_all=lambda seed: None,
        _is_in_bad_fork=lambda: False,
        machine=device,
    )
    torch._register_device_module("simgpu", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if library is not None:
        from pycoll import _native

        assert _native.load_device_library(Path(directory) / library) == "simgpu"
    return device


def ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    devices: int = 8,
    library: str | None = LIBRARY,
    hosts: str = "",
    **options: Any,
) -> list[RankResult]:
    """`function(rank, world_size, *args)` on ranks that have a device each, in turn, with the
    default group made; see `pool.run_ranks`. `hosts`: a letter a rank, which is its host.
    """
    directory = str(require())
    env = {"PYCOLL_SIM_DEVICES": str(devices), **options.pop("env", {})}
    if hosts and mounts.why_not():
        pytest.skip(mounts.why_not())
    with mounts.of(hosts or "a" * world_size) as places:
        setup = functools.partial(_set_up, directory, library, places)
        return torch_ranks(world_size, function, *args, env=env, prepare=setup, **options)


def _set_up(directory: str, library: str | None, places: list[str], rank: int) -> None:
    mounts.enter(places[rank])
    import torch

    load(Path(directory), library)
    torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
