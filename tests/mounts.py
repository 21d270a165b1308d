"""Hosts, as pycoll tells them apart, out of one machine: mount namespaces.

A rank in another mount namespace has another host identity, and is still reached over loopback.
Each is held by a sleeping child, and goes with it; ranks enter one with `enter()`, before they make
a communicator and before they start a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import subprocess
import time
from collections.abc import Iterator

CLONE_NEWNS = 0x00020000


@functools.cache
def why_not() -> str:
    """Why there can be none here; empty when there can."""
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    return f"mount namespaces cannot be made: {done.stderr.strip()}"


@contextlib.contextmanager
def of(hosts: str) -> Iterator[list[str]]:
    """`hosts` has a letter a rank: its host. Gives what each rank has to enter; empty: nothing."""
    paths = {hosts[:1]: ""}
    holders = []
    try:
        for letter in hosts:
            if letter in paths:
                continue
            holder = subprocess.Popen(["unshare", "-m", "sleep", "3600"])
            holders.append(holder)
            paths[letter] = f"/proc/{holder.pid}/ns/mnt"
            deadline = time.monotonic() + 10
            own = os.stat("/proc/self/ns/mnt").st_ino
            while os.stat(paths[letter]).st_ino == own:  # it has not come to unshare yet
                if holder.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("unshare -m failed")
                time.sleep(0.002)
        yield [paths[letter] for letter in hosts]
    finally:
        for holder in holders:
            holder.kill()
        for holder in holders:
            holder.wait()


def enter(path: str) -> None:
    """Moves this process, which has one thread, into a namespace."""
    if not path:
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(handle)
