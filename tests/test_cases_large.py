"""Public bug reports, kind A: more than 2^31 bytes or elements, and the same paths in small."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers_cases import TRANSPORTS, rss_bytes, run_case, same

over_each_transport = pytest.mark.parametrize("transport", TRANSPORTS)

# ---- A13 ----

GIB = 1 << 30


class Markers:
    """Where a count that was cut to 31 bits would go wrong (at the given scale)."""

    def __init__(self, n: int, limit: int) -> None:
        places = {0, 1, limit - 1, limit, limit + 1, n // 2, n - 1}
        self.places = sorted(place for place in places if place < n)

    def write(self, tensor: torch.Tensor, rank: int) -> None:
        for i, place in enumerate(self.places):
            tensor[place] = 10 * (rank + 1) + i

    def check(self, tensor: torch.Tensor, rank: int, what: str) -> None:
        found = [int(tensor[place]) for place in self.places]
        assert found == [10 * (rank + 1) + i for i in range(len(self.places))], (what, found)

    def all_else_is(self, tensor: torch.Tensor, value: int, what: str) -> None:
        """Counts in parts: a comparison of all of it would double the memory. (NumPy's count of
        bools is many times faster than torch's sum.)"""
        parts = tensor.split(1 << 22)
        count = sum(int(np.count_nonzero(part.numpy() == value)) for part in parts)
        assert tensor.numel() - count == len(self.places), (what, tensor.numel() - count)


class PeakMemory:
    """How much more than before a block of code needed."""

    def __enter__(self):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the high-water mark
        self.before = rss_bytes()
        return self

    def __exit__(self, *error):
        self.extra = rss_bytes("VmHWM") - self.before


def a13_large(rank, w, dtype, n, limit, extra_limit, everything=True):
    markers = Markers(n, limit)
    extra = {}

    def measured(name, call):
        with PeakMemory() as peak:
            call()
        extra[name] = peak.extra
        assert peak.extra < extra_limit, (name, peak.extra)

    tensor = torch.full((n,), 3, dtype=dtype)
    if rank == 0:
        markers.write(tensor, 0)
    measured("broadcast", lambda: dist.broadcast(tensor, 0))
    markers.check(tensor, 0, "broadcast")
    markers.all_else_is(tensor, 3, "broadcast")
    tensor.fill_(3)
    if rank == 1:
        markers.write(tensor, 1)
    measured("all_reduce", lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX))
    markers.check(tensor, 1, "all_reduce")
    markers.all_else_is(tensor, 3, "all_reduce")
    tensor.fill_(rank + 3)
    if rank == 0:
        markers.write(tensor, 0)
        measured("send", lambda: dist.send(tensor, 1))
    else:
        measured("recv", lambda: dist.recv(tensor, 0))
    markers.check(tensor, 0, "recv")
    markers.all_else_is(tensor, 3, "recv")
    if everything:
        tensor.fill_(rank + 3)
        markers.write(tensor, rank)
        output = torch.full((w * n,), 1, dtype=dtype)
        measured("all_gather", lambda: dist.all_gather_into_tensor(output, tensor))
        for r, part in enumerate(output.view(w, n)):
            markers.check(part, r, "all_gather")
            markers.all_else_is(part, r + 3, "all_gather")
    return extra


def available_memory() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) * 1024


@over_each_transport
def test_a13_counters_of_many_small_slices(transport):
    """A13, small: the same path with slices of 4 KiB."""
    env = {"PYCOLL_SLOT_BYTES": "4096", "PYCOLL_WINDOW_BYTES": "8192"}
    for dtype, n in ((torch.uint8, (1 << 21) + 5), (torch.float32, (1 << 19) + 3)):
        limit = 1 << (20 if dtype == torch.uint8 else 18)
        run_case(2, a13_large, dtype, n, limit, 16 << 20, transport=transport, env=env)


@pytest.mark.full
@pytest.mark.timeout(900)
@over_each_transport
@pytest.mark.parametrize(
    ("dtype", "n", "limit", "needed"),
    [
        (torch.uint8, (1 << 31) + 5, 1 << 31, 13 * GIB),
        (torch.float32, (1 << 29) + 3, 1 << 29, 13 * GIB),
    ],
)
def test_a13_more_than_2_gib(transport, dtype, n, limit, needed):
    """A13: more than 2^31 bytes or elements; less than 256 MiB of memory beside the tensors."""
    everything = available_memory() > needed + 2 * GIB
    if not everything and available_memory() < 6 * GIB:
        pytest.skip("needs 6 GiB of memory")
    options = {"transport": transport, "timeout": 800, "group_timeout": 300}
    run_case(2, a13_large, dtype, n, limit, GIB // 4, everything, **options)
    if not everything:
        pytest.skip("all but all_gather: that needs 15 GiB of memory")


# ---- A14 ----


def positions(source: int, target: int, begin: int, end: int) -> torch.Tensor:
    return torch.arange(begin, end) * 8 + source * 3 + target


def a14_uneven(rank, w, scale):
    """Splits of prime sizes: rows[s][t] is what rank s sends rank t."""
    primes = (12_569, 12_211, 11_887, 12_553, 12_101, 12_409, 11_801, 12_487, 12_253)
    rows = [[primes[(3 * s + t) % 9] * scale + t for t in range(w)] for s in range(w)]
    parts = [positions(rank, t, 0, n) for t, n in enumerate(rows[rank])]
    source = torch.cat(parts)
    del parts
    taken = [rows[s][rank] for s in range(w)]
    output = torch.full((sum(taken),), -1)
    dist.all_to_all_single(output, source, taken, rows[rank])
    step = 1 << 22
    for s, part in enumerate(output.split(taken)):
        for begin in range(0, len(part), step):
            end = min(begin + step, len(part))
            same(part[begin:end], positions(s, rank, begin, end), (s, begin))
    return "done"


@over_each_transport
def test_a14_uneven_splits_in_small_messages(transport):
    """A14, small: thousands of messages of 4 KiB a pair of ranks."""
    env = {"PYCOLL_SLOT_BYTES": "4096"}
    run_case(3, a14_uneven, 20, transport=transport, env=env)


@pytest.mark.full
@over_each_transport
def test_a14_large_uneven_splits(transport):
    """A14: 110 million elements a rank, 880 MB, in splits of prime sizes."""
    if available_memory() < 9 * GIB:
        pytest.skip("needs 9 GiB of memory")
    run_case(3, a14_uneven, 2999, transport=transport, timeout=250, group_timeout=200)
