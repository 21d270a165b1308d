"""Runs PyTorch's suite on pycoll: `python tests/conformance/run.py --world-size 4`.

Prints one line a test that was not passed or skipped, and the totals. `--write` writes skips.json,
the list of what is skipped at each world size, with upstream's reason. `--device simgpu`: its tests
of GPU tensors, on simulated GPUs; then skips_simgpu.json, which has our reasons, too
(on_simgpu.py).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from conformance.suite import TEST_SECONDS, load  # noqa: E402

SKIPS = {"cpu": HERE / "skips.json", "simgpu": HERE / "skips_simgpu.json"}
# It compares names with a table of torch's own: a backend from elsewhere is called "custom".
EXCLUDED = {"test_ddp_logging_data_cpu"}


class Verdict(NamedTuple):
    outcome: str  # pass, fail, skip
    why: str


def run(world_size: int, device: str = "cpu") -> dict[str, Verdict]:
    """All tests, one after the other, each in a session of its own."""
    gpu: Callable[[], None] | None = None
    lacks: Mapping[str, str] = {}
    if device == "simgpu":
        import native_build
        from conformance import on_simgpu

        built = native_build.simulated("simgpu_device", "pycoll_simgpu")
        if isinstance(built, str):
            raise SystemExit(f"no simulated GPUs: {built}")
        os.environ["PYCOLL_SIM_DEVICES"] = str(world_size)
        gpu, lacks = functools.partial(on_simgpu.install, built), on_simgpu.LACKS
    with tempfile.TemporaryDirectory(prefix="pycoll-conformance-") as scratch:
        os.environ["TMPDIR"] = tempfile.tempdir = scratch  # the suite leaves files behind
        suite = load(world_size, gpu)
        names = unittest.TestLoader().getTestCaseNames(suite)
        verdicts = {}
        for name in names:
            if name in lacks:
                verdicts[name] = Verdict("skip", lacks[name])
            elif name not in EXCLUDED:
                verdicts[name] = verdict_on(suite, name)
        return verdicts


def verdict_on(suite: type[unittest.TestCase], name: str) -> Verdict:
    method = getattr(suite, name)
    if getattr(method, "__unittest_skip__", False):
        return Verdict("skip", method.__unittest_skip_why__)
    reader, writer = os.pipe()
    sys.stdout.flush()
    driver = os.fork()
    if driver == 0:
        os.close(reader)
        _drive(suite, name, writer)
    os.close(writer)
    said = b""
    deadline = time.monotonic() + TEST_SECONDS + 15
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reader, 1 << 16)
        if not part:
            break
        said += part
        if said.endswith(b"\n"):
            break
    os.close(reader)
    try:
        os.killpg(driver, signal.SIGKILL)  # not reaped yet: the number is still its own
    except ProcessLookupError:
        os.kill(driver, signal.SIGKILL)
    os.waitpid(driver, 0)
    if not said.endswith(b"\n"):
        return Verdict("fail", "no verdict in time")
    return Verdict(*json.loads(said))


def _drive(suite: type[unittest.TestCase], name: str, writer: int) -> None:
    """In the forked process; does not return."""
    os.setsid()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        result = unittest.TestResult()
        suite(name)(result)
        broken = result.errors + result.failures
        if broken or result.unexpectedSuccesses:
            verdict = Verdict("fail", broken[0][1] if broken else "an unexpected success")
        elif result.skipped:
            verdict = Verdict("skip", result.skipped[0][1])
        else:
            verdict = Verdict("pass", "")
    except BaseException:
        verdict = Verdict("fail", traceback.format_exc())
    os.write(writer, json.dumps([verdict.outcome, verdict.why[-4000:]]).encode() + b"\n")
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--device", choices=list(SKIPS), default="cpu")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    verdicts = run(arguments.world_size, arguments.device)
    for name, verdict in verdicts.items():
        if verdict.outcome == "fail":
            print(f"fail {name}: {verdict.why}")
    counts = Counter(verdict.outcome for verdict in verdicts.values())
    print(
        f"{arguments.device}, world size {arguments.world_size}: {counts['pass']} passed, "
        f"{counts['fail']} failed, {counts['skip']} skipped, {len(EXCLUDED)} excluded, "
        f"{time.monotonic() - start:.0f} s"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(verdicts))
    if arguments.write:
        file = SKIPS[arguments.device]
        known = json.loads(file.read_text()) if file.exists() else {}
        skipped = {name: v.why for name, v in verdicts.items() if v.outcome == "skip"}
        known[str(arguments.world_size)] = skipped
        file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    sys.exit(main())
