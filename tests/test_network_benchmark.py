"""benchmarks/network.py runs, checks its results and says what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import netns

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "network.py"
QUICK = ["--sizes", "4,256K", "--rounds", "2", "--batch-ms", "1", "--size-seconds", "0.1"]


def run(*arguments):
    command = [sys.executable, SCRIPT, *QUICK, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("network", ["loopback", "10gbit"])
def test_a_row_a_size_and_a_column_a_contender(network, tmp_path):
    if network != "loopback" and (reason := netns.why_not()):
        pytest.skip(reason)
    file = tmp_path / "figures.json"
    done = run("--networks", network, "--algorithms", "ring", "--json", file)
    assert done.returncode == 0, done.stderr
    assert ("rate 10Gbit" in done.stdout) == (network == "10gbit")
    (result,) = json.loads(file.read_text())["results"]
    assert [row["bytes"] for row in result["rows"]] == [4, 262144]
    for row in result["rows"]:
        assert row["wrong"] == 0
        assert set(row["us"]) == {"socket", "gloo", "pycoll", "ring"}
        assert all(value > 0 for value in row["us"].values())


def test_an_unknown_network_is_refused():
    done = run("--networks", "carrier-pigeon")
    assert done.returncode != 0
    assert "neither loopback, veth nor a rate" in done.stderr


def test_codecs_against_none_and_gloo(tmp_path):
    if reason := netns.why_not():
        pytest.skip(reason)
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    command = [sys.executable, SCRIPT.with_name("compression.py"), "--networks", "1gbit"]
    command += ["--sizes", "1M", "--codecs", "none,int8,gloo", "--rounds", "2"]
    command += ["--json", figures, "--plot", plot]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(figures.read_text())["results"]["1gbit"]
    assert row["error"]["none"] < 1e-6
    assert row["error"]["gloo"] < 1e-6
    assert 0.009 < row["error"]["int8"] < 0.011
    # 8.125 bits a value, and what TCP and IP add; without a codec 32.
    assert 8.125 < row["bits"]["int8"] < 8.8
    assert 32 < row["bits"]["none"] < 34
    assert row["codec_seconds"]["int8"] > 0
    assert all(len(times) == 2 for times in row["seconds"].values())
    assert plot.read_bytes().startswith(b"\x89PNG")
