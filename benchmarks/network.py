"""all_reduce over TCP: pycoll, Gloo and a plain socket, side by side over shaped links.

    python benchmarks/network.py                             # loopback, veth, 1 and 10 Gbit/s
    python benchmarks/network.py --networks 10gbit --sizes 64M
    python benchmarks/network.py --ranks-per-host 2 --algorithms ring,hierarchical --sizes 64M

Hosts are network namespaces joined by a veth pair, whose ends `tc tbf` slows down to a rate: that
needs root, iproute2 and util-linux. Only `loopback` (all ranks on this host, PYCOLL_TRANSPORT=tcp)
needs none of them. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import random
import re
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pycoll.bench.launch import rows_until_the_end
from pycoll.bench.machine import machine, machine_lines
from pycoll.bench.units import format_size, geometric_mean, parse_size
from pycoll.cli.usage import output_file

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import netns

ADDRESS = "10.77.0.{}/24"
SIZES = "4,256,4K,16K,64K,256K,1M,4M,16M,64M"
NETWORKS = "loopback,veth,1gbit,10gbit"
SOCKET_PORT = 29_477


@dataclass(frozen=True)
class Network:
    """How ranks are joined: `rate` of `tc tbf`; none for an unshaped pair, or for loopback."""

    name: str
    ranks_per_host: int
    rate: str = ""

    @property
    def ranks(self) -> int:
        return 2 * self.ranks_per_host

    @property
    def is_loopback(self) -> bool:
        return self.name == "loopback"


@dataclass(frozen=True)
class Plan:
    contenders: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int
    batch_seconds: float
    size_seconds: float
    seed: int


@dataclass
class Row:
    """Microseconds a call of each contender at one size, of the slowest rank, one a round."""

    bytes: int
    times: dict[str, list[float]] = field(default_factory=dict)
    wrong: int = 0

    def us(self, name: str) -> float:
        return statistics.median(self.times[name])


# ---- The ranks' side ----


class PlainSocket:
    """What a network can do at most: as many bytes each way as an all_reduce of two hosts moves,
    over one connection, written and read by blocking calls, with nothing done to them."""

    def __init__(self, rank: int, host: str, interrupt: float) -> None:
        if rank == 0:
            with socket.create_server((host, SOCKET_PORT)) as server:
                server.settimeout(interrupt)
                self.peer, _ = server.accept()
        else:
            self.peer = self._connect(host, interrupt)
        self.peer.settimeout(interrupt)
        self.peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.inbox = bytearray()

    @staticmethod
    def _connect(host: str, patience: float) -> socket.socket:
        deadline = time.monotonic() + patience
        while True:
            try:
                return socket.create_connection((host, SOCKET_PORT), timeout=1)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def call(self, tensor: Any) -> None:
        outgoing = memoryview(tensor.numpy()).cast("B")
        if len(self.inbox) < len(outgoing):
            self.inbox = bytearray(len(outgoing))
        sender = None
        if len(outgoing) > 4096:
            sender = threading.Thread(target=self.peer.sendall, args=(outgoing,))
            sender.start()
        else:
            self.peer.sendall(outgoing)
        room = memoryview(self.inbox)[: len(outgoing)]
        while room:
            got = self.peer.recv_into(room)
            if got == 0:
                raise ConnectionError("the other rank is gone")
            room = room[got:]
        if sender:
            sender.join()


def make_calls(contender: str, rank: int, host: str) -> Callable[[Any], None]:
    import torch.distributed as dist

    if contender == "socket":
        return PlainSocket(rank, host, 60).call
    os.environ.pop("PYCOLL_ALGO", None)
    if contender not in ("gloo", "pycoll"):
        os.environ["PYCOLL_ALGO"] = f"all_reduce={contender}"
    backend = "gloo" if contender == "gloo" else "pycoll"
    timeout = datetime.timedelta(seconds=60)
    group: Any = dist.new_group(backend=backend, timeout=timeout)
    return lambda tensor: dist.all_reduce(tensor, group=group)


def run_rank(rank: int, network: Network, paths: list[str], directory: str, plan: Plan,
             rows: Connection) -> None:  # fmt: skip
    host = "127.0.0.1"
    if network.is_loopback:
        os.environ["PYCOLL_TRANSPORT"] = "tcp"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        netns.enter(paths[rank // network.ranks_per_host])
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        host = ADDRESS.format(1).split("/")[0]
    import torch
    import torch.distributed as dist

    import pycoll  # noqa: F401  registers the backend

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), network.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=network.ranks)
    shuffle = random.Random(plan.seed)
    try:
        calls = {name: make_calls(name, rank, host) for name in plan.contenders}
        buffer = torch.zeros(max(1, max(plan.sizes) // 4), dtype=torch.float32)
        for size in plan.sizes:
            row = measure_size(plan, calls, buffer[: max(1, size // 4)], shuffle, network.ranks)
            if rank == 0:
                rows.send(row)
    finally:
        dist.destroy_process_group()


def measure_size(plan: Plan, calls: dict[str, Callable[[Any], None]], tensor: Any,
                 shuffle: random.Random, ranks: int) -> Row:  # fmt: skip
    row = Row(tensor.numel() * 4)
    counts = {}
    for name, call in calls.items():
        if name != "socket":
            row.wrong += wrong_after(call, tensor, ranks)
        # Sums of sums would grow for ever; zeros stay zeros, and cost the same as other numbers.
        tensor.fill_(0)
        batch(call, tensor, 2)
        estimate = max(batch(call, tensor, 2), 1e-7)
        counts[name] = max(1, round(plan.batch_seconds / estimate))
        row.times[name] = []
    rounds, until = 0, time.monotonic() + plan.size_seconds
    order = list(calls)
    while rounds < plan.rounds and (rounds < 5 or everyone_before(until)):
        shuffle.shuffle(order)  # the same seed on every rank, so the same order
        for name in order:
            row.times[name].append(batch(calls[name], tensor, counts[name]) * 1e6)
        rounds += 1
    return row


def wrong_after(call: Callable[[Any], None], tensor: Any, ranks: int) -> int:
    """Elements that are not the exact sum, of values that depend on rank and position."""
    import torch
    import torch.distributed as dist

    pattern = torch.arange(tensor.numel(), dtype=torch.int32).remainder_(251)
    torch.add(pattern, dist.get_rank(), out=tensor)
    call(tensor)
    return int((tensor != pattern * ranks + ranks * (ranks - 1) // 2).sum())


def batch(call: Callable[[Any], None], tensor: Any, count: int) -> float:
    """Seconds a call, of the slowest rank."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call(tensor)
    return maximum((time.perf_counter() - start) / count)


