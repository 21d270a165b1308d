"""The kernels themselves on a GPU, all ranks as streams of one process; and under
compute-sanitizer. tests/test_simgpu_shared.py runs the same program without a GPU.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import helpers_gpu_program

SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"
# These wait for no other kernel.
ALONE = ["copy", "scale", "cast_float16", "cast_check_float16", "cast_check_bfloat16"]
ALONE += ["reduce_many"]
TOGETHER = ["one_shot_ll", "one_shot_kernel", "two_shot_kernel", "ring", "tree"]
TOGETHER += ["two_shot"]


@pytest.fixture(scope="module")
def program() -> Path:
    built = helpers_gpu_program.build()
    assert isinstance(built, Path), built
    return built


def run(*command: object, timeout: float = 90) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return f"{done.stdout}exit code {done.returncode}"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_kernel_computes_right(program, ranks):
    output = run(program, "check", ranks)
    assert output.startswith("ok check") and output.endswith("exit code 0"), output


def test_every_codec_has_the_bytes_of_the_host(program):
    # Beyond what the largest grid takes at a time.
    output = run(program, "codecs", (1 << 23) + 9, timeout=240)
    assert output.startswith("ok codecs") and output.endswith("exit code 0"), output


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_thousand_replays_among_eager_calls(program, ranks):
    output = run(program, "replay", ranks, 1000)
    assert output.startswith("ok replay") and output.endswith("exit code 0"), output


def test_lists_of_tensors_have_the_bytes_of_the_cpu(program):
    output = run(program, "lists", 200, 1)
    assert output.startswith("ok lists") and output.endswith("exit code 0"), output


@pytest.mark.parametrize("names", [ALONE, TOGETHER], ids=["alone", "together"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(program, tool, names):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(SANITIZER)
    if sanitizer is None:
        pytest.skip("there is no compute-sanitizer")
    command = [sanitizer, "--tool", tool, "--error-exitcode", 9, program, "check", 2, *names]
    output = run(*command, timeout=100)
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer does not support this device here")
    if names is TOGETHER and "gave up (1)" in output and "0 errors" in output:
        pytest.skip(f"kernels do not run at the same time under {tool}: they timed out")
    assert "ok check" in output and output.endswith("exit code 0"), output[-6000:]
