"""Ranks that call different things, and wrong arguments: errors before anything is written."""

from __future__ import annotations

import time
from datetime import timedelta

import numpy as np
import pytest

import pycoll
from helpers_threads import ThreadRanks
from pool import communicator_ranks, run_ranks, torch_ranks
from pycoll import _core

# Far below the timeouts of the groups: a mismatch is seen, not waited for.
AT_ONCE = 3.0
UNTOUCHED = 99


def full(n, dtype="float32"):
    return np.full(n, UNTOUCHED, dtype)


def all_reduce(n=4, dtype="float32", **options):
    def call(communicator):
        array = full(n, dtype)
        return [array], lambda: communicator.all_reduce(array, **options)

    return call


def broadcast(n=4, dtype="float32", **options):
    def call(communicator):
        array = full(n, dtype)
        return [array], lambda: communicator.broadcast(array, **options)

    return call


def all_gather(n=4):
    def call(communicator):
        output = full((communicator.world_size, n))
        return [output], lambda: communicator.all_gather(output, full(n))

    return call


def barrier():
    return lambda communicator: ([], communicator.barrier)


# name: (what rank 1 calls, what the others call, words of the message)
MISMATCHES = {
    "count": (all_reduce(4), all_reduce(6), ["sizes", "4 x float32", "6 x float32"]),
    "large_count": (all_reduce(100_000), all_reduce(200_000), ["sizes", "100000", "200000"]),
    "empty": (all_reduce(0), all_reduce(5), ["sizes", "0 x float32", "5 x float32"]),
    "dtype": (all_reduce(4, "float16"), all_reduce(4), ["dtypes", "float16", "float32"]),
    "dtype_of_the_same_size": (all_reduce(4, "int32"), all_reduce(4), ["int32", "float32"]),
    "dtype_of_bytes": (broadcast(4, "bool"), broadcast(4, "uint8"), ["bool", "uint8"]),
    "dtype_of_8_bytes": (all_reduce(4, "int64"), all_reduce(4, "float64"), ["int64", "float64"]),
    "op": (all_reduce(op="max"), all_reduce(op="sum"), ["reduce operations", "max", "sum"]),
    "root": (broadcast(root=1), broadcast(root=0), ["roots", "root 1", "root 0"]),
    "broadcast_count": (broadcast(8), broadcast(4), ["sizes", "8 x float32", "4 x float32"]),
    "collective": (all_reduce(), broadcast(), ["operations differ", "all_reduce", "broadcast"]),
    "barrier": (barrier(), all_reduce(), ["operations differ", "barrier", "all_reduce"]),
    "gather": (all_gather(4), all_gather(5), ["sizes", "4 x float32", "5 x float32"]),
    "algorithm": (
        all_reduce(algorithm="ring"),
        all_reduce(algorithm="one_shot"),
        ["algorithms differ", "algorithm="],
    ),
}
FORCED = ["one_shot", "two_shot", "ring", "tree", "recursive_doubling"]
for name in FORCED:
    MISMATCHES[f"count_{name}"] = (
        all_reduce(50_000, algorithm=name),
        all_reduce(60_000, algorithm=name),
        ["sizes", "50000", "60000"],
    )
    MISMATCHES[f"dtype_{name}"] = (
        all_reduce(300, "int32", algorithm=name),
        all_reduce(300, algorithm=name),
        ["dtypes", "int32", "float32"],
    )


def mismatch(communicator, odd, others):
    communicator.barrier()
    arrays, call = (odd if communicator.rank == 1 else others)(communicator)
    start = time.monotonic()
    try:
        call()
    except pycoll.Error as error:
        took = time.monotonic() - start
        clean = all((a == np.array(UNTOUCHED).astype(a.dtype)).all() for a in arrays)
        return type(error).__name__, str(error), took, clean
    return "no error", "", 0.0, True


@pytest.mark.parametrize("name", MISMATCHES)
def test_every_rank_learns_of_a_mismatch(name):
    odd, others, words = MISMATCHES[name]
    group = ThreadRanks(3)
    results = group.run(mismatch, odd, others)
    group.close()
    # A root sends what it has and leaves; all that receive see it.
    told = [r for r in results if r[0] != "no error"]
    assert len(told) == 3 or (len(told) == 2 and "broadcast" in name + results[0][1]), results
    for kind, text, took, clean in told:
        assert kind in ("MismatchError", "AbortedError"), text
        assert took < AT_ONCE
        assert clean, "an output was written"
        assert "rank 1" in text
        for word in words:
            assert word in text, text
    assert "MismatchError" in [kind for kind, *_ in told]


