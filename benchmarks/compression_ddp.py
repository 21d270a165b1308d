"""Training steps of stock DDP over shaped links: hooks of pycoll, torch's hooks over Gloo, none.

    python benchmarks/compression_ddp.py                     # 100 Mbit/s, 1 and 10 Gbit/s
    python benchmarks/compression_ddp.py --networks 1gbit --plot time-against-error.png
    python benchmarks/compression_ddp.py --hosts 2x2 --contenders pycoll,pycoll/int8,gloo

Ranks in two network namespaces (see network.py: root, iproute2) train an MLP of 33.6 MB, a model
for each contender, from the same weights on the same data. Their order changes from step to step.
`x` is how many times faster a step is than pycoll's without a hook, medians of one run; `error` the
relative L2 error of its averaged gradients, against the float64 mean of all ranks' own at those
weights; `bits` what the first host's interface sent for each gradient; `cpu` CPU time of rank 0 as
part of the step's. See benchmarks/README.md.
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

from compression import parser_of, settled_bytes
from network import Network, batch, measure, network_of
from scatter import Point, draw

from pycoll.bench.machine import machine, machine_lines
from pycoll.cli.usage import count

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import netns

# A backend, and what compresses: pycoll's codecs, PowerSGD and top-k; torch's hooks over Gloo.
CONTENDERS = (
    "pycoll,pycoll/fp16,pycoll/int8,pycoll/int4,pycoll/powersgd,"
    "gloo,gloo/fp16,gloo/bf16,gloo/powersgd,nothing"
)
BASE = "pycoll"
POWER_SGD_RANK = 4
# torch's hook calls all_reduce from callbacks of futures: with several buckets ranks of Gloo make
# these calls in different orders, and fail.
ONE_BUCKET = ("gloo/powersgd",)
# Steps that are exact with PowerSGD: torch's hook needs two, for DDP cuts its buckets anew.
EXACT_STEPS = 2
WARM_UP = EXACT_STEPS + 2  # and two that compress
LEARNING_RATE = 1e-5  # so that weights, and what gradients are like, hardly change


@dataclass(frozen=True)
class Plan:
    contenders: tuple[str, ...]
    width: int
    layers: int
    batch: int
    rounds: int
    seed: int


@dataclass
class Row:
    """Seconds a step of the slowest rank, one a round; what rank 0 found in those steps."""

    bytes: int  # of the gradients
    seconds: dict[str, list[float]] = field(default_factory=dict)
    error: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)
    bits: dict[str, float] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def cpu(self, name: str) -> float:
        return statistics.median(self.cpu_seconds[name]) / self.median(name)

    @property
    def points(self) -> list[Point]:
        errors = {name: statistics.median(found) for name, found in self.error.items()}
        return [Point(name, errors[name], self.median(name)) for name in self.seconds]


# ---- The ranks' side ----

Data = tuple[Any, Any]


def model_of(plan: Plan) -> Any:
    """Linear layers and ReLU: one product a layer and sample, so few a byte of gradients."""
    import torch
    from torch import nn

    torch.manual_seed(plan.seed)
    layers: list[nn.Module] = []
    for _ in range(plan.layers):
        linear = nn.Linear(plan.width, plan.width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Trainee:
    """One contender: its own weights, group, hook and optimizer."""

    def __init__(self, name: str, plan: Plan) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        self._plan = plan
        backend, _, compressor = name.partition("/")
        self.model = model_of(plan)
        group: Any = dist.new_group(
            backend="pycoll" if backend == "pycoll" else "gloo",
            timeout=datetime.timedelta(seconds=120),
        )
        self.ddp = DistributedDataParallel(
            self.model,
            process_group=group,
            gradient_as_bucket_view=True,
            bucket_cap_mb=1 << 20 if name in ONE_BUCKET else None,
        )
        hook = HOOKS[backend](compressor, group)
        if hook is not None:
            self.ddp.register_comm_hook(*hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.cpu_seconds = 0.0  # of the last step

    def step(self, data: Data) -> None:
        start = time.process_time()
        self.optimizer.zero_grad()
        loss_of(self.ddp, data).backward()
        self.optimizer.step()
        self.cpu_seconds = time.process_time() - start

    def mean_gradients(self, number: int, ranks: int) -> list[Any]:
        """What a step's averaged gradients should be, in float64: all ranks' own, made here."""
        import torch

        parameters = list(self.model.parameters())
        means = [torch.zeros_like(x, dtype=torch.float64) for x in parameters]
        for rank in range(ranks):
            loss = loss_of(self.model, data_of(self._plan, number, rank))
            for mean, own in zip(means, torch.autograd.grad(loss, parameters), strict=True):
                mean += own.double() / ranks
        return means

    def error(self, means: list[Any]) -> float:
        """Of the last step's gradients."""
        wrong = exact = 0.0
        for parameter, mean in zip(self.model.parameters(), means, strict=True):
            wrong += float((parameter.grad.double() - mean).square().sum())
            exact += float(mean.square().sum())
        return (wrong / exact) ** 0.5


