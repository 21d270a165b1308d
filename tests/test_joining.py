"""Ranks that never come, are interrupted while they wait for others, or meet strangers."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import threading
import time

import numpy as np
import pytest

import pycoll
from pool import run_ranks

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_a_missing_rank_is_named(tmp_path):
    store = pycoll.FileStore(tmp_path)
    options = {"PYCOLL_CONNECT_TIMEOUT": "0.5"}
    start = time.monotonic()
    with pytest.raises(pycoll.TimeoutError, match="rank 1 to join the group") as caught:
        pycoll.Communicator(store, 0, 2, options=options)
    assert time.monotonic() - start < 2
    assert "PYCOLL_CONNECT_TIMEOUT" in str(caught.value)
    assert isinstance(caught.value, TimeoutError)


def test_two_processes_with_one_rank(tmp_path):
    """A launcher that gives a rank twice: whoever came first is told, and not at its timeout."""
    store = pycoll.FileStore(tmp_path)
    ended = {}

    def join(name, seconds):
        start = time.monotonic()
        with pytest.raises(pycoll.Error) as caught:
            pycoll.Communicator(store, 0, 2, options={"PYCOLL_CONNECT_TIMEOUT": str(seconds)})
        ended[name] = str(caught.value), time.monotonic() - start

    first = threading.Thread(target=join, args=("first", 30))
    first.start()
    while not list(tmp_path.iterdir()):
        time.sleep(0.01)
    time.sleep(0.1)
    second = threading.Thread(target=join, args=("second", 2))
    second.start()
    first.join()
    second.join()
    text, seconds = ended["first"]
    assert "rank 0 of 2: another process has joined the group as this rank" in text, ended
    assert seconds < 10, ended
    assert "waited 2 s for rank 1" in ended["second"][0], ended


@pytest.mark.parametrize("call", ["set", "get"])
def test_what_the_system_refuses_a_store_is_an_error_of_the_group(call):
    class Refused(dict):
        def set(self, key, value):
            self.fail_in("set")
            self[key] = value

        def get(self, key, timeout):
            self.fail_in("get")
            raise TimeoutError(key)

        def fail_in(self, here):
            if here == call:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "some file")

    with pytest.raises(pycoll.OperatingSystemError, match="the store failed: .*some file") as told:
        pycoll.Communicator(Refused(), 0, 2)
    assert isinstance(told.value.__cause__, OSError) and told.value.__cause__.errno == errno.EMFILE


def join_alone(rank, world_size, directory):
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        pycoll.Communicator(pycoll.FileStore(directory), 0, 2)
    except KeyboardInterrupt:
        return time.monotonic() - start
    return None


def test_control_c_interrupts_joining():
    assert run_ranks(1, join_alone)[0].value < 0.4 + 1.5


def addresses():
    """The abstract sockets that this process listens on."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.update(
                re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{descriptor}"))
            )
    with open("/proc/net/unix") as file:
        rows = [line.split() for line in file]
    listens = "00010000"  # between bind and listen a socket is there, but refuses
    return {
        row[7][1:]
        for row in rows
        if row[6] in inodes and row[3] == listens and row[-1].startswith("@pycoll-")
    }


def test_a_stranger_at_the_socket_does_no_harm(tmp_path):
    store = pycoll.FileStore(tmp_path)
    made = []
    first = threading.Thread(target=lambda: made.append(pycoll.Communicator(store, 0, 2)))
    first.start()
    deadline = time.monotonic() + 5
    while not (listening := addresses()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert listening
    strangers = []
    for packet in (
        b"",
        b"garbage",
        b"H wrongkey 1",
        b"O x y z",
        b"\0" * 4000,
    ):
        for name in listening:
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect("\0" + name)
            if packet:
                stranger.send(packet)
            strangers.append(stranger)
    second = pycoll.Communicator(store, 1, 2)
    first.join(20)
    arrays = [np.arange(5.0), np.arange(5.0)]
    thread = threading.Thread(target=made[0].all_reduce, args=(arrays[0],))
    thread.start()
    second.all_reduce(arrays[1])
    thread.join()
    np.testing.assert_array_equal(arrays, [2 * np.arange(5.0)] * 2)
    for stranger in strangers:
        stranger.close()
    second.close()
    made[0].close()
