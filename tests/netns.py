"""Hosts for tests: network namespaces joined by veth pairs, which end with the test.

Nothing has a name in the file system: a namespace is held by a sleeping child, and goes with it.
Ranks enter one with `enter()`, before they make a communicator.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import time
from types import TracebackType

CLONE_NEWNET = 0x40000000


@functools.cache
def why_not() -> str:
    """Why there can be no network namespaces here; empty when there can."""
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} not found (Debian: apt-get install iproute2 util-linux)"
    try:
        with Hosts(2) as hosts:
            hosts.join(0, 1, "10.99.0.{}/24")
    except (RuntimeError, OSError) as error:
        return f"network namespaces cannot be made: {error}"
    return ""


def enter(path: str) -> None:
    """Moves the calling thread, and whatever it starts from then on, into a namespace."""
    handle = os.open(path, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(handle)


class Hosts:
    """`count` network namespaces with loopback up: `paths` to enter them, `run` for commands."""

    def __init__(self, count: int) -> None:
        self.paths: list[str] = []
        self._holders: list[subprocess.Popen[bytes]] = []
        self._links = 0
        try:
            for _ in range(count):
                self._add()
        except BaseException:
            self.close()
            raise

    def _add(self) -> None:
        holder = subprocess.Popen(["unshare", "--net", "sleep", "3600"], stderr=subprocess.PIPE)
        self._holders.append(holder)
        path = f"/proc/{holder.pid}/ns/net"
        deadline = time.monotonic() + 10
        own = os.stat("/proc/self/ns/net").st_ino
        while os.stat(path).st_ino == own:  # it has not come to unshare yet
            if holder.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("unshare --net failed")
            time.sleep(0.002)
        self.paths.append(path)
        self.run(len(self.paths) - 1, "ip link set lo up")

    def run(self, host: int, command: str) -> str:
        """A command, split at blanks, inside a host; its output. Raises RuntimeError."""
        done = subprocess.run(
            ["nsenter", f"--net={self.paths[host]}", *command.split()],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command}: {done.stderr.strip()}")
        return done.stdout

    def join(self, a: int, b: int, *networks: str, name: str | None = None) -> str:
        """A cable between two hosts, with the same interface name on both; returns the name.

        Each of `networks` is an address with {} for the host's number + 1: "10.0.0.{}/24".
        """
        name = name or f"eth{self._links}"
        self._links += 1
        peer = self._holders[b].pid
        self.run(a, f"ip link add {name} type veth peer name {name} netns {peer}")
        for host in (a, b):
            self.run(host, f"ip link set {name} up")
            for network in networks:
                address = network.format(host + 1)
                extra = " nodad" if ":" in address else ""
                self.run(host, f"ip addr add {address} dev {name}{extra}")
        return name

    def shape(self, name: str, rate: str) -> str:
        """Slows an interface that `join` made down to `rate` ("1gbit"), on both hosts: what each
        sends. Returns how, as tc says it. Messages up to the burst, a millisecond's worth, pass at
        full speed after a pause.
        """
        unit = {"m": 10**6, "g": 10**9}[rate[-4]]
        burst = max(131_072, int(float(rate[:-4]) * unit / 8 / 1000))
        for host in (0, 1):
            self.run(
                host,
                f"tc qdisc replace dev {name} root tbf rate {rate} burst {burst} latency 20ms",
            )
        return " ".join(self.run(0, f"tc qdisc show dev {name}").split())

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
        for holder in self._holders:
            holder.wait()
            if holder.stderr is not None:
                holder.stderr.close()
        self._holders.clear()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
