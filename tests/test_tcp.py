"""The TCP transport: collectives, addresses and interfaces, death."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time

import numpy as np
import pytest

import netns
import pycoll
from pool import communicator_ranks, run_ranks, torch_ranks
from pycoll import _core
from reference import check_all_reduce, edge_sizes
from test_faults import (
    PROMPTLY,
    aborting,
    barrier_until_error,
    error_of,
    last_to_finish,
    late_rank,
    leave_on_one,
    loop_until_error,
)

TCP = {"PYCOLL_TRANSPORT": "tcp"}
# Without those that read peers' memory.
ALL_REDUCE = [row.name for row in _core.algorithms("all_reduce") if not row.needs_window]
# Messages of one line, one connection; and larger ones spread over three.
SETTINGS = [
    {"PYCOLL_SLOT_BYTES": 64, "PYCOLL_FIFO_DEPTH": 2, "PYCOLL_TCP_CONNECTIONS": 1},
    {"PYCOLL_SLOT_BYTES": 16384, "PYCOLL_TCP_CONNECTIONS": 3},
]


# ---- Collectives ----


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("settings", SETTINGS, ids=["small", "striped"])
@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_all_reduce(groups, algorithm, settings, world_size):
    cases = [("float32", "sum", n) for n in [*edge_sizes(world_size), 1009, 30_000]]
    cases += [("bfloat16", "avg", 1009), ("int64", "max", 4097), ("float64", "product", 100)]
    check_all_reduce(groups(world_size, **TCP, **settings), algorithm, cases)


def mixed(communicator, seed, rounds):
    """Random collectives, the same on every rank; integers, so every order gives the same."""
    agreed = random.Random(seed)
    rank, world_size = communicator.rank, communicator.world_size
    ranks = np.arange(world_size, dtype=np.int64)
    for _ in range(rounds):
        what = agreed.choice(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier"])
        n = agreed.choice([1, 5, 700, 20_000])
        root = agreed.randrange(world_size)
        steps = np.arange(n, dtype=np.int64)
        mine = steps * (rank + 1)
        if what == "all_reduce":
            communicator.all_reduce(mine)
            np.testing.assert_array_equal(mine, steps * (ranks + 1).sum())
        elif what == "all_gather":
            output = np.zeros((world_size, n), np.int64)
            communicator.all_gather(output, mine)
            np.testing.assert_array_equal(output, np.outer(ranks + 1, steps))
        elif what == "reduce_scatter":
            output = np.zeros(n, np.int64)
            communicator.reduce_scatter(output, np.add.outer(ranks, mine))
            np.testing.assert_array_equal(output, world_size * rank + steps * (ranks + 1).sum())
        elif what == "broadcast":
            communicator.broadcast(mine, root)
            np.testing.assert_array_equal(mine, steps * (root + 1))
        else:
            communicator.barrier()
    return rounds


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_mix_of_collectives_between_processes(world_size):
    results = communicator_ranks(world_size, mixed, 5, 60, env=TCP, timeout=90)
    assert [result.value for result in results] == [60] * world_size


def run_ahead(communicator, rounds):
    array = np.zeros(3, np.int64)
    for i in range(rounds):
        if communicator.rank == 0:
            array[:] = i
        elif i == 10:
            time.sleep(0.5)
        communicator.broadcast(array, 0)
        assert array.tolist() == [i] * 3


def test_a_root_that_runs_ahead_overwrites_nothing():
    communicator_ranks(3, run_ahead, 3000, env=TCP, timeout=60)


def several_groups(rank, world_size, directory):
    """Groups come and go; the descriptors that they share do not add up."""
    counts = []
    store = pycoll.FileStore(directory)
    with pycoll.Communicator(store, rank, world_size, name="stays") as stays:
        for i in range(4):
            made = [pycoll.Communicator(store, rank, world_size, name=f"{i}-{k}") for k in range(3)]
            for k, each in enumerate(made):
                array = np.full(100, float(k))
                each.all_reduce(array)
                assert array[0] == k * world_size
            counts.append(len(os.listdir("/proc/self/fd")))
            for each in made:
                each.close()
            array = np.ones(5)
            stays.all_reduce(array)
            assert array[0] == world_size
    return counts, len(os.listdir("/proc/self/task"))


def test_groups_share_connections():
    for result in run_ranks(3, several_groups, env=TCP, timeout=60):
        counts, _threads = result.value
        assert counts[0] == counts[-1]


def torch_body(rank, world_size):
    import torch
    import torch.distributed as dist

    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    parts = [torch.zeros(3) for _ in range(world_size)]
    dist.all_gather(parts, torch.full((3,), float(rank)))
    return tensor[0].item(), [part[0].item() for part in parts]


def test_torch_over_tcp():
    for result in torch_ranks(3, torch_body, env=TCP):
        assert result.value == (6.0, [0.0, 1.0, 2.0])


# ---- Hosts, addresses, interfaces ----


def in_host(rank, world_size, directory, paths, env, function, *args):
    """`function(communicator, *args)` inside the namespace of this rank."""
    netns.enter(paths[rank])
    os.environ.update(env[rank])
    store = pycoll.FileStore(directory)
    with pycoll.Communicator(store, rank, world_size) as communicator:
        return function(communicator, *args)


def sum_of_ranks(communicator):
    array = np.full(100_000, communicator.rank + 1.0)
    communicator.all_reduce(array)
    assert array[0] == array[-1]
    return array[0]


def test_two_hosts_of_two_ranks(hosts):
    """Two namespaces are two hosts: shared memory inside, TCP between."""
    net = hosts(2)
    net.join(0, 1, "10.77.0.{}/24")
    paths = [net.paths[0], net.paths[0], net.paths[1], net.paths[1]]
    results = run_ranks(4, in_host, paths, [{}] * 4, mixed, 11, 40, timeout=60)
    assert [result.value for result in results] == [40] * 4


@pytest.mark.parametrize("address", ["fd00:77::{}/64", None], ids=["global", "link-local"])
def test_hosts_with_ipv6_only(hosts, address):
    net = hosts(2)
    net.join(0, 1, *([address] if address else []))
    if address is None:  # duplicate address detection takes a moment
        deadline = time.monotonic() + 10
        while "tentative" in net.run(0, "ip -6 addr show dev eth0") + net.run(
            1, "ip -6 addr show dev eth0"
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    start = time.monotonic()
    results = run_ranks(2, in_host, net.paths, [TCP] * 2, sum_of_ranks)
    assert [result.value for result in results] == [3.0, 3.0]
    assert time.monotonic() - start < 5


def test_hosts_without_ipv6(hosts):
    net = hosts(2)
    for host in range(2):
        net.run(host, "sysctl -w net.ipv6.conf.all.disable_ipv6=1")
    net.join(0, 1, "10.77.0.{}/24")
    results = run_ranks(2, in_host, net.paths, [TCP] * 2, sum_of_ranks)
    assert [result.value for result in results] == [3.0, 3.0]


def connect_error(rank, world_size, directory, paths, env):
    netns.enter(paths[rank])
    os.environ.update(env[rank])
    start = time.monotonic()
    kind, text, when = error_of(
        lambda: pycoll.Communicator(pycoll.FileStore(directory), rank, world_size)
    )
    return kind, text, when - start


def two_cables(hosts):
    """eth0 and eth1 between two hosts."""
    net = hosts(2)
    net.join(0, 1, "10.77.0.{}/24")
    net.join(0, 1, "10.78.0.{}/24")
    return net


def black_hole(net, name):
    for host in range(2):
        # Neighbours are known, so the host does not say "no route": packets just vanish.
        other = 2 - host
        net.run(
            host,
            f"ip neigh replace 10.{76 + int(name[-1]) + 1}.0.{other} "
            f"lladdr 02:00:00:00:00:99 dev {name} nud permanent",
        )


@pytest.mark.parametrize("wish", ["eth1", "eth", "eth0, eth1", ""])
def test_an_address_that_swallows_packets_does_not_hold_up_the_others(hosts, wish):
    """(J4)"""
    net = two_cables(hosts)
    black_hole(net, "eth0")
    env = [{**TCP, "PYCOLL_SOCKET_IFNAME": wish}] * 2
    start = time.monotonic()
    results = run_ranks(2, in_host, net.paths, env, sum_of_ranks)
    assert [result.value for result in results] == [3.0, 3.0]
    assert time.monotonic() - start < 5


def test_an_interface_that_swallows_packets_is_named(hosts):
    """(J4)"""
    net = two_cables(hosts)
    black_hole(net, "eth1")
    env = [{**TCP, "PYCOLL_SOCKET_IFNAME": "eth1", "PYCOLL_CONNECT_TIMEOUT": "2"}] * 2
    for result in run_ranks(2, connect_error, net.paths, env):
        kind, text, waited = result.value
        assert kind == "TimeoutError"
        assert 1.5 < waited < 4
        for word in (f"rank {1 - result.rank}", "10.78.0.", "eth1", "PYCOLL_SOCKET_IFNAME"):
            assert word in text, text
        assert "10.77" not in text


def test_an_interface_that_does_not_exist(tmp_path):
    """(J4)"""
    start = time.monotonic()
    options = {**TCP, "PYCOLL_SOCKET_IFNAME": "nope0"}
    with pytest.raises(pycoll.InvalidArgumentError) as caught:
        pycoll.Communicator(pycoll.FileStore(tmp_path), 0, 2, options=options)
    assert time.monotonic() - start < 1
    for word in ("PYCOLL_SOCKET_IFNAME=nope0", "lo (127.0.0.1)"):
        assert word in str(caught.value)


def torch_in_host(rank, world_size, directory, paths, master):
    import torch
    import torch.distributed as dist

    netns.enter(paths[rank])
    dist.init_process_group("pycoll", init_method=master, rank=rank, world_size=world_size)
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor[0].item()


@pytest.mark.parametrize("master", ["tcp://10.77.0.1:29511", "tcp://[fd00:77::1]:29511"])
def test_torch_rendezvous_over_both_families(hosts, master):
    net = hosts(2)
    net.join(0, 1, "10.77.0.{}/24", "fd00:77::{}/64")
    results = run_ranks(2, torch_in_host, net.paths, master)
    assert [result.value for result in results] == [3.0, 3.0]


# ---- Failures ----


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_a_killed_rank_is_named_within_a_second(world_size, algorithm):
    args = (world_size - 1, algorithm, 300_000)
    results = communicator_ranks(
        world_size, loop_until_error, *args, check=False, timeout=30, env=TCP
    )
    for result in results[:-1]:
        assert result.error is None, result.report()
        kind, text, after, again, _ = result.value
        assert f"rank {world_size - 1} died" in text, text
        assert after < PROMPTLY
        assert again == (kind, text)


def test_a_rank_killed_while_the_others_sleep():
    for result in communicator_ranks(3, barrier_until_error, 1, check=False, env=TCP):
        if result.rank == 1:
            continue
        assert result.error is None, result.report()
        _, text, waited, cpu = result.value
        assert "rank 1 died" in text
        assert waited < 0.5 + PROMPTLY
        assert cpu < 0.3


def killed_with_children(communicator):
    communicator.barrier()
    if communicator.rank == 1:
        for _ in range(2):
            if os.fork() == 0:  # a DataLoader's worker, say
                time.sleep(4)
                os._exit(0)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    _, text, when = error_of(communicator.barrier)
    return text, when - start


def test_children_of_a_killed_rank_do_not_hide_its_death():
    results = communicator_ranks(2, killed_with_children, check=False, env=TCP)
    text, waited = results[0].value
    assert "rank 1 died" in text
    assert waited < 0.3 + PROMPTLY


def stopped_for_a_while(rank, world_size, directory):
    options = {"PYCOLL_HEARTBEAT": "1"}
    store = pycoll.FileStore(directory)
    with pycoll.Communicator(store, rank, world_size, options=options) as communicator:
        communicator.barrier()
        if rank == 1:
            parent = os.getpid()
            if os.fork() == 0:
                time.sleep(4)
                os.kill(parent, signal.SIGCONT)
                os._exit(0)
            os.kill(parent, signal.SIGSTOP)
        array = np.full(3_000_000, rank + 1.0)
        communicator.all_reduce(array, algorithm="ring")
        return array[-1]


def test_a_stopped_process_is_not_dead():
    results = run_ranks(2, stopped_for_a_while, env=TCP)
    assert [result.value for result in results] == [3.0, 3.0]


def stop_when_data_comes(array, pid):
    while array[0] != 0:
        time.sleep(0.0005)
    os.kill(pid, signal.SIGSTOP)


def given_up_half_way(communicator):
    """On rank 1: the broadcast's error; elements that had come then, and that came later."""
    pids = np.zeros((2, 1), np.int64)
    communicator.all_gather(pids, np.array([os.getpid()]))
    root = int(pids[0, 0])
    for _ in range(20):  # all may have come before the root stops: then once more
        array = np.full(12_000_000, communicator.rank, np.float32)
        try:
            if communicator.rank == 0:
                communicator.broadcast(array, algorithm="tree")
                continue
            stopper = threading.Thread(target=stop_when_data_comes, args=(array, root))
            stopper.start()
            communicator.broadcast(array, algorithm="tree", timeout=1)
            stopper.join()
            os.kill(root, signal.SIGCONT)
        except pycoll.Error as error:
            if communicator.rank == 0:
                return None
            stopper.join()
            come = int(np.count_nonzero(array == 0))
            array.fill(7)
            os.kill(root, signal.SIGCONT)
            time.sleep(0.5)  # what was on its way comes now
            return type(error).__name__, come, int(np.count_nonzero(array != 7))
    return None


