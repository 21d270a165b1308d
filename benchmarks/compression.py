"""all_reduce with codecs over shaped links: time, error, bytes on the wire, time spent in codecs.

    python benchmarks/compression.py                         # 100 Mbit/s, 1 and 10 Gbit/s
    python benchmarks/compression.py --networks 1gbit --sizes 64M --codecs none,int8
    python benchmarks/compression.py --hosts 2x2             # two ranks a host
    python benchmarks/compression.py --plot time-against-error.png

Ranks in two network namespaces (see network.py: root, iproute2), gaussian values, the mean. The
order of contenders changes from round to round. `x` is how many times faster than pycoll without a
codec, medians of one run; `error` the relative L2 error of the mean, against float64; `bits` what
the first host's interface sent for each value; `cpu` CPU time of encoding and decoding on its own,
in this process, as part of the call's time. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from network import Network, batch, measure, network_of
from scatter import Point, draw

from pycoll.bench.machine import machine, machine_lines
from pycoll.bench.units import format_size
from pycoll.cli.usage import count, output_file, size_list

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import netns

CODECS = "none,fp16,bf16,fp8_e4m3,int8,int4,uint4,sign,gloo"
INTERFACE = Path("/proc/thread-self/net/dev")


@dataclass(frozen=True)
class Plan:
    contenders: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int
    seed: int


@dataclass
class Row:
    """Of one size: seconds a call of the slowest rank, one a round; and what else was found."""

    bytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    bits: dict[str, float] = field(default_factory=dict)
    codec_seconds: dict[str, float] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    @property
    def points(self) -> list[Point]:
        return [Point(name, self.error[name], self.median(name)) for name in self.seconds]


def run_rank(rank: int, network: Network, paths: list[str], directory: str, plan: Plan,
             rows: Connection) -> None:  # fmt: skip
    netns.enter(paths[rank // network.ranks_per_host])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    import torch
    import torch.distributed as dist

    import pycoll

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), network.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=network.ranks)
    groups: dict[str, Any] = {}
    for name in plan.contenders:
        options = pycoll.Options(codec=None if name == "none" else name) if name != "gloo" else None
        groups[name] = dist.new_group(
            backend="gloo" if name == "gloo" else "pycoll",
            timeout=datetime.timedelta(seconds=120),
            pg_options=options,
        )
    try:
        for size in plan.sizes:
            row = measure_size(plan, groups, size, rank, network)
            if rank == 0:
                rows.send(row)
    finally:
        dist.destroy_process_group()


def measure_size(plan: Plan, groups: dict[str, Any], size: int, rank: int,
                 network: Network) -> Row:  # fmt: skip
    import torch
    import torch.distributed as dist

    row = Row(size)
    generator = torch.Generator().manual_seed(plan.seed)
    inputs = [torch.randn(size // 4, generator=generator) for _ in range(network.ranks)]
    mean = torch.zeros(size // 4, dtype=torch.float64)
    for values in inputs:
        mean += values.double() / network.ranks
    tensor = torch.empty(size // 4)
    # Ranks of a host first sum their values exactly, each a part: codecs see no more than that.
    coded = inputs[rank][: tensor.numel() // network.ranks_per_host]
    op = {name: dist.ReduceOp.SUM if name == "gloo" else dist.ReduceOp.AVG for name in groups}
    for name, group in groups.items():
        tensor.copy_(inputs[rank])
        dist.all_reduce(tensor, op[name], group=group)  # connections are made here
        got = tensor.double() / (network.ranks if name == "gloo" else 1)
        row.error[name] = float((got - mean).norm() / mean.norm())
        sent = sent_bytes(tensor, inputs[rank], op[name], group)
        row.bits[name] = sent * 8 / tensor.numel()
        row.seconds[name] = []
        row.codec_seconds[name] = codec_seconds(name, coded)
    shuffle, order = random.Random(plan.seed), list(groups)
    for _ in range(plan.rounds):
        shuffle.shuffle(order)
        for name in order:
            tensor.copy_(inputs[rank])
            call = lambda x, name=name: dist.all_reduce(x, op[name], group=groups[name])  # noqa: E731
            row.seconds[name].append(batch(call, tensor, 1))
    return row


def sent_bytes(tensor: Any, values: Any, op: Any, group: Any) -> int:
    """What the interface of this rank's host sent in one call."""
    import torch.distributed as dist

    tensor.copy_(values)
    dist.barrier()
    before = settled_bytes()
    dist.all_reduce(tensor, op, group=group)
    return settled_bytes() - before


def settled_bytes() -> int:
    """When nothing is sent any more: the end of a call may still wait in the link's queue, and is
    counted when it leaves it."""
    found, deadline = interface_bytes(), time.monotonic() + 5
    while time.monotonic() < deadline:
        time.sleep(0.1)
        last, found = found, interface_bytes()
        if last == found:
            break
    return found


