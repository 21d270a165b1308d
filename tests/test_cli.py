"""The `pycoll` command, through its own argument parser."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys

import pytest
import torch

from pycoll import _core, _native
from pycoll.cli import checks, doctor, machine, main

EVERY = [(c, a.name) for c in _core.collectives() for a in _core.algorithms(c)]


def output_of(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def rows_of(text):
    """The cells of a printed table: {step: [vector of each rank]}; a dot is None."""
    rows = {}
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("|-"):
            label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows[label] = cells
    del rows["step"]
    return {label: [parse_vector(cell) for cell in cells] for label, cells in rows.items()}


def parse_vector(cell):
    assert cell[0] == "["
    assert cell[-1] == "]"
    return [None if x == "." else float(x) for x in cell[1:-1].split(", ") if x]


def test_recursive_doubling_is_the_lecture_s_table(capsys):
    text = output_of(
        capsys,
        *("explain", "all_reduce", "--algorithm", "recursive_doubling", "--ranks", "4"),
        *("--data", "1,2;3,4;5,6;7,8"),
    )
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table == [
        "| step    | rank 0   | rank 1   | rank 2   | rank 3   |",
        "|---------|----------|----------|----------|----------|",
        "| initial | [1, 2]   | [3, 4]   | [5, 6]   | [7, 8]   |",
        "| 1       | [4, 6]   | [4, 6]   | [12, 14] | [12, 14] |",
        "| 2       | [16, 20] | [16, 20] | [16, 20] | [16, 20] |",
    ]
    assert text.splitlines()[-1] == (
        "checked: every output holds each of 4 contributions once; no deadlock at FIFO depth 1+"
    )
    # The default data is the same.
    arguments = ("explain", "all_reduce", "--algorithm", "recursive_doubling")
    assert output_of(capsys, *arguments) == text


REDUCE = {
    "sum": math.fsum,
    "avg": lambda x: math.fsum(x) / len(x),
    "min": min,
    "max": max,
    "product": math.prod,
}


def expected(collective, inputs, op, root):
    """What each rank's output must be; None: it has none."""
    ranks = len(inputs)
    everything = [x for row in inputs for x in row]
    only_root = [None] * root, [None] * (ranks - 1 - root)
    reduced = [REDUCE[op](column) for column in zip(*inputs, strict=True)]
    share = len(reduced) // ranks
    return {
        "all_reduce": [reduced] * ranks,
        "reduce_scatter": [reduced[r * share : (r + 1) * share] for r in range(ranks)],
        "all_gather": [everything] * ranks,
        "broadcast": [inputs[root]] * ranks,
        "reduce": [*only_root[0], reduced, *only_root[1]],
        "gather": [*only_root[0], everything, *only_root[1]],
        "scatter": [inputs[root][r * share : (r + 1) * share] for r in range(ranks)],
        "all_to_all": [
            [x for row in inputs for x in row[r * share : (r + 1) * share]] for r in range(ranks)
        ],
        "barrier": [list(range(ranks))] * ranks,  # those who are known to have come
    }[collective]


@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_the_last_row_is_the_result(capsys, collective, algorithm, ranks, op):
    width = 0 if collective == "barrier" else 2 * ranks
    inputs = [[float((7 * r + 3 * i) % 11) for i in range(width)] for r in range(ranks)]
    root = ranks - 1 if collective in ("broadcast", "reduce", "gather", "scatter") else 0
    data = ";".join(",".join(map(str, row)) for row in inputs)
    text = output_of(
        capsys,
        *("explain", collective, "--algorithm", algorithm, "--ranks", str(ranks)),
        *("--data", data, "--op", op, "--root", str(root)),
    )
    rows = rows_of(text)
    assert next(iter(rows)) == "initial"
    last = list(rows.values())[-1]
    for rank, wanted in enumerate(expected(collective, inputs, op, root)):
        got = last[rank]
        if wanted is None:
            continue
        if collective in ("reduce_scatter", "scatter"):  # the row shows what else the rank knows
            share = len(got) // ranks
            got = got[rank * share : (rank + 1) * share]
        assert got == pytest.approx(wanted, rel=1e-5)
    assert text.splitlines()[-1].startswith("checked: ")


