"""pycoll: collective communication for training.

With torch: `import pycoll; torch.distributed.init_process_group("pycoll")`.
Without: `pycoll.Communicator(pycoll.FileStore(path), rank, world_size)` on NumPy arrays.
"""

from __future__ import annotations

import importlib.util
import os

from pycoll._core import (
    AbortedError,
    Error,
    InvalidArgumentError,
    MismatchError,
    OperatingSystemError,
    PeerError,
    TimeoutError,
    UnsupportedError,
)
from pycoll.communicator import Communicator, Work
from pycoll.store import FileStore

__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "Communicator",
    "Error",
    "FileStore",
    "InvalidArgumentError",
    "MismatchError",
    "OperatingSystemError",
    "PeerError",
    "TimeoutError",
    "UnsupportedError",
    "Work",
    "__version__",
]

if os.environ.get("PYCOLL_TORCH", "1") != "0" and importlib.util.find_spec("torch") is not None:
    from pycoll._registration import register

    register()
    del register
