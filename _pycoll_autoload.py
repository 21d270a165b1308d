"""Makes `init_process_group("pycoll")` work without `import pycoll`.

torch calls these from entry points, the first at the end of every `import torch` (where an
exception would break torch itself). So this module stands outside the package, imports no native
code, and the backend is loaded when the first process group is made.
"""

from __future__ import annotations

import re
from typing import Any

NAME = "pycoll"
# Where pycoll was built without CUDA, calls on its tensors say so.
DEVICES = ["cpu", "cuda"]


def _create(options: Any, backend_options: Any) -> Any:
    from pycoll._registration import create

    return create(options, backend_options)


def register(*more_devices: str) -> None:
    """Registers the backend's name with torch.distributed; calling it again changes nothing.

    `more_devices` are types of devices that it serves from now on. A torch built without
    distributed is left alone.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    backend = dist.Backend
    known = list(backend.backend_capability.get(NAME, DEVICES))
    wanted = [*known, *(device for device in more_devices if device not in known)]
    if NAME.upper() not in backend._plugins or wanted != known:
        backend.register_backend(NAME, _create, extended_api=True, devices=wanted)


def register_at_torch_import() -> None:
    """Entry point of group `torch.backends`. From 2.14 on torch asks `register` by name instead."""
    import torch

    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version is None or tuple(map(int, version.groups())) < (2, 14):
        register()
