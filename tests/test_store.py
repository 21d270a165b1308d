"""FileStore: the key-value store that ranks meet over when there is no torch."""

from __future__ import annotations

import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool import run_ranks
from pycoll import FileStore

AWKWARD_KEYS = [
    "",
    ".",
    "..",
    "../escape",
    "/etc/passwd",
    "a/b",
    "a%2Fb",
    "nul\0byte",
    "ünï©ode",
    "new\nline",
    "x" * 5000,
    "x" * 4999 + "y",
    "key-a",
    "tmp-a",
    "hash-a",
    "CASE",
    "case",
]


def test_values_come_back_as_bytes(tmp_path):
    store = FileStore(tmp_path)
    store.set("text", "grüße")
    store.set("bytes", b"\x00\xff\n")
    store.set("empty", b"")
    assert store.get("text") == "grüße".encode()
    assert store.get("bytes") == b"\x00\xff\n"
    assert store.get("empty") == b""


def test_awkward_keys_stay_apart_and_inside_the_directory(tmp_path):
    store = FileStore(tmp_path / "store")
    for index, key in enumerate(AWKWARD_KEYS):
        store.set(key, str(index))
    assert [int(store.get(key)) for key in AWKWARD_KEYS] == list(range(len(AWKWARD_KEYS)))
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]
    assert len(list((tmp_path / "store").iterdir())) == len(AWKWARD_KEYS)


@given(entries=st.dictionaries(st.text(), st.binary(), max_size=8))
def test_is_a_dictionary(entries, tmp_path_factory):
    store = FileStore(tmp_path_factory.mktemp("store"))
    for key, value in entries.items():
        store.set(key, b"old")
        store.set(key, value)
    assert {key: store.get(key, timeout=0) for key in entries} == entries


def test_check_and_delete(tmp_path):
    store = FileStore(tmp_path)
    store.set("a", b"1")
    assert store.check(["a"])
    assert store.check([])
    assert not store.check(["a", "b"])
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert not store.check(["a"])


def test_get_waits_for_a_later_set(tmp_path):
    store = FileStore(tmp_path)
    writer = threading.Timer(0.2, lambda: FileStore(tmp_path).set("late", b"here"))
    writer.start()
    start = time.monotonic()
    assert store.get("late", timeout=10) == b"here"
    assert 0.15 < time.monotonic() - start < 5
    writer.join()


@pytest.mark.parametrize("timeout", [None, 0.1, 0])
def test_timeout_names_key_and_directory(tmp_path, timeout):
    store = FileStore(tmp_path, timeout=0.1)
    start = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        store.get("rank/3", timeout=timeout)
    assert "'rank/3'" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert time.monotonic() - start < 5


def test_a_failed_set_leaves_nothing(tmp_path):
    store = FileStore(tmp_path)
    os.mkdir(store._file("a"))  # os.replace cannot put a file over a directory
    with pytest.raises(OSError, match="key-a"):
        store.set("a", b"1")
    assert [entry.name for entry in tmp_path.iterdir()] == ["key-a"]


def exchange(rank, world_size, directory, rounds):
    """Everybody writes large values over and over; a torn read would mix two rounds."""
    store = FileStore(directory, timeout=20)
    size = 100_000
    for number in range(rounds):
        store.set(f"value/{rank}", bytes([rank * 16 + number]) * size)
        for peer in range(world_size):
            value = store.get(f"value/{peer}")
            assert len(value) == size
            assert len(set(value)) == 1
            assert value[0] // 16 == peer
    store.set(f"done/{rank}", b"")
    return [store.get(f"done/{peer}") for peer in range(world_size)]


def test_between_processes_no_value_is_torn():
    results = run_ranks(3, exchange, 16)
    assert [result.value for result in results] == [[b""] * 3] * 3
