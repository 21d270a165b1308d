"""The prover on Programs that use peers' own vectors: what a lease allows, and until when."""

from __future__ import annotations

import pytest

from program_edit import build, edit
from pycoll import _core
from pycoll._core import Program, Ref, Step

ROWS = [(c, a.name) for c in _core.collectives() for a in _core.algorithms(c) if a.needs_lease]
Rows = pytest.mark.parametrize(("collective", "algorithm"), ROWS)


def kind_of(programs: list[Program], *texts: str) -> str:
    result = _core.check(programs)
    for text in texts:
        assert text in result.message, result
    return result.kind


def test_there_are_some() -> None:
    assert {c for c, _ in ROWS} >= {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}


@Rows
def test_nobody_may_end_while_peers_use_its_vectors(collective: str, algorithm: str) -> None:
    for world_size in (2, 3, 5):
        programs = build(collective, algorithm, world_size)
        for program in programs:
            edit(program, lambda s: s.pop())
        kind = kind_of(programs, "may have ended, and its caller have its vectors back")
        assert kind == "race"


@Rows
def test_a_barrier_before_the_use_is_none_after_it(collective: str, algorithm: str) -> None:
    programs = build(collective, algorithm, 3)
    for program in programs:
        edit(program, lambda s: s.insert(0, s.pop()))
    assert kind_of(programs, "may have ended") == "race"


@Rows
def test_what_is_not_lent_is_not_touched(collective: str, algorithm: str) -> None:
    for attribute in ("lends_input", "lends_output"):
        programs = build(collective, algorithm, 3)
        lenders = [program for program in programs if getattr(program, attribute)]
        if not lenders:
            continue
        setattr(lenders[-1], attribute, False)
        verb = "reads the input" if attribute == "lends_input" else "writes the output"
        text = f"{verb} of rank {lenders[-1].rank}, which that rank keeps"
        assert kind_of(programs, text) == "race"


@Rows
def test_without_a_lease_nothing_of_a_peer_is_used(collective: str, algorithm: str) -> None:
    programs = build(collective, algorithm, 3)
    for program in programs:
        program.needs_lease = False
    assert kind_of(programs) == "invalid"
    programs = build(collective, algorithm, 3)
    programs[1].needs_lease = False
    programs[1].lends_input = programs[1].lends_output = False
    assert kind_of(programs) == "invalid"


def test_two_ranks_that_sum_the_same_chunk() -> None:
    programs = build("all_reduce", "zero_copy", 3)

    def take_the_next(steps: list[Step]) -> None:
        steps[0].src = steps[0].dst = Ref("input", 1)
        steps[0].dst = Ref("output", 1)
        steps[0].remote_chunk = 1

    edit(programs[0], take_the_next)
    assert kind_of(programs) in ("race", "wrong_result")


def test_sums_for_the_root_alone_are_no_all_reduce() -> None:
    programs = build("all_reduce", "zero_copy", 3)
    for program in programs:
        edit(program, lambda s: setattr(s[0], "to_rank", 0))
    assert kind_of(programs, "rank 1: no step writes output[0]") == "wrong_result"


def test_a_window_cannot_be_lent() -> None:
    programs = build("all_reduce", "zero_copy", 2)
    edit(programs[0], lambda s: setattr(s[0], "remote", "output"))
    assert kind_of(programs, "reads a peer's output") == "invalid"


def test_explain_shows_the_sums_at_every_rank() -> None:
    programs = build("all_reduce", "zero_copy", 3)
    shown = _core.trace(programs, [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0]])
    assert shown.rows[-1].values == [[111.0, 222.0, 333.0]] * 3
    # Each rank reads two vectors and writes two.
    assert len(shown.transfers) == 12
