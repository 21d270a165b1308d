"""Tests that need a GPU: skipped, with the reason, where there is none, or none that pycoll serves.

`make test-gpu` sets PYCOLL_REQUIRE_GPU=1: then that is an error.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@functools.cache
def why_not() -> str:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    from pycoll import _native

    if "cuda" not in _native.load().device_libraries():
        return "pycoll was built without its CUDA part, or cannot load it (`pycoll doctor`)"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    if not here or not why_not():
        return
    if os.environ.get("PYCOLL_REQUIRE_GPU") == "1":
        raise pytest.UsageError(f"the GPU tests cannot run: {why_not()}")
    for item in here:
        item.add_marker(pytest.mark.skip(reason=why_not()))


def pytest_report_header() -> str:
    if why_not():
        return f"GPU: {why_not()}"
    import torch

    name = torch.cuda.get_device_name(0)
    return f"GPU: {name}, torch {torch.__version__} for CUDA {torch.version.cuda}"