@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
def test_defaults_and_the_list_of_steps(capsys, collective, algorithm):
    arguments = ("explain", collective, "--algorithm", algorithm, "--ranks", "3")
    text = output_of(capsys, *arguments, "--steps")
    programs = _core.build_programs(collective, algorithm, 3)
    for rank, program in enumerate(programs):
        assert f"rank {rank}" in text
        for lane in range(len(program.lanes)):
            for step in program.steps(lane):
                assert str(step) in text
    assert rows_of(text) == rows_of(output_of(capsys, *arguments))


def test_hosts_decide_who_talks_to_whom(capsys):
    arguments = ("explain", "all_reduce", "--algorithm", "hierarchical", "--steps")
    arguments += ("--data", "1,2,3,4;5,6,7,8;9,10,11,12;13,14,15,16")
    text = output_of(capsys, *arguments, "--hosts", "2x2")
    assert text.startswith("all_reduce, hierarchical, 4 ranks, hosts of 2x2\n")
    programs = _core.build_programs("all_reduce", "hierarchical", 4, hosts=[0, 0, 1, 1])
    assert all(str(step) in text for step in programs[2].steps())
    uneven = output_of(capsys, *arguments, "--hosts", "3,1")
    assert rows_of(uneven) != rows_of(text)
    assert list(rows_of(uneven).values())[-1] == [[28.0, 32.0, 36.0, 40.0]] * 4


def test_without_an_algorithm_it_lists_them(capsys):
    text = output_of(capsys, "explain")
    for collective, algorithm in EVERY:
        assert f"\n{collective}\n" in "\n" + text
        assert f"  {algorithm} " in text
    text = output_of(capsys, "explain", "all_reduce")
    assert "ring" in text
    assert "\nbroadcast\n" not in text


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        (["all_redcue"], ["all_redcue", "all_reduce", "broadcast"]),
        (["all_redcue", "--algorithm", "ring"], ["all_redcue", "all_reduce"]),
        (["all_reduce", "--algorithm", "rign"], ["rign", "ring", "recursive_doubling"]),
        (["all_reduce", "--algorithm", "ring", "--ranks", "0"], ["--ranks", "0"]),
        (["all_reduce", "--algorithm", "ring", "--root", "4"], ["--root", "0 to 3"]),
        (["all_reduce", "--algorithm", "ring", "--data", "1;2"], ["2 vectors for 4 ranks"]),
        (["all_reduce", "--algorithm", "ring", "--data", "1;2;x;4"], ["'x'"]),
        (["all_reduce", "--algorithm", "ring", "--data", "1;2;3;4,5"], ["different lengths"]),
        (["all_reduce", "--algorithm", "ring", "--plot", "a.pdf"], ["a.pdf", ".png"]),
        (["all_reduce", "--ranks", "3", "--steps"], ["--ranks, --steps", "--algorithm"]),
        (["--algorithm", "ring"], ["--algorithm without COLLECTIVE"]),
        (["all_reduce", "--algorithm", "ring", "--hosts", "2x"], ["'2x'", "2 hosts of 2"]),
        (["all_reduce", "--algorithm", "ring", "--hosts", "2,0"], ["'2,0'"]),
        (["all_reduce", "--algorithm", "ring", "--hosts", "2x2", "--ranks", "3"], ["4 ranks"]),
    ],
)
def test_wrong_names_are_errors_that_list_what_there_is(capsys, arguments, reasons):
    assert main(["explain", *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    for reason in reasons:
        assert reason in captured.err


@pytest.mark.parametrize("ranks", [1, 4, 8])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "recursive_doubling", "two_shot"])
def test_the_plot_is_a_picture(capsys, tmp_path, algorithm, ranks):
    pytest.importorskip("matplotlib")
    file = tmp_path / "new" / "picture.png"
    arguments = ("--algorithm", algorithm, "--ranks", str(ranks), "--plot", str(file))
    text = output_of(capsys, "explain", "all_reduce", *arguments)
    assert f"wrote {file}" in text
    content = file.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert 400 < width < 3000
    assert 150 < height < 5000


