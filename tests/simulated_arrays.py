"""Arrays with __cuda_array_interface__ on the simulated CUDA runtime: what CuPy's are on a GPU.

Its functions are called by ctypes, from the copy of the runtime that the GPU library of the
process uses (tests/sim/CMakeLists.txt: pycoll_simgpu).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import native_build

NON_BLOCKING = 1  # cudaStreamNonBlocking: not ordered with the legacy default stream


def require() -> str:
    """Builds what is missing and returns where it is; skips the test where it cannot be built."""
    built = native_build.simulated("pycoll_simgpu")
    if isinstance(built, str):
        pytest.skip(built)
    return str(built)


class Gpu:
    """The CUDA runtime of this process; `device` is current in the calling thread from then on.

    Communicators of the process then serve its arrays, as where libpycoll_cuda.so is installed.
    """

    def __init__(self, directory: str, device: int) -> None:
        from pycoll import _native

        library = Path(directory) / "libpycoll_simgpu.so"
        _native.gpu_library = lambda: library
        self._cuda = ctypes.CDLL(str(Path(directory) / "libpycoll_sim_cuda.so"))
        self.call("cudaSetDevice", device)

    def call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._cuda, function)(*arguments)
        assert code == 0, f"{function}: error {code}"

    def stream(self) -> int:
        handle = ctypes.c_void_p()
        self.call("cudaStreamCreateWithFlags", ctypes.byref(handle), NON_BLOCKING)
        assert handle.value
        return handle.value

    def synchronize(self, stream: int = 1) -> None:
        self.call("cudaStreamSynchronize", ctypes.c_void_p(stream))

    def delay(self, stream: int, seconds: float) -> None:
        """Queues a pause."""
        usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
        microseconds = ctypes.c_void_p(int(1e6 * seconds))
        self.call("cudaLaunchHostFunc", ctypes.c_void_p(stream), usleep, microseconds)

    def free_memory(self) -> int:
        """Bytes of the device that this process has not allocated."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def array(self, values: Any, stream: int | None = None) -> GpuArray:
        """A copy of a NumPy array on the current device, which exports `stream`."""
        return GpuArray(self, np.array(values, order="C"), stream)

    def empty(self, shape: Any, dtype: Any = np.float32) -> GpuArray:
        """All bits set, which no result has."""
        return self.array(np.full(shape, -1).astype(dtype))


class GpuArray:
    def __init__(self, gpu: Gpu, values: Any, stream: int | None) -> None:
        self._gpu = gpu
        self._like = np.empty_like(values)
        pointer = ctypes.c_void_p()
        if values.nbytes:
            gpu.call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(values.nbytes))
        self.interface: dict[str, Any] = {
            "shape": values.shape,
            "typestr": values.dtype.str,
            "data": (pointer.value or 0, False),
            "version": 3,
            "strides": None,
            "stream": stream,
        }
        self._copy(pointer.value, values.ctypes.data)
        gpu.synchronize()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.interface

    @property
    def pointer(self) -> int:
        return self.interface["data"][0]

    def but(self, **changed: Any) -> GpuArray:
        """The same memory, described otherwise."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.interface = {**self.interface, **changed}
        return other

    def fill(self, byte: int, stream: int) -> None:
        """Queues it, and takes its time: what does not wait for it sees the old values."""
        self._gpu.delay(stream, 0.05)
        size = ctypes.c_size_t(self._like.nbytes)
        on = ctypes.c_void_p(stream)
        self._gpu.call("cudaMemsetAsync", ctypes.c_void_p(self.pointer), byte, size, on)

    def get(self, stream: int = 1) -> Any:
        """Its values, once `stream` has come so far."""
        self._gpu.synchronize(stream)
        values = np.empty_like(self._like)
        self._copy(values.ctypes.data, self.pointer)
        return values

    def _copy(self, to: int | None, source: int | None) -> None:
        if self._like.nbytes == 0:
            return
        size, by_address = ctypes.c_size_t(self._like.nbytes), 4  # cudaMemcpyDefault
        self._gpu.call("cudaMemcpy", ctypes.c_void_p(to), ctypes.c_void_p(source), size, by_address)
