"""Public bug reports, kind G: groups that come and go, stores, forks, ends of scripts.

As in test_cases_failure.py, every case is a script of its own on every rank.
"""

from __future__ import annotations

import datetime
import gc
import os
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from helpers_cases import footprint, rss_bytes, same, still_works
from helpers_scripts import Script, keep, run_series

WORLD = 4
SECONDS = 30  # of groups


def begin(rank, w, directory, name="store"):
    init(rank, w, store=dist.FileStore(os.path.join(directory, name), w))


def init(rank, w, seconds=SECONDS, **how):
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("pycoll", rank=rank, world_size=w, timeout=timeout, **how)


def settled(limits, slack=(0, 1, 0)):
    """Descriptors, threads and files come down to `limits`; a group may have one thread more."""
    deadline = time.monotonic() + 5
    most = [limit + more for limit, more in zip(limits, slack, strict=True)]
    while any(now > limit for now, limit in zip(footprint(), most, strict=True)):
        assert time.monotonic() < deadline, (limits, footprint())
        time.sleep(0.02)


# ---- Groups that come and go ----


def g1(rank, w, directory, port):
    """Made and destroyed again and again: over one address, as torchrun gives it, and over one
    store object."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    for again in range(5):
        init(rank, w)
        still_works(rank, w)
        dist.destroy_process_group()
        if again == 1:
            before = footprint()
    store = dist.FileStore(os.path.join(directory, "store"), w)
    for again in range(5):
        init(rank, w, store=dist.PrefixStore(str(again), store) if again % 2 else store)
        still_works(rank, w)
        dist.destroy_process_group()
    del store
    gc.collect()
    settled(before)


def g3(rank, w, directory):
    """200 groups, each used and destroyed. And groups that are only dropped, which torch keeps."""
    begin(rank, w, directory)
    for again in range(200):
        group = dist.new_group()
        still_works(rank, w, group)
        dist.destroy_process_group(group)
        if again == 19:
            before, memory = footprint(), rss_bytes()
    settled(before)
    assert rss_bytes() - memory < 10 << 20
    for _ in range(3):
        still_works(rank, w, dist.new_group())
    gc.collect()
    still_works(rank, w)
    dist.destroy_process_group()  # and with it all
    del group
    gc.collect()
    settled((before[0], before[1], 0))


def g4(rank, w, directory):
    """Groups that only their members make."""
    begin(rank, w, directory)
    mine = [0, 3] if rank in (0, 3) else [1, 2]
    group = dist.new_group(mine, use_local_synchronization=True)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == 3
    dist.destroy_process_group(group)
    # torch then numbers both alike; it waits for as many ranks as there are in all.
    group = dist.new_group(mine)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == 3
    still_works(rank, w)


def g5(rank, w, directory):
    """torch sorts the ranks of a group."""
    begin(rank, w, directory)
    group = dist.new_group([2, 0])
    if rank in (0, 2):
        assert dist.get_rank(group) == rank // 2
        assert dist.get_global_rank(group, 1) == 2
        assert dist.get_group_rank(group, 2) == 1
        tensor = torch.full((7,), float(rank))
        dist.broadcast(tensor, 2, group)
        same(tensor, torch.full((7,), 2.0))
        parts = [torch.zeros(3) for _ in range(2)]
        dist.all_gather(parts, torch.full((3,), float(rank)), group)
        same(torch.stack(parts), torch.tensor([[0.0] * 3, [2.0] * 3]))
    still_works(rank, w)


# ---- Forks ----


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def g7(rank, w, directory):
    """DataLoader's workers are forked amid steps, with a call under way."""
    begin(rank, w, directory)
    for step in range(20):
        work = dist.all_reduce(torch.ones(1 << 16), async_op=True)
        total = sum(batch.sum() for batch in DataLoader(Numbers(), 2, num_workers=2))
        work.wait()
        dist.all_reduce(total)
        assert total.item() == 28 * w, step


# ---- Ends ----


