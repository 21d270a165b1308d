"""The GPU tests of PyTorch's own suite, on simulated GPUs (tests/conformance/on_simgpu.py)."""

from __future__ import annotations

import pytest

import simgpu
import test_conformance

pytestmark = [*test_conformance.pytestmark, pytest.mark.full]


def test_suite_of_torch(tmp_path):
    simgpu.require()
    test_conformance.check_suite(tmp_path, "simgpu", world_size=2, total=117)