def data_of(plan: Plan, number: int, rank: int) -> Data:
    """Of a rank's step: what is given, and what is wanted."""
    import torch

    generator = torch.Generator().manual_seed((number << 16) + rank)
    given, wanted = torch.randn((2, plan.batch, plan.width), generator=generator)
    return given, wanted


def loss_of(forward: Any, data: Data) -> Any:
    """A sum over features: gradients far from the least numbers of float16."""
    given, wanted = data
    return (forward(given) - wanted).square().sum(1).mean()


def pycoll_hook(compressor: str, group: Any) -> Any:
    import pycoll

    if not compressor:
        return None
    codec: Any = {
        "powersgd": pycoll.PowerSGD(rank=POWER_SGD_RANK, start_step=EXACT_STEPS),
        "topk": pycoll.TopK(),
    }.get(compressor, compressor)
    return pycoll.CompressionState(group, codec), pycoll.compress_hook


def torch_hook(compressor: str, group: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if not compressor:
        return None
    if compressor == "powersgd":
        settings = {"matrix_approximation_rank": POWER_SGD_RANK}
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=EXACT_STEPS, **settings)
        return state, powerSGD_hook.powerSGD_hook
    hook = getattr(default_hooks, f"{compressor}_compress_hook")

    # DDP refuses the hook of bfloat16 by its name unless the backend is NCCL; Gloo can sum it.
    def same_hook(state, bucket):  # DDP would compare annotations with its own
        return hook(state, bucket)

    return group, same_hook


def no_communication(compressor: str, group: Any) -> Any:
    from ddp import leave_alone

    return None, leave_alone


HOOKS = {"pycoll": pycoll_hook, "gloo": torch_hook, "nothing": no_communication}


def run_rank(rank: int, network: Network, paths: list[str], directory: str, plan: Plan,
             rows: Connection) -> None:  # fmt: skip
    netns.enter(paths[rank // network.ranks_per_host])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    import torch
    import torch.distributed as dist

    import pycoll  # noqa: F401  registers the backend

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), network.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=network.ranks)
    try:
        row = train_in_turn(plan, rank, network.ranks)
        if rank == 0:
            rows.send(row)
    finally:
        dist.destroy_process_group()


