"""torch.distributed over pycoll: layouts of tensors, and arguments that are refused."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from pool import torch_ranks


def check(tensor, expected):
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def numbered(shape, rank: int, dtype=torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) % 11 + 20 * rank).to(dtype)


VIEWS = {
    "column": lambda t: t[:, 1],
    "every_second": lambda t: t.reshape(-1)[::2] if not t.is_contiguous() else t.view(-1)[::2],
    "transposed": lambda t: t.t(),
    "offset": lambda t: t[1:, 2:5],
    "permuted": lambda t: t.view(2, 3, 4).permute(2, 0, 1),
    "channels_last": lambda t: t.view(1, 3, 2, 4).permute(0, 3, 1, 2),
}
assert VIEWS["channels_last"](torch.empty(4, 6)).is_contiguous(memory_format=torch.channels_last)


def strided(rank, w):
    for name, view in VIEWS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for asynchronous in (False, True):
                sources = [view(numbered((4, 6), r, dtype)) for r in range(w)]
                shape = sources[0].shape

                def output(view=view, dtype=dtype):
                    base = torch.full((4, 6), -7, dtype=dtype)
                    return base, view(base)

                def done(work, base, out, expected, asynchronous=asynchronous, name=name):
                    if work is not None:
                        work.wait()
                    check(out, expected)
                    out.fill_(-7)
                    assert (base == -7).all(), f"{name}: wrote between the elements"

                base, out = output()
                outputs, bases = [], []
                for _ in range(w):
                    one_base, one = output()
                    bases.append(one_base)
                    outputs.append(one)
                work = dist.all_gather(outputs, sources[rank], async_op=asynchronous)
                for r in range(w):
                    done(work, bases[r], outputs[r], sources[r])
                work = dist.scatter(
                    out, sources if rank == 1 else None, src=1, async_op=asynchronous
                )
                done(work, base, out, sources[rank])
                work = dist.gather(
                    sources[rank],
                    outputs if rank == 1 else None,
                    dst=1,
                    async_op=asynchronous,
                )
                if work is not None:
                    work.wait()
                for r in range(w if rank == 1 else 0):
                    done(work, bases[r], outputs[r], sources[r])
                out.copy_(sources[rank])
                before = base.clone()
                work = dist.reduce(out, 0, async_op=asynchronous)
                if work is not None:
                    work.wait()
                if rank == 0:
                    done(None, base, out, sum(s.double() for s in sources).to(dtype))
                else:
                    check(base, before)
                    base.fill_(-7)
                work = dist.all_to_all(outputs, [s * 1 for s in sources], async_op=asynchronous)
                for r in range(w):
                    done(work, bases[r], outputs[r], sources[rank])
                request = dist.isend(sources[rank], (rank + 1) % w, tag=3)
                received = dist.irecv(out, (rank - 1) % w, tag=3)
                request.wait()
                done(received, base, out, sources[(rank - 1) % w])
                stacked = torch.full((2 * w, *shape), -7, dtype=dtype)
                dist.all_gather_into_tensor(stacked[::2], sources[rank])
                check(stacked[::2], torch.stack(sources))
                assert (stacked[1::2] == -7).all()
                piece = torch.full((2, *shape), -7, dtype=dtype)
                dist.reduce_scatter_tensor(piece[:1], torch.stack([s + rank for s in sources]))
                total = sources[rank].double() * w + w * (w - 1) // 2
                check(piece[0], total.to(dtype))
                assert (piece[1] == -7).all()
    return "done"


@pytest.mark.parametrize("world_size", [2, 3])
def test_strided_tensors_in_every_collective(world_size):
    results = torch_ranks(world_size, strided, timeout=90)
    assert [result.value for result in results] == ["done"] * world_size


def lazy(rank, w):
    """Views whose memory does not hold their values: conjugated, negated.

    Given to the backend itself: torch's dispatcher makes copies of them first, and with any backend
    a result that dist.* writes goes to the copy.
    """
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    total = w * (w + 1) // 2
    whole = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    conjugated = whole.conj()
    assert conjugated.is_conj()
    backend.allreduce([conjugated], dist.AllreduceOptions()).wait()
    check(conjugated.resolve_conj(), torch.tensor([1 - 2j, 3 + 1j]) * total)
    check(whole, torch.tensor([1 + 2j, 3 - 1j]) * total)  # the same memory, the other sign

    whole = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    outputs = [torch.zeros(2, dtype=torch.complex64) for _ in range(w)]
    backend.allgather([outputs], [whole.conj()], AllgatherOptions()).wait()
    for r, output in enumerate(outputs):
        check(output, torch.tensor([1 - 2j, 3 + 1j]) * (r + 1))

    negated = whole.conj().imag
    assert negated.is_neg()
    parts = [torch.zeros(2) for _ in range(w)]
    dist.all_gather(parts, negated)
    for r, part in enumerate(parts):
        check(part, torch.tensor([-2.0, 1.0]) * (r + 1))
    backend.allreduce([negated], dist.AllreduceOptions()).wait()
    check(negated.resolve_neg(), torch.tensor([-2.0, 1.0]) * total)
    check(whole.imag, torch.tensor([2.0, -1.0]) * total)
    return "done"


@pytest.mark.parametrize("world_size", [1, 3])
def test_conjugated_and_negated_views(world_size):
    assert [r.value for r in torch_ranks(world_size, lazy)] == ["done"] * world_size


def kinds(rank, w):
    total = w * (w + 1) / 2
    mine = float(rank + 1)
    leaf = torch.full((3, 2), mine, requires_grad=True)
    expected = torch.full((3, 2), total)
    dist.reduce(leaf, 0)
    if rank == 0:
        check(leaf.detach(), expected)
    outputs = [torch.zeros(3, 2, requires_grad=True) for _ in range(w)]
    dist.all_gather(outputs, torch.full((3, 2), mine, requires_grad=True))
    check(torch.stack([o.detach() for o in outputs])[:, 0, 0], torch.arange(1.0, w + 1))
    with torch.inference_mode():
        for asynchronous in (False, True):
            out = torch.zeros(2, 3).t()
            source = [torch.full((3, 2), mine + r) for r in range(w)] if rank == 0 else None
            work = dist.scatter(out, source, src=0, async_op=asynchronous)
            if work is not None:
                work.wait()
            check(out, torch.full((3, 2), 1.0 + rank))
            out = torch.zeros(w, 4)[:, ::2]
            work = dist.all_to_all_single(out, torch.full((w, 2), mine), async_op=asynchronous)
            if work is not None:
                work.wait()
            check(out[:, 0], torch.arange(1.0, w + 1))
    scalar = torch.tensor(mine)
    gathered = [torch.tensor(0.0) for _ in range(w)]
    dist.gather(scalar, gathered if rank == 0 else None)
    if rank == 0:
        check(torch.stack(gathered), torch.arange(1.0, w + 1))
    taken = torch.tensor(0.0)
    dist.scatter(taken, [torch.tensor(float(r)) for r in range(w)] if rank == 0 else None)
    check(taken, torch.tensor(float(rank)))
    for shape in ((0,), (1, 0, 2), (0, 3)):
        empty = torch.empty(shape)
        dist.reduce(empty, w - 1)
        dist.gather(empty, [torch.empty(shape) for _ in range(w)] if rank == 0 else None)
        dist.scatter(empty, [torch.empty(shape) for _ in range(w)] if rank == 0 else None)
        dist.all_to_all([torch.empty(shape) for _ in range(w)], [empty] * w)
        dist.all_to_all_single(torch.empty(0, 2), torch.empty(0, 2))
        if w > 1:
            work = dist.isend(empty, (rank + 1) % w)
            dist.recv(torch.empty(shape), (rank - 1) % w)
            work.wait()
    return "done"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_leaves_inference_scalars_and_nothing(world_size):
    assert [r.value for r in torch_ranks(world_size, kinds)] == ["done"] * world_size


# ---- Refused, and the group lives ----


def refusals(rank, w):
    """Texts by call; every rank makes the same mistake."""
    one = torch.ones(4)
    base = torch.full((2,), float(rank))
    expanded = base[:1].expand(4)
    crossing = torch.ones(7).as_strided((4, 2), (1, 1))
    texts = {}

    def refused(name, call):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            call()
        texts[name] = str(raised.value)

    def ones():
        return [torch.ones(4) for _ in range(w)]

    group = dist.group.WORLD
    for name, bad in (("expanded", expanded), ("crossing", crossing)):
        n = bad.numel()
        refused(f"overlapping all_reduce {name}", lambda b=bad: dist.all_reduce(b))
        refused(
            f"overlapping all_gather {name}",
            lambda b=bad, n=n: dist.all_gather([b, *[torch.ones(n)] * (w - 1)], torch.ones(n)),
        )
        refused(
            f"overlapping into {name}",
            lambda b=bad, n=n: group._allgather_base(b, torch.ones(n // w)).wait(),
        )
        refused(
            f"overlapping scatter {name}",
            lambda b=bad: dist.scatter(b, [b] * w, src=rank),
        )
        refused(f"overlapping recv {name}", lambda b=bad: dist.recv(b, (rank + 1) % w))
        refused(f"overlapping any {name}", lambda b=bad: dist.recv(b))
        refused(
            f"overlapping all_to_all {name}",
            lambda b=bad: dist.all_to_all([b] * w, [one] * w),
        )
    shared = torch.ones(8)
    refused(
        "overlapping outputs",
        lambda: dist.all_gather([shared[i : i + 4] for i in range(w)], one),
    )
    refused(
        "overlapping columns",
        lambda: dist.all_gather([shared[::2]] * w, one),
    )
    refused(
        "non-root gather",
        lambda: group.gather([ones()], [one], root_other(rank, w, "gather")),
    )
    refused(
        "non-root scatter",
        lambda: group.scatter([one], [ones()], root_other(rank, w, "scatter")),
    )
    refused("ranks all_gather", lambda: group.allgather([ones()[1:]], [one]).wait())
    refused("ranks reduce_scatter", lambda: group.reduce_scatter([one], [ones()[1:]]).wait())
    refused("type", lambda: group.allgather([[t.double() for t in ones()]], [one]).wait())
    refused(
        "Split sizes sum",
        lambda: dist.all_to_all_single(one, one.clone(), [1] * w, [1] * w),
    )
    refused(
        "Split sizes odd",
        lambda: dist.all_to_all_single(torch.ones(w + 1), torch.ones(w + 1)),
    )
    refused("same as the rank send", lambda: dist.send(one, rank))
    refused("same as the rank isend", lambda: group.send([one], rank, 0))
    refused("same as the rank recv", lambda: group.recv([one], rank, 0))
    refused("rank 17", lambda: group.send([one], 17, 0))
    refused("rank -3", lambda: group.recv([one], -3, 0))
    maximum = dist.ReduceOp.MAX
    refused("SUM and AVG", lambda: dist.all_reduce(torch.ones(3).to_sparse(), op=maximum))
    assert base.tolist() == [rank, rank]
    assert (one == 1).all()
    dist.all_reduce(one)
    assert one.tolist() == [w] * 4
    return texts


def root_other(rank, w, kind):
    options = {"gather": dist.GatherOptions, "scatter": dist.ScatterOptions}[kind]()
    options.rootRank = (rank + 1) % w
    return options


def test_what_is_refused_says_why_and_hurts_nobody():
    for result in torch_ranks(2, refusals):
        for name, text in result.value.items():
            word = next(
                w
                for w in (
                    "overlapping",
                    "non-root",
                    "Split sizes",
                    "same as the rank",
                    "ranks",
                    "type",
                    "rank 17",
                    "rank -3",
                    "SUM and AVG",
                )
                if name.startswith(w)
            )
            assert word in text, (name, text)
        assert len(result.value) == 29


# ---- Refused here, so told to the group ----


def wrong_slot(rank, w, collective):
    lengths = [2, 3, 4]
    wrong = rank == 1
    start = time.monotonic()
    try:
        if collective == "all_gather":
            outputs = [torch.full((n, 2), -1.0) for n in lengths]
            dist.all_gather(outputs, torch.ones(lengths[rank] + 7 * wrong, 2))
        elif collective == "reduce_scatter":
            inputs = [torch.ones(n, 2) for n in lengths]
            outputs = [torch.full((lengths[rank] + 7 * wrong, 2), -1.0)]
            dist.reduce_scatter(outputs[0], inputs)
        else:  # the lists differ between ranks, each is right in itself
            lengths = [2, 4, 3] if wrong else lengths
            outputs = [torch.full((n, 2), -1.0) for n in lengths]
            dist.all_gather(outputs, torch.ones(lengths[rank], 2))
    except RuntimeError as error:
        assert all((output == -1).all() for output in outputs)
        return str(error), time.monotonic() - start
    return None


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_a_tensor_that_does_not_fit_its_place_ends_the_call_on_every_rank(collective):
    for result in torch_ranks(3, wrong_slot, collective):
        text, took = result.value
        assert took < 5
        for word in (collective, "rank 1", "[10, 2]", "[3, 2]"):
            assert word in text


def test_ranks_with_different_lists_of_lengths_are_told():
    for result in torch_ranks(3, wrong_slot, "lists"):
        text, took = result.value
        assert took < 5
        assert "all_gather" in text
        assert "lengths differ" in text


def wrong_splits(rank, w):
    """Each rank's splits are right in themselves, but 0 sends 1 more than it expects."""
    taken, given = [2] * w, [2] * w
    if rank == 0:
        given = [2, 3, 2]
    start = time.monotonic()
    try:
        dist.all_to_all_single(torch.ones(sum(taken), 5), torch.ones(sum(given), 5), taken, given)
        dist.barrier()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return None


def test_splits_that_do_not_match_between_ranks():
    results = torch_ranks(3, wrong_splits, group_timeout=10)
    for result in results:
        text, took = result.value
        assert took < 5, text
        assert "all_to_all" in text
