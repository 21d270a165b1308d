"""Public bug reports, kind I: memory, shared memory, CPUs, limits of the system.

I13 is `test_groups_share_descriptors` and `test_too_few_descriptors_are_named` in test_network.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import random
import signal
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mounts
import netns
import pycoll
from helpers_cases import TRANSPORTS, numbered, run_case, same, still_works
from helpers_limits import (
    CROSS_MEMORY,
    PIDFD_OPEN,
    PR_SET_DUMPABLE,
    cpu_quota,
    forbid_calls,
    prctl,
    small_dev_shm,
)
from helpers_scripts import run_commands
from pool import run_ranks, torch_ranks

over_each_transport = pytest.mark.parametrize("transport", TRANSPORTS)
needs_mounts = pytest.mark.skipif(bool(mounts.why_not()), reason=mounts.why_not())
needs_networks = pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not())


def entering(path, rank):
    mounts.enter(path)


# ---- I1 ----


def i1_more_than_dev_shm(rank, w, elements):
    shm = os.statvfs("/dev/shm")
    assert shm.f_blocks * shm.f_frsize <= 64 << 20, "the test has another /dev/shm"
    for n in (256, elements):
        # Whole numbers that float32 holds exactly, and their sum.
        values = torch.arange(n, dtype=torch.float32).remainder_(4093)
        x = values + rank
        dist.all_reduce(x)
        assert torch.equal(x, values.mul_(w).add_(w * (w - 1) // 2)), n
    shared = pycoll.empty(1 << 20)
    shared.fill_(rank + 1.0)
    dist.all_reduce(shared)
    assert shared.min() == shared.max() == w * (w + 1) / 2
    return shm.f_bfree - os.statvfs("/dev/shm").f_bfree


@needs_mounts
@pytest.mark.parametrize(
    ("size", "megabytes"),
    [("1m", 64), *(pytest.param(size, 256, marks=pytest.mark.full) for size in ("1m", "64m"))],
)
def test_i1_shared_memory_needs_no_dev_shm(size, megabytes):
    with small_dev_shm(size) as path:
        results = run_case(
            4,
            i1_more_than_dev_shm,
            megabytes << 18,
            prepare=functools.partial(entering, path),
            timeout=120,
        )
    for result in results:
        assert result.value == 0, "blocks of /dev/shm are in use"
        assert "pycoll" not in result.stderr, result.stderr


# ---- I2 ----


def i2_killed_amid_a_call(rank, w, directory, path, seed):
    """What is left in /dev/shm; then calls until this process is killed, or a few if it is not."""
    mounts.enter(path)
    left = os.listdir("/dev/shm")
    store = pycoll.FileStore(directory)
    communicator = pycoll.Communicator(store, rank, w)
    # Filled: 16 MiB that a leak would keep.
    array = pycoll.empty_array(4 << 20, np.float32)
    array[:] = rank + 1
    communicator.all_reduce(array)
    assert array[0] == array[-1] == w * (w + 1) / 2
    if seed is None:
        return left
    communicator.barrier()
    delay = 0.02 + 0.05 * random.Random(seed).random()
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with contextlib.suppress(pycoll.Error):  # a peer was killed first
        while True:
            communicator.all_reduce(array, "max")
    time.sleep(10)
    return None


def shared_bytes():
    """Of all memory that lies in tmpfs or a memfd on this machine."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["Shmem"].split()[0]) * 1024


@needs_mounts
@pytest.mark.parametrize("times", [8, pytest.param(20, marks=pytest.mark.full)])
def test_i2_killed_jobs_leave_no_memory_behind(times):
    before = shared_bytes()
    with small_dev_shm("16m") as path:
        for seed in range(times):
            results = run_ranks(4, i2_killed_amid_a_call, path, seed, check=False)
            for result in results:
                assert result.exitcode == -signal.SIGKILL, result.report()
        for result in run_ranks(4, i2_killed_amid_a_call, path, None):
            assert result.value == []
    # Each job had 64 MiB; other tests may use some meanwhile.
    deadline = time.monotonic() + 10
    while shared_bytes() - before > times * (64 << 20) / 2:
        assert time.monotonic() < deadline, (before, shared_bytes())
        time.sleep(0.1)


# ---- I4 ----

I4_SCRIPT = """
import os, signal, sys, threading
import pycoll

signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background inherit none
rank, directory, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = pycoll.FileStore(directory)
communicator = pycoll.Communicator(store, rank, 4)
array = pycoll.empty_array(1 << 18, "float32")
array[:] = 0
store.set(f"pid{rank}", str(os.getpid()))
communicator.barrier()
pids = [int(store.get(f"pid{r}")) for r in range(4)]
if rank == 0 and how.startswith("SIG"):
    kill = lambda: [os.kill(pid, getattr(signal, how)) for pid in pids]
    threading.Timer(0.1, kill).start()
for i in range(50 if how == "end" else 1 << 40):
    communicator.all_reduce(array)
    if how == "exception" and rank == 2 and i == 5:
        raise ValueError("at rank 2")
"""


