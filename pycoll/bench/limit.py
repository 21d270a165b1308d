"""The hand-written loop over memory of two ranks, as one more contender.

It works on the contenders' own vectors where these are shareable, the very same pages, mapped by
the other rank as well; else on vectors in shared memory of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pycoll.bench.calls import Call
from pycoll.bench.memory import PAGE, Operands, pages
from pycoll.bench.problem import Problem

SOURCE = Path(__file__).with_name("limit.c")
# 512-bit vectors where there are any: compilers shy away from them by themselves.
FLAGS = ["-O3", "-march=native", "-shared", "-fPIC", "-std=gnu11"]
WIDE = ["-mprefer-vector-width=512"]


@dataclass(frozen=True)
class Place:
    """Memory that another process can map: a descriptor of this one, and where in the file."""

    pid: int
    descriptor: int
    offset: int  # of the first byte
    size: int

    def map(self) -> tuple[mmap.mmap, int]:
        """The mapping, and the first byte's address in this process."""
        start = self.offset // PAGE * PAGE
        file = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(file, self.size + self.offset - start, offset=start)
        finally:
            os.close(file)
        return mapping, address_of(mapping) + self.offset - start


def address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def place_of(tensor: torch.Tensor) -> Place:
    """Where a tensor in a shared file mapping lies. Raises RuntimeError for any other memory."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions, offset, _, inode, *_ = line.split(maxsplit=5)
        low, high = (int(text, 16) for text in bounds.split("-"))
        if low <= address < high and permissions[3] == "s" and inode != "0":
            offset_in_file = int(offset, 16) + address - low
            size = tensor.numel() * tensor.element_size()
            return Place(os.getpid(), descriptor_of(int(inode)), offset_in_file, size)
    raise RuntimeError("--limit: these tensors are not in memory that the other rank could map")


def descriptor_of(inode: int) -> int:
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.stat(f"/proc/self/fd/{name}").st_ino == inode:
                return int(name)
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    raise RuntimeError("--limit: the file behind the shareable memory is no longer open")


def build() -> ctypes.CDLL:
    """Compiles the loop for this CPU. Raises RuntimeError with what the compiler said."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("--limit needs a C compiler: install one or set CC")
    with tempfile.TemporaryDirectory(prefix="pycoll-limit-") as directory:
        library = Path(directory) / "limit.so"
        command = [*shlex.split(compiler), *FLAGS, str(SOURCE), "-o", str(library)]
        done = subprocess.run([*command, *WIDE], capture_output=True, text=True)
        if done.returncode:  # not every compiler and CPU knows WIDE
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"--limit: {compiler} does not compile the loop:\n{done.stderr}")
        return ctypes.CDLL(str(library))


class Limit:
    """The loop, with the interface of `calls.Caller`."""

    name = "limit"
    checked = True

    def __init__(self, buffer: torch.Tensor, shareable: bool) -> None:
        self._rank = dist.get_rank()
        function = build().limit_all_reduce
        function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int]
        self._function = function
        self._buffer = buffer
        self._own: torch.Tensor | None = None
        self._kept: list[Any] = []  # mappings that addresses point into
        if not shareable:
            self._own = buffer = self._shared_tensor(buffer.numel())
        self._base = buffer.data_ptr()
        _, self._peer = self._keep(exchange(place_of(buffer))[1 - self._rank])
        flags = self._shared_tensor(PAGE)
        _, self._flags = self._keep(exchange(place_of(flags))[0])

    def call(self, problem: Problem) -> Call:
        function, flags, rank = self._function, self._flags, self._rank

        def call(first: int, second: int, elements: int) -> None:
            if function(first, second, elements, flags, rank):
                raise RuntimeError("the hand-written loop: the other rank did not come")

        return call

    def arguments(self, problem: Problem, operands: Operands) -> tuple[Any, ...]:
        mine = operands.output.data_ptr()
        theirs = self._peer + mine - self._base
        pair = (theirs, mine) if self._rank else (mine, theirs)
        return (*pair, problem.count)

    def operands(self, problem: Problem, offered: list[Operands]) -> list[Operands]:
        if self._own is None:
            return offered
        views = []
        for one in offered:
            start = one.output.data_ptr() - self._buffer.data_ptr()
            size = one.output.numel() * one.output.element_size()
            view = self._own[start : start + size].view(problem.dtype)
            views.append(Operands(view, view))
        return views

    def _shared_tensor(self, size: int) -> torch.Tensor:
        file = os.memfd_create("pycoll-limit", os.MFD_CLOEXEC)
        os.ftruncate(file, pages(size))
        mapping = mmap.mmap(file, pages(size))
        self._kept.append((file, mapping))  # the descriptor stays open, for the other rank
        return torch.frombuffer(mapping, dtype=torch.uint8)[:size]

    def _keep(self, place: Place) -> tuple[mmap.mmap, int]:
        found = place.map()
        self._kept.append(found)
        return found


def exchange(place: Place) -> list[Place]:
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, place)
    return places
