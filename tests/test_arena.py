"""The arena against a model of it: who holds which bytes, and what a peer may still write."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

import pycoll
from helpers_shareable import shareable
from pool import run_ranks
from pycoll import InvalidArgumentError, _core

MIB = 1 << 20
GRANULE = 2 * MIB
GRANULES = 24
PAGE = mmap.PAGESIZE
SIZES = st.one_of(
    st.integers(1, 3 * MIB), st.sampled_from([0, GRANULE, GRANULE + 1, 33 * MIB, 100 * MIB])
)


def poke(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


def peek(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


class Block:
    def __init__(self, begin: int, size: int, mark: int) -> None:
        self.begin, self.size, self.mark = begin, size, mark
        self.range = (begin, begin + max(size, 8))
        for place in self.places():
            poke(place, mark)

    def places(self) -> tuple[int, int]:
        return self.begin, self.begin + max(self.size - 8, 0)

    def check(self) -> None:
        assert [peek(place) for place in self.places()] == [self.mark] * 2


class ArenaMachine(RuleBasedStateMachine):
    blocks = Bundle("blocks")
    tickets = Bundle("tickets")

    @initialize(cache=st.sampled_from([0, 4 * MIB, 1 << 40]))
    def make(self, cache: int) -> None:
        self.arena = _core.Arena(GRANULES * GRANULE, cache_bytes=cache, large_pages=False)
        self.cache = cache
        self.live: list[Block] = []
        self.freed: list[Block] = []  # of them, those that were quarantined when they were freed
        self.quarantined: dict[int, tuple[int, int]] = {}
        self.made = 0
        self.peer = mmap.mmap(self.arena.fd, self.arena.bytes)

    @rule(target=blocks, size=SIZES)
    def allocate(self, size: int) -> Block | MultipleResults[Block]:
        address = self.arena.allocate(size)
        if address is None:
            return multiple()
        self.made += 1
        assert address % GRANULE == 0
        assert self.arena.offset_of(address, size) == address - self.arena.base
        extent = (address, address + size)
        assert not any(overlap(extent, other.range) for other in self.live)
        assert not any(overlap(extent, range_) for range_ in self.quarantined.values())
        block = Block(address, size, self.made)
        self.live.append(block)
        for place in block.places():
            assert self.peer_sees(place) == block.mark
        return block

    def peer_sees(self, address: int) -> int:
        at = address - self.arena.base
        return int.from_bytes(self.peer[at : at + 8], "little")

    @rule(block=consumes(blocks))
    def free(self, block: Block) -> None:
        self.arena.free(block.begin)
        self.live.remove(block)
        if any(overlap(block.range, range_) for range_ in self.quarantined.values()):
            self.freed.append(block)

    @rule(target=tickets, begin=st.integers(0, GRANULES * GRANULE), size=st.integers(1, 9 * MIB))
    def quarantine(self, begin: int, size: int) -> int | MultipleResults[int]:
        if begin + size > self.arena.bytes:
            with pytest.raises(InvalidArgumentError, match="not inside"):
                self.arena.quarantine(begin, size)
            return multiple()
        ticket = self.arena.quarantine(begin, size)
        start = self.arena.base + begin
        self.quarantined[ticket] = (start, start + size)
        return ticket

    @rule(target=tickets, block=blocks)
    def quarantine_block(self, block: Block) -> int:
        assume(block.size > 0)
        ticket = self.arena.quarantine(block.begin - self.arena.base, block.size)
        self.quarantined[ticket] = (block.begin, block.begin + block.size)
        assert self.arena.offset_of(block.begin, block.size) is None
        # All of it, the page too that its last byte lies in.
        self.peer_writes_pages(block.begin, block.begin + -(-block.size // PAGE) * PAGE)
        return ticket

    @rule(ticket=tickets)
    def peer_writes(self, ticket: int) -> None:
        """Late: it must show in no block, be it live, freed or made anew."""
        assume(ticket in self.quarantined)
        begin, end = self.quarantined[ticket]
        self.peer_writes_pages(-(-begin // PAGE) * PAGE, end // PAGE * PAGE)

    def peer_writes_pages(self, begin: int, end: int) -> None:
        for page in range(begin - self.arena.base, end - self.arena.base, PAGE):
            self.peer[page : page + 8] = self.peer[page + PAGE - 8 : page + PAGE] = b"peerpeer"

    @rule(ticket=consumes(tickets))
    def release(self, ticket: int) -> None:
        self.arena.release(ticket)
        del self.quarantined[ticket]
        ranges = self.quarantined.values()
        self.freed = [b for b in self.freed if any(overlap(b.range, range_) for range_ in ranges)]

    @invariant()
    def memory_is_kept(self) -> None:
        for block in [*self.live, *self.freed]:
            block.check()
        stats = self.arena.statistics()
        assert stats["blocks"] == len(self.live)
        assert stats["live"] >= sum(block.size for block in self.live)
        assert stats["cached"] <= self.cache

    def teardown(self) -> None:
        """Nothing is lost: with all freed and released the arena is one piece again, and shared."""
        if not hasattr(self, "arena"):
            return
        for block in self.live:
            self.arena.free(block.begin)
        for ticket in self.quarantined:
            self.arena.release(ticket)
        address = self.arena.allocate(self.arena.bytes)
        assert address == self.arena.base
        for granule in range(GRANULES):
            assert self.arena.offset_of(address + granule * GRANULE, GRANULE) is not None
            poke(address + granule * GRANULE, granule + 1)
            assert self.peer_sees(address + granule * GRANULE) == granule + 1
        self.peer.close()
        self.arena.free(address)
        assert self.arena.statistics()["live"] == 0


ArenaMachine.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
test_against_model = ArenaMachine.TestCase


def test_memory_is_given_back():
    arena = _core.Arena(256 * MIB, cache_bytes=8 * MIB, large_pages=False)
    for _ in range(20):
        blocks = [arena.allocate(n * MIB) for n in (1, 3, 8, 20, 5)]
        for block in blocks:
            ctypes.memset(block, 1, MIB)
        assert arena.statistics()["backed"] >= 5 * MIB
        for block in blocks:
            arena.free(block)
        assert arena.statistics()["backed"] <= 8 * MIB
    again = arena.allocate(256 * MIB)
    assert again == arena.base  # the cache gave way
    assert arena.statistics()["backed"] == 0


def test_a_freed_block_serves_the_next_with_its_memory():
    arena = _core.Arena(64 * MIB, large_pages=False)
    first = arena.allocate(3 * MIB)
    poke(first, 77)
    arena.free(first)
    assert arena.statistics()["cached"] == 4 * MIB
    second = arena.allocate(4 * MIB - 5)
    assert (second, peek(second)) == (first, 77)
    assert arena.statistics()["reused"] == 1
    arena.free(second)
    arena.free(second)  # twice, and what is no block: ignored
    arena.free(second + 64)
    arena.free(1)
    assert arena.statistics()["cached"] == 4 * MIB


def test_quarantined_memory_stays_although_freed():
    arena = _core.Arena(64 * MIB, cache_bytes=0, large_pages=False)
    block = arena.allocate(2 * MIB)
    poke(block + MIB, 5)
    one, two = (arena.quarantine(MIB, 100), arena.quarantine(MIB + 50, 100))
    arena.free(block)
    assert arena.statistics()["quarantined"] == 2 * MIB
    arena.release(one)
    arena.release(one)
    assert arena.allocate(MIB) != block
    assert peek(block + MIB) == 5
    arena.release(two)
    assert arena.statistics()["quarantined"] == 0
    assert peek(block + MIB) == 0  # punched
    assert arena.allocate(MIB) == block


def test_offsets():
    arena = _core.Arena(16 * MIB)
    assert arena.base % GRANULE == 0
    assert arena.offset_of(arena.base, 16 * MIB) == 0
    assert arena.offset_of(arena.base, 16 * MIB + 1) is None
    assert arena.offset_of(arena.base + 5, 0) == 5
    assert arena.offset_of(arena.base - 1, 1) is None
    assert arena.offset_of(arena.base + 16 * MIB, 0) is None
    assert arena.offset_of(0, 1) is None


def test_a_second_mapping_of_the_file_sees_the_blocks():
    arena = _core.Arena(16 * MIB)
    arena.allocate(MIB)
    block = arena.allocate(5 * MIB)
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, 5 * MIB, dtype=np.uint8)
    ctypes.memmove(block, data.ctypes.data, data.nbytes)
    with mmap.mmap(arena.fd, arena.bytes) as peer:
        offset = arena.offset_of(block, data.nbytes)
        assert peer[offset : offset + data.nbytes] == data.tobytes()


def test_arenas_that_cannot_be():
    with pytest.raises(InvalidArgumentError, match="at least"):
        _core.Arena(1000)
    with pytest.raises(OSError, match="no address space|mmap|ftruncate"):
        _core.Arena(1 << 62)
    arena = _core.Arena(16 * MIB)
    assert arena.allocate(17 * MIB) is None
    assert arena.allocate((1 << 64) - 1) is None
    assert arena.statistics()["refused"] == 2


def test_blocks_are_freed_by_any_thread():
    arena = _core.Arena(512 * MIB, cache_bytes=16 * MIB)
    mailbox: list[int] = []
    lock = threading.Lock()
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(150):
            size = int(rng.integers(8, 5 * MIB))
            block = arena.allocate(size)
            if block is not None:
                poke(block, block ^ seed)
                poke(block + size - 8, block ^ seed)
                if (peek(block), peek(block + size - 8)) != (block ^ seed,) * 2:
                    wrong.append(f"{seed} shares {block}")
            with lock:
                if block is not None:
                    mailbox.append(block)
                old = mailbox.pop(int(rng.integers(len(mailbox)))) if len(mailbox) > 9 else None
            if old is not None:
                arena.free(old)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for block in mailbox:
        arena.free(block)
    stats = arena.statistics()
    assert (stats["live"], stats["blocks"]) == (0, 0)
    assert stats["allocations"] == 600


def limited(code: str, limits: list[tuple[int, int]]) -> str:
    def set_limits() -> None:
        for which, value in limits:
            resource.setrlimit(which, (value, value))

    code = f"from pycoll import _core as c; a = c.process_arena(); {code}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYCOLL_TORCH": "0", "OMP_NUM_THREADS": "1"},
        preexec_fn=set_limits,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.strip()


GIB = 1 << 30


def test_the_process_arena_fits_into_the_limits():
    assert limited("print(a.bytes)", []) == str(64 * GIB)
    assert limited("print(a.bytes)", [(resource.RLIMIT_AS, 8 * GIB)]) == str(2 * GIB)
    assert limited("print(a.bytes)", [(resource.RLIMIT_FSIZE, 3 * GIB)]) == str(3 * GIB)
    show = "print(a, c.allocate_shareable(5), c.process_arena_problem())"
    answer = limited(show, [(resource.RLIMIT_FSIZE, 10 * MIB)])
    assert answer.startswith("None None the limit on address space or on the size of files")


def limited_rank(rank, world_size, directory):
    resource.setrlimit(resource.RLIMIT_AS, (16 * GIB, 16 * GIB))
    with pycoll.Communicator(pycoll.FileStore(f"{directory}/store"), rank, world_size) as group:
        array = shareable(np.full(MIB, rank + 1, np.float32))
        group.all_reduce(array)
        assert (array == world_size * (world_size + 1) / 2).all()
        # Refused while the arenas take more than half.
        mmap.mmap(-1, 6 * GIB).close()
        return group.statistics()["zero_copy_calls"]


def test_peers_arenas_fit_into_the_limits():
    """Without a limit each would take 64 GiB of address space: that of two ranks fits, no more."""
    for world_size, direct in ((2, 1), (5, 0)):
        results = run_ranks(world_size, limited_rank, timeout=40)
        assert [result.value for result in results] == [direct] * world_size
