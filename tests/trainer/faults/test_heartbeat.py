"""Heartbeats of real processes over a real store: one is stopped, all hang, one reports a fault, one is done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from server.up.forks import Forked
from tests.trainer.ranks import Ranks as Cases
from tests.waiting import wait_until
from tests.warm import TRAINERS, warm
from trainer.faults.heartbeat import DONE, Beat, Watched, hang, silence, watched_by


class Ranks:
    """Processes that only beat."""

    def __init__(self, root: Path, world: int, what: str) -> None:
        self._root = root / what
        self._root.mkdir()
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
        self.processes: list[Forked] = []
        for rank in map(str, range(world)):
            said, errors = self._root / f"{rank}.said", self._root / f"{rank}.errors"
            said.touch()
            arguments = ["tests.trainer.faults.beating", rank, str(world), what]
            self.processes.append(warm(TRAINERS).start(arguments, env, said, errors=errors))
        wait_until(lambda: all(file.read_text() == "there\n" for file in self._root.glob("*.said")), 120)

    def said(self, rank: int) -> str:
        self.processes[rank].wait(60)
        return (self._root / f"{rank}.errors").read_text()


@pytest.fixture
def end() -> Iterator[list[Ranks]]:
    started: list[Ranks] = []
    yield started
    for ranks in started:
        for process in ranks.processes:
            process.kill()


def test_a_stopped_rank_is_named_and_killed_and_all_leave(tmp_path: Path, end: list[Ranks]) -> None:
    end.append(ranks := Ranks(tmp_path, 3, "stop"))
    stopped = ranks.processes[1]
    ranks.store.get("hotswap/0/beat/1")  # waits for its first
    os.kill(stopped.pid, signal.SIGSTOP)
    said = ranks.said(0)
    assert "no heartbeat for" in said
    assert f"rank 1 (process {stopped.pid} on" in said
    assert "train of step 7" in said
    assert ranks.said(2) == "", "one says it, the others leave"
    assert stopped.wait(60) == -signal.SIGKILL
    assert [process.wait(60) for process in (ranks.processes[0], ranks.processes[2])] == [1, 1]


def test_a_hang_is_told_by_place_with_the_stacks(tmp_path: Path, end: list[Ranks]) -> None:
    end.append(ranks := Ranks(tmp_path, 2, "hang"))
    said = ranks.said(0) + ranks.said(1)
    assert "no rank got on for 1.5 s" in said
    assert "train of step 7" in said
    assert "publish of step 7" in said
    assert "Current thread" in said, "where each thread is"
    assert [process.wait(60) for process in ranks.processes] == [1, 1]


@pytest.mark.broad
def test_a_reported_fault_ends_the_others_and_one_that_is_done_is_not_missed(tmp_path: Path, end: list[Ranks]) -> None:
    end.append(ranks := Ranks(tmp_path, 2, "fault"))
    assert ranks.processes[0].wait(60) == 1
    assert ranks.store.get("hotswap/0/fault") == b"the disk is full"
    end.append(ranks := Ranks(tmp_path, 2, "done"))
    assert [process.wait(60) for process in ranks.processes] == [0, 0]
    assert json.loads(ranks.store.get("hotswap/0/beat/1"))["phase"] == "done"


def test_leaving_on_request_is_no_fault_and_a_fault_is_told_when_the_watch_has_ended(one_rank: Cases) -> None:
    """The others would end themselves for it, in the middle of closing; and a rank does not end itself for its own."""
    told = one_rank.call("left_with", errors=["Preempted", "RankFailed", "DataError"])
    assert told == [["", "", "DataError: it is over"]]


STOPPING = """
import os, sys, threading, time
from trainer.launch import RunDir, Stopping

stopping = Stopping(float(sys.argv[1]), RunDir.of_environment().being_torn_down)
print("ready", flush=True)
if sys.argv[2] == "deaf":
    threading.Lock().acquire()
    blocked = threading.Semaphore(0)
    blocked.acquire()  # as in a collective whose peer is gone
while not stopping.requested:
    time.sleep(0.01)
stopping.close()
sys.exit(7)
"""


def sigterm(root: Path, grace_s: float, what: str, **environment: str) -> tuple[int, float]:
    """The exit status of a process that is sent SIGTERM, and the seconds that took."""
    (root / "stopping.py").write_text(STOPPING)
    process = subprocess.Popen(
        [sys.executable, str(root / "stopping.py"), str(grace_s), what],
        env=os.environ | {"PYTHONPATH": os.getcwd()} | environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    psutil.Process(process.pid).terminate()
    return process.wait(60), time.monotonic() - began


def test_sigterm(tmp_path: Path) -> None:
    """Noticed at the next step; by a process that waits for ever too, which leaves after its grace; obeyed at once when
    a launcher ends what a failed rank has left."""
    assert sigterm(tmp_path, 100, "listens")[0] == 7
    status, seconds = sigterm(tmp_path, 1.0, "deaf")
    assert (status, seconds >= 1.0) == (143, True)
    assert sigterm(tmp_path, 100, "deaf", HOTSWAP_RUN_DIR=str(tmp_path))[0] == 143
    (tmp_path / "leave").touch()
    assert sigterm(tmp_path, 100, "listens", HOTSWAP_RUN_DIR=str(tmp_path))[0] == 7


def beat(rank: int = 1, number: int = 1, phase: str = "train", step: int = 7, still_s: float = 0.0) -> Beat:
    return Beat(rank, 100 + rank, "host", number, phase, step, still_s)


def test_silence_is_counted_from_the_last_new_beat() -> None:
    peer = Watched(1, now=10.0)
    assert peer.see(None, 12.0) == 2.0
    assert peer.see(beat(number=1), 13.0) == 0.0
    assert peer.see(beat(number=1), 18.0) == 5.0
    assert peer.see(beat(number=2), 19.0) == 0.0
    assert peer.see(beat(number=3, phase=DONE), 20.0) == 0.0
    assert peer.see(beat(number=3, phase=DONE), 99.0) == 0.0, "one that is done is not missed"


def test_who_is_silent_is_named_with_where_it_was() -> None:
    peer = Watched(1, now=0.0)
    assert "rank 1, which has sent none" in silence(peer, 5.0)
    peer.see(beat(), 1.0)
    assert "rank 1 (process 101 on host), train of step 7" in silence(peer, 5.0)


def test_everyone_is_watched_by_one() -> None:
    assert sorted(watched_by(rank, 4) for rank in range(4)) == [0, 1, 2, 3]
    assert all(watched_by(rank, 4) != rank for rank in range(4))


def test_a_hang_is_one_only_when_nobody_gets_on() -> None:
    assert hang([beat(0, still_s=50), beat(1, still_s=2)], 30) == ""
    assert hang([], 30) == ""
    found = hang([beat(0, still_s=50), beat(1, still_s=40), beat(2, phase="publish", still_s=31)], 30)
    assert "no rank got on for 30 s" in found
    assert "wait for rank 2." in found


def test_a_rank_that_is_done_does_not_hide_a_hang() -> None:
    """Its last beat is never followed by another, so it would look for ever as if it had just got on."""
    found = hang([beat(0, still_s=50), beat(1, phase=DONE, still_s=1)], 30)
    assert "no rank got on for 30 s" in found
    assert "rank 1" not in found
    assert hang([beat(0, phase=DONE, still_s=50)], 30) == ""


def test_without_a_majority_nobody_is_suspected() -> None:
    found = hang([beat(0, still_s=50), beat(1, phase="rollout", still_s=40)], 30)
    assert "rollout of step 7" in found
    assert "wait for" not in found
