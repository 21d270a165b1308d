"""The prover rejects Programs that are broken on purpose.

Each broken Program breaks one promise; the test names the kind of fault that must be found, and
every message must name the rank, the lane and the step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from program_edit import build, edit, message_step
from pycoll import _core
from pycoll._core import Lane, Program, Ref, Step

ROWS = [(c, a) for c in _core.collectives() for a in _core.algorithms(c)]
ROW_IDS = [f"{c}-{a.name}" for c, a in ROWS]
PLACE = r"rank \d+, lane \d+, step \d+ \("

Rows = pytest.mark.parametrize(("collective", "row"), ROWS, ids=ROW_IDS)


def rejected(
    programs: Sequence[Program], kinds: str | set[str], *texts: str, **options: int
) -> _core.CheckResult:
    result = _core.check(programs, **options)  # type: ignore[arg-type]
    assert not result.ok
    assert result.kind in ({kinds} if isinstance(kinds, str) else kinds), result
    assert re.search(PLACE, result.message), result
    for text in texts:
        assert text in result.message, result
    return result


@Rows
def test_any_dropped_step(collective: str, row: _core.AlgorithmInfo) -> None:
    for world_size in (2, 3, 4, 5):
        for rank in range(world_size):
            pristine = build(collective, row.name, world_size)
            for lane in range(len(pristine[rank].lanes)):
                for index in range(len(pristine[rank].steps(lane))):
                    programs = build(collective, row.name, world_size)
                    edit(programs[rank], lambda s, i=index: s.pop(i), lane)
                    result = _core.check(programs)
                    assert not result.ok, (world_size, rank, lane, index)
                    assert result.kind not in ("invalid", "wrong_order")
                    if "no step writes" in result.message and row.needs_lease:
                        assert "output[" in result.message  # this rank would have written
                    elif not programs[rank].steps(lane) or "no step writes" in result.message:
                        assert f"rank {rank}" in result.message
                    else:
                        assert re.search(PLACE, result.message), result


@Rows
def test_any_step_done_twice(collective: str, row: _core.AlgorithmInfo) -> None:
    def harmless(step: Step) -> bool:
        # The same result is stored once more, unless it replaced its own operand (in place).
        in_place = step.src.space == "input" and step.dst.space == "output"
        return step.kind in ("copy", "copy_from") or (step.kind == "reduce_from" and not in_place)

    for rank in range(4):
        pristine = build(collective, row.name, 4)
        for lane in range(len(pristine[rank].lanes)):
            for index, step in enumerate(pristine[rank].steps(lane)):
                programs = build(collective, row.name, 4)
                edit(programs[rank], lambda s, i=index: s.insert(i, s[i]), lane)
                result = _core.check(programs)
                assert result.ok == harmless(step), (rank, lane, index, result)


def test_swapped_chunk_of_a_message() -> None:
    programs = build("all_reduce", "ring", 4)

    def swap(steps: list[Step]) -> None:
        assert steps[1].kind == "recv_reduce_send"
        steps[1].src = Ref("input", (steps[1].src.chunk + 1) % 4)

    edit(programs[2], swap)
    rejected(programs, "mismatch", "rank 2, lane 0, step 1", "expects chunk", "sent by rank 1")


def test_swapped_chunk_of_an_output() -> None:
    programs = build("all_gather", "ring", 4)

    def swap(steps: list[Step]) -> None:
        steps[-1].dst, steps[-2].dst = steps[-2].dst, steps[-1].dst

    edit(programs[1], swap)
    rejected(programs, "wrong_result", "rank 1, lane 0, step", "it must be chunk 0 of rank")


def test_swapped_chunk_of_a_scatter() -> None:
    programs = build("reduce_scatter", "one_shot", 3)

    def swap(steps: list[Step]) -> None:
        steps[0].src, steps[1].src = steps[1].src, steps[0].src

    edit(programs[1], swap)
    rejected(programs, "wrong_result", "parts of different chunks are summed")


def test_cyclic_wait() -> None:
    programs = build("all_reduce", "recursive_doubling", 2)
    for program in programs:
        edit(program, lambda s: s.reverse())
    rejected(
        programs,
        "deadlock",
        "rank 0, lane 0, step 0 (recv_reduce",
        "waits for a message from rank 1 on channel 0",
        "rank 1, lane 0, step 0 (recv_reduce",
        "which waits for rank 0 again",
    )


@pytest.mark.parametrize("algorithm", ["ring", "tree", "recursive_doubling"])
def test_swapped_operands(algorithm: str) -> None:
    for rank in range(5):
        pristine = build("all_reduce", algorithm, 5)
        for lane in range(len(pristine[rank].lanes)):
            for index, step in enumerate(pristine[rank].steps(lane)):
                if not step.kind.startswith("recv_reduce"):
                    continue
                programs = build("all_reduce", algorithm, 5)

                def swap(steps: list[Step], index: int = index) -> None:
                    steps[index].received_first = not steps[index].received_first

                edit(programs[rank], swap, lane)
                rejected(programs, "wrong_order", " + ")


def test_another_order_than_promised() -> None:
    programs = build("all_reduce", "ring", 3)
    for program in programs:
        program.order = "rank_order"
    rejected(programs, "wrong_order", "output[0] is ((1 + 2) + 0): it begins with rank 1")
    programs = build("all_reduce", "recursive_doubling", 4)
    for program in programs:
        program.order = "ring_order"
    rejected(programs, "wrong_order", "a sum of several ranks is added at once")


def test_different_trees_on_different_ranks() -> None:
    # Three ranks send to each other and sum in an order of their own: right, but not alike.
    programs = build("all_reduce", "ring", 3)
    for rank, program in enumerate(programs):
        after, before = (rank + 1) % 3, (rank + 2) % 3
        program.input_chunks = program.output_chunks = program.acc_chunks = 1
        own = Ref("input", 0)
        steps = [
            message_step("send", src=own, to_rank=after),
            message_step("send", src=own, to_rank=before),
            message_step("recv_reduce", src=own, dst=Ref("acc", 0), from_rank=after),
            message_step("recv_reduce", src=Ref("acc", 0), dst=Ref("output", 0), from_rank=before),
        ]
        for step in steps[2:]:
            step.received_first = False
        program.set_steps(0, steps)
    rejected(programs, "wrong_order", "rank 1", "rank 0 combines it as ((0 + 1) + 2)")


def test_doubled_contribution() -> None:
    programs = build("all_reduce", "recursive_doubling", 4)

    def same_peer_again(steps: list[Step]) -> None:
        steps[2].to_rank = steps[0].to_rank
        steps[3].from_rank = steps[1].from_rank

    for program in programs:
        edit(program, same_peer_again)
    rejected(programs, "wrong_result", "output[0] is", "the part of rank 0 is in it 2 times")


def test_missing_contribution() -> None:
    programs = build("all_reduce", "one_shot", 3)
    for program in programs:
        program.groups = [[0, 1, 2], sorted({program.rank, 0, 1})]

        def fewer(steps: list[Step]) -> None:
            steps[2].group = 1

        edit(program, fewer)
    rejected(programs, "wrong_result", "rank 0, lane 0, step 2", "the part of rank 2 is missing")


def test_wrong_wire() -> None:
    programs = build("all_reduce", "ring", 4)

    def flip(steps: list[Step]) -> None:
        steps[2].wire = "value"

    edit(programs[3], flip)
    rejected(programs, "mismatch", "rank 3, lane 0, step 2", "expects a value and gets a partial")


def test_wrong_peer() -> None:
    programs = build("all_reduce", "recursive_doubling", 4)

    def misdirect(steps: list[Step]) -> None:
        steps[2].to_rank = 3

    edit(programs[0], misdirect)
    rejected(programs, "deadlock", "rank 2, lane 0, step 3", "waits for a message from rank 0")


def test_message_that_nobody_receives() -> None:
    programs = build("broadcast", "tree", 3)
    edit(programs[2], lambda s: s.append(message_step("send", src=Ref("output"), to_rank=1)))
    rejected(
        programs, "leftover", "rank 2, lane 0, step 1", "rank 1 never receives", depth=4, rounds=3
    )
    # With fewer slots than rounds the sender gets stuck first.
    rejected(
        programs,
        "deadlock",
        "rank 2, lane 0, step 1",
        "rank 1 has no step for that",
        depth=2,
        rounds=3,
    )


def test_message_of_another_slice() -> None:
    # The second copy of slice 0 arrives where slice 1 is due.
    programs = build("broadcast", "tree", 2)
    edit(programs[0], lambda s: s.insert(0, s[0]))
    rejected(programs, "mismatch", "rank 1, lane 0, step 0", "gets slice 0 in round 1", depth=4)


def test_finished_result_summed_again() -> None:
    # Every rank finishes after the first exchange: AVG would divide twice.
    programs = build("all_reduce", "recursive_doubling", 4)

    def finish_early(steps: list[Step]) -> None:
        steps[1].dst = Ref("output", 0)
        steps[2].src = Ref("output", 0)
        steps[3].src = Ref("input", 0)
        steps[3].wire = "value"

    for program in programs:
        edit(program, finish_early)
    rejected(programs, "wrong_result", "step 3", "finished already", in_place=False)


def test_accumulator_read_before_it_is_written() -> None:
    programs = build("all_reduce", "recursive_doubling", 4)
    edit(programs[1], lambda s: setattr(s[0], "src", Ref("acc", 0)))
    rejected(programs, "race", "rank 1, lane 0, step 0", "acc[0], which this round has not written")


def test_accumulator_is_gone_after_the_round() -> None:
    # Rank 0 sums into acc at the end of a round and sends it at the beginning of the next.
    programs = build("all_reduce", "recursive_doubling", 2)
    edit(programs[0], lambda s: s.append(message_step("copy", src=Ref("input"), dst=Ref("acc"))))
    assert _core.check(programs, in_place=False).ok
    edit(programs[0], lambda s: setattr(s[0], "src", Ref("acc", 0)))
    edit(programs[1], lambda s: setattr(s[1], "wire", "partial"))
    rejected(programs, "race", "rank 0, lane 0, step 0", in_place=False)


@pytest.mark.parametrize(
    ("collective", "algorithm", "barriers"),
    [
        ("all_reduce", "one_shot", 1),
        ("all_reduce", "two_shot", 2),
        ("all_gather", "one_shot", 1),
        ("reduce_scatter", "one_shot", 1),
        ("broadcast", "one_shot", 1),
    ],
)
def test_missing_barrier(collective: str, algorithm: str, barriers: int) -> None:
    for missing in range(barriers):
        for world_size in (2, 3, 4):

            def drop(steps: list[Step], missing: int = missing) -> None:
                places = [i for i, s in enumerate(steps) if s.kind == "barrier"]
                assert len(places) == barriers
                del steps[places[missing]]

            programs = build(collective, algorithm, world_size)
            for program in programs:
                edit(program, drop)
            rejected(programs, "race", "window[")
            programs = build(collective, algorithm, world_size)
            edit(programs[1], drop)
            rejected(programs, {"deadlock", "race"}, "rank 1")


def flagged_broadcast(reader_first: bool) -> list[Program]:
    """Rank 0 shows its data in the window and rings rank 1 with a message, and that is all."""
    programs = build("broadcast", "one_shot", 2)
    bell = message_step("recv", dst=Ref("output", 0), from_rank=0)
    look = message_step("copy_from", dst=Ref("output", 0), from_rank=0)
    programs[0].set_steps(
        0,
        [
            message_step("copy", src=Ref("input", 0), dst=Ref("window", 0)),
            message_step("send", src=Ref("input", 0), to_rank=1),
            message_step("copy", src=Ref("input", 0), dst=Ref("output", 0)),
        ],
    )
    programs[1].set_steps(0, [look, bell] if reader_first else [bell, look])
    return programs


def test_window_buffer_reused_too_early() -> None:
    programs = flagged_broadcast(reader_first=False)
    # Two rounds use the two buffers; the third writes the first again.
    assert _core.check(programs, depth=4, rounds=2).ok
    rejected(programs, "race", "window[0] of rank 0", depth=4, rounds=3)
    # Nor does a single slot help: it is free before rank 1 has looked.
    rejected(programs, "race", "window[0] of rank 0", depth=1, rounds=3)


def test_credit_orders_the_reuse_of_a_window() -> None:
    # Rank 1 looks before it answers with its credit, so one slot holds rank 0 back: with two
    # messages a round, the second send waits for the slot of the first.
    programs = flagged_broadcast(reader_first=False)
    send = programs[0].steps(0)[1]
    bell = programs[1].steps(0)[0]
    edit(programs[0], lambda s: s.insert(2, send))
    edit(programs[1], lambda s: s.append(bell))
    assert _core.check(programs, depth=1, rounds=5).ok
    rejected(programs, "race", "window[0] of rank 0", depth=4, rounds=5)


def test_window_read_before_the_bell() -> None:
    rejected(flagged_broadcast(reader_first=True), "race", "window[0] of rank 0", rounds=1)


def late_sender(lanes: int) -> list[Program]:
    """Rank 1 stores the sum of two ranks before, or beside, sending its own input."""
    programs = build("all_reduce", "recursive_doubling", 2)
    send, receive = programs[1].steps(0)
    programs[1].lanes = [Lane([receive, send])] if lanes == 1 else [Lane([receive]), Lane([send])]
    return programs


def test_input_overwritten_in_place() -> None:
    programs = late_sender(lanes=1)
    assert _core.check(programs, in_place=False).ok
    rejected(
        programs,
        "race",
        "rank 1, lane 0, step 1 (send input[0], to 0)",
        "reads input[0], which in place is output[0] and was overwritten by rank 1, lane 0, step 0",
    )


def test_input_overwritten_in_place_by_another_lane() -> None:
    programs = late_sender(lanes=2)
    assert _core.check(programs, in_place=False).ok
    rejected(programs, "race", "rank 1, lane", "lane 0", "lane 1")


def test_barrier_that_misses_a_rank() -> None:
    programs = build("barrier", "recursive_doubling", 5)
    for program in programs:
        edit(program, lambda s: s.__delitem__(slice(4, 6)))
    rejected(programs, "wrong_result", "the barrier ends here before rank")


def test_barrier_of_two_halves() -> None:
    programs = build("barrier", "one_shot", 4)
    for program in programs:
        program.groups = [[0, 1] if program.rank < 2 else [2, 3]]
    rejected(programs, "wrong_result", ", lane 0, step 0", "ends here before rank 2")


# ---- rooted collectives and all_to_all -----------------------------------------------------------


def test_partial_sum_of_another_rank() -> None:
    # Rank 2 gives its parent what it received, without its own part.
    programs = _core.build_programs("reduce", "ring", 4, root=0)
    edit(programs[2], lambda s: s.__setitem__(0, message_step("recv_send", from_rank=1, to_rank=3)))
    rejected(programs, "mismatch", "rank 3, lane 0, step 0", "expects a partial and gets a value")
    edit(programs[3], lambda s: setattr(s[0], "wire", "value"))
    rejected(programs, "wrong_result", "rank 0, lane 0", "the part of rank 2 is missing")


def test_sum_that_begins_at_the_wrong_place() -> None:
    programs = _core.build_programs("reduce", "direct", 4, root=1)

    def swap(steps: list[Step]) -> None:
        steps[0].from_rank, steps[1].from_rank = steps[1].from_rank, steps[0].from_rank

    edit(programs[1], swap)
    rejected(programs, "wrong_order", "((1 + 3) + 2)", "rank 3 comes after rank 1")


def test_swapped_blocks_of_a_gather() -> None:
    programs = _core.build_programs("gather", "ring", 4, root=3)

    def swap(steps: list[Step]) -> None:
        steps[1].dst, steps[2].dst = steps[2].dst, steps[1].dst

    edit(programs[3], swap)
    rejected(programs, "wrong_result", "rank 3, lane 0, step", "it must be chunk 0 of rank")


def test_block_that_is_kept_too_early() -> None:
    # The first rank of the chain keeps the block of the last.
    programs = _core.build_programs("scatter", "ring", 4, root=0)
    edit(programs[1], lambda s: s.insert(0, s.pop()))
    rejected(programs, "wrong_result", "rank 1, lane 0, step 0", "it must be chunk 1 of rank 0")


def test_block_for_another_rank() -> None:
    programs = build("all_to_all", "direct", 4)

    def swap(steps: list[Step]) -> None:
        steps[0].src, steps[2].src = steps[2].src, steps[0].src

    edit(programs[2], swap)
    rejected(programs, "wrong_result", "it must be chunk", "of rank 2")


def test_blocks_in_the_order_of_a_neighbour() -> None:
    # Everybody receives before it sends.
    programs = build("all_to_all", "direct", 3)
    for program in programs:

        def receive_first(steps: list[Step]) -> None:
            steps[0], steps[1] = steps[1], steps[0]

        edit(program, receive_first)
    rejected(programs, "deadlock", "waits for a message")


def test_lengths_that_only_differ_when_drawn() -> None:
    """Rank 0 takes a block through its own window, where there is room for any length."""
    programs = build("all_gather", "one_shot", 3)

    def through_the_window(steps: list[Step]) -> None:
        last = steps[-1]
        steps[-1:] = [
            message_step("copy_from", dst=Ref("window", 1), from_rank=last.from_rank),
            message_step("copy", src=Ref("window", 1), dst=last.dst),
        ]

    for program in programs:
        program.window_chunks = 2
    edit(programs[0], through_the_window)
    assert _core.check(programs, draws=0).ok
    rejected(programs, "mismatch", "window[", "which has another size")


@pytest.mark.parametrize("collective", ["reduce", "gather", "scatter"])
def test_missing_barrier_of_a_root(collective: str) -> None:
    for world_size in (2, 3, 4):
        programs = _core.build_programs(collective, "one_shot", world_size, root=1)
        for program in programs:
            edit(program, lambda s: [s.remove(x) for x in list(s) if x.kind == "barrier"])
        rejected(programs, "race", "window[")


def test_ring_of_another_order() -> None:
    hosts = [0, 1, 0, 1]
    programs = _core.build_programs("all_reduce", "ring", 4, hosts=hosts)
    assert [p.ring for p in programs] == [[0, 2, 1, 3]] * 4
    assert _core.check(programs).ok
    for program in programs:
        program.ring = []
    rejected(programs, "wrong_order", "rank 1 comes after rank 2")
    programs = _core.build_programs("all_reduce", "ring", 4, hosts=hosts)
    programs[3].ring = [0, 1, 2, 3]
    assert "rank 3 (Program 3 of 4): another ring" in _core.check(programs).message


def test_hierarchical_sums_with_swapped_sides() -> None:
    hosts = [0, 1, 0, 1, 0]
    swapped = 0
    for rank in range(5):
        pristine = _core.build_programs("all_reduce", "hierarchical", 5, hosts=hosts)
        for index, step in enumerate(pristine[rank].steps(0)):
            if not step.kind.startswith("recv_reduce"):
                continue
            programs = _core.build_programs("all_reduce", "hierarchical", 5, hosts=hosts)

            def swap(steps: list[Step], index: int = index) -> None:
                steps[index].received_first = not steps[index].received_first

            edit(programs[rank], swap)
            rejected(programs, "wrong_order", " + ")
            swapped += 1
    assert swapped >= 10
