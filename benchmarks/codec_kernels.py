"""Codecs on one core: how fast they encode and decode, beside a copy of the same float32 values.

    python benchmarks/codec_kernels.py             # 256 KB in cache, 64 MB from memory
    python benchmarks/codec_kernels.py --codecs fp16,int8 --sizes 64M --rounds 51
    python benchmarks/codec_kernels.py --require   # exit code 1 where one is too slow

GB/s are bytes of float32 values a second, of `memcpy` bytes that are copied a second; the share is
one over the other. One thread on one CPU, its CPU time; the order of contenders changes from round
to round, medians. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import numpy as np

from pycoll import _core
from pycoll.bench.machine import last_level_cache, machine, machine_lines
from pycoll.bench.units import format_size
from pycoll.cli.usage import output_file, size_list

COPY = "memcpy"
# Shares that encoding and decoding are to reach from memory.
WANTED = {"fp16": 0.8, "int8": 0.6}
LEAST_SECONDS = 2e-3  # of a measurement in cache: as many calls as it takes

Call = Callable[[], object]


@dataclass
class Figures:
    """Of one size: seconds a call, one a round."""

    bytes: int
    cold: bool  # all memory is read from and written beyond the caches
    seconds: dict[str, list[float]] = field(default_factory=dict)
    bits: dict[str, float] = field(default_factory=dict)  # of a value's code

    def rate(self, name: str) -> float:
        """Bytes of float32 a second."""
        return self.bytes / statistics.median(self.seconds[name])

    def share(self, name: str) -> float:
        return self.rate(name) / self.rate(COPY)


def calls_of(codecs: list[str], figures: Figures, seed: int) -> dict[str, Call]:
    """What takes turns: the copy, and "encode NAME" and "decode NAME" of each codec. All read the
    same values, or their code, and decode to the same memory."""
    values = np.random.default_rng(seed).standard_normal(figures.bytes // 4, np.float32)
    out = np.empty_like(values)
    addresses = (out.ctypes.data, values.ctypes.data)
    calls: dict[str, Call] = {COPY: lambda: ctypes.memmove(*addresses, values.nbytes)}
    key = _core.RandomKey(seed=seed)
    for name in codecs:
        codec = _core.Codec(kind=name)
        code = np.empty(codec.code_bytes(len(values)), np.uint8)

        def encode(codec: _core.Codec = codec, code: np.ndarray = code) -> None:
            _core.encode(codec=codec, values=values, dtype="float32", code=code, key=key)

        def decode(codec: _core.Codec = codec, code: np.ndarray = code) -> None:
            _core.decode(codec=codec, codes=[code], values=out, dtype="float32")

        encode()
        calls[f"encode {name}"], calls[f"decode {name}"] = encode, decode
        figures.bits[name] = code.nbytes * 8 / len(values)
    return calls


def measure(codecs: list[str], size: int, rounds: int, seed: int) -> Figures:
    caches = last_level_cache()
    figures = Figures(size, cold=size >= caches)
    calls = calls_of(codecs, figures, seed)
    other = np.ones(2 * caches // 8)  # reading it leaves nothing else in the caches
    counts = {name: 1 if figures.cold else enough(call) for name, call in calls.items()}
    shuffle, order = random.Random(seed), list(calls)
    for turn in range(rounds + 1):
        shuffle.shuffle(order)
        for name in order:
            if figures.cold:
                other.max()
            seconds = timed(calls[name], counts[name])
            if turn > 0:  # the first round touches memory
                figures.seconds.setdefault(name, []).append(seconds)
    return figures


def enough(call: Call) -> int:
    timed(call, 1)
    return max(1, round(LEAST_SECONDS / max(timed(call, 1), 1e-7)))


def timed(call: Call, count: int) -> float:
    start = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - start) / count


@contextmanager
def one_cpu() -> Iterator[int]:
    """Keeps this thread on a CPU; which one."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield max(before)
    finally:
        os.sched_setaffinity(0, before)


def report(codecs: list[str], figures: Figures) -> bool:
    """Prints a size; whether everything is reached that is wanted there."""
    where = "from memory" if figures.cold else "in cache"
    print(f"\n{format_size(figures.bytes)}, {where}: {COPY} {figures.rate(COPY) / 1e9:.1f} GB/s")
    print(f"{'codec':<10}{'bits':>7}{'encode GB/s':>13}{'share':>7}{'decode GB/s':>13}{'share':>7}")
    all_reached = True
    for name in codecs:
        cells = [f"{name:<10}{figures.bits[name]:>7.3f}"]
        names = (f"encode {name}", f"decode {name}")
        cells += [f"{figures.rate(x) / 1e9:>13.1f}{figures.share(x):>7.2f}" for x in names]
        if figures.cold and name in WANTED:
            reached = min(map(figures.share, names)) >= WANTED[name]
            all_reached &= reached
            cells.append(f"  {WANTED[name]:.2f} {'reached' if reached else 'NOT reached'}")
        print("".join(cells), flush=True)
    return all_reached


def main() -> int:
    names = [row[0] for row in _core.codecs()]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", default=",".join(names), help="default: all")
    parser.add_argument(
        "--sizes",
        type=size_list,
        default=size_list("256K,64M"),
        help="bytes of float32; beyond the last cache the caches are emptied before each call "
        "(default 256K,64M)",
    )
    parser.add_argument("--rounds", type=int, default=21, help="of each (default 21)")
    parser.add_argument("--seed", type=int, default=1, help="of values and of the order")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="all figures, every round")
    parser.add_argument("--require", action="store_true", help="exit code 1 if not all is reached")
    arguments = parser.parse_args()
    codecs = arguments.codecs.split(",")
    if unknown := set(codecs) - set(names):
        parser.error(f"--codecs: no {', '.join(unknown)}; there are: {', '.join(names)}")
    if min(arguments.rounds, *arguments.sizes) < 1 or min(arguments.sizes) < 4:
        parser.error("--rounds and --sizes: a round and a value at least")

    facts = machine()
    print("\n".join(machine_lines(facts)))
    found, reached = [], True
    with one_cpu() as cpu:
        print(f"pinned    to CPU {cpu}, caches of {format_size(last_level_cache())} at most")
        for size in arguments.sizes:
            found.append(measure(codecs, size, arguments.rounds, arguments.seed))
            reached &= report(codecs, found[-1])
    if arguments.json:
        content = {"machine": facts, "results": [asdict(figures) for figures in found]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if arguments.require and not reached else 0


if __name__ == "__main__":
    sys.exit(main())