def mismatch_in_order(communicator):
    a, b = full(8), full(8)
    calls = [
        lambda: communicator.all_reduce(a, async_op=True),
        lambda: communicator.broadcast(b, async_op=True),
    ]
    if communicator.rank == 1:
        calls.reverse()
    works = []
    texts = []
    try:
        works = [call() for call in calls]
    except pycoll.Error as error:
        texts.append(str(error))
    for work in works:
        try:
            work.wait()
        except pycoll.Error as error:
            texts.append(str(error))
    return texts


def test_a_different_order_of_asynchronous_calls():
    for result in communicator_ranks(3, mismatch_in_order):
        assert result.value, "no error"
        assert result.exitcode == 0
        for word in ("operations differ", "all_reduce #1", "broadcast #1", "rank 1"):
            assert word in result.value[0], result.value[0]


def torch_mismatch(rank, world_size, kind):
    import torch
    import torch.distributed as dist

    tensor = torch.full((1000,), float(UNTOUCHED))
    start = time.monotonic()
    try:
        if kind == "count":
            tensor = tensor[: 400 + 200 * (rank == 1)]
            dist.all_reduce(tensor)
        elif kind == "dtype":
            tensor = tensor.to(torch.bfloat16 if rank == 1 else torch.float32)
            dist.all_reduce(tensor, async_op=True).wait()
        elif kind == "operation":
            (dist.broadcast if rank == 1 else dist.all_reduce)(
                tensor, **({"src": 1} if rank == 1 else {})
            )
    except dist.DistBackendError as error:
        took = time.monotonic() - start
        return str(error), took, bool((tensor == UNTOUCHED).all())
    return None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("count", ["400 x float32", "600 x float32"]),
        ("dtype", ["bfloat16", "float32"]),
        ("operation", ["broadcast", "all_reduce"]),
    ],
)
def test_torch_ranks_learn_of_a_mismatch(kind, words):
    for result in torch_ranks(3, torch_mismatch, kind, check=False):
        assert result.exitcode == 0, result.report()
        assert "terminate called" not in result.stderr
        if kind == "operation" and result.rank == 1 and result.value is None:
            continue  # a broadcast's root waits for nobody
        text, took, clean = result.value
        assert took < AT_ONCE
        assert clean
        for word in [*words, "rank 1", "#1"]:
            assert word in text, text


# ---- Arguments that are wrong on this rank alone ----


@pytest.fixture(scope="module")
def pair():
    group = ThreadRanks(2)
    yield group
    group.close()


TIMES = [-1.0, -1e-9, float("nan"), float("-inf")]


@pytest.mark.parametrize("seconds", TIMES)
def test_a_timeout_that_is_no_time_is_refused(pair, tmp_path, seconds):
    def attempt(communicator):
        array = np.full(3, 1.0)
        matrix = np.ones((2, 3))
        calls = [
            lambda **o: communicator.all_reduce(array, **o),
            lambda **o: communicator.broadcast(array, **o),
            lambda **o: communicator.all_gather(matrix, array.copy(), **o),
            lambda **o: communicator.reduce_scatter(array, matrix, **o),
            lambda **o: communicator.barrier(**o),
        ]
        for call in calls:
            for asynchronous in (False, True):
                with pytest.raises(pycoll.InvalidArgumentError, match="timeout"):
                    call(timeout=seconds, async_op=asynchronous)
        work = communicator.all_reduce(array, async_op=True)
        with pytest.raises(pycoll.InvalidArgumentError, match="timeout"):
            work.wait(timeout=seconds)
        work.wait()
        assert (array == 2).all()
        assert (matrix == 1).all()

    pair.run(attempt)
    with pytest.raises(pycoll.InvalidArgumentError, match="timeout"):
        pycoll.Communicator(pycoll.FileStore(tmp_path), 0, 1, timeout=seconds)


@pytest.mark.parametrize("seconds", [1e9, 1e300, float("inf")])
def test_a_timeout_longer_than_any_clock(pair, seconds):
    def use(communicator):
        for late in (0, 1):
            array = np.ones(3)
            if communicator.rank == late:
                time.sleep(0.1)  # the other one waits, and must not think that time is up
            communicator.all_reduce(array, timeout=seconds)
            work = communicator.all_reduce(array, timeout=seconds, async_op=True)
            assert work.wait(timeout=seconds)
            assert (array == 4).all()

    pair.run(use)


