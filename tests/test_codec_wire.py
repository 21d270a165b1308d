"""What compressed collectives send: the codes, and little besides."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
from pathlib import Path

import numpy as np
import pytest

from codec_model import pieces, values_of
from codec_reference import Kind
from pool import communicator_ranks
from pycoll import _core

HEADER_BYTES = 64  # of a message, and zeros at the end of codes, at most
SLOT_BYTES = 1 << 17  # of codes in one message, at most (PYCOLL_SLOT_BYTES)
# b.5 of the specification: bits of a code, and bits of scales a block of 256.
BITS = {
    "fp16": (16, 0),
    "bf16": (16, 0),
    "fp8_e4m3": (8, 32),
    "fp8_e5m2": (8, 32),
    "int8": (8, 32),
    "int4": (4, 32),
    "uint8": (8, 64),
    "uint4": (4, 64),
    "sign": (1, 32),
    "ternary": (2, 32),
}
N = 1_000_003
FAMILIES = (socket.AF_INET, socket.AF_INET6)

pytestmark = pytest.mark.skipif(
    any(name == "tcp" and reason for name, _, reason in _core.try_transports()),
    reason="no TCP between processes here",
)


def bytes_received() -> int:
    """By all TCP connections of this process, as the kernel counts them (tcp_info(7))."""
    total = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the directory itself
            if not str(file.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as one:
                if one.type == socket.SOCK_STREAM and one.family in FAMILIES:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    total += struct.unpack_from("Q", info, 128)[0]
    return total


def code_bytes(name: str, n: int) -> int:
    bits, scale_bits = BITS[name]
    return math.ceil(n * bits / 8) + math.ceil(n / 256) * scale_bits // 8


def all_reduces(communicator, names):
    rank, got = communicator.rank, {}
    for name in names:
        x = values_of(rank, N)
        communicator.all_reduce(x[:8192].copy(), codec=name)  # connections are there
        before = bytes_received()
        communicator.barrier()  # nobody has begun before all have looked
        communicator.all_reduce(x, codec=name)
        got[name] = bytes_received() - before
        communicator.barrier()
    return got


def expected(name: str, rank: int, world_size: int) -> tuple[int, int]:
    """Bytes of codes that a rank receives, and messages: codes, receipts for its own, a barrier."""
    payload = messages = 0
    for owner, begin, end in pieces(Kind(name), N, world_size):
        # What a rank owns comes from all peers, and the sum of it goes to them; and the other way.
        times = world_size - 1 if owner == rank else 1
        length = code_bytes(name, end - begin)
        payload += times * length
        messages += 2 * times * math.ceil(length / SLOT_BYTES)
    return payload, messages + 2 * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_on_the_wire_are_those_of_the_codes(world_size):
    env = {"PYCOLL_TRANSPORT": "tcp"}
    for result in communicator_ranks(world_size, all_reduces, list(BITS), env=env, timeout=60):
        for name, received in result.value.items():
            payload, messages = expected(name, result.rank, world_size)
            assert payload <= received <= payload + messages * HEADER_BYTES, (name, result.rank)


def exact(communicator):
    before = bytes_received()
    communicator.barrier()
    communicator.all_reduce(np.ones(N, np.float32))
    return bytes_received() - before


def test_the_kernels_count_is_what_a_call_without_a_codec_sends():
    """The measure itself: half of the vector's sums and half of its values, four bytes each."""
    for result in communicator_ranks(2, exact, env={"PYCOLL_TRANSPORT": "tcp"}, timeout=60):
        assert 4 * N <= result.value <= 4 * N * 1.01