def train_in_turn(plan: Plan, rank: int, ranks: int) -> Row:
    trainees = {name: Trainee(name, plan) for name in plan.contenders}
    count = sum(x.numel() for x in next(iter(trainees.values())).model.parameters())
    row = Row(count * 4)
    for name, trainee in trainees.items():
        for number in range(WARM_UP):
            trainee.step(data_of(plan, number, rank))
        row.bits[name] = sent_bytes(trainee, data_of(plan, WARM_UP, rank)) * 8 / count
        row.seconds[name], row.error[name], row.cpu_seconds[name] = [], [], []
    shuffle, order = random.Random(plan.seed), list(trainees)
    for number in range(WARM_UP + 1, WARM_UP + 1 + plan.rounds):
        shuffle.shuffle(order)
        data = data_of(plan, number, rank)
        for name in order:
            trainee = trainees[name]
            means = trainee.mean_gradients(number, ranks) if rank == 0 else None
            row.seconds[name].append(batch(trainee.step, data, 1))
            row.cpu_seconds[name].append(trainee.cpu_seconds)
            if means is not None:
                row.error[name].append(trainee.error(means))
    return row


def sent_bytes(trainee: Trainee, data: Data) -> int:
    """What the interface of this rank's host sends in a step."""
    import torch.distributed as dist

    dist.barrier()
    before = settled_bytes()
    trainee.step(data)
    return settled_bytes() - before


# ---- The other side ----


def report(network: Network, plan: Plan) -> Row:
    print(f"\n{network.name}, 2 hosts x {network.ranks_per_host} ranks", flush=True)
    (row,) = measure(network, plan, run_rank)
    base = row.median(BASE) if BASE in row.seconds else None
    print(f"gradients of {row.bytes / 1e6:.1f} MB, {plan.batch} samples a rank")
    print(f"{'contender':<18} {'ms':>9} {'x':>6} {'error':>10} {'bits':>7} {'cpu':>6}")
    for point in sorted(row.points, key=lambda point: point.seconds):
        times = "" if base is None else f"{base / point.seconds:6.2f}"
        cells = f"{point.name:<18} {point.seconds * 1e3:9.2f} {times:>6} {point.error:10.2g}"
        print(f"{cells} {row.bits[point.name]:7.3f} {100 * row.cpu(point.name):5.0f}%")
    return row


def contenders(text: str) -> tuple[str, ...]:
    """An argument like pycoll/int8,gloo."""
    from pycoll import _core

    hooks = {
        "pycoll": ["powersgd", "topk", *(row[0] for row in _core.codecs())],
        "gloo": ["fp16", "bf16", "powersgd"],
        "nothing": [],
    }
    names = tuple(text.split(","))
    for name in names:
        backend, slash, hook = name.partition("/")
        if backend not in hooks:
            known = ", ".join(hooks)
            raise argparse.ArgumentTypeError(f"{name} does not begin with one of: {known}")
        if slash and hook not in hooks[backend]:
            known = ", ".join(hooks[backend]) or "none"
            raise argparse.ArgumentTypeError(f"no {name}; hooks of {backend} are: {known}")
    return names


def main() -> int:
    parser = parser_of(__doc__, "steps", "weights")
    parser.add_argument(
        "--contenders", type=contenders, default=contenders(CONTENDERS), metavar="A,B",
        help=f"default {CONTENDERS}",
    )  # fmt: skip
    parser.add_argument("--width", type=count, default=1024, help="of a layer; default 1024")
    parser.add_argument("--layers", type=count, default=8, help="default 8")
    parser.add_argument("--batch", type=count, default=16, help="samples a rank; default 16")
    arguments = parser.parse_args()

    plan = Plan(arguments.contenders, arguments.width, arguments.layers, arguments.batch,
                arguments.rounds, arguments.seed)  # fmt: skip
    facts = machine()
    print("\n".join(machine_lines(facts)))
    networks = [network_of(name, arguments.hosts) for name in arguments.networks.split(",")]
    results = {network.name: report(network, plan) for network in networks}
    if arguments.json:
        rows = {name: asdict(row) for name, row in results.items()}
        content = {"machine": facts, "ranks_per_host": arguments.hosts, "results": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    if arguments.plot:
        panels = {f"{x}, {row.bytes / 1e6:.1f} MB": row.points for x, row in results.items()}
        draw(panels, arguments.plot, "step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
