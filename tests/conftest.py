"""Shared by all tests. Helpers for several ranks are in pool.py: `from pool import run_ranks`."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

import netns

if TYPE_CHECKING:
    from helpers_threads import ThreadGroups

# The same examples in every run; a slow machine is no failure (tests have deadlines of their own).
hypothesis.settings.register_profile("pycoll", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("pycoll")

# Tests that import one of these build native programs in one place (native_build.claim).
NATIVE = re.compile(
    r"^(import|from) (native_build|simgpu|simulated_arrays|helpers_groups)\b", re.MULTILINE
)


@functools.cache
def lane(file: Path) -> str:
    """`make test` runs two lanes at once: compilers and simulators keep a core busy, while the
    other tests wait much of their time, for deadlines and for each other's ranks.
    """
    return "native" if NATIVE.search(file.read_text()) else "ranks"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane(config.rootpath / nodeid.split("::")[0])

    return Lanes(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The lane of compilers gives way: ranks are tested for what they do within some time."""
    mine = "PYTEST_XDIST_WORKER" in os.environ and lane(item.path) == "native"
    if mine and os.getpriority(os.PRIO_PROCESS, 0) < 10:
        os.setpriority(os.PRIO_PROCESS, 0, 10)


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


@pytest.fixture
def hosts() -> Iterator[Callable[[int], netns.Hosts]]:
    """Makes network namespaces: hosts(count)."""
    reason = netns.why_not()
    if reason:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield lambda count: stack.enter_context(netns.Hosts(count))