@needs_mounts
@needs_networks
@pytest.mark.parametrize(
    ("how", "codes"),
    [
        ("end", {0}),
        ("exception", {1}),
        # Who hears of a peer's end before its own signal comes raises that.
        ("SIGTERM", {-signal.SIGTERM, 1}),
        ("SIGINT", {-signal.SIGINT, 1}),
    ],
)
def test_i4_nothing_is_left_however_a_job_ends(how, codes, tmp_path):
    with netns.Hosts(1) as net, small_dev_shm("16m") as mount:
        inside = ["nsenter", f"--net={net.paths[0]}", f"--mount={mount}"]
        command = [*inside, sys.executable, "-c", I4_SCRIPT]
        commands = [[*command, str(rank), str(tmp_path), how] for rank in range(4)]
        ended = run_commands(commands, 40, {"PYCOLL_TORCH": "0", "OMP_NUM_THREADS": "1"})
        left = run_commands([[*inside, "ls", "-A", "/dev/shm"]], 20, {})[0].stdout
        sockets = net.run(0, "cat /proc/net/unix")
    for job in ended:
        assert job.exitcode in codes, job
        assert "terminate called" not in job.stderr, job
    if how == "exception":
        assert "ValueError: at rank 2" in ended[2].stderr
        assert "rank 2" in ended[0].stderr, ended[0]
    if how.startswith("SIG"):
        assert any(job.exitcode == -getattr(signal, how) for job in ended), ended
    assert left == ""
    assert "pycoll" not in sockets


# ---- I5, I14 ----


def i5_two_jobs(rank, w, directory, paths, port, killed):
    """Two ranks a job; the jobs have their networks, and one port, which is all they are told."""
    job, rank = divmod(rank, 2)
    torch.set_num_threads(1)
    netns.enter(paths[job])
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("pycoll", init_method=address, rank=rank, world_size=2)
    x = numbered(rank, (1000,), salt=job)
    dist.all_reduce(x)
    same(x, numbered(0, (1000,), salt=job) + numbered(1, (1000,), salt=job))
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()
    return "done"


@needs_networks
@over_each_transport
def test_i5_two_jobs_of_one_port_and_again_after_sigkill(transport):
    env = {"PYCOLL_TRANSPORT": transport}
    with netns.Hosts(2) as net:
        for killed in (True, False):
            results = run_ranks(4, i5_two_jobs, net.paths, 29517, killed, env=env, check=not killed)
            for result in results:
                if killed:
                    # A peer's death may reach one before it has its sum.
                    told = result.error is not None and result.error.is_a("DistBackendError")
                    assert result.exitcode == -signal.SIGKILL or told, result.report()
                else:
                    assert result.value == "done"


def i14_two_jobs(rank, w, directory, ports, steps):
    job, rank = divmod(rank, 2)
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{ports[job]}"
    dist.init_process_group("pycoll", init_method=address, rank=rank, world_size=2)
    for step in range(steps):
        x = torch.arange(300.0) + 1000 * job + rank + step
        dist.all_reduce(x)
        same(x, 2 * (torch.arange(300.0) + 1000 * job + step) + 1, (job, step))
        parts = [torch.empty(3) for _ in range(2)]
        dist.all_gather(parts, torch.full((3,), 10.0 * job + rank))
        same(torch.stack(parts), torch.tensor([[10.0 * job] * 3, [10.0 * job + 1] * 3]), step)
    dist.destroy_process_group()
    return "done"


@over_each_transport
def test_i14_two_jobs_on_one_host_never_meet(transport):
    env = {"PYCOLL_TRANSPORT": transport}
    for result in run_ranks(4, i14_two_jobs, (29518, 29519), 200, env=env, timeout=60):
        assert result.value == "done"


# ---- I6 ----