def torch_timeouts(rank, world_size):
    import datetime

    import torch
    import torch.distributed as dist

    longest = datetime.timedelta.max
    for limit in (longest, datetime.timedelta(days=120_000), datetime.timedelta(days=400)):
        group = dist.new_group(timeout=limit)
        tensor = torch.ones(3)
        for late in range(world_size):
            if rank == late:
                time.sleep(0.1)
            dist.all_reduce(tensor, group=group)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            assert work.wait(limit)
        assert (tensor == world_size ** (2 * world_size)).all()
        dist.destroy_process_group(group)
    return tensor.tolist()


def test_torch_timeouts_longer_than_any_clock():
    for result in torch_ranks(2, torch_timeouts):
        assert result.value == [16] * 3


def read_only(array):
    array.flags.writeable = False
    return array


ones = np.ones
windows = np.lib.stride_tricks.sliding_window_view


def names_of(collective: str) -> str:
    return ", ".join(["auto", *(row.name for row in _core.algorithms(collective))])


WRONG = {
    "expanded": (lambda c: c.all_reduce(np.broadcast_to(ones(1), (8,))), ["read-only"]),
    "stride_0": (
        lambda c: c.all_reduce(np.lib.stride_tricks.as_strided(ones(1), (8,), (0,))),
        ["share memory", "(8,)", "expanded or overlapping"],
    ),
    "overlapping": (
        lambda c: c.broadcast(np.lib.stride_tricks.as_strided(ones(9), (8, 2), (8, 8))),
        ["share memory", "(8, 2)"],
    ),
    "overlapping_output": (
        lambda c: c.all_gather(np.lib.stride_tricks.as_strided(ones(4), (2, 4), (0, 8)), ones(4)),
        ["output", "share memory"],
    ),
    "read_only": (lambda c: c.all_reduce(read_only(ones(3))), ["array is read-only"]),
    "not_an_array": (lambda c: c.all_reduce([1.0, 2.0]), ["list", "numpy.ndarray"]),
    "algorithm": (
        lambda c: c.all_reduce(ones(3), algorithm="rings"),
        ["'rings'", "all_reduce", names_of("all_reduce")],
    ),
    "algorithm_of_another": (
        lambda c: c.broadcast(ones(3), algorithm="two_shot"),
        ["'two_shot'", "broadcast", names_of("broadcast")],
    ),
    "op": (lambda c: c.all_reduce(ones(3), op="median"), ["'median'", "reduce operation"]),
    "dtype": (lambda c: c.all_reduce(np.array(["a"])), ["str"]),
    "object": (lambda c: c.all_reduce(np.array([object()])), ["object"]),
    "root": (lambda c: c.broadcast(ones(3), root=2), ["root 2", "group of 2"]),
    "negative_root": (lambda c: c.broadcast(ones(3), root=-1), ["root -1"]),
    "gather_shape": (
        lambda c: c.all_gather(ones((3, 4)), ones(4)),
        ["output", "(3, 4)", "(2, 4)", "world size 2"],
    ),
    "gather_dtype": (
        lambda c: c.all_gather(ones((2, 4), np.float32), ones(4)),
        ["float32", "float64"],
    ),
    "scatter_shape": (
        lambda c: c.reduce_scatter(ones(4), ones((2, 5))),
        ["input", "(2, 5)", "(2, 4)"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(pair, name):
    call, words = WRONG[name]

    def attempt(communicator):
        with pytest.raises(pycoll.InvalidArgumentError) as caught:
            call(communicator)
        assert isinstance(caught.value, ValueError)
        # The group is as good as before: nobody was told, nothing was counted.
        array = np.ones(2)
        communicator.all_reduce(array)
        assert array.tolist() == [2, 2]
        return str(caught.value)

    for text in pair.run(attempt):
        for word in words:
            assert word in text, text


@pytest.mark.parametrize(
    ("dtype", "op", "why"),
    [("complex64", "max", "complex"), ("float32", "band", "non-integral")],
)
def test_a_reduction_that_is_not_there_is_named(pair, dtype, op, why):
    def attempt(communicator):
        words = f"all_reduce with {op} on {dtype}: .*{why}"
        with pytest.raises(pycoll.UnsupportedError, match=words):
            communicator.all_reduce(np.ones(3, dtype), op)

    pair.run(attempt)


def torch_wrong(rank, world_size):
    import torch
    import torch.distributed as dist

    base = torch.arange(4.0)
    # torch's dispatcher swallows meta tensors, whatever the backend.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    calls = {
        "expanded": lambda: dist.all_reduce(base[:1].expand(1 << 20)),
        "overlapping": lambda: dist.all_reduce(base.as_strided((3, 2), (1, 1))),
        "meta": lambda: backend.allreduce([torch.ones(3, device="meta")]),
        "sparse": lambda: dist.broadcast(torch.eye(3).to_sparse(), 0),
        "gather_numel": lambda: dist.all_gather_into_tensor(torch.ones(5), torch.ones(2)),
        "gather_dtype": lambda: dist.all_gather_into_tensor(
            torch.ones(2 * world_size, dtype=torch.float64), torch.ones(2)
        ),
        "gather_list_length": lambda: dist.all_gather([torch.ones(2)] * 2, torch.ones(2)),
        "gather_output": lambda: dist.all_gather_into_tensor(
            torch.ones(1).expand(2 * world_size), torch.ones(2)
        ),
        "scatter_numel": lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(7)),
        "scatter_0d": lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.tensor(1.0)),
    }
    texts = {}
    for name, call in calls.items():
        try:
            call()
            texts[name] = ("no error", "")
        except RuntimeError as error:
            texts[name] = (type(error).__name__, str(error))
    good = torch.ones(3)
    dist.all_reduce(good)
    return texts, base.tolist(), good.tolist()


