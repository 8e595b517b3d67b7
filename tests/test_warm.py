"""What becomes of an order to a warm process whose answer nobody waits for any more."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import wait_until
from tests.warm import BARE, Warm

ENDLESS, SHORT = ["timeit", "-n1", "-r1", "import time; time.sleep(3600)"], ["this"]


@pytest.fixture
def warm() -> Warm:
    return Warm(BARE)


def interrupted(*_: Any) -> None:
    raise TimeoutError("the test's time is over")


@pytest.mark.parametrize("order", ["start", "poll"])
def test_the_next_one_gets_its_own_answer(
    warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """And what was started for nobody is gone."""
    endless = warm.start(ENDLESS, dict(os.environ), tmp_path / "log")
    forked = psutil.Process(psutil.Process(endless.pid).ppid())
    others = {child.pid for child in forked.children()}
    send = socket.send_fds
    ask = endless.poll if order == "poll" else lambda: warm.start(ENDLESS, dict(os.environ), tmp_path / "log")
    with monkeypatch.context() as patched:
        patched.setattr(socket, "send_fds", lambda *args: interrupted(send(*args)))
        with pytest.raises(TimeoutError):
            ask()
    short = warm.start(SHORT, dict(os.environ), tmp_path / "short")
    assert short.wait(60) == 0
    assert "Beautiful is better than ugly." in (tmp_path / "short").read_text()
    assert endless.poll() is None
    wait_until(lambda: {p.pid for p in forked.children() if p.status() != psutil.STATUS_ZOMBIE} <= others)
    endless.kill()
    assert endless.wait(60) == -9


def test_a_question_about_an_unknown_process_ends_nobody(warm: Warm, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="has started no process 0"):
        warm.ask({"poll": 0})
    assert warm.start(SHORT, dict(os.environ), tmp_path / "log").wait(60) == 0


def test_one_that_is_killed_with_its_answer_unread_ends_nobody_else(warm: Warm, tmp_path: Path) -> None:
    other = Warm(BARE)
    socket.send_fds(other._socket, [b'{"number": 1, "poll": 0}'], [])
    poll = select.poll()
    poll.register(other._socket, select.POLLIN)
    assert poll.poll(60_000), "the answer is there"
    other._socket.close()
    assert warm.start(SHORT, dict(os.environ), tmp_path / "log").wait(60) == 0
