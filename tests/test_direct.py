"""pycoll.all_reduce: the direct call gives what torch.distributed's own gives."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pycoll
from pool import torch_ranks

OPS = {"sum": "SUM", "avg": "AVG", "product": "PRODUCT", "min": "MIN", "max": "MAX"}


def values(rank: int, n: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + n)
    return torch.randint(1, 5, (n,), generator=generator).to(getattr(torch, dtype))


def returned(world_size: int, function) -> list:
    results = torch_ranks(world_size, function)
    assert [result.error for result in results] == [None] * world_size
    return [result.value for result in results]


def compare(rank, w):
    wrong = []
    for dtype in ("float32", "bfloat16", "float64", "int64", "uint8"):
        for op, name in OPS.items():
            if op == "avg" and dtype in ("int64", "uint8"):
                continue
            # In the flag's cache line, in the cell, in the window, over several rounds.
            for n in (0, 1, 13, 15, 1000, 5000, 300_000):
                if n == 300_000 and dtype != "float32":
                    continue
                mine = values(rank, n, dtype)
                theirs = mine.clone()
                assert pycoll.all_reduce(mine, op) is None
                dist.all_reduce(theirs, getattr(dist.ReduceOp, name))
                if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
                    wrong.append((dtype, op, n))
    return wrong


@pytest.mark.parametrize("w", [1, 2, 3])
def test_gives_what_torch_distributed_gives(w):
    assert returned(w, compare) == [[]] * w


def forms(rank, w):
    half = dist.new_group([0, 1])
    whole = torch.full((4, 6), rank + 1.0)
    pycoll.all_reduce(whole, "sum", None)
    strided = torch.full((4, 6), rank + 1.0).t()
    pycoll.all_reduce(strided)
    torch_op = torch.full((3,), rank + 1.0)
    pycoll.all_reduce(torch_op, dist.ReduceOp.MAX)
    named = torch.full((3,), rank + 1.0)
    if rank < 2:
        pycoll.all_reduce(group=half, tensor=named, op="".join(["a", "vg"]))
    later = torch.full((3,), rank + 1.0)
    work = pycoll.all_reduce(later, async_op=True)
    work.wait()
    parameter = torch.nn.Parameter(torch.full((3,), rank + 1.0))
    pycoll.all_reduce(parameter.data)
    with torch.no_grad():
        pycoll.all_reduce(parameter)
    # The group that was asked for last is remembered: others must not be taken for it.
    for group in (half, None, half):
        if group is None or rank < 2:
            probe = torch.ones(1)
            pycoll.all_reduce(probe, "sum", group)
            assert probe.item() == (w if group is None else 2)
    return [t.flatten()[0].item() for t in (whole, strided, torch_op, named, later, parameter)]


def test_forms_of_the_call():
    first, second, third = returned(3, forms)
    assert first == second == [6, 6, 3, 1.5, 6, 18]
    assert third == [6, 6, 3, 3, 6, 18]


def errors(rank, w):
    texts = []
    for call in (
        lambda: pycoll.all_reduce(torch.ones(2), "median"),
        lambda: pycoll.all_reduce(),
        lambda: pycoll.all_reduce([1.0]),
        lambda: pycoll.all_reduce(torch.ones(1), tensor=torch.ones(1)),
        lambda: pycoll.all_reduce(torch.ones(1), oops=1),
        lambda: pycoll.all_reduce(torch.ones(1).expand(4)),
        lambda: pycoll.all_reduce(torch.ones(2).to_sparse(), "max"),
    ):
        try:
            call()
            texts.append("no error")
        except Exception as error:
            texts.append(type(error).__name__)
    good = torch.ones(2)
    pycoll.all_reduce(good)  # the group is not harmed
    try:
        pycoll.all_reduce(torch.ones(2 + rank))
    except dist.DistBackendError as error:
        texts.append(str(error))
    return good.tolist(), texts


def test_errors():
    for good, texts in returned(2, errors):
        assert good == [2, 2]
        assert texts[:5] == ["ValueError"] + ["TypeError"] * 4
        assert texts[5:7] == ["RuntimeError", "RuntimeError"]
        assert "sizes differ" in texts[7] and "rank 0" in texts[7] and "rank 1" in texts[7]


class Seen(TorchFunctionMode):
    """Names of what torch.distributed is asked for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    """Names of the operators that torch dispatches."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def mixed(rank, w):
    """One rank calls directly, the other by torch.distributed: they are in the same operation."""
    all_reduce = pycoll.all_reduce if rank == 0 else dist.all_reduce
    seen = {}
    for dtype in (torch.complex64, torch.complex128, torch.float16, torch.bool):
        numbers = torch.ones(5, dtype=dtype)
        all_reduce(numbers)
        seen[str(dtype)] = numbers[0].item()
    # What torch collects until the end of the block is not begun before.
    group = dist.distributed_c10d._get_default_group()
    collected = [torch.full((3,), rank + 1.0) for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager(group):
        for tensor in collected:
            all_reduce(tensor)
        seen["inside"] = [tensor[0].item() - rank for tensor in collected]
    seen["collected"] = [tensor[0].item() for tensor in collected]
    return seen


def test_may_be_mixed_with_torch_distributed():
    assert (
        returned(2, mixed)
        == [
            {
                "torch.complex64": 2,
                "torch.complex128": 2,
                "torch.float16": 2,
                "torch.bool": True,
                "inside": [1, 1],
                "collected": [3, 3],
            }
        ]
        * 2
    )


def watched(rank, w):
    with Seen() as functions:
        pycoll.all_reduce(torch.ones(2))
    with Dispatched() as operators:
        pycoll.all_reduce(torch.ones(2))
    try:
        pycoll.all_reduce(torch.ones(2, dtype=torch.complex64), "product")
        refused = "not refused"
    except ValueError as error:
        refused = str(error)
    return functions.names, operators.names, refused


def test_modes_see_the_call_and_complex_is_refused_as_by_torch():
    for functions, operators, refused in returned(1, watched):
        assert "all_reduce" in functions
        assert "c10d.allreduce_.default" in operators
        assert "on complex tensors" in refused


def threads(rank, w):
    """Calls at once in two threads, each on a group of its own, and messages on both."""
    groups = [dist.new_group(list(range(w))) for _ in range(2)]
    wrong = []

    def work(which):
        for i in range(300):
            tensor = torch.full((1 + i % 20,), float(rank + i))
            pycoll.all_reduce(tensor, "sum", groups[which])
            if tensor[0].item() != sum(r + i for r in range(w)):
                wrong.append((which, i))
            if i % 50 == which:
                dist.barrier(groups[which])

    running = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return wrong


def test_two_groups_in_two_threads():
    assert returned(2, threads) == [[], []]


WITHOUT_TORCH = """
import sys

class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import pycoll

assert pycoll.is_shareable(pycoll.empty_array(3))
for use in (
    lambda: pycoll.all_reduce,
    lambda: pycoll.empty(3),
    lambda: pycoll.shareable().__enter__(),
):
    try:
        use()
    except ImportError as error:
        print(error)
"""


def test_without_torch_it_says_what_is_missing():
    environment = {**os.environ, "PYCOLL_TORCH": "0"}
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert first == "pycoll.all_reduce needs torch (No module named 'torch')"
    assert len(others) == 2 and all("No module named 'torch" in line for line in others)


def test_looks_like_a_function():
    assert list(inspect.signature(pycoll.all_reduce).parameters) == [
        "tensor",
        "op",
        "group",
        "async_op",
        "codec",
        "step",
        "residual",
        "sum_residual",
    ]
    assert "DistBackendError" in pycoll.all_reduce.__doc__