def g9(rank, w, directory, how):
    """50 calls that nobody waits for, and the script ends."""
    begin(rank, w, directory)
    keep([dist.all_reduce(torch.ones(1 << 16), async_op=True) for _ in range(50)])
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise ValueError("of the script's own")


def g12(rank, w, directory, how, destroys):
    """A world of one rank."""
    options = {
        "file": lambda: {"init_method": f"file://{directory}/meeting"},
        "tcp": lambda: {"init_method": f"tcp://127.0.0.1:{free_port()}"},
        "env": lambda: os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()) or {},
        "hash": lambda: {"store": dist.HashStore()},
    }
    init(rank, w, **options[how]())
    still_works(rank, w)
    if destroys:
        dist.destroy_process_group()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


# ---- What is left of others in a store ----
#
# torch's FileStore hangs when it is made of a file with something else in it (2.13), before any
# backend is asked: G11's first scenario is not pycoll's.


def g11_crashed(rank, w, directory):
    """A run on a file that one has left which was killed."""
    begin(rank, w, directory)
    still_works(rank, w)
    os._exit(0)


def g11_after_it(rank, w, directory):
    file = os.path.join(directory, "..", "g11_crashed", "store")
    assert os.path.getsize(file) > 0
    start, text = time.monotonic(), "works"
    try:
        init(rank, w, seconds=5, store=dist.FileStore(file, w))
        still_works(rank, w)
    except RuntimeError as error:
        text = str(error)
    print(text)
    assert time.monotonic() - start < 15


# name: (ranks, scenario, its arguments)
CASES = {
    "g1": (3, g1, ("port",)),
    "g3": (2, g3, ()),
    "g4": (4, g4, ()),
    "g5": (4, g5, ()),
    "g7": (2, g7, ()),
    "g9_return": (2, g9, ("return",)),
    "g9_exit": (2, g9, ("exit",)),
    "g9_raise": (2, g9, ("raise",)),
    "g11_crashed": (2, g11_crashed, ()),
    "g11_after_it": (2, g11_after_it, ()),
    **{
        f"g12_{how}_{end}": (1, g12, (how, end == "destroyed"))
        for how in ("file", "tcp", "env", "hash")
        for end in ("destroyed", "left")
    },
}


def one_of(rank, w, directory, name, port):
    ranks, scenario, args = CASES[name]
    if rank < ranks:
        scenario(rank, ranks, directory, *(port if arg == "port" else arg for arg in args))


# The gate has them over shared memory, test-full over TCP, too.
@pytest.fixture(scope="module", params=["shm", pytest.param("tcp", marks=pytest.mark.full)])
def outcomes(request):
    """{case: how it ended on each rank}"""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"PYCOLL_TRANSPORT": request.param}
    scripts = [Script(name, one_of, (name, agent.port), env, seconds=60) for name in CASES]
    before = set(os.listdir("/dev/shm"))
    found = run_series(WORLD, scripts)
    left = [name for name in set(os.listdir("/dev/shm")) - before if "pycoll" in name]
    assert not left
    return {name: ranks[: CASES[name][0]] for name, ranks in found.items()}


def check(ranks, code=0):
    for ended in ranks:
        assert ended.exitcode == code, ended
        assert "terminate called" not in ended.stderr, ended
        assert code == 1 or "Traceback" not in ended.stderr, ended


@pytest.mark.parametrize("case", ["g1", "g3", "g4", "g5", "g7"])
def test_groups(outcomes, case):
    """G1, G3, G4, G5, G7."""
    check(outcomes[case])


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("exit", 3), ("raise", 1)])
def test_g9_ends_with_calls_under_way(outcomes, how, code):
    check(outcomes[f"g9_{how}"], code)


def test_g11_a_file_that_a_killed_run_has_left(outcomes):
    check(outcomes["g11_crashed"])
    check(outcomes["g11_after_it"])


@pytest.mark.parametrize("end", ["destroyed", "left"])
@pytest.mark.parametrize("how", ["file", "tcp", "env", "hash"])
def test_g12_a_world_of_one(outcomes, how, end):
    ranks = outcomes[f"g12_{how}_{end}"]
    check(ranks)
    assert ranks[0].seconds < 10, ranks