def everyone_before(until: float) -> bool:
    return maximum(float(time.monotonic() > until)) == 0


def maximum(value: float) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor.item())


# ---- The other side ----


@contextlib.contextmanager
def built(network: Network) -> Iterator[list[str]]:
    """The namespaces of both hosts, joined and shaped; prints how."""
    if network.is_loopback:
        print("shaping   none: all ranks in one namespace, over loopback")
        yield []
        return
    if reason := netns.why_not():
        raise SystemExit(f"--networks {network.name}: {reason}")
    with netns.Hosts(2) as hosts:
        name = hosts.join(0, 1, ADDRESS, name="eth0")
        if network.rate:
            print(f"shaping   {hosts.shape(name, network.rate)}, on both ends of a veth pair")
        else:
            print("shaping   none: a veth pair between two namespaces")
        yield hosts.paths


def measure(network: Network, plan: Any, run: Callable[..., None]) -> Iterator[Any]:
    """What rank 0 of `run(rank, network, paths, directory, plan, rows)` sends, row by row."""
    import torch.multiprocessing as mp

    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    with (
        built(network) as paths,
        tempfile.TemporaryDirectory(prefix="pycoll-bench-") as directory,
        receiver,
    ):
        arguments = (network, paths, directory, plan, sender)
        context = mp.spawn(run, args=arguments, nprocs=network.ranks, join=False)
        sender.close()  # so that end-of-file says that rank 0 is gone
        yield from rows_until_the_end(context, receiver)


