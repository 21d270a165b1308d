"""Public bug reports, kind R: launchers, generations of an elastic job, signals.

The scenarios run under a real torchrun, which starts this file's `main` as its script.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pycoll
from helpers_scripts import run_commands
from pool import alone, run_ranks
from pycoll._generation import key_prefix

EXAMPLE = Path(__file__).parent.parent / "examples" / "elastic.py"


def elastic_example(*arguments: object) -> None:
    sys.argv = [str(EXAMPLE), *map(str, arguments)]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def torchrun(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]


def processes_of(word: str) -> list[int]:
    """Those that have `word` in their environment, which a job's processes inherit."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # it has gone, or has not been reaped
            continue
        if word.encode() in environment:
            found.append(int(entry.name))
    return found


def wait_for(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def nothing_remains(word: str, seconds: float = 35) -> None:
    wait_for(lambda: not processes_of(word), seconds, f"{processes_of(word)} live on")
    assert not [name for name in os.listdir("/dev/shm") if "pycoll" in name]


# ---- R1, R5 ----


def two_accidents(directory: str) -> None:
    """The example; a rank dies in training in generation 0, and while it connects in generation 1,
    when its keys are in the store. In generation 2 the others look for it before it is there."""
    rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if generation == 1 and rank == 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    # For the one torchrun ends the first of these naps, for the other nothing does.
    time.sleep({(1, 2): 60.0, (2, 1): 1.0}.get((generation, rank), 0.0))
    elastic_example("--checkpoint", f"{directory}/checkpoint", "--steps", 12, "--kill-at", 5)


def one_line(rank, world_size, directory):
    """What the example fits when nothing happens."""
    names = runpy.run_path(str(EXAMPLE))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    made = names["dist"].init_process_group
    store = dist.FileStore(f"{directory}/s", world_size)
    names["dist"].init_process_group = lambda backend: made(
        backend, store=store, rank=rank, world_size=world_size
    )
    path = Path(directory) / "checkpoint"
    names["train"](path, 12, None)
    weights = torch.load(path)["model"]
    return weights["weight"].item(), weights["bias"].item()


@pytest.mark.timeout(150)
def test_r1_r5_a_job_survives_two_deaths_and_ends_as_without_them(tmp_path):
    word = f"R1={os.getpid()}-{time.monotonic_ns()}"
    start = time.monotonic()
    command = torchrun("--nproc-per-node", 3, "--max-restarts", 2, "--standalone")
    command += [__file__, "two_accidents", str(tmp_path)]
    (job,) = run_commands([command], 100, {"OMP_NUM_THREADS": "1", "R1": word.removeprefix("R1=")})
    assert job.exitcode == 0, job.stdout + job.stderr
    assert time.monotonic() - start < 60
    begun = sorted(re.findall(r"rank (\d), generation (\d): from step (\d+)", job.stdout))
    # Generation 1 dies before it has begun; nobody of generation 2 heard of anybody of it. Rank 0
    # may have been ended while it saved what came out of step 4.
    last = {step for _, generation, step in begun if generation == "2"}
    assert last in ({"4"}, {"5"}), begun
    both = (("0", "0"), ("2", *last))
    assert begun == sorted((str(r), g, s) for r in range(3) for g, s in both)
    weight, bias = run_ranks(3, one_line)[0].value
    expected = f"y = {weight:.9f} x {bias:+.9f}"
    ended = re.findall(r"rank (\d), generation 2: (y = .*)", job.stdout)
    assert sorted(ended) == [(str(r), expected) for r in range(3)]
    assert "terminate called" not in job.stderr
    assert "rank 1 died" in job.stderr, "survivors name the dead rank"
    nothing_remains(word)


def dies_while_it_connects(rank, world_size, directory, port, keys_before):
    """Generation 0 of a job whose store outlives it: rank 1 is known to the store, and killed."""
    as_elastic(port, 0)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == 0:
        deadline = time.monotonic() + 10
        while store.num_keys() == keys_before and time.monotonic() < deadline:
            time.sleep(0.01)
        return store.num_keys() - keys_before
    pycoll.Communicator(store, rank, world_size)
    return None


def next_generation(rank, world_size, directory, port):
    as_elastic(port, 1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if rank == 1:
        time.sleep(0.5)  # what rank 0 finds meanwhile is of generation 0
    with pycoll.Communicator(store, rank, world_size) as communicator:
        array = np.arange(5.0) + rank
        communicator.all_reduce(array)
        return array.tolist()


def as_elastic(port, generation):
    os.environ.update(
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID="run",
        TORCHELASTIC_RESTART_COUNT=str(generation),
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_r5_keys_of_a_dead_generation_lead_nobody_astray(transport):
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"PYCOLL_TRANSPORT": transport}
    args = (agent.port, agent.num_keys())
    first = run_ranks(2, dies_while_it_connects, *args, env=env, check=False)
    assert first[1].exitcode == -signal.SIGKILL
    assert first[0].value == 1, "rank 1 has left nothing behind, so this test shows nothing"
    for result in run_ranks(2, next_generation, agent.port, env=env, timeout=20):
        assert result.value == [1.0, 3.0, 5.0, 7.0, 9.0]


def prefixes(*environments):
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(agent.port)
    stores = [dist.PrefixStore("a", dist.PrefixStore("b", agent)), agent, other, dist.HashStore()]
    return [[key_prefix(s, {**env, "MASTER_PORT": port}) for s in stores] for env in environments]


def test_r5_who_has_a_generation_in_its_names():
    elastic = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "run 7",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    own = {**elastic, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    several = {**elastic, "GROUP_WORLD_SIZE": "2"}
    made = alone(prefixes, {}, own, elastic, several)
    assert made[0] == made[1] == [""] * 4
    assert made[2] == ["elastic/run 7/2/"] * 2 + [""] * 2
    # Agents may have counted different numbers.
    assert made[3] == ["elastic/run 7/"] * 2 + [""] * 2


def one_agents_accident(directory: str) -> None:
    """In the first generation rank 1 dies, and rank 0 does not notice: its agent ends it, because
    the other one is back. Afterwards the example."""
    accident = Path(directory, "accident")
    if not accident.exists():
        dist.init_process_group("pycoll")
        dist.barrier()
        if dist.get_rank() == 1:
            accident.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    elastic_example("--checkpoint", f"{directory}/checkpoint", "--steps", 12)


@pytest.mark.full
@pytest.mark.timeout(200)
def test_r1_with_two_agents_that_count_restarts_apart(tmp_path):
    """Rank 1's agent counts a restart, the other one a change of members."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shape = ["--nnodes", 2, "--nproc-per-node", 1, "--max-restarts", 2]
    shape += ["--local-addr", "127.0.0.1"]
    meeting = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id two".split()
    script = [__file__, "one_agents_accident", tmp_path]
    commands = [
        torchrun(*shape, *meeting, "--rdzv-conf", f"is_host={int(node == 0)}", *script)
        for node in range(2)
    ]
    jobs = run_commands(commands, 150, {"OMP_NUM_THREADS": "1"})
    for job in jobs:
        assert job.exitcode == 0, job.stdout + job.stderr
    text = jobs[0].stdout + jobs[1].stdout
    counts = re.findall(r"generation (\d): from step 0\b", text)
    assert sorted(counts) == ["0", "1"], text
    assert len(set(re.findall(r": (y = .*)", text))) == 1, text


# ---- R3 ----


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 30

    def __getitem__(self, index):
        return float(index)


def trains_with_workers(directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("pycoll")
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2)
    for step, batch in enumerate(loader):
        dist.all_reduce(batch)
        if step == 20:
            Path(directory, f"trains-{dist.get_rank()}").touch()


@pytest.mark.timeout(120)
def test_r3_sigterm_to_torchrun_ends_grandchildren_too(tmp_path):
    word = f"{os.getpid()}-{time.monotonic_ns()}"
    # `; true`: bash stays, and has the script as its child.
    script = f"{sys.executable} {__file__} trains_with_workers {tmp_path}; true"
    command = torchrun("--nproc-per-node", 2, "--standalone", "--no-python", "bash", "-c", script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "R3": word}
    with (tmp_path / "out").open("wb") as out:
        job = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        wait_for(lambda: len(list(tmp_path.glob("trains-*"))) == 2, 60, "nothing trains")
        assert len(processes_of(f"R3={word}")) >= 1 + 2 * (
            1 + 1 + 2
        )  # torchrun, bash, script, workers
        job.send_signal(signal.SIGTERM)
        job.wait(35)
        nothing_remains(f"R3={word}")
    finally:
        for pid in processes_of(f"R3={word}"):
            os.kill(pid, signal.SIGKILL)
        job.wait(10)
    assert "terminate called" not in (tmp_path / "out").read_text()


if __name__ == "__main__":
    {f.__name__: f for f in (two_accidents, one_agents_accident, trains_with_workers)}[sys.argv[1]](
        *sys.argv[2:]
    )
