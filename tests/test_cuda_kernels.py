"""What nvcc makes of the device kernels: everything in registers, wide accesses, the right flags.

Each kernel's PTX is looked at on its own: what it waits and releases with, how wide it loads.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import native_build

KERNELS = native_build.ROOT / "csrc" / "kernels" / "cuda"
SOURCES = ["all_reduce", "codec", "executor", "shared_device", "fused"]
ARCHITECTURES = ["80", "90", "100"]

# Kernels by a part of their mangled names: those that wait for peers, and by what.
WAITS = {
    "run_program_kernel": ["ld.acquire.sys.b64", "ld.acquire.sys.b32", "st.release.sys.b64"],
    "one_shot_kernel": ["ld.acquire.sys.b64", "st.release.sys.b64"],
    "two_shot_kernel": ["ld.acquire.sys.b64", "st.release.sys.b64"],
    "one_shot_ll_kernel": [
        *("ld.relaxed.sys.b64", "st.relaxed.sys.b64"),  # data and flag in one
        *("ld.acquire.sys.b32", "st.release.sys.b32"),  # credits
    ],
}
NEVER_WAIT = [
    *("reduce_many_kernel", "copy_many_kernel", "reduce_places_kernel", "copy_places_kernel"),
    *("cast_kernel", "scale_any_kernel"),
    *("cast_list_kernel", "unscale_list_kernel", "multiply_list_kernel"),
]
# Element by element, and four bytes of data at a time.
NARROW = ["scale_any_kernel", "one_shot_ll_kernel", "_kernelINS0_15AnyOp", "sum_chunks_kernel"]
# Least numbers of wide loads and stores. What codes of blocks have is in narrower words: eight
# values a thread. Those that encode find scales and random numbers with their neighbours.
CODECS = {
    "encode_blocks_kernel": (5, 2),
    "encode_narrow_kernel": (5, 3),
    "13decode_kernelINS0_12Block": (0, 3),
    "13decode_kernelINS0_13Narrow": (1, 3),
    "clear_exponents_kernel": (0, 1),
}


@pytest.fixture(scope="module")
def nvcc() -> str:
    found = native_build.find_nvcc()
    if not found:
        pytest.skip("nvcc not found (set CUDA_HOME, or put it on PATH)")
    return found


def compile_kernels(nvcc: str, source: str, *options: str | Path) -> str:
    common = ["-std=c++20", "-O3", "-fmad=false", "-I", native_build.ROOT / "csrc"]
    done = native_build.run([nvcc, *common, *options, KERNELS / f"{source}.cu"], 600)
    assert done.returncode == 0, done.stdout
    assert "warning" not in done.stdout, done.stdout
    return done.stdout


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_keep_everything_in_registers(nvcc, tmp_path, source, architecture):
    report = compile_kernels(
        nvcc, source, f"-arch=sm_{architecture}", "-Xptxas", "-v", "-c", "-o", tmp_path / "out.o"
    )
    kernels = re.findall(r"Compiling entry function '(\w+)'", report)
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
    assert len(kernels) == len(frames) >= 4, report
    assert set(frames) == {("0", "0")}, report


@pytest.fixture(scope="module")
def kernels(nvcc, tmp_path_factory) -> dict[str, str]:
    """PTX of each kernel by its mangled name."""
    found = {}
    for source in SOURCES:
        ptx_file = tmp_path_factory.mktemp("ptx") / f"{source}.ptx"
        compile_kernels(nvcc, source, "-arch=compute_80", "-ptx", "-o", ptx_file)
        for text in ptx_file.read_text().split(".entry ")[1:]:
            found[text.split("(")[0].strip()] = text
    return found


def those(kernels: dict[str, str], part: str) -> dict[str, str]:
    # Lengths stand before names, so that "two_shot_kernel" is no part of another's.
    chosen = {name: ptx for name, ptx in kernels.items() if re.search(rf"\d{part}", name)}
    assert chosen, f"no kernel is called {part}"
    return chosen


@pytest.mark.timeout(600)
def test_nothing_bypasses_coherence(kernels):
    assert len(kernels) >= 25
    for name, ptx in kernels.items():
        assert "ld.global.nc" not in ptx, f"{name}: peers write what kernels read"
        assert not re.search(r"\b(membar|fence|volatile)\b", ptx), name


@pytest.mark.timeout(600)
def test_flags_between_ranks_are_acquired_and_released(kernels):
    for part, instructions in WAITS.items():
        for name, ptx in those(kernels, part).items():
            for instruction in instructions:
                assert instruction in ptx, f"{name}: {instruction} is missing"
            narrower = re.findall(r"(?:ld\.acquire|st\.release)\.(?:cta|gpu)[.\w]*", ptx)
            assert not narrower, f"{name}: peers are outside that scope: {narrower}"


@pytest.mark.timeout(600)
def test_kernels_of_a_shared_gpu_wait_for_nobody(kernels):
    for part in NEVER_WAIT:
        for name, ptx in those(kernels, part).items():
            assert not re.search(r"ld\.(acquire|relaxed)|nanosleep", ptx), name
            # One, where the threads of a block show each other the places that they have looked up.
            assert len(re.findall(r"bar\.sync", ptx)) == (part == "reduce_places_kernel"), name


@pytest.mark.timeout(600)
def test_vectors_move_sixteen_bytes_at_a_time(kernels):
    for name, ptx in kernels.items():
        if any(part in name for part in NARROW):
            continue
        for access in ("ld", "st"):
            # Of pointers that a kernel has looked up it is not known that they are global.
            wide = re.findall(rf"{access}(?:\.global)?\.v4\.[bfu]32", ptx)
            least = next((CODECS[part] for part in CODECS if part in name), (3, 3))
            least_here = least[access == "st"]
            assert len(wide) >= least_here, f"{name}: {len(wide)} wide accesses by {access}"


@pytest.mark.timeout(600)
def test_codecs_have_the_arithmetic_of_the_cpu(kernels):
    for part in CODECS:
        found = {name: ptx for name, ptx in kernels.items() if part in name}
        assert found, f"no kernel is called {part}"
        for name, ptx in found.items():
            assert not re.search(r"\bld\.acquire|nanosleep", ptx), f"{name} waits"
            inexact = re.findall(
                r"\b(?:fma|rcp|div\.(?:full|approx)|sqrt\.approx)\S*|\S*ftz\S*", ptx
            )
            assert not inexact, f"{name}: {inexact[:3]} is not what the CPU does"
    blocks = [ptx for name, ptx in kernels.items() if "encode_blocks_kernel" in name]
    assert all("div.rn.f32" in ptx for ptx in blocks)


def find_disassembler(nvcc: str) -> str | None:
    """Of the toolkit, or of the package nvidia-cuda-nvdisasm."""
    beside = Path(nvcc).parent / "nvdisasm"
    packages = [path for root in sys.path for path in Path(root).glob("nvidia/*/bin/nvdisasm")]
    usable = [str(path) for path in (beside, *packages) if os.access(path, os.X_OK)]
    return usable[0] if usable else native_build.find("nvdisasm")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", SOURCES)
def test_machine_code_has_what_ptx_promised(nvcc, tmp_path, source):
    disassembler = find_disassembler(nvcc)
    if disassembler is None:
        pytest.skip("nvdisasm not found (pip install nvidia-cuda-nvdisasm)")
    cubin = tmp_path / "out.cubin"
    compile_kernels(nvcc, source, "-arch=sm_90", "-cubin", "-o", cubin)
    done = native_build.run([disassembler, "-c", cubin], 300)
    assert done.returncode == 0, done.stdout[-2000:]
    parts = done.stdout.split(".section\t.text.")[1:]
    assert len(parts) >= 4, done.stdout[:2000]
    for part in parts:
        name = part.split(",")[0]
        waits = any(re.search(rf"\d{kernel}", name) for kernel in WAITS)
        assert not re.search(r"\bLDG\.\S*CONSTANT", part), f"{name} reads past the caches"
        assert not re.search(r"\b(LDL|STL)\b", part), f"{name} uses local memory"
        if not any(narrow in name for narrow in [*NARROW, *CODECS]):
            assert re.search(r"\bLDG?\.E\.128\b", part), f"{name} loads no 16 bytes"
            assert re.search(r"\bSTG?\.E\.128\b", part), f"{name} stores no 16 bytes"
        if waits:
            assert re.search(r"\bLD\.E\S*\.STRONG\.SYS", part), name
            assert "CCTL.IVALL" in part, f"{name}: an acquire must empty the first-level cache"
            assert "MEMBAR.ALL.SYS" in part, f"{name}: a release must be one"
