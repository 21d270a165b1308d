"""The models of the protocols in shared and device memory hold, and every broken variant fails."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODELS = Path(__file__).resolve().parent.parent / "models"
BROKEN = {
    "cell": ["ONE_BUFFER", "FLAG_FIRST", "ANY_NUMBER", "SHARED_COUNT"],
    "device_ll": ["NO_CREDIT", "CREDIT_EARLY", "ONE_BUFFER", "ANY_ROUND", "CREDIT_OF_LAST"],
    "device_phases": [
        *("NO_READY", "NO_DONE", "ONE_KIND", "RESET_LATE", "HOST_NUMBERS"),
        *("NO_EMPTY", "EMPTY_EARLY", "FULL_EARLY"),
    ],
    "device_ring": [
        *("NO_CREDIT", "DEPTH_OFF_BY_ONE", "FLAG_EARLY", "CREDIT_EARLY", "HOST_COUNTERS"),
    ],
    "device_tree": ["NO_CREDIT", "FLAG_EARLY", "ONE_COUNTER", "FORGET_CHILD"],
    "device_two_shot": [
        *("ONE_WINDOW", "NO_FIRST_BARRIER", "NO_SECOND_BARRIER", "HOST_COUNTERS", "OWN_PARITY"),
    ],
    "doorbell": ["NO_SLEEPER_FENCE", "NO_WAKER_FENCE", "NO_RECHECK", "NO_WAKE"],
    "endpoints": ["NO_REDIAL", "NO_WAITING", "DROP_WAITING", "NO_COUNT"],
    "fifo": ["PUBLISH_EARLY", "RELEASE_EARLY", "DEPTH_OFF_BY_ONE", "NO_CREDIT"],
    "host_work": ["NO_END", "RESET_LATE", "OPEN_EARLY", "ONE_WORD", "HAND_OVER_EARLY"],
    "lease": [
        *("NO_ENTER_FENCE", "NO_REVOKE_FENCE", "NO_CHECK_AT_ENTRY", "NO_CHECK_AFTER"),
        *("NO_WAIT", "NO_BARRIER", "PAST_IS_GRANTED", "START_BEFORE_ALL"),
    ],
    "messages": ["NO_TELL", "TELL_AT_HALF", "NO_LIMIT", "SEND_FIRST"],
    "turn": ["NUMBER_UNCHECKED", "DRIVE_ANYWAY", "LEAVE_SILENTLY", "IDLE_EARLY"],
    "window": ["ONE_BUFFER", "NO_BARRIER", "LAST_MEMBER_MISSED", "STALE_ARRIVAL"],
}
DEADLINE_S = 120

MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} not found (Debian: apt-get install spin gcc)"
)


def run(command: list[str], where: Path) -> str:
    done = subprocess.run(
        command, cwd=where, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def errors_of(model: str, where: Path, *defines: str) -> int:
    """Explores every state of a model; the number of errors (0, or 1: it stops at the first).

    A broken variant (`defines`) is through soon: compiling would take longer than searching.
    """
    run(["spin", *[f"-D{name}" for name in defines], "-a", str(MODELS / f"{model}.pml")], where)
    # Safety only: assertions and invalid end states. Memory is bounded, in megabytes.
    effort = "-O0" if defines else "-O1"
    run(["gcc", effort, "-w", "-DSAFETY", "-DMEMLIM=2048", "-o", "pan", "pan.c"], where)
    report = run(["./pan", "-m200000"], where)
    found = re.search(r"errors: (\d+)", report)
    assert found, report
    if found.group(1) == "0":  # only a complete search proves anything
        assert "Search not completed" not in report and "too small" not in report, report
    return int(found.group(1))


@pytest.mark.parametrize("model", BROKEN)
def test_a_model_holds(model, tmp_path):
    assert errors_of(model, tmp_path) == 0


@pytest.mark.parametrize("model, variant", [(m, v) for m in BROKEN for v in BROKEN[m]])
def test_a_broken_variant_fails(model, variant, tmp_path):
    assert errors_of(model, tmp_path, variant) >= 1
