"""The fused kernels of pycoll.mixed_precision beside torch's operations, and beside a plain copy.

    python benchmarks/fused.py            # a minute, one thread
    python benchmarks/fused.py --quick

For each operation and list of tensors: the median time of pycoll, of what torch has for the same
(one thread), and of a copy of as many bytes as the operation has to read and to write at least.
The three take turns, in an order drawn anew for every round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import pycoll

Run = Callable[[], Any]
# Elements of each tensor.
LISTS = {
    "one of 16 Mi": [1 << 24],
    "160 of 156,000": [156_000] * 160,
    "4096 of 256": [256] * 4096,
}
NAMES = ("float32", "float16", "bfloat16")


class Contest(NamedTuple):
    ours: Run
    theirs: Run
    bytes: int  # that are read and written at least


def tensors(sizes: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(n).to(dtype) for n in sizes]


def cast(sizes: list[int], dtype: torch.dtype) -> Contest:
    """float32 to 16 bits, scaled, and whether all is finite."""
    sources, targets = tensors(sizes, torch.float32), tensors(sizes, dtype)

    def theirs() -> bool:
        scaled = torch._foreach_mul(sources, 0.5)
        torch._foreach_copy_(targets, scaled)
        return all(bool(t.isfinite().all()) for t in targets)

    moved = sum(sizes) * (4 + dtype.itemsize)
    return Contest(lambda: pycoll.cast_(targets, sources, 0.5), theirs, moved)


def unscale(sizes: list[int], dtype: torch.dtype) -> Contest:
    """Gradients divided by the scale, looked at, and their norm."""
    ours, theirs = tensors(sizes, dtype), tensors(sizes, dtype)
    found, inverse = torch.zeros(()), torch.tensor(0.999)

    def with_torch() -> float:
        torch._amp_foreach_non_finite_check_and_unscale_(theirs, found, inverse)
        return torch.nn.utils.get_total_norm(theirs).item()

    moved = 2 * sum(sizes) * dtype.itemsize
    return Contest(lambda: pycoll.unscale_(ours, 0.999), with_torch, moved)


def clip(sizes: list[int], dtype: torch.dtype) -> Contest:
    """Gradients multiplied by what makes their norm 1."""
    ours, theirs = tensors(sizes, dtype), tensors(sizes, dtype)
    factor = torch.tensor(0.999999)
    moved = 2 * sum(sizes) * dtype.itemsize
    return Contest(
        lambda: pycoll.clip_by_norm_(ours, 1.0, 0.999999),
        lambda: torch._foreach_mul_(theirs, factor),
        moved,
    )


OPERATIONS = {"cast": cast, "unscale": unscale, "clip": clip}


def copy_of(moved: int) -> Run:
    source, target = torch.ones(moved // 8), torch.ones(moved // 8)  # half is read, half written
    return lambda: target.copy_(source)


def median_times(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            began = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(each[1:]) for name, each in times.items()}  # the first warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few rounds")
    rounds = 5 if parser.parse_args().quick else 21
    torch.set_num_threads(1)
    header = ("operation", "dtype", "tensors", "pycoll ms", "GB/s", "torch ms", "copy ms")
    print("{:<10}{:<10}{:<16}{:>10}{:>8}{:>10}{:>9}  torch/pycoll  pycoll/copy".format(*header))
    for name, operation in OPERATIONS.items():
        for dtype in NAMES[1:] if name == "cast" else NAMES:
            for shape, sizes in LISTS.items():
                contest = operation(sizes, getattr(torch, dtype))
                copy = copy_of(contest.bytes)
                runs: dict[str, Run] = {"ours": contest.ours, "torch": contest.theirs, "copy": copy}
                took = median_times(runs, rounds)
                print(
                    f"{name:<10}{dtype:<10}{shape:<16}{took['ours'] * 1e3:>10.3f}"
                    f"{contest.bytes / took['ours'] / 1e9:>8.1f}{took['torch'] * 1e3:>10.3f}"
                    f"{took['copy'] * 1e3:>9.3f}{took['torch'] / took['ours']:>14.2f}"
                    f"{took['ours'] / took['copy']:>13.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
