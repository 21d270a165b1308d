"""Public bug reports, kind J: addresses, names, ports, and how ranks find each other.

Elsewhere: J4 in test_tcp.py, J9 in test_tcp_meeting.py; strangers' noise at the listening sockets
in test_tcp_meeting.py, test_network.py and test_joining.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import re
import resource
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import netns
import pycoll
from helpers_cases import TRANSPORTS, all_words, error_of, numbered, same
from pool import communicator_ranks, run_ranks
from pycoll.cli.machine import choose_for_master
from test_joining import addresses
from test_tcp import black_hole, connect_error
from test_tcp_meeting import tcp_ports

over_each_transport = pytest.mark.parametrize("transport", TRANSPORTS)
TCP = {"PYCOLL_TRANSPORT": "tcp"}
CLONE_NEWNS, CLONE_NEWUTS = 0x00020000, 0x04000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


def init(address, rank, w, seconds=15.0):
    """`address` as init_method, or, where it is a pair, MASTER_ADDR and MASTER_PORT."""
    if isinstance(address, tuple):
        os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
        address = "env://"
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("pycoll", init_method=address, rank=rank, world_size=w, timeout=timeout)


def sums_and_ends(rank, w):
    x = numbered(rank, (1000,))
    dist.all_reduce(x)
    same(x, torch.stack([numbered(r, (1000,)) for r in range(w)]).sum(0))
    dist.destroy_process_group()
    return "done"


def meets(rank, w, directory, paths, address):
    """What ranks in those namespaces need to meet, in seconds."""
    torch.set_num_threads(1)
    netns.enter(paths[rank])
    start = time.monotonic()
    init(address, rank, w)
    took = time.monotonic() - start
    sums_and_ends(rank, w)
    return took


def lines_of(text):
    return [line for line in text.splitlines() if line.strip()]


# ---- J1 ----


def j1_port_in_use(rank, w, directory):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        start = time.monotonic()
        text = error_of(lambda: init(f"tcp://127.0.0.1:{port}", 0, 2))
        took = time.monotonic() - start
        all_words(text, port, "EADDRINUSE")
    # The port is free again, and so is this process.
    init(f"tcp://127.0.0.1:{port}", 0, 1)
    sums_and_ends(0, 1)
    return took


def test_j1_a_port_in_use_is_named_at_once():
    assert run_ranks(1, j1_port_in_use)[0].value < 5


# ---- J3 ----


def with_names(directory, rank, lines):
    """This process is on a host called worker<rank> whose /etc/hosts has `lines`; its path."""
    libc = ctypes.CDLL(None, use_errno=True)
    name = f"worker{rank}".encode()
    file = Path(directory, f"hosts{rank}")
    file.write_text(lines)
    for call in (
        lambda: libc.unshare(CLONE_NEWNS | CLONE_NEWUTS),
        lambda: libc.sethostname(name, len(name)),
        lambda: libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        lambda: libc.mount(str(file).encode(), b"/etc/hosts", None, MS_BIND, None),
    ):
        if call() != 0:
            raise OSError(ctypes.get_errno(), "names of a host")
    assert socket.gethostbyname(socket.gethostname()).startswith("127.0.1.")
    return file


def j3_own_name_is_loopback(rank, w, directory, paths, address):
    torch.set_num_threads(1)
    netns.enter(paths[rank])
    other = 1 - rank
    with_names(directory, rank, f"127.0.1.1 worker{rank}\n10.79.0.{other + 1} worker{other}\n")
    init(address, rank, w)
    return sums_and_ends(rank, w)


@pytest.mark.parametrize("address", ["tcp://10.79.0.1:29521", ("worker0", 29521)])
def test_j3_a_hostname_that_is_loopback_leads_nobody_astray(hosts, address):
    net = hosts(2)
    net.join(0, 1, "10.79.0.{}/24")
    results = run_ranks(2, j3_own_name_is_loopback, net.paths, address, env=TCP)
    assert [result.value for result in results] == ["done"] * 2


# ---- J6, J7 ----


@pytest.mark.parametrize("families", ["v4", "both"])
def test_j6_a_host_without_ipv6_or_with_both_is_no_slower(hosts, families):
    net = hosts(2)
    if families == "v4":
        for host in range(2):
            net.run(host, "sysctl -w net.ipv6.conf.all.disable_ipv6=1")
            net.run(host, "sysctl -w net.ipv6.conf.default.disable_ipv6=1")
    net.join(0, 1, "10.79.0.{}/24", *(["fd00:79::{}/64"] if families == "both" else []))
    results = run_ranks(2, meets, net.paths, ("10.79.0.1", 29522), env=TCP)
    for result in results:
        assert result.value < 5
        assert len(lines_of(result.stderr)) <= 1, result.stderr
        assert "pycoll" not in result.stderr


@pytest.mark.parametrize(
    "address",
    ["tcp://[fd00::1]:29523", ("fd00::1", 29523), ("fe80::1%eth0", 29523)],
    ids=["url", "variable", "scope"],
)
def test_j7_hosts_with_ipv6_alone(hosts, address):
    net = hosts(2)
    net.join(0, 1, "fd00::{}/64", "fe80::{}/64")
    results = run_ranks(2, meets, net.paths, address, env=TCP)
    assert max(result.value for result in results) < 5


def test_j7_addresses_of_ipv6_are_in_brackets(hosts):
    net = hosts(2)
    net.join(0, 1, "fd00::{}/64")
    for host in range(2):
        # Packets to the neighbour vanish.
        neighbour = f"fd00::{2 - host} lladdr 02:00:00:00:00:99 dev eth0"
        net.run(host, f"ip -6 neigh replace {neighbour} nud permanent")
    env = [{**TCP, "PYCOLL_CONNECT_TIMEOUT": "1"}] * 2
    for result in run_ranks(2, connect_error, net.paths, env):
        assert re.search(r"\[fd00::[12]\]:\d+ \(interface eth0", result.value[1]), result.value


def j4_torch_over_a_black_hole(rank, w, directory, paths):
    torch.set_num_threads(1)
    netns.enter(paths[rank])
    os.environ.update(PYCOLL_SOCKET_IFNAME="eth1", PYCOLL_CONNECT_TIMEOUT="1")
    start = time.monotonic()
    text = error_of(lambda: init("tcp://10.77.0.1:29524", rank, w))
    return text, time.monotonic() - start


def test_j4_the_store_is_reached_and_the_interface_swallows_packets(hosts):
    """(J4) As torch users see it: the store by the one interface, ranks by the other."""
    net = hosts(2)
    net.join(0, 1, "10.77.0.{}/24")
    net.join(0, 1, "10.78.0.{}/24")
    black_hole(net, "eth1")
    for result in run_ranks(2, j4_torch_over_a_black_hole, net.paths, env=TCP):
        text, took = result.value
        all_words(text, "10.78.0.", "eth1", "PYCOLL_SOCKET_IFNAME")
        assert took < 5


# ---- J8, J11 ----


def j8_name_comes_late(rank, w, directory, paths, seconds):
    """The worker looks for a name and a master that are not there for a while."""
    torch.set_num_threads(1)
    netns.enter(paths[rank])
    file = with_names(directory, rank, f"127.0.1.1 worker{rank}\n")
    if rank == 0:
        time.sleep(seconds)
        # In place: another file would not be the one that is mounted.
        for other in range(w):
            Path(directory, f"hosts{other}").write_text("10.79.0.1 master\n127.0.1.1 x\n")
    start = time.monotonic()
    init(("master", 29525), rank, w, 30)
    took = time.monotonic() - start
    sums_and_ends(rank, w)
    assert file.exists()
    return took


def test_j8_a_worker_waits_for_a_name_and_its_master(hosts):
    net = hosts(2)
    net.join(0, 1, "10.79.0.{}/24")
    results = run_ranks(2, j8_name_comes_late, net.paths, 2.0, env=TCP, timeout=60)
    assert results[1].value > 1.5, "the worker was not first"
    assert max(result.value for result in results) < 15


def j8_name_never_comes(rank, w, directory, path):
    netns.enter(path)
    with_names(directory, 1, "127.0.1.1 worker1\n")
    start = time.monotonic()
    text = error_of(lambda: init(("nowhere.example", 29526), 1, 2, 1))
    return text, time.monotonic() - start, choose_for_master({}, "nowhere.example").reason


@pytest.mark.full
def test_j8_a_name_that_never_comes_is_an_error_in_time(hosts):
    result = run_ranks(1, j8_name_never_comes, hosts(1).paths[0])[0]
    text, took, diagnosis = result.value
    all_words(text, "nowhere.example")
    assert took < 12
    # The error is that of torch's store, which gives the reason in a warning; so does the doctor.
    all_words(result.stderr, "nowhere.example", "name resolution")
    all_words(diagnosis, "nowhere.example", "does not resolve", "name resolution")


def j11_late(rank, w, directory, port, seconds):
    torch.set_num_threads(1)
    if rank == 3:
        time.sleep(seconds)
    before = resource.getrusage(resource.RUSAGE_SELF)
    init(f"tcp://127.0.0.1:{port}", rank, w, 60)
    after = resource.getrusage(resource.RUSAGE_SELF)
    sums_and_ends(rank, w)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@over_each_transport
@pytest.mark.parametrize("seconds", [1.5, pytest.param(10, marks=pytest.mark.full)])
def test_j11_a_rank_that_starts_late_is_waited_for_in_sleep(seconds, transport):
    env = {"PYCOLL_TRANSPORT": transport}
    for result in run_ranks(4, j11_late, 29527, seconds, env=env, timeout=60):
        assert result.value < 0.5, "it did not sleep"
        assert "pycoll" not in result.stderr


# ---- Strangers ----

DROPPED = r"pycoll: dropped a connection .*which did not show (its|this process's) key"


def knocked_at(communicator, transport):
    """Rank 1's listening socket hears from strangers while calls go on."""
    store = pycoll.FileStore(os.environ["KNOCK"])
    if communicator.rank == 1:
        (place,) = addresses() if transport == "shm" else tcp_ports()
        store.set("place", str(place))
    else:
        place = store.get("place").decode()
        for number in range(40):
            if transport == "shm":
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stranger.connect("\0" + place)
                packet = b"H " + b"0" * 32 + b" " + b"1" * 32
            else:
                stranger = socket.create_connection(("127.0.0.1", int(place)), 5)
                packet = b"COLLtcP1" + b"0" * 104
            with stranger:
                stranger.settimeout(5)
                if number % 2 == 0:
                    stranger.sendall(packet)
                    with contextlib.suppress(ConnectionError):
                        assert stranger.recv(100) == b"", "a stranger was answered"
                # The others go again without a word, as health checks do.
    communicator.barrier()
    total = torch.arange(5.0).numpy() + communicator.rank
    communicator.all_reduce(total)
    return total.tolist()


