"""Which algorithm is chosen: a table that covers every call, and what PYCOLL_ALGO changes."""

from __future__ import annotations

import itertools

import pytest

from pycoll import _core

SIZES = (0, 1, 4096, 64 << 10, 1 << 20, 1 << 30, 1 << 62)
select = _core.select_algorithm


@pytest.mark.parametrize("collective", _core.collectives())
def test_every_call_has_an_algorithm_that_can_run(collective: str) -> None:
    needs_window = {a.name: a.needs_window for a in _core.algorithms(collective)}
    for bytes, window, several in itertools.product(SIZES, (False, True), (False, True)):
        name = select(collective, bytes, has_window=window, several_hosts=several)
        assert window or not needs_window[name]


def test_large_all_reduces_follow_hosts() -> None:
    chosen = {
        (bytes, several): select("all_reduce", bytes, has_window=False, several_hosts=several)
        for bytes in (4, 64 << 20)
        for several in (False, True)
    }
    assert chosen == {
        (4, False): "recursive_doubling",
        (4, True): "recursive_doubling",
        (64 << 20, False): "ring",
        (64 << 20, True): "hierarchical",
    }


def test_rules_come_first_where_they_cover_the_size() -> None:
    rules = "reduce=direct:0-1k,ring:1k-1M;gather=ring"
    found = [
        select("reduce", bytes, has_window=False, several_hosts=False, rules=rules)
        for bytes in (0, 1023, 1024, (1 << 20) - 1, 1 << 20)
    ]
    assert found == ["direct", "direct", "ring", "ring", "ring"]
    # Larger ones follow the built-in table, windows first.
    assert (
        select("reduce", 1 << 20, has_window=True, several_hosts=False, rules=rules) == "one_shot"
    )
    assert select("gather", 5, has_window=True, several_hosts=False, rules=rules) == "ring"
    forced = "all_reduce=hierarchical"
    assert select("all_reduce", 4, has_window=True, several_hosts=False, rules=forced) == (
        "hierarchical"
    )


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ("all_reduce=ring:8k-8k", "covers no size"),
        ("all_reduce=ring:9k-8k", "covers no size"),
        ("reduce=ring;gather=ring;reduce=tree", "names reduce twice"),
        ("scatter=tree", "no algorithm of scatter; there are: auto, direct, ring, one_shot"),
        ("reduce_all=ring", "all_reduce, all_gather, .*gather, scatter, all_to_all"),
    ],
)
def test_rules_that_mean_nothing(rules: str, text: str) -> None:
    with pytest.raises(_core.InvalidArgumentError, match=text):
        select("barrier", 0, has_window=False, several_hosts=False, rules=rules)
