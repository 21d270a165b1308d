"""Programs that are not safe to run are refused, with the rank, the lane and the step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from program_edit import build, edit, message_step
from pycoll import _core
from pycoll._core import Lane, Program, Ref

INVALID: dict[str, tuple[str, str, Callable[[Program], object], str]] = {
    "chunk": (
        "all_reduce", "ring",
        lambda p: edit(p, lambda s: setattr(s[0], "src", Ref("input", 4))), "of only 4",
    ),
    "negative chunk": (
        "all_reduce", "ring",
        lambda p: edit(p, lambda s: setattr(s[0], "src", Ref("input", -1))), "of only 4",
    ),
    "accumulator": (
        "all_reduce", "ring",
        lambda p: edit(p, lambda s: setattr(s[1], "src", Ref("acc", 0))), "of only 0",
    ),
    "writes input": (
        "all_gather", "ring",
        lambda p: edit(p, lambda s: setattr(s[1], "dst", Ref("input", 0))), "dst may not be input",
    ),
    "reduces an output": (
        "all_reduce", "ring",
        lambda p: edit(p, lambda s: setattr(s[1], "src", Ref("output", 0))),
        "src may not be output",
    ),
    "no source": (
        "all_reduce", "ring",
        lambda p: edit(p, lambda s: setattr(s[0], "src", Ref())), "src may not be none",
    ),
    "partial into output": (
        "all_reduce", "ring",
        lambda p: edit(p, lambda s: setattr(s[-1], "wire", "partial")),
        "a partial message cannot be stored in output",
    ),
    "value into acc": (
        "broadcast", "tree",
        lambda p: (
            setattr(p, "acc_chunks", 1),
            edit(p, lambda s: setattr(s[0], "dst", Ref("acc", 0))),
        ),
        "a value message cannot be stored in acc",
    ),
    "peer": (
        "all_reduce", "ring",
        lambda p: edit(p, lambda s: setattr(s[0], "to_rank", 4)), "rank 4 is no peer",
    ),
    "itself": (
        "all_reduce", "ring",
        lambda p: edit(p, lambda s: setattr(s[0], "to_rank", 1)), "rank 1 is no peer",
    ),
    "reads its own window as a peer": (
        "all_gather", "one_shot",
        lambda p: edit(p, lambda s: setattr(s[-1], "from_rank", 1)), "rank 1 is no peer",
    ),
    "channel": (
        "all_reduce", "ring",
        lambda p: edit(p, lambda s: setattr(s[0], "channel", 1)), "channel 1 of only 1",
    ),
    "two lanes at one end": (
        "all_reduce", "ring",
        lambda p: setattr(p, "lanes", [p.lanes[0], Lane([p.steps(0)[0]])]),
        "lane 0 uses the same end",
    ),
    "group": (
        "all_reduce", "one_shot",
        lambda p: edit(p, lambda s: setattr(s[1], "group", 1)), "no group 1",
    ),
    "group order": (
        "all_reduce", "one_shot", lambda p: setattr(p, "groups", [[1, 0, 2, 3]]), "sorted",
    ),
    "group twice": (
        "all_reduce", "one_shot", lambda p: setattr(p, "groups", [[0, 1, 1, 2]]), "unique",
    ),
    "group without itself": (
        "all_reduce", "one_shot", lambda p: setattr(p, "groups", [[0, 2]]), "without this rank",
    ),
    "group of strangers": (
        "all_reduce", "one_shot", lambda p: setattr(p, "groups", [[0, 1, 4]]), "no rank of 4",
    ),
    "remote chunk": (
        "all_gather", "one_shot",
        lambda p: edit(p, lambda s: setattr(s[-1], "remote_chunk", 1)), "window[1] of only 1",
    ),
    "remote size": (
        "all_reduce", "two_shot",
        lambda p: edit(p, lambda s: setattr(s[-1], "remote_chunk", 1)), "another size",
    ),
    "sizes in a step": (
        "all_reduce", "two_shot",
        lambda p: edit(p, lambda s: setattr(s[0], "src", Ref("input", 1))), "different sizes",
    ),
    "copy onto itself": (
        "all_reduce", "two_shot",
        lambda p: edit(p, lambda s: setattr(s[0], "src", s[0].dst)), "copies onto itself",
    ),
    "only the root has input": (
        "broadcast", "tree",
        lambda p: edit(p, lambda s: s.append(
            message_step("copy", src=Ref("input"), dst=Ref("output")))),
        "only the root",
    ),
    "only the root has output": (
        "reduce", "ring", lambda p: edit(p, lambda s: s.append(
            message_step("copy", src=Ref("input"), dst=Ref("output")))),
        "only the root of a reduce has an output",
    ),
    "output of a gather": (
        "gather", "direct", lambda p: edit(p, lambda s: s.append(
            message_step("recv", dst=Ref("output", 2), from_rank=2))),
        "only the root of a gather has an output",
    ),
    "only the root scatters": (
        "scatter", "direct", lambda p: edit(p, lambda s: s.append(
            message_step("send", src=Ref("input", 2), to_rank=2))),
        "only the root of a scatter may read input",
    ),
    "passes on what it cannot measure": (
        "all_gather", "ring", lambda p: edit(p, lambda s: s.append(
            message_step("recv_send", from_rank=0, to_rank=2))),
        "unknown length",
    ),
    "another rank's block": (
        "all_gather", "ring",
        lambda p: edit(p, lambda s: setattr(s[1], "dst", Ref("output", 2))), "different sizes",
    ),
    "own block elsewhere": (
        "reduce_scatter", "one_shot",
        lambda p: edit(p, lambda s: setattr(s[-1], "src", Ref("input", 2))), "different sizes",
    ),
    "barrier of unequal rounds": (
        "all_to_all", "direct",
        lambda p: (
            setattr(p, "groups", [[0, 1, 2, 3]]),
            edit(p, lambda s: s.append(message_step("barrier", group=0))),
        ),
        "different numbers of rounds",
    ),
    "window of unequal rounds": (
        "all_to_all", "direct", lambda p: setattr(p, "window_chunks", 1),
        "different numbers of rounds",
    ),
    "chunks of an exchange": (
        "all_to_all", "direct", lambda p: setattr(p, "input_chunks", 2), "2 input and 4 output",
    ),
    "ring of too few": (
        "all_reduce", "ring", lambda p: setattr(p, "ring", [0, 1, 2]), "each of 4 ranks once",
    ),
    "ring twice": (
        "all_reduce", "ring", lambda p: setattr(p, "ring", [0, 1, 2, 2]), "each of 4 ranks once",
    ),
    "chunks of a gather": (
        "all_gather", "ring", lambda p: setattr(p, "output_chunks", 3), "1 input and 3 output",
    ),
    "no channels": ("all_reduce", "ring", lambda p: setattr(p, "channels", 0), "0 channels"),
    "window of more chunks": (
        "all_reduce", "one_shot", lambda p: setattr(p, "window_chunks", 2), "2 window chunks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_invalid_program(name: str) -> None:
    collective, algorithm, change, text = INVALID[name]
    programs = build(collective, algorithm, 4)
    _core.validate(programs[1])
    change(programs[1])
    with pytest.raises(_core.InvalidArgumentError, match="rank 1") as error:
        _core.validate(programs[1])
    assert text in str(error.value)
    result = _core.check(programs)
    assert result.kind == "invalid"
    assert "rank 1" in result.message


def test_programs_of_different_things() -> None:
    ring = build("all_reduce", "ring", 4)
    assert _core.check([]).kind == "invalid"
    assert "not the number of Programs" in _core.check(ring[:3]).message
    assert "not its place" in _core.check([ring[1], ring[0], *ring[2:]]).message
    mixed = [*ring[:3], build("reduce_scatter", "ring", 4)[3]]
    assert "rank 3 (Program 3 of 4): another collective" in _core.check(mixed).message
    mixed = [*ring[:3], build("all_reduce", "tree", 4)[3]]
    assert _core.check(mixed).kind == "invalid"
    with pytest.raises(_core.InvalidArgumentError, match="depth and rounds must be at least 1"):
        _core.check(ring, depth=0)
