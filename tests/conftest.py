"""Shared by all tests. Helpers for several ranks are in pool.py: `from pool import run_ranks`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from helpers_threads import ThreadGroups

# The same examples in every run; a slow machine is no failure (tests have deadlines of their own).
hypothesis.settings.register_profile("pycoll", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("pycoll")


def pytest_report_header() -> str:
    import pycoll

    try:
        import torch

        version = torch.__version__
    except ImportError:
        version = "not installed"
    cpus = len(os.sched_getaffinity(0))
    return f"pycoll {pycoll.__version__} in {pycoll.__path__[0]}, torch {version}, {cpus} CPUs"


@pytest.fixture(scope="module")
def groups() -> Iterator[ThreadGroups]:
    """Groups of ranks that are threads, kept from test to test: `groups(world_size, **options)`."""
    from helpers_threads import ThreadGroups

    made = ThreadGroups()
    yield made
    made.close()


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Fails a test after which files of ours lie in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    yield
    left = {name for name in set(os.listdir("/dev/shm")) - before if "pycoll" in name}
    assert not left