def test_the_doctor_answers(capsys):
    text = output_of(capsys, "doctor")
    for section in checks.CHECKS:
        assert f"\n{section}\n" in "\n" + text
    report = json.loads(output_of(capsys, "doctor", "--json"))
    assert set(report) == set(checks.CHECKS)
    by_name = {f["name"]: f for f in report["build"]}
    assert by_name["native core"]["state"] == "ok"
    assert any(f["name"] == "shm" and f["state"] == "ok" for f in report["transports"])
    arena, large_pages = report["shareable memory"]
    assert arena["state"] == "ok" and "64 GiB" in arena["text"]
    assert large_pages["state"] == "ok" or "MADV_COLLAPSE" in large_pages["text"]
    sets = next(f for f in report["processors"] if f["name"] == "instruction sets")
    assert _core.best_isa() in sets["text"]


def test_a_broken_check_is_a_finding(monkeypatch, capsys):
    def broken():
        raise RuntimeError("no such file")

    monkeypatch.setitem(doctor.CHECKS, "network", broken)
    assert "this check failed: RuntimeError: no such file" in output_of(capsys, "doctor")


def test_what_is_missing_says_what_to_do(monkeypatch, capsys):
    def refused(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(machine.os, "memfd_create", refused)
    monkeypatch.setenv("PYCOLL_ALGOO", "ring")
    text = " ".join(output_of(capsys, "doctor").split())
    assert "!! shm memfd_create: [Errno 1] Operation not permitted" in text
    assert "seccomp" in text
    assert "PYCOLL_ALGOO 'ring': pycoll reads no such variable" in text


def test_the_doctor_says_who_serves_cuda_tensors(monkeypatch, tmp_path):
    def finding():
        _native.gpu_problem.cache_clear()
        return checks.gpu_library()

    monkeypatch.setattr(_native, "gpu_library", lambda: None)
    assert finding().state == "info" and "without its CUDA part" in finding().text
    file = tmp_path / "libpycoll_cuda.so"
    file.write_bytes(b"no library")
    monkeypatch.setattr(_native, "gpu_library", lambda: file)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert finding().state == "missing" and "torch is built without CUDA" in finding().text
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert finding().state == "missing" and "cannot open the GPU library" in finding().text
    _native.gpu_problem.cache_clear()


def test_the_doctor_shows_the_variables_in_force(monkeypatch, capsys):
    monkeypatch.setenv("PYCOLL_FIFO_DEPTH", "8")
    text = " ".join(output_of(capsys, "doctor").split())
    assert "PYCOLL_FIFO_DEPTH 8 (default: 4): " in text
    monkeypatch.setenv("PYCOLL_FIFO_DEPTH", "many")
    text = " ".join(output_of(capsys, "doctor").split())
    assert "!! PYCOLL_FIFO_DEPTH" in text
    assert "many" in text, "the refusal names the value"


def test_the_interface_that_reaches_the_master_is_chosen(monkeypatch):
    found = machine.interfaces()
    assert "127.0.0.1" in found["lo"]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    choice = machine.choose_interface(found)
    assert (choice.name, "MASTER_ADDR=127.0.0.1" in choice.reason) == ("lo", True)
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    choice = machine.choose_interface(found)
    assert not choice.name
    assert "MASTER_ADDR=no.such.host.invalid" in choice.reason


def test_the_command_is_a_module_and_imports_no_plotting():
    code = (
        "import sys, pycoll.cli\n"
        "pycoll.cli.main(['explain', 'all_reduce', '--algorithm', 'ring'])\n"
        "pycoll.cli.main(['doctor'])\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    line = [sys.executable, "-m", "pycoll", "explain", "nosuch"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "all_reduce" in done.stderr