TORCH_WORDS = {
    "expanded": ["all_reduce", "1048576", "share memory", "expanded"],
    "overlapping": ["all_reduce", "[3, 2]", "share memory"],
    "meta": ["meta"],
    "sparse": ["Sparse", "broadcast"],
    "gather_numel": ["5", "6", "world size 3"],
    "gather_dtype": [],
    "gather_list_length": ["2", "3"],
    "gather_output": ["share memory"],
    "scatter_numel": ["7", "6"],
    "scatter_0d": ["shape []", "no dim 0"],
}


def test_wrong_tensors_are_refused_before_memory_is_touched():
    for result in torch_ranks(3, torch_wrong):
        texts, base, good = result.value
        assert base == [0, 1, 2, 3]
        assert good == [3, 3, 3]
        for name, words in TORCH_WORDS.items():
            kind, text = texts[name]
            assert kind != "no error", name
            for word in words:
                assert word in text, (name, text)


def torch_unsupported(rank, world_size):
    import torch
    import torch.distributed as dist

    texts = {}
    for dtype, op in ((torch.float32, "BAND"), (torch.complex64, "MIN")):
        try:
            dist.all_reduce(torch.ones(3, dtype=dtype), op=getattr(dist.ReduceOp, op))
        except (RuntimeError, ValueError) as error:
            texts[op] = str(error)
    return texts


def test_torch_reductions_that_are_not_there_are_named():
    for result in torch_ranks(2, torch_unsupported):
        assert "non-integral" in result.value["BAND"]
        assert "complex" in result.value["MIN"]


def wrong_rank(rank, world_size, directory):
    store = pycoll.FileStore(directory)
    try:
        pycoll.Communicator(store, 3, 3)
    except ValueError as error:
        return str(error)


def test_a_rank_outside_the_group():
    assert "rank 3 is not between 0 and world_size - 1 = 2" in run_ranks(1, wrong_rank)[0].value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": "0"}, "rank is a whole number, not '0'"),
        ({"world_size": "1"}, "world_size is a whole number, not '1'"),
        ({"timeout": timedelta(seconds=3)}, "timeout is a number of seconds"),
        ({"store": "/tmp/run1"}, r"pycoll\.FileStore\(directory\).*'/tmp/run1'"),
    ],
)
def test_arguments_of_another_kind(tmp_path, arguments, words):
    right = {"store": pycoll.FileStore(tmp_path), "rank": 0, "world_size": 1}
    with pytest.raises(pycoll.InvalidArgumentError, match=words):
        pycoll.Communicator(**right | arguments)


def test_unknown_names_are_answered_with_those_there_are(tmp_path):
    group = pycoll.Communicator(pycoll.FileStore(tmp_path), 0, 1)
    with pytest.raises(pycoll.InvalidArgumentError, match="'mean'.*there are: sum, avg, product"):
        group.all_reduce(np.zeros(3), "mean")
    with pytest.raises(pycoll.InvalidArgumentError, match="'str32' is no dtype; there are: bool"):
        group.all_reduce(np.array(["a"]))
