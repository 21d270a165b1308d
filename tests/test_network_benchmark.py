"""benchmarks/network.py and compression*.py run, check results and say what they measured."""

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


def figures_of(script, folder, *arguments):
    """What a script of compressed gradients writes; that it draws a picture."""
    if reason := netns.why_not():
        pytest.skip(reason)
    figures, plot = folder / "figures.json", folder / "plot.png"
    command = [sys.executable, SCRIPT.with_name(script), "--networks", "1gbit", "--rounds", "2"]
    command += [*arguments, "--json", figures, "--plot", plot]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    return json.loads(figures.read_text())


@pytest.mark.parametrize("hosts", ["2x1", "2x2"])
def test_codecs_against_none_and_gloo(hosts, tmp_path):
    """Two ranks of a host sum their values first: its interface sends no more codes than one's."""
    arguments = ("--hosts", hosts, "--sizes", "1M", "--codecs", "none,int8,gloo")
    found = figures_of("compression.py", tmp_path, *arguments)
    assert found["ranks_per_host"] == int(hosts[-1])
    (row,) = found["results"]["1gbit"]
    assert row["error"]["none"] < 1e-6
    assert row["error"]["gloo"] < 1e-6
    assert 0.009 < row["error"]["int8"] < 0.011
    # 8.125 bits a value, and what TCP and IP add; without a codec 32.
    assert 8.125 < row["bits"]["int8"] < 8.8
    assert 32 < row["bits"]["none"] < 34
    assert row["codec_seconds"]["int8"] > 0
    assert all(len(times) == 2 for times in row["seconds"].values())


def test_steps_of_ddp_with_hooks(tmp_path):
    names = ["pycoll", "pycoll/int8", "pycoll/powersgd", "gloo/fp16", "gloo/powersgd", "nothing"]
    shape = ("--width", "256", "--layers", "2", "--batch", "32")
    found = figures_of("compression_ddp.py", tmp_path, "--contenders", ",".join(names), *shape)
    row = found["results"]["1gbit"]
    assert row["bytes"] == 4 * 2 * (256 * 256 + 256)
    assert all(list(row[key]) == names for key in ("seconds", "error", "bits", "cpu_seconds"))
    assert all(min(times) > 0 and len(times) == 2 for times in row["seconds"].values())
    # Two ranks' data are independent: own gradients are as far from the mean as that is from 0.
    least = {"nothing": 0.5, "pycoll/powersgd": 0.1, "gloo/powersgd": 0.1, "pycoll/int8": 5e-3}
    most = {"pycoll": 1e-6, "pycoll/int8": 0.02, "gloo/fp16": 2e-3, "nothing": 2}
    for name, errors in row["error"].items():
        assert least.get(name, 0) <= min(errors) and max(errors) < most.get(name, 2), name
    assert row["bits"]["pycoll"] > 32 > 20 > row["bits"]["gloo/fp16"] > 16
    assert 8 < row["bits"]["pycoll/int8"] < 10 > row["bits"]["pycoll/powersgd"]
    assert row["bits"]["nothing"] < 0.5