@over_each_transport
def test_a_stranger_is_dropped_and_logged_once(transport, tmp_path):
    env = {"PYCOLL_TRANSPORT": transport, "KNOCK": str(tmp_path)}
    results = communicator_ranks(2, knocked_at, transport, env=env)
    for result in results:
        assert result.value == [1.0, 3.0, 5.0, 7.0, 9.0]
    (line,) = lines_of(results[1].stderr)
    assert re.fullmatch(DROPPED + ".*", line), line
    # Whom it was: rank 0, which is the stranger here.
    assert ("user " if transport == "shm" else "127.0.0.1]:") in line, line
    assert results[0].stderr == ""


class WrongKeyStore(pycoll.FileStore):
    """Shows this rank its peer's description with another key, as the store of a job would to which
    another job has written; of two processes the one with the greater id dials."""

    def get(self, key, timeout=None):
        value = super().get(key, timeout)
        own = int(os.environ["RANK"])
        if not key.endswith(f"rank/{1 - own}"):
            return value
        before = {"tcp": r"(tcp=\+tcp 1 \w{32} )", "shm": r"(shm=\+shm \d+ \S+ \w{32} )"}
        pattern = before[os.environ["PYCOLL_TRANSPORT"]] + r"\w{32}"
        text, changes = re.subn(pattern, r"\g<1>" + "x" * 32, value.decode())
        assert changes == 1, "descriptions look different now"
        return text.encode()


def wrong_key(rank, w, directory):
    os.environ["RANK"] = str(rank)
    store = WrongKeyStore(directory)
    options = {"PYCOLL_CONNECT_TIMEOUT": "2"}
    start = time.monotonic()
    text = error_of(lambda: pycoll.Communicator(store, rank, w, options=options), pycoll.Error)
    took = time.monotonic() - start
    # The process is none the worse.
    with pycoll.Communicator(pycoll.FileStore(directory), rank, w, name="right") as communicator:
        total = torch.arange(5.0).numpy() + rank
        communicator.all_reduce(total)
    return text, took, total.tolist()


@over_each_transport
def test_a_peer_with_a_wrong_key_is_dropped_and_logged(transport):
    results = run_ranks(2, wrong_key, env={"PYCOLL_TRANSPORT": transport})
    for result in results:
        text, took, total = result.value
        assert f"rank {1 - result.rank}" in text, text
        assert took < 6
        assert total == [1.0, 3.0, 5.0, 7.0, 9.0]
    said = [line for result in results for line in lines_of(result.stderr)]
    assert len(said) == 1, "who was dialled says so, once"
    assert re.match(DROPPED, said[0])
