"""The state and the checkpoint that `hotswap up` takes, what it discards, and what runs and is left alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from server.errors import CliError
from server.up import server as up
from server.up.paths import ServerInfo
from server.up.processes import Child as RealChild
from server.up.state import StateDir
from tests.server.up.restarts import MODEL, Answers, Up, frozen, save_checkpoint
from tests.waiting import wait_until


def test_another_checkpoint_is_refused_with_the_choices_and_nothing_is_changed(server: Up, tmp_path: Path) -> None:
    server.start()
    server.make_key()
    server.stop()
    other = save_checkpoint(tmp_path / "other", 9.0)
    before = server.records()
    with pytest.raises(CliError) as refused:
        server.start(model=str(other))
    for choice in (f"--model {server.checkpoint}", f"weights push {other}", "--state-dir", "--name", "--fresh"):
        assert choice in str(refused.value)
    assert "1 API key(s), inference closed to who has none, versions 1 to 1" in str(refused.value)
    server.stop()
    assert server.records() == before
    server.start()
    assert server.served() == (1, 1.0)


def test_the_same_checkpoint_elsewhere_is_the_same(server: Up, tmp_path: Path) -> None:
    server.ran(2.0)
    moved = server.checkpoint.rename(tmp_path / "moved")
    server.start(model=str(moved))
    assert server.served() == (2, 2.0)
    server.stop()
    save_checkpoint(moved, 7.0)
    assert f"{moved} has changed since" in server.start(model=str(moved)).said[0]
    assert server.served() == (2, 2.0)


def test_any_checkpoint_may_begin_where_nothing_was_committed(server: Up, tmp_path: Path) -> None:
    server.server = server.new()
    server.server.start()  # its publication fails
    server.kill()
    server.start(model=str(save_checkpoint(tmp_path / "other", 9.0)))
    assert server.served() == (1, 9.0)


def test_another_name_in_the_same_state_is_refused(server: Up, tmp_path: Path) -> None:
    server.ran()
    (file := tmp_path / "models.yaml").write_text(f"models: [{{name: other, checkpoint: {server.checkpoint}}}]")
    for options in ({"name": "other"}, {"model": None, "models": file}):
        with pytest.raises(CliError, match="serves toy, not other"):
            server.start(**options)
        server.stop()
    server.start()
    assert server.served() == (1, 1.0)


def test_what_a_version_has_besides_must_be_run(server: Up, tmp_path: Path) -> None:
    draft = save_checkpoint(tmp_path / "draft", 0.5)
    drafting = ("--speculative-config", json.dumps({"model": str(draft), "method": "draft_model"}))
    server.ran()
    said = server.start(vllm_args=drafting).said  # named for the first time: a version has it from now on
    assert said[-1] == f"version 1 has no draft model: a new version gets {draft}"
    assert [part.name for part in server.version(server.active().version).parts] == ["draft"]
    server.stop()
    with pytest.raises(CliError, match="version 2 has a draft model: name one with --speculative-config"):
        server.start()
    server.stop()
    assert "publish" not in server.start(vllm_args=drafting).children


@pytest.mark.parametrize(
    ("name", "options"), [("logs", {}), ("store.db", {}), ("store.db", {"fresh": True}), ("versions", {})]
)
def test_what_is_in_the_way_in_the_state_directory_is_one_line(
    server: Up, name: str, options: dict[str, object]
) -> None:
    server.state_dir.mkdir()
    if name == "store.db":
        (server.state_dir / name).mkdir()
    else:
        (server.state_dir / name).write_text("somebody's")
    with pytest.raises(CliError, match="cannot be used"):
        server.start(**options)
    assert server.server is not None
    assert server.server.children == {}


def test_fresh_discards_all_but_the_admin_key_and_says_what(server: Up, tmp_path: Path) -> None:
    """It may begin with another checkpoint."""
    started = server.start()
    server.trained(2.0)
    server.make_key()
    admin_key = started.admin_key
    server.stop()
    server.start()
    server.kill()
    started = server.start(fresh=True, model=str(save_checkpoint(tmp_path / "other", 9.0)))
    assert server.told == [
        "discarding 1 API key(s), inference closed to who has none, versions 1 to 2 and a history of 1 swap(s)"
    ]
    assert server.served() == (1, 9.0)
    assert server.door(None) == "anonymous"
    assert started.admin_key == admin_key
    assert not list((server.state_dir / "versions").glob("[0-9]*"))
    assert len(server.slots) == 1


def test_a_discard_that_was_begun_comes_to_its_end(server: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    server.start()
    server.make_key()
    server.stop()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("server.up.state.remove_copies", killed)
        with pytest.raises(KeyboardInterrupt):
            server.start(fresh=True)
    server.kill()
    server.start()
    assert server.door(None) == "anonymous"
    assert server.served() == (1, 1.0)
    assert server.told == []


def test_fresh_takes_the_copies_of_this_store_wherever_they_are_and_nothing_else(server: Up, tmp_path: Path) -> None:
    steps, used = tmp_path / "steps", tmp_path / "used"
    (steps / "1000").mkdir(parents=True)
    (steps / "1000" / "model.safetensors").write_bytes(b"a trainer's")
    server.ran(persist=used)
    shutil.copytree(used / "1", steps / "1")  # a copy that nobody has said is this store's
    with frozen(steps):
        server.start(fresh=True, persist="off")
    assert not used.exists()
    server.stop()
    server.start(fresh=True, persist=steps)
    assert (steps / "1" / "version.json").exists()
    assert (steps / "1000" / "model.safetensors").exists()
    assert server.served() == (2, 1.0)
    server.stop()
    server.start(fresh=True)
    assert [path.name for path in steps.iterdir()] == ["1000"]
    server.stop()
    server.ran(fresh=True, persist=used)
    server.start()  # what is in its own place is its own
    assert server.served() == (1, 1.0)


def test_copies_of_another_store_are_neither_used_nor_discarded(server: Up, tmp_path: Path) -> None:
    server.options["persist"] = tmp_path / "copies"
    server.ran()
    other = Up(server.checkpoint, tmp_path / "other-state")
    other.ran()
    before = other.records()
    for options in ({}, {"fresh": True}):
        with frozen(tmp_path / "copies"), pytest.raises(CliError, match="copies of another store's versions"):
            other.start(persist=tmp_path / "copies", **options)
        other.stop()
        assert other.records() == before


def test_up_twice_is_refused_and_changes_nothing(server: Up, shm: Path) -> None:
    started = server.start()
    ServerInfo("http://h:1", "http://h:2", MODEL, started.store, "/key", os.getpid()).write(server.state_dir)
    for options in ({}, {"fresh": True}, {"port": started.config.port}):
        second = server.new(**options)
        refused = pytest.raises(CliError, match=rf"already runs with its state in .*process {os.getpid()}\)")
        with frozen(server.state_dir), frozen(shm), refused, second:
            pass
        with frozen(server.state_dir), frozen(shm):
            second.stop()
    assert all(child.calls == [] for child in started.children.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("which", ["port", "admin_port"])
def test_a_port_that_is_taken_is_said_before_anything_is_changed(server: Up, shm: Path, which: str) -> None:
    server.ran()
    started = server.start(persist="off")
    ServerInfo("http://h:1", "http://h:2", MODEL, started.store, "/key", os.getpid()).write(server.state_dir)
    server.kill()
    second = server.new(fresh=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if which == "port":
            second.config = up.replace(second.config, port=port)
        else:
            second.admin_port = port
        with frozen(server.state_dir), frozen(shm), pytest.raises(CliError, match=f"port {port}"), second:
            pass
    server.start()
    assert server.served() == (1, 1.0)


def test_state_directories_share_no_memory_whatever_their_port_and_name(server: Up, tmp_path: Path) -> None:
    one, other = server.new(port=8123), Up(server.checkpoint, tmp_path / "elsewhere").new(port=8123)
    assert one.arena != other.arena
    assert one.arena == server.new(port=8124).arena


def test_a_server_that_was_replaced_in_its_directory_removes_nothing(server: Up) -> None:
    """The directory was removed under the server, and another one was started there."""
    first = server.start()
    server.state_dir.rename(server.state_dir.with_name("aside"))
    second = server.start()
    ServerInfo("http://h:1", "http://h:2", MODEL, second.store, "/key", os.getpid()).write(server.state_dir)
    with frozen(server.state_dir), frozen(second.arena):
        first.stop()
    shutil.rmtree(server.state_dir)
    second.stop()
    for stopped in (first, second):
        assert all(child.calls == ["stop"] for child in stopped.children.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("eligible", "asleep", "readyz", "ready"),
    [
        ([0, 1], [], 200, True),
        ([0], [], 200, False),
        ([0], [1], 200, True),
        ([0], [1], 503, False),
        ([], [0, 1], 503, True),
        ([], [], 200, False),
    ],
)
def test_it_is_ready_when_each_instance_serves_or_sleeps_as_it_was_ordered_to(
    server: Up, eligible: list[int], asleep: list[int], readyz: int, ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = server.start(instances=2)
    looks = [(f"instance-{i}", None, i in eligible) for i in range(2)]
    asleep_now = [f"instance-{i}" for i in asleep]
    monkeypatch.setattr(up.httpx, "get", Answers(looks, asleep=asleep_now, readyz=readyz).get)
    assert started._ready() is ready


def test_processes_that_a_killed_up_left_are_waited_for_and_ended(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.claim()
    log = tmp_path / "log"
    ends = RealChild("ends", ["tests.server.up.stubborn", "gentle"], log, {}, [state.inherited])
    stays = RealChild("stays", ["tests.server.up.stubborn"], log, {}, [state.inherited])
    wait_until(lambda: log.read_text().count("runs") == 2, 120)
    ends.process.terminate()
    state.release()
    state.claim()
    told: list[str] = []
    state.end_leftovers(0.2, 0.2, told.append)
    assert ends.process.wait() == -signal.SIGTERM
    assert stays.process.wait() == -signal.SIGKILL
    assert str(stays.process.pid) in told[0]
    state.release()
