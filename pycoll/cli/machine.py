"""What a Linux machine offers: probes, each of which tries the thing itself."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

SIOCGIFADDR = 0x8915  # ioctl: the IPv4 address of an interface (netdevice(7))


def shared_memory_problems() -> list[str]:
    """What keeps ranks of this machine from sharing memory; empty when all of it works.

    Makes a memfd, passes it through an abstract unix socket, maps it twice and compares, and opens
    a pidfd: what the shm transport does to meet its peers.
    """
    problems = []
    try:
        probe_shared_descriptor()
    except (OSError, AttributeError, ValueError) as error:
        problems.append(f"{error}")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        problems.append(f"pidfd_open: {error}")
    return problems


def probe_shared_descriptor() -> None:
    """Raises OSError that names the part which does not work."""
    with step("memfd_create"):
        ours = os.memfd_create("pycoll-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with step("ftruncate of a memfd"):
            os.ftruncate(ours, mmap.PAGESIZE)
        with step("passing a descriptor over an abstract unix socket"):
            theirs = pass_over_abstract_socket(ours)
        try:
            with step("mapping the passed memory"):
                compare_mappings(ours, theirs)
        finally:
            os.close(theirs)
    finally:
        os.close(ours)


class step:
    """Puts the name of what was tried in front of an OSError."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise OSError(f"{self.name}: {error}") from error


def pass_over_abstract_socket(descriptor: int) -> int:
    name = f"\0pycoll-doctor-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(name)
        listener.listen(1)
        client.connect(name)
        server, _ = listener.accept()
        with server:
            socket.send_fds(client, [b"x"], [descriptor])
            _, descriptors, _, _ = socket.recv_fds(server, 1, 1)
    if not descriptors:
        raise OSError("no descriptor arrived")
    return descriptors[0]


def compare_mappings(ours: int, theirs: int) -> None:
    with mmap.mmap(ours, mmap.PAGESIZE) as here, mmap.mmap(theirs, mmap.PAGESIZE) as there:
        nonce = secrets.token_bytes(16)
        here[:16] = nonce
        if there[:16] != nonce:
            raise OSError("what one mapping wrote, the other does not read")


def cpu_model() -> str:
    for line in lines_of("/proc/cpuinfo"):
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


def cgroup_cpus() -> float | None:
    """The tightest CPU quota (in CPUs) of this process's control groups, as the core sees it: None
    without one, or without a native core."""
    try:
        from pycoll import _core
    except ImportError:
        return None
    return _core.cgroup_cpus()


def interfaces() -> dict[str, list[str]]:
    """The addresses of each network interface, IPv4 first."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name, addresses in found.items():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue  # no IPv4 address
            addresses.append(socket.inet_ntoa(answer[20:24]))
    for line in lines_of("/proc/net/if_inet6"):
        packed, _, _, _, _, name = line.split()
        found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed)))
    return found


@dataclass(frozen=True)
class Choice:
    name: str  # empty: none
    reason: str


def choose_interface(found: dict[str, list[str]]) -> Choice:
    """The interface that a transport over the network would use, and why."""
    master = os.environ.get("MASTER_ADDR")
    if master:
        return choose_for_master(found, master)
    name = default_route()
    if name:
        return Choice(name, "it has the default route, and MASTER_ADDR is not set")
    up = [name for name, addresses in found.items() if addresses]
    if up:
        return Choice(up[0], "there is no default route: ranks of this machine only")
    return Choice("", "no interface has an address: ranks of this machine can still share memory")


def choose_for_master(found: dict[str, list[str]], master: str) -> Choice:
    try:
        answers = socket.getaddrinfo(master, None, type=socket.SOCK_DGRAM)
    except OSError as error:
        return Choice("", f"MASTER_ADDR={master} does not resolve ({error}): correct it")
    for family, _, _, _, address in answers:
        name = interface_towards(found, family, str(address[0]))
        if name:
            return Choice(name, f"it reaches MASTER_ADDR={master} ({address[0]})")
    return Choice("", f"no route to MASTER_ADDR={master}: correct it, or the routing table")


def interface_towards(found: dict[str, list[str]], family: int, address: str) -> str | None:
    """The interface of the route to `address`: a UDP socket is connected, nothing is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            ours = probe.getsockname()[0].partition("%")[0]
    except OSError:
        return None
    return next((name for name, addresses in found.items() if ours in addresses), None)


def default_route() -> str | None:
    """The interface of the default route, IPv4 before IPv6; None when there is none."""
    routes = []  # (metric, interface), in the kernel's tables: hexadecimal, destination 0 of 0 bits
    for line in lines_of("/proc/net/route")[1:]:
        name, destination, _, _, _, _, metric, mask, *_ = line.split()
        if int(destination, 16) == 0 and int(mask, 16) == 0:
            routes.append((int(metric), name))
    if not routes:
        for line in lines_of("/proc/net/ipv6_route"):
            destination, bits, _, _, _, metric, *_, name = line.split()
            if int(destination, 16) == 0 and int(bits, 16) == 0 and name != "lo":
                routes.append((int(metric, 16), name))
    return min(routes)[1] if routes else None


def lines_of(file: str) -> list[str]:
    """The lines of a file of /proc; none when this kernel does not have it."""
    try:
        return Path(file).read_text().splitlines()
    except OSError:
        return []
