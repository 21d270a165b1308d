"""Who dials a process and is no rank of its groups does no harm."""

from __future__ import annotations

import random
import socket

import pycoll
from pool import run_ranks
from test_joining import addresses
from test_network import descriptors, sum_of_ranks


def megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def strange_packets(seed):
    """Beginnings that a stranger may send; the key is what it does not know."""
    draw = random.Random(seed)
    yield b"H " + b"0" * 32 + b" " + b"1" * 32
    yield b"H"
    yield b"O group 0 1"
    yield b"A group " + b"x" * 4000
    yield b"\0"
    yield b"x" * 60_000
    for _ in range(30):
        yield draw.randbytes(draw.randrange(1, 5000))


def knock(name, packets):
    """One connection with those packets; it ends when the listener has had enough."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(5)
        stranger.connect("\0" + name)
        sent = 0
        try:
            for packet in packets:
                stranger.send(packet)
                sent += 1
        except (BrokenPipeError, ConnectionResetError):
            pass
        return sent


def flooded(rank, world_size, directory, messages):
    """Rank 0 is knocked at by strangers (threads of rank 1) while it works and connects."""
    store = pycoll.FileStore(directory)
    first = pycoll.Communicator(store, rank, world_size, name="first", timeout=60)
    if rank == 0:
        store.set("names", "\n".join(addresses()))
    names = store.get("names").decode().split("\n")
    first.barrier()
    before = megabytes()
    passed = 0
    if rank == 1:
        for name in names:
            for seed in range(3):
                for packet in strange_packets(seed):
                    passed += knock(name, [packet, packet])
            small = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            small.connect("\0" + name)  # says nothing
            kept = [small]
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hasty:
                hasty.connect("\0" + name)
                for _ in range(messages):
                    try:
                        hasty.send(b"H")
                    except OSError:  # it was closed: knock again
                        break
            for _ in range(200):  # more than may wait at once
                kept.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                kept[-1].connect("\0" + name)
    second = pycoll.Communicator(store, rank, world_size, name="second", timeout=60)
    sums = [sum_of_ranks(first), sum_of_ranks(second)]
    return sums, megabytes() - before, descriptors()


def test_strangers_do_no_harm():
    for result in run_ranks(2, flooded, 1_000_000, timeout=120):
        sums, grown, _ = result.value
        assert sums == [3.0, 3.0]
        assert grown < 30 if result.rank == 1 else grown < 8
