"""What is concluded from heartbeats."""

from __future__ import annotations

from trainer.faults.heartbeat import DONE, Beat, Watched, hang, silence, watched_by


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
    assert "rank 1, which never did" in silence(peer, 5.0)
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
