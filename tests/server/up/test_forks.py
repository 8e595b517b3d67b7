"""Processes forked by a fork server: what they have of their own, how they end, and orders that come to nothing."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from server.up import forks
from server.up.forks import Forks
from tests.waiting import ended, wait_until

STARTS = ("server.up.forks",)
NOTHING = "tests.warm:prepare_bare"
PROGRAM = "tests.server.up.forked"
ENDLESS, SHORT = [PROGRAM, "time.sleep(3600)"], ["this"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Forks]:
    found = forks.begin(NOTHING, tmp_path / "forks.log")
    yield found
    found.stop()


def said(server: Forks, tmp_path: Path, code: str, **how: Any) -> str:
    log = tmp_path / "said"
    log.unlink(missing_ok=True)
    assert server.start([PROGRAM, code], {**os.environ, "OWN": "its own"}, log, **how).wait(120) == 0
    return log.read_text()


def test_a_forked_process_is_one_of_its_own(server: Forks, tmp_path: Path) -> None:
    code = "print(os.environ['OWN'], os.getpgid(0) == os.getpid(), sys.orig_argv[1:3])"
    assert said(server, tmp_path, code).startswith("its own True ['-m', 'tests.server.up.forked']\n")
    title = "import psutil; print(psutil.Process().cmdline())"
    assert f"'-m', '{PROGRAM}'" in said(server, tmp_path, title)


def test_it_has_what_it_is_to_inherit(server: Forks, tmp_path: Path) -> None:
    read, write = os.pipe()
    code = f"os.write({write}, b'through it')"
    said(server, tmp_path, code, inherited=[write])
    os.close(write)
    assert os.read(read, 100) == b"through it"
    assert os.read(read, 100) == b"", "nothing else has it open: the fork server has not kept it"
    os.close(read)


@pytest.mark.parametrize(
    ("code", "status"), [("raise SystemExit(5)", 5), ("x", 1), ("os.abort()", -signal.SIGABRT), ("1", 0)]
)
def test_its_status_is_that_of_its_program(server: Forks, tmp_path: Path, code: str, status: int) -> None:
    process = server.start([PROGRAM, code], dict(os.environ), tmp_path / "log")
    assert process.wait(120) == status, (tmp_path / "log").read_text()


def test_one_that_has_ended_had_an_id(server: Forks, tmp_path: Path) -> None:
    """Its start and its end may be told at once."""
    process = server.start(["this"], dict(os.environ), tmp_path / "log")
    wait_until(lambda: (tmp_path / "log").exists() and "Namespaces" in (tmp_path / "log").read_text(), 60)
    later = server.start(["this"], dict(os.environ), tmp_path / "log")
    assert later.wait(120) == 0
    assert process.pid > 0


def test_a_program_leaves_in_order(server: Forks, tmp_path: Path) -> None:
    """Functions that it has registered for its end run, and threads are waited for."""
    code = "import atexit, threading, time; atexit.register(print, 'last'); "
    code += "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()"
    assert said(server, tmp_path, code).split()[-2:] == ["thread", "last"]


def test_signals_reach_one_that_is_yet_to_be_forked(tmp_path: Path) -> None:
    """The fork server still imports; nothing waits for it meanwhile."""
    server = forks.begin("tests.server.up.forked:prepare", tmp_path / "forks.log")
    process = server.start(ENDLESS, dict(os.environ), tmp_path / "log")
    assert (process.poll(), process.started, server.ready) == (None, None, False)
    process.terminate()
    (tmp_path / "go").touch()
    assert process.wait(120) == -signal.SIGTERM
    assert server.ready
    server.stop()


def test_nothing_is_started_by_a_server_that_has_ended(tmp_path: Path) -> None:
    server = forks.begin("tests.no_such_module:prepare", tmp_path / "forks.log")
    process = server.start(ENDLESS, dict(os.environ), tmp_path / "log")
    assert process.wait(120) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError, match="was never started"):
        _ = process.pid
    assert server.look()
    later = server.start(ENDLESS, dict(os.environ), tmp_path / "log")
    later.terminate()
    assert later.wait(120) == -signal.SIGTERM
    assert "No module named 'tests.no_such_module'" in (tmp_path / "forks.log").read_text()
    server.stop()


@pytest.mark.parametrize("killed", [True, False])
def test_what_it_has_forked_ends_with_it(server: Forks, tmp_path: Path, killed: bool) -> None:
    process = server.start(ENDLESS, dict(os.environ), tmp_path / "log")
    found = psutil.Process(process.pid)
    if killed:
        psutil.Process(found.ppid()).kill()
    else:
        server.stop()
    wait_until(lambda: ended(found))
    assert process.wait(120) == -signal.SIGTERM


def test_it_ends_with_what_has_begun_it(tmp_path: Path) -> None:
    """And so does all that it has forked."""
    program = "import os, sys, time; from pathlib import Path; from server.up import forks; "
    program += f"server = forks.begin({NOTHING!r}, Path({str(tmp_path / 'forks.log')!r})); "
    program += f"print(server.start({ENDLESS!r}, dict(os.environ), Path({str(tmp_path / 'log')!r})).pid, flush=True); "
    program += "time.sleep(3600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        forked = psutil.Process(int(process.stdout.readline()))
        server = psutil.Process(forked.ppid())
        process.kill()
    for one in (forked, server):
        wait_until(lambda one=one: ended(one))


def test_a_fork_that_is_nothing_yet_ends_too(tmp_path: Path) -> None:
    """It has no group to send a signal to, and has asked the kernel for none."""
    server = forks.begin(f"{PROGRAM}:prepare_slow_forks", tmp_path / "forks.log")
    forked = psutil.Process(server.start(ENDLESS, dict(os.environ), tmp_path / "log").pid)
    of_forked = psutil.Process(forked.ppid())
    server._socket.close()
    wait_until(lambda: ended(of_forked))
    (tmp_path / "go").touch()
    wait_until(lambda: ended(forked))
    server.stop()


def test_what_was_ordered_by_an_interrupted_call_is_killed(
    server: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = server.start(ENDLESS, dict(os.environ), tmp_path / "log")
    forked = psutil.Process(psutil.Process(endless.pid).ppid())

    def interrupted(*_: Any) -> None:
        raise TimeoutError("the time is over")

    send = socket.send_fds
    with monkeypatch.context() as patched:
        patched.setattr(socket, "send_fds", lambda *args: interrupted(send(*args)))
        with pytest.raises(TimeoutError):
            server.start(ENDLESS, dict(os.environ), tmp_path / "log")
    assert server.start(SHORT, dict(os.environ), tmp_path / "short").wait(120) == 0
    assert "Beautiful is better than ugly." in (tmp_path / "short").read_text()
    wait_until(lambda: (server.look(), {child.pid for child in forked.children()} == {endless.pid})[1])
    assert endless.poll() is None


def test_a_process_with_many_descriptors_has_a_fork_server(tmp_path: Path) -> None:
    """select() takes none beyond 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2048)), hard))
    with contextlib.ExitStack() as held:
        while held.enter_context(open(os.devnull)).fileno() < 1024:
            pass
        server = forks.begin(NOTHING, tmp_path / "forks.log")
        held.callback(server.stop)
        assert server.start(SHORT, dict(os.environ), tmp_path / "log").wait(120) == 0


def test_a_connection_that_goes_takes_its_own_processes_alone(tmp_path: Path) -> None:
    """Of a fork server that listens; an answer may be unread."""
    from tests.warm import BARE, connected

    one, other = connected(BARE), connected(BARE)
    stays = one.start(ENDLESS, dict(os.environ), tmp_path / "log")
    goes = psutil.Process(other.start(ENDLESS, dict(os.environ), tmp_path / "log").pid)
    other.start(SHORT, dict(os.environ), tmp_path / "log")
    poll = select.poll()
    poll.register(other._socket, select.POLLIN)
    assert poll.poll(60_000), "an answer is there"
    other.stop()
    wait_until(lambda: ended(goes))
    assert one.start(SHORT, dict(os.environ), tmp_path / "log").wait(120) == 0
    assert stays.poll() is None
    stays.kill()
    assert stays.wait(120) == -signal.SIGKILL
    one.stop()
