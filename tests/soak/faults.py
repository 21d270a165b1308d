"""What goes wrong in a soak, one row a kind: what the victim does, and what the others may see."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import pycoll
from soak.calls import WrongValue

# What becomes of the victim: it is killed, raises an error of its own, or goes on as the others do.
Fate = Literal["killed", "raises", "goes on"]


@dataclass(frozen=True)
class Moment:
    """A rank at the beginning of its calls."""

    rank: int
    world: int
    victim: int
    seconds: float  # until the fault comes, of those that come by time
    seed: int
    directory: str

    @property
    def mine(self) -> bool:
        return self.rank == self.victim


@dataclass(frozen=True)
class Fault:
    """`arm` is called by every rank before its calls, `during` before the call with which the fault
    comes: by the victim, or `of_all` ranks. `harmless`: all calls of the group must end well.
    """

    name: str
    fate: Fate
    arm: Callable[[Moment], Any] | None = None
    during: Callable[[pycoll.Communicator, Moment], None] | None = None
    of_all: bool = False
    harmless: bool = False


def _after(seconds: float, action: Callable[[], Any]) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def _kill(moment: Moment) -> None:
    if moment.mine:
        _after(moment.seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _interrupt(moment: Moment) -> None:
    if moment.mine:
        _after(moment.seconds, lambda: os.kill(os.getpid(), signal.SIGINT))


def _stop(moment: Moment) -> None:
    """Stopped for a while."""
    pause = random.Random(moment.seed).uniform(0.05, 0.6)
    _stop_from_outside(moment, pause, signal.SIGCONT)


def _freeze(moment: Moment) -> None:
    """Stopped for longer than anybody waits, and then gone."""
    _stop_from_outside(moment, 8.0, signal.SIGKILL)


def _stop_from_outside(moment: Moment, pause: float, then: signal.Signals) -> None:
    """By another process: a stopped one can do nothing for itself."""
    if not moment.mine:
        return
    victim = os.getpid()
    if os.fork() == 0:
        time.sleep(moment.seconds)
        os.kill(victim, signal.SIGSTOP)
        time.sleep(pause)
        os.kill(victim, then)
        os._exit(0)


def _delay(moment: Moment) -> threading.Event:
    """A thread that takes the GIL away, again and again."""
    stop = threading.Event()

    def hold() -> None:
        rng = random.Random(moment.seed)
        until = time.monotonic() + 1
        while not stop.is_set() and time.monotonic() < until:
            held = time.monotonic() + rng.uniform(0, 0.03)
            while time.monotonic() < held:
                pass
            time.sleep(rng.uniform(0, 0.02))

    if moment.mine:
        threading.Thread(target=hold, daemon=True).start()
    return stop


def _sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:
            continue
    return found


def _reset(moment: Moment) -> None:
    """Every connection of the victim breaks, as if something between the hosts had reset it."""
    before = set(_sockets())

    def reset() -> None:
        for descriptor in set(_sockets()) - before:
            try:
                with socket.socket(fileno=os.dup(descriptor)) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6):
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                        one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    if moment.mine:
        _after(moment.seconds, reset)


class Oops(Exception):
    """The victim's own mistake."""


def _raise(group: pycoll.Communicator, moment: Moment) -> None:
    raise Oops("the model has no gradient")


def _close(group: pycoll.Communicator, moment: Moment) -> None:
    group.close()
    raise Oops("closed")


def _abort(group: pycoll.Communicator, moment: Moment) -> None:
    group.abort("the victim has had enough")
    raise Oops("aborted")


def _mismatch(group: pycoll.Communicator, moment: Moment) -> None:
    group.all_reduce(np.ones(12_345, np.int16), op="min")
    raise AssertionError("a call that no other rank made has ended well")


def _bad_argument(group: pycoll.Communicator, moment: Moment) -> None:
    """A refused call leaves the group as it was."""
    try:
        group.broadcast(np.ones(3), root=99)
    except pycoll.InvalidArgumentError:
        return
    raise AssertionError("root 99 was accepted")


def _part(group: pycoll.Communicator, moment: Moment, name: str) -> None:
    """All ranks make another group and use it. The victim may fail; then nobody can have it."""
    try:
        store = pycoll.FileStore(moment.directory, timeout=5)
        # Less than the time that the first group gives to ranks which have failed here at once.
        options = pycoll.Options(variables={"PYCOLL_CONNECT_TIMEOUT": "2"})
        with pycoll.Communicator(
            store, moment.rank, moment.world, name=name, timeout=5, options=options
        ) as part:
            array = np.full(10, part.rank + 1, np.int64)
            part.all_reduce(array)
            if array[0] != part.world_size * (part.world_size + 1) // 2:
                raise WrongValue(f"{array[0]} in the group {name}")
    except pycoll.Error as error:
        if not moment.mine and f"rank {moment.victim}" not in str(error):
            raise AssertionError(f"no word of rank {moment.victim}: {error}") from error


def _without_descriptors(group: pycoll.Communicator, moment: Moment) -> None:
    """Or with so few that it gets some part of the way."""
    used = max(map(int, os.listdir("/proc/self/fd")))
    some = random.Random(moment.seed).randrange(12)
    with _limit(moment, resource.RLIMIT_NOFILE, used + some):
        _part(group, moment, "without descriptors")


def _without_space(group: pycoll.Communicator, moment: Moment) -> None:
    """No file of the victim may grow: it gets no memory to share."""
    with _limit(moment, resource.RLIMIT_FSIZE, 4096):
        _part(group, moment, "without space")


@contextlib.contextmanager
def _limit(moment: Moment, what: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    if moment.mine:
        resource.setrlimit(what, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


FAULTS = [
    Fault("killed", "killed", arm=_kill),
    Fault("interrupted", "raises", arm=_interrupt),
    Fault("stopped for a while", "goes on", arm=_stop, harmless=True),
    Fault("stopped for good", "killed", arm=_freeze),
    Fault("delayed", "goes on", arm=_delay, harmless=True),
    Fault("connections reset", "goes on", arm=_reset),
    Fault("raises", "raises", during=_raise),
    Fault("closes", "raises", during=_close),
    Fault("aborts", "raises", during=_abort),
    Fault("calls something else", "goes on", during=_mismatch),
    Fault("refused call", "goes on", during=_bad_argument, harmless=True),
    Fault("no descriptors", "goes on", during=_without_descriptors, of_all=True, harmless=True),
    Fault("no space", "goes on", during=_without_space, of_all=True, harmless=True),
]
