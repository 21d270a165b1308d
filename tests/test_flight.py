"""What the flight recorder keeps, in the process, in dumps and from outside."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pycoll
from helpers_scripts import fork
from pool import communicator_ranks, run_ranks, torch_ranks
from pycoll.cli.flight_report import as_json, report
from pycoll.flight import Group, Process, live, merge, parse, records

TRANSPORTS = ["shm", "tcp"]


def dumped(directory: str) -> Process:
    (path,) = pycoll.dump_flight_records(directory)
    return parse(path.read_bytes())


def only_group(directory: str) -> Group:
    (group,) = dumped(directory).groups
    return group


def some_calls(communicator, directory):
    rank, world = communicator.rank, communicator.world_size
    before = time.time()
    communicator.all_reduce(np.ones(5, np.float32))
    communicator.all_reduce(np.ones((2, 3), np.int64), op="max", async_op=True).wait()
    communicator.broadcast(np.zeros(7, np.uint8), root=1)
    communicator.all_gather(np.zeros((world, 4), np.float16), np.zeros(4, np.float16))
    communicator.barrier()
    if rank == 0:
        communicator.send(np.arange(3.0), 1, tag=9)
        communicator.recv(np.zeros(6, np.int32), None, tag=4)
    elif rank == 1:
        communicator.recv(np.zeros(3), 0, tag=9)
        communicator.send(np.zeros(6, np.int32), 0, tag=4)
    after = time.time()
    place = Path(directory, str(rank))
    place.mkdir()
    group = only_group(str(place))
    assert (group.rank, group.world_size, group.life) == (rank, world, "live")
    assert group.name == "pycoll/world" and group.current is None and not group.open_messages
    for record in [*group.calls, *group.messages]:
        assert record.state == "done"
        assert before - 0.01 <= record.start <= (record.end or after) <= after + 0.01
    starts = [call.start for call in group.calls]
    assert starts == sorted(starts)
    return group.key, [c.text for c in group.calls], [m.text for m in group.messages]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_calls_are_there(transport, tmp_path):
    ranks = communicator_ranks(
        3, some_calls, str(tmp_path), env={"PYCOLL_TRANSPORT": transport}, timeout=60
    )
    keys, calls, messages = zip(*[rank.value for rank in ranks], strict=True)
    assert len(set(keys)) == 1
    assert calls[0] == calls[1] == calls[2]
    assert calls[0] == [
        "all_reduce #1 (sum, 5 x float32)",
        "all_reduce #2 (max, 6 x int64)",
        "broadcast #3 (root 1, 7 x uint8)",
        "all_gather #4 (4 x float16)",
        "barrier #5",
    ]
    assert messages[0] == [
        "send to rank 1 (tag 9, 3 x float64)",
        "recv from rank 1 (tag 4, 6 x int32)",  # it was from any
    ]
    assert messages[1] == [
        "recv from rank 0 (tag 9, 3 x float64)",
        "send to rank 0 (tag 4, 6 x int32)",
    ]
    assert messages[2] == []


def calls_of_torch(rank, world, directory):
    import torch
    import torch.distributed as dist

    part = dist.new_group([0, 1])
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    if rank < 2:
        dist.all_reduce(torch.ones(2, 2), op=dist.ReduceOp.MAX, group=part, async_op=True).wait()
    place = Path(directory, str(rank))
    place.mkdir()
    groups = {group.world_size: group for group in dumped(str(place)).groups if group.calls}
    assert groups[2].name != groups[3].name if rank < 2 else list(groups) == [3]
    return {size: [call.text for call in group.calls][-3:] for size, group in groups.items()}


def test_groups_of_torch(tmp_path):
    for result in torch_ranks(3, calls_of_torch, str(tmp_path), timeout=60):
        assert result.value[3][-1] == "all_reduce #3 (sum, 4 x float32)"
        if result.rank < 2:
            assert result.value[2] == ["all_reduce #1 (max, 4 x float32)"]


def many_calls(communicator, directory):
    for turn in range(records.RING + 700):
        communicator.all_reduce(np.ones(1 + turn % 7, np.float32))
    place = Path(directory, str(communicator.rank))
    place.mkdir()
    return only_group(str(place))


def test_the_ring_holds_the_latest(tmp_path):
    for result in communicator_ranks(2, many_calls, str(tmp_path)):
        group = result.value
        numbers = [call.sequence for call in group.calls]
        assert numbers == list(range(701, 701 + records.RING))
        for call in group.calls:
            assert call.text == (
                f"all_reduce #{call.sequence} (sum, {1 + (call.sequence - 1) % 7} x float32)"
            )


def read_amid_calls(communicator, directory):
    """A reader never sees a call that was not made, however fast the ring turns."""
    stop = threading.Event()

    def read() -> int:
        looks = 0
        while not stop.is_set():
            (process,) = live.read(live.find([os.getpid()]))
            for call in process.groups[0].calls:
                expected = f"(sum, {1 + (call.sequence - 1) % 7} x float32)"
                assert call.text.endswith(f"all_reduce #{call.sequence} {expected}"), call
            looks += 1
        return looks

    looks: list[int] = []
    failure: list[BaseException] = []

    def watch() -> None:
        try:
            looks.append(read())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    until = time.monotonic() + 3
    turn, more = 0, np.ones(1, np.float32)
    while more[0] > 0:
        for _ in range(70):
            communicator.all_reduce(np.ones(1 + turn % 7, np.float32))
            turn += 1
        # Ranks end together; these calls are of the pattern, too.
        more = np.full(1 + turn % 7, float(time.monotonic() < until), np.float32)
        communicator.all_reduce(more)
        turn += 1
    stop.set()
    thread.join()
    assert not failure, failure
    return turn, looks[0]


def test_reading_amid_calls(tmp_path):
    for result in communicator_ranks(2, read_amid_calls, str(tmp_path), timeout=60):
        turns, looks = result.value
        assert turns > records.RING and looks > 5


def many_groups(rank, world, directory, rounds):
    counts = []
    place = Path(directory, f"dump {rank}")
    place.mkdir()
    store = pycoll.FileStore(os.path.join(directory, "store"), timeout=20)
    with pycoll.Communicator(store, rank, world, name="all the time") as stays:
        stays.all_reduce(np.ones(2))
        for turn in range(rounds):
            failing = pycoll.Communicator(store, rank, world, name=f"round {turn}")
            failing.barrier()
            if turn % 2:
                failing.close()
            else:
                failing.abort("it is no longer needed")
            del failing
            groups = {group.name: group for group in dumped(str(place)).groups}
            counts.append(len(groups))
            assert groups["pycoll/all the time"].calls[-1].sequence == 1 + turn
            assert groups[f"pycoll/round {turn}"].life == ("closed" if turn % 2 else "died")
            stays.barrier()
    return counts


def test_ended_groups_make_room():
    for result in run_ranks(2, many_groups, 12, timeout=60):
        assert result.value == [2] * 12


def waits_for_a_stopped_peer(communicator, directory):
    communicator.barrier()
    Path(directory, f"pid {communicator.rank}").write_text(str(os.getpid()))
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    communicator.all_reduce(np.ones(12, np.int32))
    communicator.barrier()


def stopped_job(transport: str, directory: Path) -> threading.Thread:
    env = {"PYCOLL_TRANSPORT": transport}
    thread = threading.Thread(
        target=communicator_ranks,
        args=(3, waits_for_a_stopped_peer, str(directory)),
        kwargs={"env": env, "timeout": 60},
    )
    thread.start()
    return thread


def pids(directory: Path) -> list[int]:
    until = time.monotonic() + 30
    files = [directory / f"pid {rank}" for rank in range(3)]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < until
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_rank_is_seen_from_outside(transport, tmp_path):
    thread = stopped_job(transport, tmp_path)
    job = pids(tmp_path)
    try:
        until = time.monotonic() + 20
        wrong = None
        while wrong is None and time.monotonic() < until:
            time.sleep(0.2)
            (merged,) = merge.merge(live.read(live.find(job)))
            wrong = merge.astray(merged)
            waiting = [r for r, place in merged.places.items() if place.group.current is not None]
            if waiting != [0, 2]:
                wrong = None
        assert wrong is not None
        assert wrong.text == (
            "ranks 0, 2 waited in all_reduce #2 (sum, 12 x int32); "
            "rank 1 has not come beyond barrier #1"
        )
        saved = live.save(live.find(job), tmp_path)
        assert sorted(parse(path.read_bytes()).pid for path in saved) == sorted(job)
    finally:
        os.kill(job[1], signal.SIGCONT)
        thread.join()
    assert live.read(live.find(job)) == []  # it ended with its processes


def asked_by_signal(communicator, directory):
    if communicator.rank == 1:
        Path(directory, "ready").write_text(str(os.getpid()))
        communicator.recv(np.zeros(3), 0, tag=5)
        return len(list(Path(directory).glob("*.flight")))
    while not Path(directory, "ready").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    pid = int(Path(directory, "ready").read_text())
    os.kill(pid, signal.SIGUSR1)
    until = time.monotonic() + 10
    while not (found := list(Path(directory).glob("*.flight"))) and time.monotonic() < until:
        time.sleep(0.01)
    process = parse(found[0].read_bytes())
    communicator.send(np.zeros(3), 1, tag=5)
    (group,) = process.groups
    return process.pid == pid, [message.text for message in group.open_messages]


def test_a_signal_asks_for_records(tmp_path):
    env = {"PYCOLL_DUMP_DIR": str(tmp_path)}
    ranks = communicator_ranks(2, asked_by_signal, str(tmp_path), env=env)
    assert ranks[0].value == (True, ["recv from rank 0 (tag 5, 3 x float64)"])
    assert ranks[1].value == 1


def with_a_handler(rank, world, directory, place):
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    store = pycoll.FileStore(os.path.join(directory, "store"), timeout=20)
    for name in ("one", "two"):
        pycoll.Communicator(store, rank, world, name=name)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.01)
    return heard


def test_the_handler_that_was_there_is_called(tmp_path):
    (result,) = run_ranks(1, with_a_handler, "", env={"PYCOLL_DUMP_DIR": str(tmp_path)})
    assert result.value == [signal.SIGUSR1]
    assert len(list(tmp_path.glob("*.flight"))) == 1
    (result,) = run_ranks(1, with_a_handler, "", env={"PYCOLL_DUMP_DIR": ""})
    assert result.value == [signal.SIGUSR1]


def forks(communicator, directory):
    communicator.all_reduce(np.ones(2))

    def child() -> str:
        store = pycoll.FileStore(directory + f"/child {communicator.rank}", timeout=20)
        with pycoll.Communicator(store, 0, 1, name="of the child") as own:
            own.barrier()
            (process,) = live.read(live.find([os.getpid()]))
            assert process.pid == os.getpid()
            return ", ".join(group.name for group in process.groups)

    how, said = fork(child)
    communicator.all_reduce(np.ones(2))
    (process,) = live.read(live.find([os.getpid()]))
    return how, said, process.groups[0].calls[-1].sequence


def test_a_forked_child_has_records_of_its_own(tmp_path):
    for result in communicator_ranks(2, forks, str(tmp_path)):
        assert result.value == (0, "pycoll/of the child", 2), result.value


def test_what_cannot_be_written_is_named(tmp_path):
    nowhere = tmp_path / "is not there"

    def dump() -> str:
        store = pycoll.FileStore(tmp_path, timeout=20)
        with pycoll.Communicator(store, 0, 1):
            with pytest.raises(pycoll.OperatingSystemError, match="is not there/pycoll-"):
                pycoll.dump_flight_records(nowhere)
        return "done"

    assert fork(dump) == (0, "done")


@pytest.fixture(scope="module")
def valid(tmp_path_factory) -> bytes:
    place = tmp_path_factory.mktemp("dumps")
    communicator_ranks(2, some_calls, str(place))
    return next(place.glob("0/*.flight")).read_bytes()


@given(st.binary(max_size=300))
def test_garbage_is_refused(data):
    with pytest.raises(ValueError):
        parse(data)


@given(data=st.data())
def test_damaged_dumps_are_read_or_refused(valid, data):
    damaged = bytearray(valid)
    # Where there is something: the heads and the first records.
    places = st.integers(0, 8192 + 4096 * 2)
    for place in data.draw(st.lists(places, min_size=1, max_size=20)):
        damaged[place] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.sampled_from([len(valid), len(valid) - 1, 5000]))]
    try:
        process = parse(bytes(damaged))
    except ValueError:
        return
    assert isinstance(report([process], closed=True), str)
    assert isinstance(as_json([process]), list)
