"""Waiting: CPUs by affinity and control groups, ranks that share CPUs, ranks that are idle."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import numpy as np
import pytest

import pycoll
from pool import communicator_ranks, run_ranks
from pycoll import _core

CPUS = len(os.sched_getaffinity(0))


# ---- How many CPUs there are ----


class Root:
    """A file system's root with the files of control groups."""

    def __init__(self, path: Path, groups: str) -> None:
        self.path = path
        self.write("proc/self/cgroup", groups)

    def write(self, file: str, text: str) -> None:
        (self.path / file).parent.mkdir(parents=True, exist_ok=True)
        (self.path / file).write_text(text)

    def v2(self, group: str, text: str) -> None:
        self.write(f"sys/fs/cgroup/{group}/cpu.max", text)

    def v1(self, group: str, quota: int, period: int, mount: str = "cpu") -> None:
        self.write(f"sys/fs/cgroup/{mount}/{group}/cpu.cfs_quota_us", f"{quota}\n")
        self.write(f"sys/fs/cgroup/{mount}/{group}/cpu.cfs_period_us", f"{period}\n")

    @property
    def quota(self) -> float | None:
        return _core.cgroup_cpus(str(self.path))


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert _core.cgroup_cpus(str(tmp_path / "nothing")) is None
    assert _core.available_cpus(str(tmp_path / "nothing")) == CPUS
    assert Root(tmp_path, "").quota is None
    assert Root(tmp_path, "garbage\n0:\n").quota is None


def test_the_tightest_quota_of_nested_groups_counts(tmp_path):
    root = Root(tmp_path, "0::/job/step/task\n")
    root.v2("job/step/task", "max 100000\n")
    assert root.quota is None
    root.v2("", "800000 100000\n")
    assert root.quota == 8
    root.v2("job", "150000 100000\n")
    assert root.quota == 1.5
    root.v2("job/step", "300000 100000\n")
    assert root.quota == 1.5  # a child cannot have more than its parent
    root.v2("job/step/task", "25000 50000\n")
    assert root.quota == 0.5
    root.v2("job/step/other", "1000 100000\n")
    assert root.quota == 0.5  # not this process's


def test_version_1_is_read_where_it_is_mounted(tmp_path):
    root = Root(tmp_path, "5:memory:/m\n4:cpuset:/s\n3:cpu,cpuacct:/a/b\n1:name=systemd:/u\n")
    root.v1("m", 1000, 100000)
    root.v1("s", 1000, 100000)
    assert root.quota is None
    root.v1("a/b", -1, 100000)
    assert root.quota is None
    root.v1("a", 250000, 100000)
    assert root.quota == 2.5
    root.v1("a/b", 100000, 100000, mount="cpu,cpuacct")
    assert root.quota == 1


def test_both_versions_side_by_side(tmp_path):
    root = Root(tmp_path, "3:cpu:/a\n0::/b\n")
    root.v1("a", 400000, 100000)
    root.write("sys/fs/cgroup/unified/b/cpu.max", "300000 100000\n")
    assert root.quota == 3


def test_a_container_that_sees_the_hosts_path(tmp_path):
    # Without a cgroup namespace the path is not below the mount, where the own group is.
    root = Root(tmp_path, "0::/kubepods/pod1/container\n")
    root.v2("", "200000 100000\n")
    assert root.quota == 2
    # With one, but outside of it.
    outside = Root(tmp_path / "x/y", "0::/../../other\n")
    (tmp_path / "x/y/sys/fs/cgroup").mkdir(parents=True)
    outside.write("sys/other/cpu.max", "1000 100000\n")
    assert outside.quota is None


@pytest.mark.parametrize("text", ["", "max", "200000", "200000 0", "-1 100000", "lots 100000"])
def test_files_that_say_nothing_set_no_limit(tmp_path, text):
    root = Root(tmp_path, "0::/\n")
    root.v2("", text)
    assert root.quota is None


@pytest.mark.parametrize(("quota", "cpus"), [(1000, 1), (100_000, 1), (100_001, 2), (10**9, CPUS)])
def test_a_part_of_a_cpu_counts_as_one(tmp_path, quota, cpus):
    root = Root(tmp_path, "0::/\n")
    root.v2("", f"{quota} 100000\n")
    assert _core.available_cpus(str(tmp_path)) == min(cpus, CPUS)


def pinned(rank, world_size, directory):
    allowed = sorted(os.sched_getaffinity(0))
    counts = [_core.available_cpus("/nothing")]
    os.sched_setaffinity(0, allowed[:1])
    counts.append(_core.available_cpus("/nothing"))
    return counts


def test_the_affinity_mask_counts():
    assert run_ranks(1, pinned)[0].value == [CPUS, 1]


def test_this_process_has_cpus():
    assert 1 <= _core.available_cpus() <= CPUS


# ---- More ranks than CPUs ----


def on_two_cpus(rank, world_size, directory, spin_us):
    """Seconds a call of 4 bytes, medians over batches of the slowest rank: as pycoll waits by
    itself, and when it spins; the two by turns, so that other work on the machine hits both."""
    # As under `taskset`: the group counts the CPUs of its mask, not those of the machine.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    store = pycoll.FileStore(directory)
    groups = [
        pycoll.Communicator(store, rank, world_size, name="itself"),
        pycoll.Communicator(
            store, rank, world_size, name="spins", options={"PYCOLL_SPIN_US": spin_us}
        ),
    ]
    array = np.ones(1, np.float32)
    batches = []
    for _ in range(9):
        for group in groups:
            group.barrier()
            start = time.perf_counter()
            for _ in range(5):
                group.all_reduce(array)
            batches.append((time.perf_counter() - start) / 5)
    took = np.array(batches)
    groups[0].all_reduce(took, "max")
    return [float(np.median(took[0::2])), float(np.median(took[1::2]))]


# The last stage of a wait over TCP is the kernel's poll either way, which hides a shorter spin.
@pytest.mark.parametrize(
    ("transport", "spin_us", "factor"), [("shm", "100", 1.5), ("tcp", "1000", 2)]
)
def test_eight_ranks_on_two_cpus_do_not_collapse(transport, spin_us, factor):
    # Ranks that spin for their peers keep these from running: a call then takes that long times the
    # ranks in front. Those that get out of the way are faster the more ranks there are.
    env = {"PYCOLL_TRANSPORT": transport}
    for result in run_ranks(8, on_two_cpus, spin_us, timeout=60, env=env):
        itself, spinning = result.value
        assert factor * itself < spinning


# ---- Ranks that wait ----


def cpu_seconds() -> float:
    """Of the whole process, user and system: all threads count."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def wait_three_seconds(communicator, call):
    communicator.barrier()
    array = np.ones(1000)
    if communicator.rank == 0:
        time.sleep(3.3)
    start, before = time.monotonic(), cpu_seconds()
    if call == "recv":
        if communicator.rank == 0:
            for peer in range(1, communicator.world_size):
                communicator.send(array, peer)
        else:
            communicator.recv(array, 0)
    else:
        getattr(communicator, call)(array) if call != "barrier" else communicator.barrier()
    return time.monotonic() - start, cpu_seconds() - before


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("call", ["all_reduce", pytest.param("recv", marks=pytest.mark.full)])
def test_a_rank_that_waits_three_seconds_uses_under_20_ms_of_cpu(transport, call):
    results = communicator_ranks(3, wait_three_seconds, call, env={"PYCOLL_TRANSPORT": transport})
    for result in results[1:]:
        waited, used = result.value
        assert waited > 3
        assert used < 0.02
