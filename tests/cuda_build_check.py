"""What `make cuda-build` asks of an installed build with the CUDA part; no GPU is needed.

python -P tests/cuda_build_check.py
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import pycoll

sys.path.insert(0, str(Path(__file__).parent))  # -P keeps it away while pycoll is imported
from cuda_symbols import needed


def main() -> None:
    package = Path(pycoll.__file__).parent
    assert "site-packages" in package.parts, f"not the installed package: {package}"
    assert torch.version.cuda, f"torch {torch.__version__} is built without CUDA"
    library = package / "libpycoll_cuda.so"
    assert library.exists(), f"{library} was not built"
    # Opens without a driver: the runtime that torch has loaded serves it.
    ctypes.CDLL(str(library))
    assert needed(library), "the CUDA part calls nothing of the runtime"
    store = dist.HashStore()
    dist.init_process_group("cpu:pycoll,cuda:pycoll", store=store, rank=0, world_size=1)
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [1, 1, 1]
    dist.destroy_process_group()
    size = library.stat().st_size / 1e6
    print(f"pycoll on torch {torch.__version__} (CUDA {torch.version.cuda}), {library.name}:")
    print(
        f"  {size:.1f} MB, opens here; GPUs: {torch.cuda.device_count()}; CPU tensors are reduced"
    )


if __name__ == "__main__":
    main()
