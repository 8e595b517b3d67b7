"""What `hotswap up` goes on with after an end of any kind, what it refuses, and what it leaves alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from server.cli import up
from server.cli.config import UpConfig
from server.cli.errors import CliError, OtherCheckpoint, PortTaken, StateLost, StateTaken
from server.cli.paths import ServerInfo
from server.cli.processes import Child as RealChild
from server.cli.state import StateDir
from server.errors import Unauthorized
from tests.server.cli.restarts import (
    KEYS,
    MODEL,
    PERSISTING,
    STARTING,
    STOPPING,
    SWAPPING,
    Child,
    Up,
    committed,
    flip,
    frozen,
    killed_at,
    run,
    save_checkpoint,
    swap_until,
    swapped,
)
from tests.waiting import wait_until
from tests.weightsync.tensors import model
from weightsync import Publisher, SyncStore
from weightsync.control.records import CounterRecord, InstanceRecord
from weightsync.persist.disk import Disk
from weightsync.publish.checkpoint import Checkpoint

NOBODY = 2**22 + 1  # no process has such an id


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="hotswap-test-", dir="/dev/shm"))
    monkeypatch.setattr(up, "DEFAULT_ROOT", directory)
    monkeypatch.delenv("HOTSWAP_ARENA", raising=False)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def server(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Up]:
    monkeypatch.setattr(up, "Child", Child)
    found = Up(save_checkpoint(tmp_path / "model", 1.0), tmp_path / "state")
    yield found
    if found.server is not None:
        found.server.state.release()


# how a run ends, and what the next goes on with


def test_a_stop_copies_to_disk_and_gives_the_memory_back(server: Up, shm: Path) -> None:
    server.start()
    assert server.served() == (1, 1.0)
    server.stop()
    assert list(shm.iterdir()) == []
    server.start()
    assert server.trained(2.0) == 2
    server.stop()
    assert list(shm.iterdir()) == []
    started = server.start()
    assert "publish" not in started.children
    assert server.served() == (2, 2.0)
    assert re.fullmatch(
        r"going on with version 2, committed 2\d{3}-.*, from its copy in .*versions; a rollback goes to version 1",
        started.said[-1],
    )
    run(committed(started.store, 1))
    assert server.served() == (1, 1.0)
    assert server.trained(3.0) == 3


@pytest.mark.parametrize("end", ["kill", "lose_power"])
def test_an_end_without_warning_loses_no_key_version_number_or_history(server: Up, end: str) -> None:
    server.start()
    server.trained(2.0)
    server.stop()  # on disk: version 2
    server.start()
    key = server.make_key()
    history = {name: value for name, value in server.records().items() if name.startswith(KEYS.history)}
    assert len(history) == 2
    getattr(server, end)()
    started = server.start()
    assert server.served() == (2, 2.0)
    assert ("shared memory" if end == "kill" else "its copy in") in started.said[-1]
    assert server.door(key) == "somebody"
    with pytest.raises(Unauthorized):
        server.door(None)
    assert server.records().items() >= history.items()
    assert server.trained(3.0) == 3


def test_the_door_stays_closed_when_the_last_key_is_gone(server: Up) -> None:
    server.start()
    key = server.make_key()
    server.forget_keys()
    server.kill()
    for _ in range(2):
        server.start()
        for asked in (None, key):
            with pytest.raises(Unauthorized):
                server.door(asked)
        server.stop()
    server.start(fresh=True)
    assert "0 API key(s), inference closed to who has none, " in server.told[0]


@pytest.mark.parametrize("torn", ["model.safetensors", "manifest.json", "version.json"])
def test_a_torn_copy_is_not_served_and_the_version_before_it_is(server: Up, torn: str) -> None:
    server.start()
    server.trained(2.0)
    server.stop()
    os.truncate(file := server.state_dir / "versions" / "2" / torn, file.stat().st_size // 2)
    started = server.start()
    assert started.said[0].startswith("version 2 is lost: ")
    assert started.said[1].startswith("going on with version 1, ")
    assert server.served() == (1, 1.0)
    assert server.trained(3.0) == 3
    server.stop()
    server.start()
    assert server.served() == (3, 3.0)


def test_memory_that_was_damaged_meanwhile_is_not_served(server: Up) -> None:
    server.start()
    server.trained(2.0)
    server.stop()
    server.start()
    (slot,) = [path for path in server.slots if str(path) == server.version(2).slot]
    server.kill()
    flip(slot)
    assert "its copy in" in server.start().said[-1]
    assert server.served() == (2, 2.0)


def test_a_version_that_is_lost_is_said_and_the_newest_whole_one_is_served(server: Up) -> None:
    server.start()
    server.trained(2.0)
    server.stop()
    server.start()
    server.trained(3.0)  # not on disk yet
    server.lose_power()
    said = server.start().said
    assert said[0].startswith("version 3 is lost: ")
    assert said[1].startswith("going on with version 2, ")
    assert server.served() == (2, 2.0)
    assert server.active().epoch == 4
    assert server.version(3).state == "retired"
    assert server.trained(4.0) == 4


def test_with_nothing_whole_the_checkpoint_becomes_a_new_version(server: Up) -> None:
    server.options["persist"] = "off"
    server.start()
    server.trained(2.0)
    server.lose_power()
    started = server.start()
    assert re.match("version 2 is lost: .* becomes a new version", started.said[-1])
    assert server.served() == (3, 1.0)


def test_without_copies_a_stop_keeps_the_memory_and_says_so(server: Up) -> None:
    server.options["persist"] = "off"
    server.start()
    server.trained(2.0)
    server.stop()
    assert re.match("the active version stays in shared memory", server.told[-1])
    assert "persist" not in server.start().children
    assert server.served() == (2, 2.0)


def test_a_copy_that_could_not_be_written_keeps_the_memory(server: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Child, "persists", False)
    server.start()
    server.trained(2.0)
    server.stop()
    assert "stays in shared memory" in server.told[-1]
    server.start()
    assert server.served() == (2, 2.0)


def test_a_first_version_that_is_lost_before_its_commit_is_never_committed(server: Up) -> None:
    server.server = server.new()
    server.server.start()
    with Publisher(server.server.store, model=MODEL) as publisher:
        publisher.publish(model(5.0), wait=False)
    server.lose_power()
    server.server = started = server.new()
    started.start()
    run(swap_until(started.store, lambda swap: swap.phase == "aborted"))
    assert server.swap().reason == "version 1 is retired: choose one that is ready"
    server.publish(started)
    assert server.served() == (2, 1.0)


def test_a_swap_that_was_under_way_is_ended_and_no_number_is_given_out_twice(server: Up) -> None:
    url = server.start().store
    assert server.trained(2.0, commit=False) == 2
    staging = InstanceRecord("instance-0", "http://h:1", state="SERVING", pid=NOBODY)
    with contextlib.closing(SyncStore(url)) as store:
        store.put(KEYS.instance("instance-0"), staging.to_json())
    run(swap_until(url, lambda swap: (swap.target, swap.phase) == (2, "prepare"), ask=2))
    with Publisher(url, model=MODEL) as publisher, publisher.begin(Checkpoint(server.checkpoint).schema) as draft:
        assert draft.version == 3  # it is given up before it is written
    server.kill()
    started = server.start()
    assert KEYS.instance("instance-0") not in server.records()
    run(swap_until(started.store, lambda swap: swap.phase == "aborted"))
    assert server.swap().target == 2
    assert server.served() == (1, 1.0)
    assert server.trained(4.0) == 4


@pytest.mark.parametrize(("first", "then"), [("one", None), (None, "one"), ("one", "two"), ("one", "off")])
def test_copies_are_read_where_they_were_written_whatever_is_asked_now(
    server: Up, tmp_path: Path, first: str | None, then: str | None
) -> None:
    def place(name: str | None) -> Path | str | None:
        return tmp_path / name if name not in (None, "off") else name

    server.start(persist=place(first))
    server.trained(2.0)
    server.stop()
    said = server.start(persist=place(then)).said
    assert f"its copy in {place(first) or server.state_dir / 'versions'}" in said[-1]
    assert server.served() == (2, 2.0)
    server.stop()
    server.start(persist=place(then))
    assert server.served() == (2, 2.0)


def test_a_disk_that_is_not_mounted_is_not_a_version_that_is_lost(server: Up, tmp_path: Path) -> None:
    disk, aside = tmp_path / "disk", tmp_path / "aside"
    server.options["persist"] = disk
    server.start()
    server.trained(2.0)
    server.stop()
    disk.rename(aside)
    disk.mkdir()
    before = server.records()
    for options in ({}, {}, {"persist": None}):  # the next time, too, and when the option is forgotten
        with pytest.raises(StateLost, match=f"version 2 .* copy in {disk}.* mount it.*--persist off"):
            server.start(**options)
        server.stop()
    assert list(disk.iterdir()) == []
    assert {key: value for key, value in server.records().items() if KEYS.versions in key or key == KEYS.active} == {
        key: value for key, value in before.items() if KEYS.versions in key or key == KEYS.active
    }
    disk.rmdir()
    aside.rename(disk)
    server.start()
    assert server.served() == (2, 2.0)
    server.stop()
    disk.rename(aside)
    assert "becomes a new version" in server.start(persist="off").said[-1]
    assert server.served() == (3, 1.0)


def test_numbers_that_are_on_disk_were_given_out(server: Up) -> None:
    """By a store that was put back from an older copy."""
    server.start()
    server.trained(2.0)
    server.stop()
    with contextlib.closing(SyncStore(f"sqlite://{server.state_dir}/store.db")) as store:
        store.put(KEYS.counter, CounterRecord(1).to_json())
    server.start()
    assert server.trained(3.0) == 3


# which checkpoint


def test_another_checkpoint_is_refused_with_the_choices_and_nothing_is_changed(server: Up, tmp_path: Path) -> None:
    server.start()
    server.make_key()
    server.stop()
    other = save_checkpoint(tmp_path / "other", 9.0)
    before = server.records()
    with pytest.raises(OtherCheckpoint) as refused:
        server.start(model=str(other))
    for choice in (f"--model {server.checkpoint}", f"weights push {other}", "--state-dir", "--name", "--fresh"):
        assert choice in str(refused.value)
    assert "1 API key(s), inference closed to who has none, versions 1 to 1" in str(refused.value)
    server.stop()
    assert server.records() == before
    server.start()
    assert server.served() == (1, 1.0)


def test_the_same_checkpoint_elsewhere_is_the_same(server: Up, tmp_path: Path) -> None:
    server.start()
    server.trained(2.0)
    server.stop()
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


def test_another_name_in_the_same_state_is_refused(server: Up) -> None:
    server.start()
    server.stop()
    with pytest.raises(OtherCheckpoint, match="serves toy, not other"):
        server.start(name="other")


def test_what_a_version_has_besides_must_be_run(server: Up, tmp_path: Path) -> None:
    draft = save_checkpoint(tmp_path / "draft", 0.5)
    drafting = ("--speculative-config", json.dumps({"model": str(draft), "method": "draft_model"}))
    server.start()
    server.stop()
    said = server.start(vllm_args=drafting).said  # named for the first time: a version has it from now on
    assert said[-1] == f"version 1 has no draft model: a new version gets {draft}"
    assert [part.name for part in server.version(server.active().version).parts] == ["draft"]
    server.stop()
    with pytest.raises(CliError, match="version 2 has a draft model: name one with --speculative-config"):
        server.start()
    server.stop()
    assert "publish" not in server.start(vllm_args=drafting).children


@pytest.mark.parametrize(("name", "options"), [("logs", {}), ("store.db", {"fresh": True}), ("versions", {})])
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


# beginning anew


def test_fresh_discards_all_but_the_admin_key_and_says_what(server: Up, shm: Path) -> None:
    started = server.start()
    server.trained(2.0)
    server.make_key()
    admin_key = started.admin_key
    server.stop()
    server.start()
    server.kill()
    started = server.start(fresh=True)
    assert server.told == [
        "discarding 1 API key(s), inference closed to who has none, versions 1 to 2 and a history of 2 swap(s)"
    ]
    assert server.served() == (1, 1.0)
    assert server.door(None) == "anonymous"
    assert started.admin_key == admin_key
    assert not list((server.state_dir / "versions").glob("[0-9]*"))
    assert len(server.slots) == 1


def test_fresh_begins_with_another_checkpoint(server: Up, tmp_path: Path) -> None:
    server.start()
    server.stop()
    server.start(fresh=True, model=str(save_checkpoint(tmp_path / "other", 9.0)))
    assert server.served() == (1, 9.0)


def test_a_discard_that_was_begun_comes_to_its_end(server: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    server.start()
    server.make_key()
    server.stop()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("server.cli.state.remove_copies", killed)
        with pytest.raises(KeyboardInterrupt):
            server.start(fresh=True)
    server.kill()
    server.start()
    assert server.door(None) == "anonymous"
    assert server.served() == (1, 1.0)
    assert server.told == []


def test_an_etcd_is_not_discarded() -> None:
    with pytest.raises(CliError, match="--fresh"):
        UpConfig(model="m", store="etcd://h:1", fresh=True)


def test_fresh_takes_the_copies_of_this_store_wherever_they_are_and_nothing_else(server: Up, tmp_path: Path) -> None:
    steps, used = tmp_path / "steps", tmp_path / "used"
    (steps / "1000").mkdir(parents=True)
    (steps / "1000" / "model.safetensors").write_bytes(b"a trainer's")
    server.start(persist=used)
    server.stop()
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
    server.start(fresh=True, persist=used)
    server.stop()
    server.start()  # what is in its own place is its own
    assert server.served() == (1, 1.0)


def test_copies_of_another_store_are_neither_used_nor_discarded(server: Up, tmp_path: Path) -> None:
    server.options["persist"] = tmp_path / "copies"
    server.start()
    server.stop()
    other = Up(server.checkpoint, tmp_path / "other-state")
    other.start()
    other.stop()
    before = other.records()
    for options in ({}, {"fresh": True}):
        with frozen(tmp_path / "copies"), pytest.raises(CliError, match="copies of another store's versions"):
            other.start(persist=tmp_path / "copies", **options)
        other.stop()
        assert other.records() == before


# what runs is left alone


def test_up_twice_is_refused_and_changes_nothing(server: Up, shm: Path) -> None:
    started = server.start()
    ServerInfo("http://h:1", "http://h:2", MODEL, started.store, "/key", os.getpid()).write(server.state_dir)
    for options in ({}, {"fresh": True}, {"port": started.config.port}):
        second = server.new(**options)
        refused = pytest.raises(StateTaken, match=rf"already runs with its state in .*process {os.getpid()}\)")
        with frozen(server.state_dir), frozen(shm), refused, second:
            pass
        with frozen(server.state_dir), frozen(shm):
            second.stop()
    assert all(child.calls == [] for child in started.children.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("which", ["port", "admin_port"])
def test_a_port_that_is_taken_is_said_before_anything_is_changed(server: Up, shm: Path, which: str) -> None:
    server.start()
    server.stop()
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
        with frozen(server.state_dir), frozen(shm), pytest.raises(PortTaken, match=f"port {port}"), second:
            pass
    server.start()
    assert server.served() == (1, 1.0)


def test_state_directories_share_no_memory_whatever_their_port_and_name(server: Up, tmp_path: Path) -> None:
    one, other = server.new(port=8123), Up(server.checkpoint, tmp_path / "elsewhere").new(port=8123)
    assert one.arena != other.arena
    assert one.arena == server.new(port=8124).arena


def test_a_server_that_was_replaced_in_its_directory_removes_nothing(server: Up) -> None:
    """Somebody removed the directory under it, and started another there."""
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

    def answer(url: str, **_: object) -> httpx.Response:
        body = {
            "instances": [{"id": f"instance-{i}", "eligible": i in eligible} for i in range(2)],
            "asleep": [{"id": f"instance-{i}"} for i in asleep],
        }
        status = readyz if url.endswith("/readyz") else 200
        return httpx.Response(status, json=body, request=httpx.Request("GET", url))

    monkeypatch.setattr(up.httpx, "get", answer)
    assert started._ready() is ready


def test_processes_that_a_killed_up_left_are_waited_for_and_ended(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.claim()
    log = tmp_path / "log"
    ends = RealChild("ends", ["tests.server.cli.stubborn", "gentle"], log, {}, [state.inherited])
    stays = RealChild("stays", ["tests.server.cli.stubborn"], log, {}, [state.inherited])
    wait_until(lambda: log.read_text().count("runs") == 2, 60)
    ends.process.terminate()
    state.release()
    state.claim()
    told: list[str] = []
    state.end_leftovers(0.2, 0.2, told.append)
    assert ends.process.wait() == -signal.SIGTERM
    assert stays.process.wait() == -signal.SIGKILL
    assert str(stays.process.pid) in told[0]
    state.release()


# the store


def test_a_store_that_is_gone_is_not_made_anew_unasked(server: Up) -> None:
    server.start()
    server.make_key()
    server.stop()
    for path in server.state_dir.glob("store.db*"):
        path.rename(path.with_name("aside-" + path.name))
    with frozen(server.state_dir), pytest.raises(StateLost, match="put the file back, or begin anew with --fresh"):
        server.start()
    server.stop()
    for path in server.state_dir.glob("aside-*"):
        path.rename(path.with_name(path.name.removeprefix("aside-")))
    server.start()
    assert server.served() == (1, 1.0)
    server.stop()
    for path in server.state_dir.glob("store.db*"):
        path.unlink()
    server.start(fresh=True)
    assert server.door(None) == "anonymous"


def test_another_store_in_a_state_directory_is_refused(server: Up, tmp_path: Path) -> None:
    server.start()
    server.stop()
    other = Up(server.checkpoint, tmp_path / "other-state")
    other.start()
    other.stop()
    for path in server.state_dir.glob("store.db*"):
        path.unlink()
    shutil.copy(tmp_path / "other-state" / "store.db", server.state_dir)
    with pytest.raises(CliError, match="another store is in its place"):
        server.start()


def test_a_store_that_vanishes_under_a_server_is_said_once(server: Up, capsys: pytest.CaptureFixture[str]) -> None:
    started = server.start()
    started._look_at_store()
    server.state_dir.rename(aside := server.state_dir.with_name("aside"))
    for _ in range(3):
        started._look_at = 0.0
        started._look_at_store()
    assert capsys.readouterr().err.count("Requests are answered; no weights and no keys can be changed") == 1
    aside.rename(server.state_dir)
    started._look_at = 0.0
    started._look_at_store()
    assert capsys.readouterr().err == ""


# killed at any moment


@pytest.mark.parametrize("every", [397, pytest.param(19, marks=pytest.mark.broad)])
@pytest.mark.parametrize("before", ["nothing", "memory", "disk", "fresh"])
def test_a_start_may_be_killed_at_any_line(server: Up, before: str, every: int) -> None:
    key, lines = "", 1
    while True:
        if before == "nothing":
            shutil.rmtree(server.state_dir, ignore_errors=True)
        elif not server.state_dir.exists() or server.active().version == 1:
            server.start()
            server.trained(2.0)
            key = server.make_key()
            server.stop()
        if before in ("memory", "fresh"):
            server.start()
            server.kill()
        if not killed_at(server.new(fresh=before == "fresh").start, STARTING, lines):
            return
        started = server.start()
        if before == "nothing" or server.active().version == 1:
            assert before in ("nothing", "fresh")
            assert server.served() == (1, 1.0)
            assert server.door(None) == "anonymous"  # a discard takes all or nothing
        else:
            assert server.served() == (2, 2.0)
            assert server.door(key) == "somebody"
            assert server.trained(3.0, commit=False) == 3
            server.forget(3)
        assert len(started.admin_key) > 16
        server.stop()
        lines += every


@pytest.mark.parametrize("share", [40, pytest.param(4, marks=pytest.mark.broad)])
@pytest.mark.parametrize("loses", ["processes", "power"])
@pytest.mark.parametrize(
    ("work", "files", "every"), [("persist", PERSISTING, 23), ("swap", SWAPPING, 211), ("stop", STOPPING, 23)]
)
def test_a_run_may_be_killed_at_any_line(
    server: Up, work: str, files: Sequence[str], every: int, loses: str, share: int
) -> None:
    """While it copies, swaps or stops. The tensors of each version are its number."""
    server.start()
    key, newest, lines, was_killed = server.make_key(), 1, 1, True
    while was_killed:
        server.stop()
        started = server.start()
        before, target = server.active().version, server.trained(newest + 1, commit=work != "swap")
        works: dict[str, Callable[[], object]] = {
            "persist": started.children["persist"].stop,
            "swap": lambda: asyncio.run(swapped(started.store, target)),  # noqa: B023 - called at once
            "stop": started.stop,
        }
        was_killed = killed_at(works[work], files, lines)
        committed = server.active().version
        copies = {kept.version: kept for kept in Disk(server.state_dir / "versions").kept()}
        for kept in copies.values():
            kept.verify()
        (server.kill if loses == "processes" else server.lose_power)()
        goes_on = server.start()
        run(swap_until(goes_on.store, lambda swap: swap.phase in ("done", "aborted")))
        if loses == "power" and committed not in copies:
            assert goes_on.said[0].startswith(f"version {committed} is lost")
            committed = before
        assert server.served() == (committed, float(committed))
        assert server.door(key) == "somebody"
        with pytest.raises(Unauthorized):
            server.door(None)
        assert server.trained(target + 1, commit=False) == target + 1
        server.forget(target + 1)
        newest = target
        lines += every * share
