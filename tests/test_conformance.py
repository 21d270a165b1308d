"""PyTorch's own suite on pycoll (tests/conformance). What it skips is listed, with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from conformance.run import EXCLUDED, HERE, SKIPS

TOTALS = {2: 99, 3: 123, 4: 126}
full = pytest.mark.full

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13"), reason="totals and skips are those of torch 2.13"
    ),
]


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(3, marks=full), pytest.param(4, marks=full)]
)
def test_suite_of_torch(world_size, tmp_path):
    check_suite(tmp_path, "cpu", world_size, TOTALS[world_size])


def check_suite(tmp_path, device, world_size, total):
    """No test fails, so many pass, and what is skipped is what is listed."""
    report = tmp_path / "report.json"
    where = ["--device", device, "--world-size", str(world_size)]
    command = [sys.executable, HERE / "run.py", *where, "--json", report]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=800, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    verdicts = json.loads(report.read_text())
    passed = [name for name, (outcome, _) in verdicts.items() if outcome == "pass"]
    assert len(passed) == total and not EXCLUDED & verdicts.keys()
    skipped = {name: why for name, (outcome, why) in verdicts.items() if outcome == "skip"}
    assert skipped == json.loads(SKIPS[device].read_text())[str(world_size)]
