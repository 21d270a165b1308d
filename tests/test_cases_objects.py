"""Public bug reports, kind E: all-to-all with splits, objects."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from helpers_cases import (
    TRANSPORTS,
    Guarded,
    all_words,
    error_of,
    numbered,
    on_own_group,
    run_case,
    same,
    still_works,
)

over_each_transport = pytest.mark.parametrize("transport", TRANSPORTS)

# ---- E10 ----


def e10_splits(rank, w):
    rows = [[(2 * s + 3 * t + 1) % 5 for t in range(w)] for s in range(w)]  # zeros among them
    for columns in ((), (3,)):
        sources = [numbered(s, (sum(rows[s]), *columns), torch.int64) for s in range(w)]
        taken = [rows[s][rank] for s in range(w)]
        output = Guarded(torch.zeros((sum(taken), *columns), dtype=torch.int64))
        dist.all_to_all_single(output.tensor, sources[rank], taken, rows[rank])
        output.check(torch.cat([sources[s].split(rows[s])[rank] for s in range(w)]), columns)
        same(sources[rank], numbered(rank, (sum(rows[rank]), *columns), torch.int64), "input")
    return "done"


def e10_refused(rank, w):
    output = Guarded(torch.zeros(4, 2))
    for target, source, to, of in (
        ((4, 2), (4, 2), [1] * w, [1] * w),  # the sums are 3
        ((4, 2), (4, 2), None, None),  # 4 rows, 3 ranks
        ((3, 2), (3, 2), [1, 1], [1, 1, 1]),  # for two ranks
        ((3, 2), (3, 2), [-1, 2, 2], [1, 1, 1]),
        ((4, 2), (3, 2), None, [1, 1, 1]),
    ):
        text = error_of(
            lambda t=target, s=source, to=to, of=of: dist.all_to_all_single(
                output.tensor.flatten()[: 2 * t[0]].view(t), torch.ones(s), to, of
            )
        )
        assert "split sizes" in text.lower() or "divide equally" in text.lower(), text
        output.check(torch.zeros(4, 2))
    still_works(rank, w)
    return "done"


def e10_not_transposed(rank, w, n):
    """Rank 0 sends rank 1 more than that expects."""
    rows = [n] * w
    if rank == 0:
        rows[1] += 2
    source = numbered(rank, (sum(rows),))
    output = Guarded(torch.full((w * n,), -1.0))

    def call(group):
        start = time.monotonic()
        text = ""
        try:
            dist.all_to_all_single(output.tensor, source, [n] * w, rows, group=group)
            dist.barrier(group)  # who was through already is told here
        except RuntimeError as error:
            text = str(error)
        return time.monotonic() - start, text

    took, text = on_own_group(rank, w, 6, call)
    output.check(output.tensor.clone())
    return took, text


@over_each_transport
def test_e10_all_to_all_single_of_uneven_splits(transport):
    """E10: uneven splits are exact; sums that do not match are refused."""
    run_case(3, e10_splits, transport=transport)
    run_case(3, e10_refused, transport=transport)


@over_each_transport
@pytest.mark.parametrize("n", [4, 50_000])
def test_e10_splits_that_are_not_transposed(transport, n):
    """E10: an error on the ranks involved, long before the timeout."""
    results = [r.value for r in run_case(3, e10_not_transposed, n, transport=transport)]
    for took, text in results[:2]:
        assert took < 4, (took, text)
        all_words(text, "all_to_all", "rank 0", "rank 1")
    all_words(results[1][1], f"{n} elements", "another length")


def test_e10_control_on_gloo():
    """E10: the same splits on Gloo."""
    run_case(3, e10_splits, backend="gloo")


# ---- E11, E12 ----


def e11_objects(rank, w, large=40):
    sizes = [1, 2, large]

    def thing(r):
        if r >= len(sizes):
            return {"rank": r}
        return {"rank": r, "bytes": bytes([r]) * (sizes[r] << 20), "tensor": numbered(r, (3, 4))}

    def compare(one, r):
        expected = thing(r)
        assert one.keys() == expected.keys()
        assert one["rank"] == r
        if "bytes" in one:
            assert one["bytes"] == expected["bytes"]
            same(one["tensor"], expected["tensor"])

    gathered = [None] * w
    dist.all_gather_object(gathered, thing(rank))
    for r, one in enumerate(gathered):
        compare(one, r)
    del gathered
    odd = [None, {"nested": [torch.arange(3), (None, "x" * rank)]}, rank][rank % 3]
    gathered = [0] * w
    dist.all_gather_object(gathered, odd)
    assert gathered[0] is None
    assert gathered[2] == 2
    same(gathered[1]["nested"][0], torch.arange(3))
    assert gathered[1]["nested"][1] == (None, "x")
    gathered = [0] * w if rank == 1 else None
    dist.gather_object(("mine", rank, None), gathered, dst=1)
    if rank == 1:
        assert gathered == [("mine", r, None) for r in range(w)]
    sent = [thing(1), None, "text"] if rank == 2 else [0, 0, 0]
    dist.broadcast_object_list(sent, src=2)
    compare(sent[0], 1)
    assert sent[1:] == [None, "text"]
    taken = [0]
    dist.scatter_object_list(taken, [("for", r, "y" * 1000 * r) for r in range(w)], src=0)
    assert taken == [("for", rank, "y" * 1000 * rank)]
    return "done"


def e11_cannot_be_pickled(rank, w):
    def call(group):
        gathered = [None] * w
        thing = (lambda: None) if rank == 1 else {"rank": rank}
        start = time.monotonic()
        error = None
        try:
            dist.all_gather_object(gathered, thing, group=group)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        took = time.monotonic() - start
        time.sleep(max(0, 2.5 - took))  # rank 1 does not leave before the others have noticed
        return took, error

    return on_own_group(rank, w, 1.5, call)


@over_each_transport
def test_e11_objects_of_any_size(transport):
    """E11: 1, 2 and 40 MiB, None, nested tensors; gathered, broadcast, scattered."""
    run_case(3, e11_objects, transport=transport)


@over_each_transport
def test_e11_an_object_that_cannot_be_pickled(transport):
    """E11: its rank raises; the others get an error that names it, and do not hang."""
    results = [r.value for r in run_case(3, e11_cannot_be_pickled, transport=transport)]
    assert "pickle" in str(results[1][1]).lower()
    for took, error in (results[0], results[2]):
        assert took < 6
        all_words(str(error), "rank 1", "all_gather")


def test_e11_control_on_gloo():
    """E11: Gloo carries them, too."""
    run_case(3, e11_objects, 2, backend="gloo")


def e12_subgroup(rank, w):
    members = [1, 3]
    group = dist.new_group(members)
    for name, root in (("src", 3), ("group_src", 1)):
        if rank not in members:
            continue
        sent = [("from", rank), rank] if rank == 3 else [None, None]
        dist.broadcast_object_list(sent, group=group, **{name: root})
        assert sent == [("from", 3), 3]
        taken = [None]
        things = [("to", 1), ("to", 3)] if rank == 3 else None
        dist.scatter_object_list(taken, things, group=group, **{name: root})
        assert taken == [("to", rank)]
        gathered = [None, None] if rank == 3 else None
        where = {name.replace("src", "dst"): root}
        dist.gather_object({"mine": rank}, gathered, group=group, **where)
        assert gathered == ([{"mine": 1}, {"mine": 3}] if rank == 3 else None)
        one = torch.tensor([float(rank)])
        dist.broadcast(one, group=group, **{name: root})
        assert one.item() == 3
    if rank in members:
        for call in (
            lambda: dist.broadcast_object_list([rank], src=0, group=group),
            lambda: dist.scatter_object_list([None], [1, 2], src=0, group=group),
            lambda: dist.gather_object(rank, [None] * 2, dst=0, group=group),
        ):
            text = error_of(call, ValueError)
            assert "0" in text, text
            assert "rank" in text.lower(), text
        gathered = [None, None]
        dist.all_gather_object(gathered, rank, group=group)
        assert gathered == members
        dist.barrier(group)
    still_works(rank, w)
    return "done"


@over_each_transport
def test_e12_objects_in_a_subgroup(transport):
    """E12: roots by global rank and by the rank in the group; others are refused by number."""
    run_case(4, e12_subgroup, transport=transport)


def test_e12_control_on_gloo():
    """E12: the same on Gloo."""
    run_case(4, e12_subgroup, backend="gloo")


# Right for any number of ranks from 2 on, with these arguments: run over mixed transports, too.
ANY_WORLD = [
    (e10_splits, ()),
    (e11_cannot_be_pickled, ()),
]