def interface_bytes() -> int:
    line = next(x for x in INTERFACE.read_text().splitlines() if x.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def codec_seconds(name: str, values: Any) -> float:
    """CPU seconds of one core for what a rank, and one on the other host, encode and decode."""
    import numpy as np

    from pycoll import _core

    if name in ("none", "gloo"):
        return 0.0
    codec, key = _core.Codec(kind=name), _core.RandomKey()
    x = values.numpy()
    half = len(x) // 2
    out = np.empty_like(x)
    codes = [np.empty(codec.code_bytes(n), np.uint8) for n in (half, half, len(x))]

    def encode(x: Any, code: Any) -> None:
        _core.encode(codec=codec, values=x, dtype="float32", code=code, key=key)

    def decode(codes: Any, out: Any) -> None:
        _core.decode(codec=codec, codes=codes, values=out, dtype="float32")

    found = []
    for _ in range(3):
        start = time.process_time()
        encode(x, codes[2])  # its own chunk, and the peer's
        decode([codes[0], codes[0]], out[:half])  # the sum
        encode(out[:half], codes[1])
        decode([codes[2]], out)  # both chunks' results
        found.append(time.process_time() - start)
    return min(found[1:])


def report(network: Network, plan: Plan) -> list[Row]:
    print(f"\n{network.name}, 2 hosts x {network.ranks_per_host} ranks", flush=True)
    rows = []
    for row in measure(network, plan, run_rank):
        rows.append(row)
        base = row.median("none") if "none" in row.seconds else None
        print(f"{format_size(row.bytes)}:  {'codec':<9} {'ms':>9} {'x':>6} {'error':>8} "
              f"{'bits':>7} {'cpu':>6}")  # fmt: skip
        for name in sorted(row.seconds, key=row.median):
            seconds = row.median(name)
            times = "" if base is None else f"{base / seconds:6.2f}"
            share = 100 * row.codec_seconds[name] / seconds
            print(f"{'':6} {name:<9} {seconds * 1e3:9.2f} {times:>6} {row.error[name]:8.4f} "
                  f"{row.bits[name]:7.3f} {share:5.0f}%", flush=True)  # fmt: skip
    return rows


def ranks_per_host(text: str) -> int:
    """An argument like 2x2: hosts, of which there are two, and ranks on each."""
    hosts, _, ranks = text.partition("x")
    if hosts != "2" or not ranks.isdecimal() or int(ranks) < 1:
        raise argparse.ArgumentTypeError(f"{text} is neither 2x1 nor 2x2: two hosts, ranks on each")
    return int(ranks)


def codec_names(text: str) -> tuple[str, ...]:
    """An argument like none,int8,gloo."""
    from pycoll import _core

    known = ["none", "gloo", *(row[0] for row in _core.codecs())]
    names = tuple(text.split(","))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no {name!r}; there are: {', '.join(known)}")
    return names


def parser_of(description: str | None, repeated: str, seeded: str) -> argparse.ArgumentParser:
    """With the arguments that compression_ddp.py has, too: what is repeated, and drawn from a seed,
    differs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default="100mbit,1gbit,10gbit", help="rates of the links")
    parser.add_argument(
        "--hosts", type=ranks_per_host, default=1, metavar="2xN", help="ranks on each; default 2x1"
    )
    parser.add_argument("--rounds", type=count, default=5, help=f"{repeated} of each; default 5")
    parser.add_argument("--seed", type=int, default=1, help=f"of {seeded} and of the order")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="all figures, every round")
    parser.add_argument("--plot", type=output_file, metavar="FILE.png", help="time against error")
    return parser


def main() -> int:
    parser = parser_of(__doc__, "calls", "values")
    parser.add_argument(
        "--sizes", type=size_list, default="1M,64M", help="bytes of float32; default 1M,64M"
    )
    parser.add_argument(
        "--codecs", type=codec_names, default=CODECS, help=f"and none, gloo; default {CODECS}"
    )
    arguments = parser.parse_args()

    plan = Plan(arguments.codecs, tuple(arguments.sizes), arguments.rounds, arguments.seed)
    facts = machine()
    print("\n".join(machine_lines(facts)))
    networks = [network_of(name, arguments.hosts) for name in arguments.networks.split(",")]
    results = {network.name: report(network, plan) for network in networks}
    if arguments.json:
        rows = {name: [asdict(row) for row in found] for name, found in results.items()}
        content = {"machine": facts, "ranks_per_host": arguments.hosts, "results": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    if arguments.plot:
        panels = {
            f"{name}, {format_size(x[-1].bytes)}": x[-1].points for name, x in results.items()
        }
        draw(panels, arguments.plot, "call")
    return 0


if __name__ == "__main__":
    sys.exit(main())
