"""Random collectives while ranks are killed, stopped, interrupted, cut off and starved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pool import RankResult
from soak.calls import Calls, WrongValue
from soak.faults import FAULTS
from soak.rounds import Outcome, choose, complaints
from soak.run import soak


def check(seeds: range) -> None:
    report = soak(seeds)
    print(report.text())
    assert not report.complaints, "\n\n".join(report.complaints)
    assert report.injected.total() == len(seeds) == report.survived.total()
    assert report.wrong_values == 0


def test_every_fault_once():
    check(range(len(FAULTS)))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_thousand_faults():
    check(range(1000, 2040))


def ended(rank: int, **fields: object) -> RankResult:
    return RankResult(rank, value=Outcome(**{"done": 0, **fields}), exitcode=0)  # type: ignore[arg-type]


def test_what_the_soak_complains_about():
    """A round that is not survived is seen to be so."""
    killed = replace(choose(0, ["shm"]), world=2, victim=1, steps=30)
    assert killed.kind.name == "killed"
    gone = RankResult(1, exitcode=-9)
    told = ended(0, done=4, type="PeerError", error="rank 1 died", seconds=0.1)
    assert complaints(killed, [told, gone]) == []
    late = replace(told.value, seconds=60.0)
    for result, why in (
        (ended(0, done=4, type="PeerError", error="a rank died"), "no word of rank 1"),
        (RankResult(0, value=late, exitcode=0), "came after 60.0 s"),
        (ended(0, done=4), "ended after 4 calls without an error"),
        (ended(0, done=30, after="WrongValue: sum"), "afterwards WrongValue"),
        (RankResult(0, exitcode=-6, stderr="terminate called"), "exit code -6"),
        (RankResult(0, exitcode=-9, stuck=True), "stuck"),
    ):
        (said,) = complaints(killed, [result, gone])
        assert why in said
    delayed = replace(killed, fault=[fault.name for fault in FAULTS].index("delayed"))
    (said,) = complaints(delayed, [told, ended(1, done=30)])
    assert "PeerError" in said


def test_a_wrong_value_is_noticed():
    class Broken:
        rank, world_size = 0, 1

        def all_reduce(self, array, op):
            array += 1

    calls = Calls(Broken(), 1)
    with pytest.raises(WrongValue, match="rank 0: (sum|max) of call 0 at 0"):
        while True:
            calls.all_reduce()