def i6_as_in_a_container():
    """Another user, who may not be traced, and calls that a filter refuses."""
    # Python's own files may be root's alone: what is imported late has to be here before.
    dist.init_process_group("pycoll", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    prctl(PR_SET_DUMPABLE, 0)
    forbid_calls(PIDFD_OPEN, *CROSS_MEMORY)


def i6_reads_nobodys_memory(rank, w, directory):
    torch.set_num_threads(1)
    os.chmod(directory, 0o777)
    i6_as_in_a_container()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.process_vm_readv(os.getpid(), None, 0, None, 0, 0) == -1
    assert ctypes.get_errno() == 1, "the filter is not there"
    store = dist.FileStore(os.path.join(directory, "store"), w)
    dist.init_process_group("pycoll", store=store, rank=rank, world_size=w)
    for n in (3, 1 << 20):
        shared = pycoll.empty(n)
        shared.copy_(numbered(rank, (n,)))
        for x in (shared, numbered(rank, (n,))):
            dist.all_reduce(x)
            same(x, sum(numbered(r, (n,)) for r in range(w)))
    still_works(rank, w)
    dist.destroy_process_group()
    return "done"


@pytest.mark.skipif(not CROSS_MEMORY, reason="numbers of system calls are not known here")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@over_each_transport
def test_i6_no_memory_of_peers_is_read_behind_the_kernels_back(transport):
    for result in run_ranks(3, i6_reads_nobodys_memory, env={"PYCOLL_TRANSPORT": transport}):
        assert result.value == "done"
        assert "pycoll" not in result.stderr, result.stderr


# ---- I8, I10 ----


def i8_times(rank, w, threads, batches):
    """Medians over batches of the slowest rank's seconds: of pycoll and Gloo, by turns, so that
    other work on the machine hits both."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
    medians = {}
    for elements, repeats in ((1, 20), (1 << 18, 3)):
        took = np.zeros((batches, 2))
        tensor = torch.zeros(elements)
        for batch in range(batches):
            for which, group in enumerate(groups):
                dist.barrier(group=groups[0])
                start = time.perf_counter()
                for _ in range(repeats):
                    dist.all_reduce(tensor, group=group)
                took[batch, which] = time.perf_counter() - start
        slowest = torch.from_numpy(took)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        medians[elements] = slowest.median(0).values.tolist()
    return medians


@pytest.mark.parametrize("threads", [1, pytest.param(0, marks=pytest.mark.full)])
def test_i8_eight_ranks_on_two_cpus_are_no_slower_than_twice_gloo(threads):
    for result in torch_ranks(8, i8_times, threads, 7 if threads else 10, timeout=100):
        for elements, (ours, gloo) in result.value.items():
            assert ours < 2 * gloo, (elements, ours, gloo)


def i10_training(rank, w, how, group):
    """20 steps of DDP with next to no CPU; the parameters, threads, seconds."""
    start = time.monotonic()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(20):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(16, 64, generator=generator)
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    threads = [name.strip() for name in thread_names() if name.startswith("pycoll")]
    return total, threads, time.monotonic() - start


def thread_names():
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            yield file.read()


def i10_limited(how, group, rank):
    # Imports, which pycoll has no part in, at full speed.
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    if how == "taskset":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    if how == "quota":
        (group / "cgroup.procs").write_text(str(os.getpid()))


@pytest.mark.parametrize("how", ["taskset", "quota"])
@over_each_transport
def test_i10_four_ranks_train_on_half_a_cpu(transport, how):
    with contextlib.ExitStack() as stack:
        group = None
        if how == "quota":
            try:
                group = stack.enter_context(cpu_quota(50_000, 100_000))
            except OSError as error:
                pytest.skip(f"no control group can be made: {error}")
        results = run_case(
            4,
            i10_training,
            how,
            group,
            transport=transport,
            prepare=functools.partial(i10_limited, how, group),
            timeout=100,
        )
    assert len({result.value[0] for result in results}) == 1
    for result in results:
        _, threads, seconds = result.value
        # Two threads of a transport, two of a group, whatever the machine has.
        assert len(threads) <= 4, threads
        assert seconds < 30


# ---- I12 ----


def i12_many_calls(rank, w, times):
    """(resident MiB, descriptors) after a fifth of the calls, and after all."""
    sizes = [1 + (i * i * 37) % 5000 for i in range(50)]
    measured = []
    for i in range(times):
        n = sizes[i % 50]
        x = torch.full((n,), rank + 1.0)
        kind = i % 5
        if kind < 2:
            dist.all_reduce(x)
        elif kind == 2:
            dist.all_reduce(x, async_op=True)  # nobody waits for it, nobody keeps it
        elif kind == 3:
            dist.all_gather([torch.empty(n) for _ in range(w)], x)
        elif rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        if i + 1 in (times // 5, times):
            dist.barrier()
            with open("/proc/self/statm") as file:
                resident = int(file.read().split()[1]) * 4096 / 2**20
            measured.append((resident, len(os.listdir("/proc/self/fd"))))
    return measured


@over_each_transport
@pytest.mark.parametrize("times", [20_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_i12_memory_is_flat_over_many_calls(times, transport):
    for result in run_case(2, i12_many_calls, times, transport=transport, timeout=200):
        (early, descriptors), (late, descriptors_late) = result.value
        assert late - early < 8
        assert descriptors_late == descriptors
