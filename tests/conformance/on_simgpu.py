"""Puts simulated GPUs (tests/simgpu.py) in the place of torch.cuda's, for the suite's GPU tests.

For a process that does nothing else: what the suite asks of "cuda" goes to the device "simgpu".
What that device, or a torch without CUDA, does not have is in LACKS.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import simgpu

_BATCH_NORM = "torch has no kernels of SyncBatchNorm for devices from elsewhere"
_RESIZE = "the device cannot resize a storage, as mixed precision of DDP does"
_PROFILER = "torch's profiler makes an error of every event of a device from elsewhere: minutes"
_NCCL = "it makes a group of the backend named nccl"
# The reason, by test.
LACKS = {
    "test_DistributedDataParallel_SyncBatchNorm": _BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": _BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": _BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": _BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": _BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": _BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": _BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_half": _BATCH_NORM,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _BATCH_NORM,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": _RESIZE,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": _RESIZE,
    "test_ddp_native_mixed_precision_ignored_params": _RESIZE,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": _RESIZE,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": _RESIZE,
    "test_ddp_profiling_torch_profiler": _PROFILER,
    "test_ddp_uneven_inputs": "torch has no convolution for devices from elsewhere",
    "test_ddp_logging_data_gpu": "DDP measures times of CUDA's own devices alone",
    "test_average_parameters": _NCCL,
    "test_monitored_barrier_allreduce_hang": _NCCL,
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": _NCCL,
    "test_nccl_high_priority_stream": _NCCL,
}


class InPlaceOfCuda(TorchFunctionMode):
    """Every function of torch that is given a CUDA device gets the simulated one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: _place(value) for name, value in (kwargs or {}).items()}
        return func(*map(_place, args), **named)


def _place(where: Any) -> Any:
    if isinstance(where, torch.device) and where.type == "cuda":
        return torch.device("simgpu", _index(where))
    if isinstance(where, str) and where.partition(":")[0] == "cuda":
        return _place(torch.device(where))
    return where


def _index(where: Any) -> int:
    if isinstance(where, int):
        return where
    index = None if where is None else torch.device(where).index
    return torch.simgpu.current_device() if index is None else index


def install(directory: Path) -> None:
    device = simgpu.load(directory)
    InPlaceOfCuda().__enter__()
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = device.device_count
    cuda.current_device = device.current_device
    cuda.set_device = lambda where: device.set_device(_index(where))
    cuda.synchronize = lambda device=None: torch.accelerator.synchronize()
    cuda.empty_cache = lambda: None
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: None
    cuda.get_rng_state = lambda device=None: torch.zeros(0, dtype=torch.uint8)
    cuda.set_rng_state = lambda state, device=None: None
    torch.simgpu.device = lambda where: torch.accelerator.device_index(_index(where))

    def to_gpu(self: Any, where: Any = None, non_blocking: bool = False) -> Any:
        return self.to(torch.device("simgpu", _index(where)))

    torch.Tensor.cuda = torch.nn.Module.cuda = to_gpu