def test_nothing_is_written_after_an_operation_was_given_up():
    # Messages that are longer than what sockets hold: the root is stopped in the middle of some.
    env = TCP | {"PYCOLL_SLOT_BYTES": str(16 << 20)}
    _, result = communicator_ranks(2, given_up_half_way, env=env)
    kind, come, late = result.value
    assert kind == "TimeoutError"
    assert 0 < come < 12_000_000
    assert late == 0


def wait_for_lost_host(communicator, moves, running):
    communicator.barrier()
    running.touch()

    def move():  # data is on its way when the cable breaks
        while True:
            communicator.all_reduce(np.ones(100_000), algorithm="ring")

    if communicator.rank == 1 and not moves:
        time.sleep(9)
        return None
    kind, text, when = error_of(move if moves else communicator.barrier)
    return kind, text, when


@pytest.mark.parametrize("moves", [True, False], ids=["busy", "idle"])
def test_a_cable_that_breaks_is_noticed_within_the_heartbeat(hosts, moves, tmp_path):
    net = hosts(2)
    net.join(0, 1, "10.77.0.{}/24")
    env = [{**TCP, "PYCOLL_HEARTBEAT": "2"}] * 2
    cut = []

    def cut_the_cable():
        while not (tmp_path / "running").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        net.run(0, "ip link set eth0 down")
        cut.append(time.monotonic())

    thread = threading.Thread(target=cut_the_cable, daemon=True)
    thread.start()
    args = (net.paths, env, wait_for_lost_host, moves, tmp_path / "running")
    results = run_ranks(2, in_host, *args, check=False)
    for result in results[: 2 if moves else 1]:
        assert result.error is None, result.report()
        kind, text, when = result.value
        assert kind == "PeerError"
        assert re.search(f"rank {1 - result.rank} died .its host (does|did) not answer", text), text
        assert when - cut[0] < 2 + 1.5


