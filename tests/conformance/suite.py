"""PyTorch's own tests of torch.distributed, made to run on pycoll.

They ship in torch's wheel (torch/testing/_internal/distributed/distributed_test.py), which stays as
it is. It decides by the backend's name what a test may run on; so that pycoll runs all that the
suite runs for Gloo and for MPI, the tables with these names get pycoll's, and the suite's constant
BACKEND is a name that equals theirs too.
"""

from __future__ import annotations

import datetime
import importlib
import os
import tempfile
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NAME = "pycoll"
LIKE = ("gloo", "mpi")
SUITE = "torch.testing._internal.distributed.distributed_test"
TEST_SECONDS = 50


class _Alike(str):
    """pycoll's name, which equals those that it stands for as well."""

    stands_for: tuple[str, ...] = LIKE

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other in self.stands_for

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.stands_for[0])  # found in sets that list it


@contextmanager
def _environment_says(name: str, value: str) -> Iterator[None]:
    """os.environ holds plain texts only: here reading this one gives the object itself."""
    plain = os.environ.decodevalue

    def decode(encoded: bytes) -> str:
        text = plain(encoded)
        return value if text == str(value) else text

    os.environ[name] = str(value)
    os.environ.decodevalue = decode
    try:
        yield
    finally:
        os.environ.decodevalue = plain


def load(world_size: int, gpu: Callable[[], None] | None = None) -> type[unittest.TestCase]:
    """The suite's class for that many ranks. For processes that do nothing else.

    `gpu` puts simulated GPUs in the place of torch.cuda's (on_simgpu.py).
    """
    os.environ.update(
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        TEMP_DIR=tempfile.gettempdir(),
        # A file, since that opens one more test.
        INIT_METHOD=f"file://{tempfile.mktemp(prefix='init-')}",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TEST_SECONDS),
    )
    import torch.testing._internal.common_distributed as common

    import pycoll  # noqa: F401  (registers the name)

    features = common.DistTestCases.backend_feature
    for feature in ("gpu", "cuda", "ddp", "subgroup"):
        if features[feature] & {"nccl", *LIKE}:
            features[feature].add(NAME)
    features["plugin"].add(NAME)
    for name in common.TIMEOUT_OVERRIDE:
        common.TIMEOUT_OVERRIDE[name] = min(common.TIMEOUT_OVERRIDE[name], TEST_SECONDS)
    if gpu is not None:
        common.TEST_CUDA = True
    # Upstream asks for 8 ranks where 3 will do.
    common.skip_if_small_worldsize = unittest.skipIf(world_size < 3, "needs 3 ranks")
    _open_monitored_barrier()
    name = _Alike(NAME)
    if gpu is not None:
        name.stands_for = ("nccl",)
    with _environment_says("BACKEND", name):
        suite = importlib.import_module(SUITE)
    # Then events are looked for: "pycoll:all_reduce".
    suite.PROFILING_SUPPORTED_BACKENDS.append(NAME)
    suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(NAME)
    return _class_of(suite, gpu)


def _class_of(suite: Any, gpu: Callable[[], None] | None) -> type[unittest.TestCase]:
    import torch
    import torch.multiprocessing

    class OnPycoll(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            # Forked: a spawned rank imports torch for seconds.
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _check_return_codes(self, function: Callable[..., Any], elapsed: float) -> None:
            super()._check_return_codes(function, elapsed)
            # Upstream looks at rank 0.
            codes = {process.exitcode for process in self.processes}
            if function not in self.skip_return_code_checks and len(codes) > 1:
                raise RuntimeError(f"ranks ended with different codes: {codes}")

        @classmethod
        def _run(cls, *args: Any, **options: Any) -> None:
            torch.set_num_threads(1)
            if gpu is not None:
                gpu()
            super()._run(*args, **options)

    return OnPycoll


def _open_monitored_barrier() -> None:
    """torch before 2.14 looks for the name "gloo" in it; what follows is the same."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    if hasattr(dist.Backend, "_ensure_backend_registered"):
        return

    def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):
        if c10d._rank_not_in_group(group):
            return c10d._warn_not_in_group("monitored_barrier")
        given = timeout
        if given is None:
            given = c10d._get_default_timeout(c10d.get_backend(group))
        if not isinstance(given, datetime.timedelta):
            given = datetime.timedelta(seconds=given)
        return (group or c10d._get_default_group()).monitored_barrier(given, wait_all_ranks)

    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
