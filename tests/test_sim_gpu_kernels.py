"""The program of tests/gpu, which checks and times kernels on a GPU, on the simulator: so short
that it proves the program's own code. The kernels have tests of their own (test_sim_kernels.py).
"""

from __future__ import annotations

import functools
import json

import pytest

import native_build

DEADLINE_S = 240

# The first test of a build compiles it.
pytestmark = pytest.mark.timeout(native_build.BUILD_DEADLINE_S + DEADLINE_S)


@functools.cache
def program():
    reason = native_build.why_no_cuda_headers()
    if reason:
        pytest.skip(reason)
    native_build.sync()
    return native_build.build("", "gpu_kernels", project="sim") / "gpu_kernels"


def run(*arguments):
    command = ["env", "PYCOLL_SIM_TIMEOUT_S=60", program(), *map(str, arguments)]
    return native_build.run(command, DEADLINE_S)


# All takes minutes here.
SOME = ["cast_check_float16", "one_shot_ll", "two_shot_kernel", "tree"]


@pytest.mark.parametrize(("ranks", "names"), [(1, []), (2, SOME)])
def test_the_program_of_the_gpu_tests_checks_kernels(ranks, names):
    done = run("check", ranks, *names)
    assert done.returncode == 0 and done.stdout.startswith("ok check"), done.stdout


@pytest.mark.full
def test_all_of_them_with_several_ranks():
    done = run("check", 3)
    assert done.returncode == 0 and done.stdout.startswith("ok check"), done.stdout


def test_it_checks_lists_of_tensors():
    done = run("lists", 8, 1)
    assert done.returncode == 0 and done.stdout.startswith("ok lists"), done.stdout


def test_it_checks_codecs():
    done = run("codecs", 20011)
    assert done.returncode == 0 and done.stdout == "ok codecs: 480 calls\n", done.stdout


def test_it_replays_graphs():
    done = run("replay", 2, 8)
    assert done.returncode == 0 and done.stdout.startswith("ok replay"), done.stdout


@pytest.mark.parametrize("name", ["scale", "encode_int8_random", "decode_int8_sum"])
def test_it_times_what_the_benchmark_asks_for(name):
    done = run("time", name, 1, 4096, 3)
    facts = json.loads(done.stdout)
    assert (facts["name"], facts["bytes"]) == (name, 4096)
    assert len(facts["seconds"]) == 3 and min(facts["seconds"]) > 0


def test_wrong_usage_is_refused():
    done = run("time", "no_such", 1, 4096)
    assert done.returncode == 1 and "no operation no_such" in done.stdout
    assert run("check").returncode == 2


def test_the_benchmark_has_a_floor_for_everything_that_is_timed():
    from test_benchmark_scripts import load

    listed = [line.split()[:2] for line in run("--list").stdout.splitlines()]
    assert {name for name, kind in listed if kind != "check"} == set(load("cuda_kernels").FLOORS)