def test_a_timeout_says_who_is_late():
    results = communicator_ranks(3, late_rank, 1.5, env=TCP)
    for rank in (0, 1):
        kind, text, _, _ = results[rank].value
        for word in ("Timed out", "broadcast #2", "rank 2", "barrier #1"):
            assert word in text, text
        assert kind in ("TimeoutError", "AbortedError")
    assert results[2].value[0] == "AbortedError"


def disagree(communicator):
    communicator.barrier()
    array = np.zeros(10 + communicator.rank % 2)
    kind, text, _ = error_of(lambda: communicator.all_reduce(array))
    return kind, text


def test_a_mismatch_is_explained():
    results = [result.value for result in communicator_ranks(3, disagree, env=TCP)]
    assert "MismatchError" in [kind for kind, _ in results]
    for kind, text in results:
        assert kind in ("MismatchError", "AbortedError")
        for word in ("sizes differ", "10 x float64", "11 x float64"):
            assert word in text, text


def test_abort_ends_everything_everywhere():
    for result in communicator_ranks(3, aborting, env=TCP):
        kind, text, waited = result.value
        assert kind == "AbortedError"
        assert "validation diverged" in text
        assert waited < 0.3 + PROMPTLY


@pytest.mark.parametrize("how", ["close", "exit", "return"])
def test_a_rank_that_leaves_is_named(how):
    results = communicator_ranks(3, leave_on_one, how, check=False, env=TCP)
    for rank in (0, 2):
        kind, text, waited = results[rank].value
        assert kind in ("PeerError", "AbortedError"), text
        assert re.search(r"rank 1 (died|left|closed)", text), text
        assert waited < PROMPTLY + 0.5


@pytest.mark.parametrize("slow", [1, 2])
def test_exit_without_close_loses_nothing(slow):
    results = communicator_ranks(3, last_to_finish, slow, env=TCP)
    assert [result.value for result in results] == [(3.0, [0, 1, 2], 7.0)] * 3