def report(network: Network, plan: Plan) -> dict[str, object]:
    print(f"\n{network.name}, 2 hosts x {network.ranks_per_host} ranks", flush=True)
    names = plan.contenders
    widths = [max(11, len(name) + 3) for name in names]
    titles = ["bytes".rjust(6)] + [f"{n} us".rjust(w) for n, w in zip(names, widths, strict=True)]
    rows = []
    for row in measure(network, plan, run_rank):
        if not rows:
            print("  ".join([*titles, "best"]), flush=True)
        rows.append(row)
        cells = [format_size(row.bytes).rjust(6)]
        cells += [f"{row.us(n):{w}.1f}" for n, w in zip(names, widths, strict=True)]
        print("  ".join([*cells, min(names, key=row.us)]), flush=True)
    ratios: dict[str, dict[str, float]] = {}
    for name in names:
        for base in ("gloo", "socket", "ring"):
            if base in names and name not in (base, "socket", "gloo"):
                ratio = {format_size(row.bytes): row.us(base) / row.us(name) for row in rows}
                ratios[f"{base}/{name}"] = ratio
    for what, by_size in ratios.items():
        worst = min(by_size, key=lambda size: by_size[size])
        print(
            f"{what}: geometric mean {geometric_mean(list(by_size.values())):.2f}, least "
            f"{by_size[worst]:.2f} at {worst}, {list(by_size.values())[-1]:.3f} at the largest"
        )
    facts = [asdict(row) | {"us": {name: row.us(name) for name in names}} for row in rows]
    return {"network": asdict(network), "rows": facts, "ratios": ratios}


def network_of(name: str, ranks_per_host: int) -> Network:
    if name in ("loopback", "veth"):
        return Network(name, ranks_per_host)
    if not re.fullmatch(r"\d+(\.\d+)?[mg]bit", name):
        raise SystemExit(f"--networks: {name!r} is neither loopback, veth nor a rate like 10gbit")
    return Network(name, ranks_per_host, rate=name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default=NETWORKS, help=f"default {NETWORKS}")
    parser.add_argument("--ranks-per-host", default="1", help="1, or 1,2 (two hosts; default 1)")
    parser.add_argument("--sizes", default=SIZES, help=f"bytes; default {SIZES}")
    parser.add_argument("--backends", default="socket,gloo,pycoll", help="of these, default all")
    parser.add_argument("--algorithms", default="", help="pycoll's too, each forced: ring,tree,...")
    parser.add_argument("--rounds", type=int, default=21, help="batches of each, at most")
    parser.add_argument("--batch-ms", type=float, default=20, help="how long a batch takes")
    parser.add_argument("--size-seconds", type=float, default=6, help="for a size, at most")
    parser.add_argument("--seed", type=int, default=1, help="of the order in a round")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="all figures, every round")
    arguments = parser.parse_args()

    sizes = tuple(parse_size(text) for text in arguments.sizes.split(","))
    contenders = [*arguments.backends.split(","), *filter(None, arguments.algorithms.split(","))]
    facts = machine()
    print("\n".join(machine_lines(facts)))
    results = []
    for per_host in map(int, arguments.ranks_per_host.split(",")):
        # The plain socket has two ends.
        names = tuple(name for name in contenders if name != "socket" or per_host == 1)
        plan = Plan(names, sizes, arguments.rounds, arguments.batch_ms / 1e3,
                    arguments.size_seconds, arguments.seed)  # fmt: skip
        for name in arguments.networks.split(","):
            results.append(report(network_of(name, per_host), plan))
    if arguments.json:
        text = json.dumps({"machine": facts, "results": results}, indent=1)
        arguments.json.write_text(text + "\n")
    wrong = sum(row["wrong"] for result in results for row in result["rows"])  # type: ignore[attr-defined]
    if wrong:
        print(f"{wrong} elements are wrong", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
