"""What a container or an administrator may take away from a process, for tests."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import mounts

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_ALLOW = 0x7FFF0000
SECCOMP_RET_ERRNO = 0x00050000
PIDFD_OPEN = 434  # the same number on every architecture
# ptrace, process_vm_readv, process_vm_writev; by machine.
CROSS_MEMORY = {"x86_64": (101, 310, 311), "aarch64": (117, 270, 271)}.get(os.uname().machine, ())


def prctl(*arguments: int) -> None:
    function = ctypes.CDLL(None, use_errno=True).prctl
    function.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if function(*arguments, *[0] * (5 - len(arguments))) != 0:
        raise OSError(ctypes.get_errno(), f"prctl{arguments}")


def forbid_calls(*numbers: int) -> None:
    """From now on these system calls fail with EPERM in this process, as in many a container."""

    def instruction(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, k)

    load, jump_if_equal, answer = 0x20, 0x15, 0x06
    program = instruction(load, 0)  # the system call's number
    for number in numbers:
        program += instruction(jump_if_equal, number, 0, 1)
        program += instruction(answer, SECCOMP_RET_ERRNO | 1)
    program += instruction(answer, SECCOMP_RET_ALLOW)
    memory = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(memory))
    address = ctypes.create_string_buffer(header)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(address))


@contextlib.contextmanager
def small_dev_shm(size: str) -> Iterator[str]:
    """A mount namespace, to `mounts.enter`, with a /dev/shm of `size` ("64m") that is its own."""
    with mounts.of("ab") as (_, path):
        command = ["nsenter", f"--mount={path}", "mount", "-t", "tmpfs", "-o", f"size={size}"]
        subprocess.run([*command, "tmpfs", "/dev/shm"], check=True, timeout=20)
        yield path


@contextlib.contextmanager
def cpu_quota(quota_us: int, period_us: int) -> Iterator[Path]:
    """A control group whose tasks get so much CPU time; PermissionError or OSError where there can
    be none. Processes enter by writing their pid to its cgroup.procs."""
    root = Path("/sys/fs/cgroup")
    version_2 = (root / "cgroup.controllers").exists()
    group = (root if version_2 else root / "cpu") / f"pycoll-test-{os.getpid()}"
    group.mkdir()
    try:
        if version_2:
            (group / "cpu.max").write_text(f"{quota_us} {period_us}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        yield group
    finally:
        group.rmdir()
