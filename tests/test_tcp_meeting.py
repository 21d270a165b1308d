"""How processes meet over TCP: strangers, crowds, peers that are gone or cannot be reached."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import time

import numpy as np
import pytest

import netns
import pycoll
from pool import communicator_ranks, run_ranks
from test_faults import error_of

TCP = {"PYCOLL_TRANSPORT": "tcp"}


# ---- Strangers, and crowds ----


def tcp_ports():
    """The ports that this process listens on."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.update(
                re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{descriptor}"))
            )
    ports = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}") as file:
            rows = [line.split() for line in file][1:]
            ports += [
                int(r[1].rsplit(":", 1)[1], 16) for r in rows if r[3] == "0A" and r[9] in inodes
            ]
    return ports


def resident_kb():
    with open("/proc/self/status") as file:
        return int(re.search(r"VmRSS:\s+(\d+)", file.read()).group(1))


def hello_of(rng):
    """A Hello of the right form without the secret; a part of it; noise; a huge length."""
    hello = b"COLLtcP1" + bytes(rng.randrange(256) for _ in range(104))
    return rng.choice(
        [
            hello,
            hello[: rng.randrange(1, 112)],
            hello * 40,
            rng.randbytes(rng.randrange(1, 3000)),
            b"\xff" * 200,
            b"",
        ]
    )


def besieged(communicator, messages):
    """Rank 0 sends noise to all that listens here while collectives go on."""
    array = np.ones(1000)
    communicator.all_reduce(array)
    before = resident_kb()
    port = tcp_ports()[0] if communicator.rank == 1 else 0
    ports = np.zeros((2, 1), np.int64)
    communicator.all_gather(ports, np.array([port], np.int64))
    if communicator.rank == 0:
        rng = random.Random(1)
        kept = []
        sent = 0
        while sent < messages:
            with contextlib.suppress(OSError):
                stranger = socket.create_connection(("127.0.0.1", int(ports[1, 0])), 5)
                stranger.sendall(hello_of(rng))
                kept.append(stranger)
            sent += 1
            if len(kept) > 300:
                kept.pop(rng.randrange(len(kept))).close()
            if sent % 500 == 0:
                communicator.all_reduce(np.ones(10))
        for stranger in kept:
            stranger.close()
    else:
        for _ in range(messages // 500):
            communicator.all_reduce(np.ones(10))
    communicator.barrier()
    descriptors = len(os.listdir("/proc/self/fd"))
    return resident_kb() - before, descriptors


@pytest.mark.parametrize(
    "messages", [3000, pytest.param(1_000_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_strangers_do_no_harm(messages):
    results = communicator_ranks(2, besieged, messages, env=TCP, timeout=800)
    grown, descriptors = results[1].value
    assert grown < 20_000
    assert descriptors < 400


def crowd(rank, world_size, directory, path):
    netns.enter(path)
    options = {**TCP, "PYCOLL_CONNECT_TIMEOUT": "60"}
    store = pycoll.FileStore(directory)
    with pycoll.Communicator(store, rank, world_size, options=options) as communicator:
        array = np.full(10, rank + 1)
        communicator.all_reduce(array)
        return int(array[0])


@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_crowd_at_a_short_queue(hosts):
    """(J9)"""
    net = hosts(1)
    net.run(0, "sysctl -w net.core.somaxconn=8")
    results = run_ranks(32, crowd, net.paths[0], timeout=150)
    assert [result.value for result in results] == [32 * 33 // 2] * 32


# ---- Peers that cannot be reached ----


class ForgedStore(pycoll.FileStore):
    """Shows rank 0 a rank 1 that is like itself but for what `forge` makes of its addresses."""

    def __init__(self, path, forge):
        super().__init__(path)
        self.forge = forge

    def get(self, key, timeout=None):
        if not key.endswith("rank/1"):
            return super().get(key, timeout)
        own = super().get(key[:-1] + "0", timeout).decode()
        # Of two processes the one with the greater id dials.
        return self.forge(re.sub(r"tcp=\+tcp 1 \w+", "tcp=+tcp 1 " + "0" * 32, own)).encode()


def error_of_meeting(path, forge, **options):
    start = time.monotonic()
    kind, text, when = error_of(
        lambda: pycoll.Communicator(ForgedStore(path, forge), 0, 2, options={**TCP, **options})
    )
    return kind, text, when - start


def test_a_peer_that_listens_no_more_is_named_long_before_the_limit(tmp_path):
    with socket.socket() as reserved:  # nobody listens there
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        kind, text, waited = error_of_meeting(
            tmp_path, lambda r: re.sub(r":\d+\b(?!:)", f":{port}", r)
        )
    assert kind == "PeerError"
    for word in ("rank 1", "Connection refused", f"127.0.0.1:{port}", "died", "earlier run"):
        assert word in text, text
    assert 4.5 < waited < 12


def test_a_peer_with_nothing_but_a_foreign_link_local_address(tmp_path):
    def forge(record):
        tcp = re.search(r"(tcp=\+tcp 1 \w+ \w+ )(\S+)( \S+ \d+ \d+ ).*", record)
        there = f"{tcp[1]}another-host{tcp[3]}eth9=169.254.7.7:4711"
        return record.replace(tcp[0], there)

    kind, text, waited = error_of_meeting(tmp_path, forge)
    if "no transport connects" in text:
        pytest.skip("this host has no IPv4 address but loopback")
    assert kind == "PeerError"
    for word in ("rank 1", "169.254.7.7", "eth9", "link-local", "PYCOLL_SOCKET_IFNAME"):
        assert word in text, text
    assert waited < 5
