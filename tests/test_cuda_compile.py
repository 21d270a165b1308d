"""What nvcc makes of the device layer: no spills, the PTX that each operation stands for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import native_build

ARCHITECTURES = ["80", "90", "100"]
SCOPES = ["cta", "gpu", "sys"]


@pytest.fixture(scope="module")
def nvcc() -> str:
    found = native_build.find_nvcc()
    if not found:
        pytest.skip("nvcc not found (set CUDA_HOME, or put it on PATH)")
    return found


def compile_primitives(nvcc: str, *options: str | Path) -> str:
    source = native_build.ROOT / "tests" / "sim" / "primitives.cu"
    include = native_build.ROOT / "csrc"
    command = [nvcc, "-std=c++20", "-O3", "-I", include, *options, source]
    done = native_build.run(command, 240)
    if "unsupported GNU version" in done.stdout:
        pytest.skip("this nvcc does not work with this g++")
    assert done.returncode == 0, done.stdout
    assert "warning" not in done.stdout, done.stdout
    return done.stdout


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_keep_everything_in_registers(nvcc, tmp_path, architecture):
    known = native_build.run([nvcc, "--list-gpu-code"], 30).stdout.split()
    if f"sm_{architecture}" not in known:
        pytest.skip(f"this nvcc does not know sm_{architecture}")
    report = compile_primitives(
        nvcc, f"-arch=sm_{architecture}", "-Xptxas", "-v", "-c", "-o", tmp_path / "out.o"
    )
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
    assert len(frames) == 6, report  # accesses, and sum_peers of five types
    assert set(frames) == {("0", "0")}, report


def test_each_operation_is_its_ptx(nvcc, tmp_path):
    ptx_file = tmp_path / "out.ptx"
    compile_primitives(nvcc, "-arch=compute_80", "-ptx", "-o", ptx_file)
    ptx = ptx_file.read_text()
    accesses = ptx[ptx.index("accesses") :].split("// .globl")[0]
    for scope in SCOPES:
        for bits in ("32", "64"):
            for instruction in (
                f"ld.relaxed.{scope}.b{bits}",
                f"ld.acquire.{scope}.b{bits}",
                f"st.relaxed.{scope}.b{bits}",
                f"st.release.{scope}.b{bits}",
                f"atom.relaxed.{scope}.add.u{bits}",
                f"atom.acq_rel.{scope}.add.u{bits}",
                f"atom.relaxed.{scope}.or.b{bits}",
                f"atom.relaxed.{scope}.max.u{bits}",
            ):
                assert instruction in accesses, f"{instruction} is missing"
    assert not re.search(r"\b(membar|fence|volatile)\b", ptx)
    assert "ld.global.nc" not in ptx, "peers write what kernels read"
    # Packs move 16 bytes at a time, whatever they hold.
    loads = re.findall(r"ld\.global\.v4\.(?:u32|b32|f32)", ptx)
    assert len(loads) >= 5, ptx
