"""Finds the native torch module for the torch that is running.

torch's C++ classes change from one minor version to the next, so there is one binary for each:
`_c10d_2_13`, `_c10d_2_14`, ... The core (`pycoll._core`) has no torch in it and needs no choice.
What serves GPU tensors is a library of its own, because it needs CUDA.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

Version = tuple[int, int]
GPU_LIBRARY = "libpycoll_cuda.so"
REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def built_for() -> list[Version]:
    """The torch versions (major, minor) that this installation has a module for, oldest first.

    Modules of another Python version do not count: this interpreter cannot load them.
    """
    found = set()
    for suffix in EXTENSION_SUFFIXES:
        for file in Path(__file__).parent.glob(f"_c10d_*{suffix}"):
            if match := re.fullmatch(r"_c10d_(\d+)_(\d+)", file.name.removesuffix(suffix)):
                found.add((int(match[1]), int(match[2])))
    return sorted(found)


def torch_version() -> Version:
    """(major, minor) of the torch that this process uses."""
    import torch

    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if match is None:
        raise ImportError(f"pycoll cannot read the version of this torch: {torch.__version__!r}")
    return int(match[1]), int(match[2])


@functools.cache
def load() -> ModuleType:
    """The native torch module, with the library for CUDA tensors where there is one. Raises
    ImportError that says how to get a module when there is none for this torch.
    """
    import torch

    from pycoll._regions import open_regions

    module = _module()
    open_regions.tell(module)
    wanted = gpu_library() is not None and torch.version.cuda is not None
    if wanted and (problem := gpu_problem()):
        # CPU tensors can do without it.
        warnings.warn(f"pycoll cannot serve CUDA tensors: {problem}", stacklevel=2)
    return module


def loaded() -> list[ModuleType]:
    """The module that this process uses; empty when it has made no process group."""
    name = re.compile(r"pycoll\._c10d_\d+_\d+")
    return [module for key, module in list(sys.modules.items()) if name.fullmatch(key)]


def _module() -> ModuleType:
    # Before the module: it is linked to torch's libraries by name only, without a path to them.
    version = torch_version()
    built = built_for()
    if version in built:
        return importlib.import_module(f"pycoll._c10d_{version[0]}_{version[1]}")
    if built:
        names = ", ".join(f"{major}.{minor}" for major, minor in built)
        raise ImportError(
            f"pycoll was built for torch {names}, this is torch {version[0]}.{version[1]}: "
            f"rebuild with `{REBUILD}`"
        )
    raise ImportError(
        f"pycoll was built without torch, and this is torch {version[0]}.{version[1]}: to use it "
        f"with torch.distributed rebuild with `{REBUILD}`"
    )


def gpu_library() -> Path | None:
    """The library for CUDA tensors beside this package; None: the build made none."""
    file = Path(__file__).parent / GPU_LIBRARY
    return file if file.exists() else None


@functools.cache
def gpu_problem() -> str:
    """Why CUDA tensors are not served; empty when they are. Opens the library for them."""
    import torch

    file = gpu_library()
    if file is None:
        return "pycoll was built without its CUDA part"
    if torch.version.cuda is None:
        return f"this torch is built without CUDA; {file.name} is for one that has it"
    try:
        _module().load_device_library(str(file))
    except RuntimeError as error:
        return str(error)
    return ""


def load_device_library(path: str | Path) -> str:
    """Opens a library that serves a type of devices, and tells torch.distributed that "pycoll"
    does: groups made from then on take tensors of these devices. Returns the type's name.

    Raises RuntimeError when the file is no such library or was built for another version of pycoll,
    when torch has no devices of that name, and when a library serves them already.
    """
    from pycoll._registration import register

    device: str = load().load_device_library(str(path))
    register(device)
    return device
