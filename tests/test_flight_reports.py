"""`pycoll doctor --dump` and `pycoll status`: who went astray, and who comes late."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from pool import alone, communicator_ranks, torch_ranks
from pycoll import dump_flight_records
from pycoll.cli import main
from pycoll.flight import live, merge, parse
from test_flight import TRANSPORTS, pids, stopped_job


def read(directory: Path) -> list[merge.Merged]:
    return merge.merge(parse(file.read_bytes()) for file in directory.glob("*.flight"))


def strays(communicator, how):
    """Rank 1 of 3 does something else in its 21st collective."""
    for turn in range(20):
        communicator.all_reduce(np.ones(1 + turn, np.float32))
    size, op = 100, "sum"
    if communicator.rank == 1:
        size, op = {"size": (99, "sum"), "op": (100, "max"), "dies": (100, "sum")}[how]
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(Exception, match="rank 1"):
        communicator.all_reduce(np.ones(size, np.float32), op=op)
        communicator.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", ["size", "op"])
def test_a_mismatch_is_found_in_the_dumps(transport, how, tmp_path):
    env = {"PYCOLL_TRANSPORT": transport, "PYCOLL_DUMP_DIR": str(tmp_path)}
    communicator_ranks(3, strays, how, env=env)
    (merged,) = read(tmp_path)
    assert list(merged.places) == [0, 1, 2] and not merged.missing
    other = {"size": "sum, 99 x float32", "op": "max, 100 x float32"}[how]
    wrong = merge.astray(merged)
    assert wrong is not None and wrong.text == (
        f"the calls differ: rank 1 called all_reduce #21 ({other}); "
        "ranks 0, 2 called all_reduce #21 (sum, 100 x float32)"
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_rank_leaves_no_records(transport, tmp_path, capsys):
    env = {"PYCOLL_TRANSPORT": transport, "PYCOLL_DUMP_DIR": str(tmp_path)}
    ranks = communicator_ranks(3, strays, "dies", env=env, check=False)
    assert [rank.exitcode for rank in ranks] == [0, -signal.SIGKILL, 0]
    (merged,) = read(tmp_path)
    assert merged.missing == [1]
    assert main(["doctor", "--dump", *map(str, tmp_path.glob("*.flight"))]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no records of ranks 1" in text
    assert "waited in all_reduce #21 (sum, 100 x float32); rank 1 left no records" in text


def quarrels_on_a_part(rank, world):
    import torch
    import torch.distributed as dist

    part = dist.new_group([1, 2])
    dist.all_reduce(torch.ones(4))
    if rank > 0:
        with pytest.raises(RuntimeError, match="dtypes differ"):
            dist.all_reduce(
                torch.ones(8, dtype=torch.float32 if rank == 1 else torch.int32), group=part
            )
    dist.barrier()


def test_the_group_that_went_astray_is_named(tmp_path, capsys):
    torch_ranks(3, quarrels_on_a_part, env={"PYCOLL_DUMP_DIR": str(tmp_path)})
    assert main(["doctor", "--json", "--dump", *map(str, tmp_path.glob("*.flight"))]) == 0
    groups = json.loads(capsys.readouterr().out)
    wrong = [group for group in groups if group["astray"] and group["world_size"] == 2]
    assert len(wrong) == 1
    assert "float32" in wrong[0]["astray"]["text"] and "int32" in wrong[0]["astray"]["text"]
    assert [rank["life"] for rank in wrong[0]["ranks"]] == ["died", "died"]


def one_is_late(communicator, directory):
    for turn in range(40):
        if communicator.rank == 2:
            time.sleep(0.1 if turn == 17 else 0.01)
        communicator.all_reduce(np.ones(3))
    Path(directory, str(communicator.rank)).mkdir()
    dump_flight_records(Path(directory, str(communicator.rank)))


def test_who_comes_late_and_by_how_much(tmp_path, capsys):
    communicator_ranks(3, one_is_late, str(tmp_path))
    files = list(tmp_path.glob("*/*.flight"))
    (merged,) = merge.merge(parse(file.read_bytes()) for file in files)
    worst, *others = merge.lateness(merged)
    assert (worst.rank, worst.calls) == (2, 40) and worst.last > sum(one.last for one in others)
    assert worst.mean_late >= 0.01
    assert worst.worst_late >= 0.1 and worst.worst_call.startswith("all_reduce #18 ")
    assert merge.astray(merged) is None
    assert main(["doctor", "--dump", *map(str, files)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Of the last 40 collectives rank 2 came last to [234][0-9]; on average", text)
    assert "First that went astray" not in text


def test_status_of_a_running_job(tmp_path, capsys):
    thread = stopped_job("shm", tmp_path)
    job = pids(tmp_path)
    try:
        until = time.monotonic() + 20
        text = ""
        while text.count("in all_reduce #2 (sum, 12 x int32) for") < 2 and time.monotonic() < until:
            time.sleep(0.1)
            assert main(["status", *map(str, job)]) == 0
            text = capsys.readouterr().out
        words = " ".join(text.split())
        assert f"rank 1 pid {job[1]}" in words and "in no collective for" in words
        assert "rank 1 has not come beyond barrier #1." in words
        assert main(["status", "--json", *map(str, job)]) == 0
        (group,) = json.loads(capsys.readouterr().out)
        assert [rank["pid"] for rank in group["ranks"]] == job
        assert [rank["started"] for rank in group["ranks"]] == [2, 1, 2]
        assert main(["status", "--save", str(tmp_path), str(job[0])]) == 0
        assert len(list(tmp_path.glob("*.flight"))) == 1
    finally:
        os.kill(job[1], signal.SIGCONT)
        thread.join()
    assert main(["status", str(job[0])]) == 1
    assert "no process with a group of pycoll" in capsys.readouterr().out


def test_wrong_use_is_said(tmp_path, capsys):
    broken = tmp_path / "x.flight"
    broken.write_bytes(b"no")
    for arguments, why in (
        (["doctor", "--dump", str(broken)], "2 bytes are no flight records"),
        (["doctor", "--dump", str(tmp_path / "y")], "No such file"),
        (["status", "--watch", "0"], "--watch is a number of seconds above 0"),
    ):
        assert main(arguments) == 2
        assert why in capsys.readouterr().err


def own_records():
    return live.read(live.find([os.getpid()]))


def test_processes_without_groups_are_no_part_of_it():
    assert alone(own_records) == []
