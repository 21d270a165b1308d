"""A store whose answers take a while, as over a network: the note that a rank leaves there when it
gives up must be found by the others."""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
import time

import pytest
import torch.distributed as dist

import pycoll
from pool import run_ranks
from pycoll._store_adapter import adapt_store
from test_faults import error_of
from test_network import TRANSPORTS, LastRecordStore, use_up_descriptors

LATENCY = 0.02  # seconds, there and back
CONNECT_TIMEOUT = 30


class DistantStore(pycoll.FileStore):
    """A wait that is shorter than the way there and back sees nothing, ever."""

    def get(self, key, timeout=None):
        if timeout is not None and timeout < LATENCY:
            time.sleep(max(timeout, 0))
            raise TimeoutError(key)
        time.sleep(LATENCY)
        return super().get(key, None if timeout is None else timeout - LATENCY)

    def check(self, keys):
        time.sleep(LATENCY)
        return super().check(keys)


class DistantStoreWithoutCheck:
    """No more than what a store needs to have."""

    def __init__(self, directory):
        self._store = DistantStore(directory)

    def set(self, key, value):
        self._store.set(key, value)

    def get(self, key, timeout):
        return self._store.get(key, timeout)


class StoreWithACheckOfItsOwn(dict):
    set = dict.__setitem__

    def get(self, key, timeout):
        if key not in self:
            raise TimeoutError(key)
        return self[key]

    def check(self, key, expected):
        return self[key] == expected


def test_a_store_may_have_a_check_of_its_own():
    store = adapt_store(StoreWithACheckOfItsOwn())
    assert store.peek("note") is None
    store.set("note", b"why")
    assert store.peek("note") == b"why"


def gives_up(rank, world_size, directory, transport, kind):
    LastRecordStore.world_size = world_size
    store = (LastRecordStore if rank == 0 else kind)(directory)
    options = {"PYCOLL_CONNECT_TIMEOUT": str(CONNECT_TIMEOUT), "PYCOLL_TRANSPORT": transport}
    start = time.monotonic()
    kind, text, _ = error_of(lambda: pycoll.Communicator(store, rank, world_size, options=options))
    return kind, text, time.monotonic() - start


@pytest.mark.parametrize("kind", [DistantStore, DistantStoreWithoutCheck])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_note_in_a_distant_store_is_found(transport, kind):
    for result in run_ranks(4, gives_up, transport, kind, timeout=90):
        error, text, waited = result.value
        assert error == ("OperatingSystemError" if result.rank == 0 else "PeerError"), result.value
        assert "ulimit -n" in text, "not the reason"
        assert waited < CONNECT_TIMEOUT / 2, "the others waited for nothing"


class SlowLine:
    """Passes on what comes to `port`, some milliseconds later."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                time.sleep(LATENCY / 2)
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)


def gives_up_in_torch(rank, world_size, directory, port, by_torch):
    store = dist.TCPStore("127.0.0.1", port, None, False, datetime.timedelta(seconds=60))
    if rank == 0:
        # Enough to listen, and for the spare one of the note; not for the memory of the group.
        use_up_descriptors(4)
    start = time.monotonic()
    with pytest.raises((dist.DistBackendError, pycoll.Error)) as caught:
        if by_torch:
            dist.init_process_group("pycoll", store=store, rank=rank, world_size=world_size)
        else:
            pycoll.Communicator(store, rank, world_size)
    waited = time.monotonic() - start
    return str(caught.value), waited


@pytest.mark.parametrize("by_torch", [False, True], ids=["communicator", "torch"])
def test_a_note_behind_a_slow_line_is_found(by_torch):
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = {"PYCOLL_CONNECT_TIMEOUT": str(CONNECT_TIMEOUT), "PYCOLL_TRANSPORT": "shm"}
    with contextlib.closing(SlowLine(server.port)) as line:
        results = run_ranks(3, gives_up_in_torch, line.port, by_torch, env=env, timeout=90)
    for result in results:
        text, waited = result.value
        assert "errno 24" in text, text
        assert waited < CONNECT_TIMEOUT / 2, "the others waited for nothing"
