"""State that `hotswap up` goes on with after any end: killed at any line of a start, a copy, a swap or a stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from server.errors import CliError
from tests.server.refusals import refuses
from tests.server.up import restarts
from tests.server.up.restarts import KEYS, MODEL, Child, Up, committed, flip, frozen, run, save_checkpoint, swap_until
from tests.weightsync.tensors import model
from weightsync import Adapter, Publisher, SlotReader, SyncStore
from weightsync.control.records import CounterRecord, InstanceRecord
from weightsync.control.state import untried
from weightsync.persist.disk import Disk
from weightsync.publish.checkpoint import Checkpoint

NOBODY = 2**22 + 1  # no process has such an id


def test_a_stop_copies_to_disk_and_gives_the_memory_back(server: Up, shm: Path) -> None:
    server.start()
    assert server.served() == (1, 1.0)
    server.stop()
    assert server.told[0].startswith("waiting for the copies on disk; after a kill, the next start goes on")
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


@pytest.mark.parametrize("end", ["kill", "lose_power", "stop"])
def test_editions_of_adapters_outlive_a_restart_unless_they_were_in_memory_alone(server: Up, end: str) -> None:
    started = server.start()
    adapter = Adapter({"a.lora_A.weight": np.ones((2, 4), np.float32)}, {"r": 2})
    with Publisher(started.store, model=MODEL) as publisher:
        numbers = [publisher.publish_edition("math", adapter) for _ in range(2)]
    getattr(server, end)()
    started = server.start()
    said = [line for line in started.said if "adapters' editions" in line]
    with Publisher(started.store, model=MODEL) as publisher:
        left = publisher.editions("math")
        if end == "lose_power":
            names = ", ".join(f"math@{number}" for number in numbers)
            assert (left, len(said)) == ([], 1)
            assert f"publish again {names}" in said[0]
        else:
            assert ([edition.number for edition in left], said) == (numbers, [])
            for edition in left:
                SlotReader.open(edition.slot, manifest_digest=edition.manifest_digest).close()
        assert publisher.publish_edition("math", adapter) > numbers[-1], "no number is given out twice"


@pytest.mark.parametrize("end", ["kill", "lose_power"])
def test_an_end_without_warning_loses_no_key_version_number_or_history(server: Up, end: str) -> None:
    server.ran(2.0)  # on disk: version 2
    server.start()
    key = server.make_key()
    history = {name: value for name, value in server.records().items() if name.startswith(KEYS.history)}
    assert len(history) == 1, "no instance was there to end the second swap"
    getattr(server, end)()
    started = server.start()
    assert server.served() == (2, 2.0)
    assert ("shared memory" if end == "kill" else "its copy in") in started.said[-1]
    assert server.door(key) == "somebody"
    with refuses(401):
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
            with refuses(401):
                server.door(asked)
        server.stop()
    server.start(fresh=True)
    assert "0 API key(s), inference closed to who has none, " in server.told[0]


@pytest.mark.parametrize("torn", ["model.safetensors", "manifest.json", "version.json"])
def test_a_torn_copy_is_not_served_and_the_version_before_it_is(server: Up, torn: str) -> None:
    server.ran(2.0)
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
    server.ran(2.0)
    server.start()
    (slot,) = [path for path in server.slots if str(path) == server.version(2).slot]
    server.kill()
    flip(slot)
    assert "its copy in" in server.start().said[-1]
    assert server.served() == (2, 2.0)


def test_a_version_that_is_lost_is_said_and_the_newest_whole_one_is_served(server: Up) -> None:
    server.ran(2.0)
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
    server.ran(2.0)
    assert re.match("the active version stays in shared memory", server.told[-1])
    assert "persist" not in server.start().children
    assert server.served() == (2, 2.0)


def test_a_copy_that_could_not_be_written_keeps_the_memory(server: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Child, "persists", False)
    server.ran(2.0)
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

    server.ran(2.0, persist=place(first))
    said = server.start(persist=place(then)).said
    assert f"its copy in {place(first) or server.state_dir / 'versions'}" in said[-1]
    assert server.served() == (2, 2.0)
    server.stop()
    server.start(persist=place(then))
    assert server.served() == (2, 2.0)


def test_a_disk_that_is_not_mounted_is_not_a_version_that_is_lost(server: Up, tmp_path: Path) -> None:
    disk, aside = tmp_path / "disk", tmp_path / "aside"
    server.options["persist"] = disk
    server.ran(2.0)
    disk.rename(aside)
    disk.mkdir()
    before = server.records()
    for options in ({}, {}, {"persist": None}):  # the next time, too, and when the option is forgotten
        with pytest.raises(CliError, match=f"version 2 .* copy in {disk}.* mount it.*--persist off"):
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
    server.ran(2.0)
    with contextlib.closing(SyncStore(f"sqlite://{server.state_dir}/store.db")) as store:
        store.put(KEYS.counter, CounterRecord(1).to_json())
    server.start()
    assert server.trained(3.0) == 3


def test_a_store_that_is_gone_is_not_made_anew_unasked(server: Up) -> None:
    server.start()
    server.make_key()
    server.stop()
    for path in server.state_dir.glob("store.db*"):
        path.rename(path.with_name("aside-" + path.name))
    with frozen(server.state_dir), pytest.raises(CliError, match="put the file back, or begin anew with --fresh"):
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
    server.ran()
    other = Up(server.checkpoint, tmp_path / "other-state")
    other.ran()
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


@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_several_models_go_on_each_with_its_own_versions(server: Up, tmp_path: Path, end: str, elsewhere: bool) -> None:
    other = save_checkpoint(tmp_path / "other", 7.0)
    file = tmp_path / "models.yaml"
    file.write_text(f"models: [{{name: {MODEL}}}, {{name: org/other, checkpoint: {other}}}]")
    options = {"models": file} | ({"persist": tmp_path / "copies"} if elsewhere else {})
    server.ran(2.0, **options)  # on disk: a version of each
    server.start(**options)
    getattr(server, end)()
    started = server.start(**options)
    assert (server.served(), server.served("org/other")) == ((2, 2.0), (1, 7.0))
    assert not any(name.startswith("publish") for name in started.children)
    said = "shared memory" if end == "kill" else "its copy in"
    gone_on = [re.match(rf"(\S+): going on with version \d, .*{said}", line) for line in started.said]
    assert [found and found[1] for found in gone_on] == [MODEL, "org/other"]
    server.stop()
    server.start(**{**options, "models": None})
    assert server.served() == (2, 2.0), "one of them alone"
    server.stop()
    server.start(**options)
    assert server.served("org/other") == (1, 7.0)
    server.stop()
    server.start(fresh=True, **options)
    assert "versions 1 to 2 of toy" in server.told[0]
    assert "versions 1 to 1 of org/other" in server.told[0]
    assert (server.served(), server.served("org/other")) == ((1, 1.0), (1, 7.0))


# killed at any line


@pytest.mark.parametrize("every", [397, pytest.param(31, marks=pytest.mark.broad)])
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
        if not restarts.killed_at(server.new(fresh=before == "fresh").start, restarts.STARTING, lines):
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


@pytest.mark.parametrize("share", [40, pytest.param(6, marks=pytest.mark.broad)])
@pytest.mark.parametrize("loses", ["processes", "power"])
@pytest.mark.parametrize(
    ("work", "files", "every"),
    [("persist", restarts.PERSISTING, 23), ("swap", restarts.SWAPPING, 211), ("stop", restarts.STOPPING, 23)],
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
            "swap": lambda: asyncio.run(restarts.swapped(started.store, target)),  # noqa: B023 - called at once
            "stop": started.stop,
        }
        was_killed = restarts.killed_at(works[work], files, lines)
        committed = server.active().version
        copies = {kept.version: kept for kept in Disk(server.state_dir / "versions").kept()}
        for kept in copies.values():
            kept.verify()
        (server.kill if loses == "processes" else server.lose_power)()
        goes_on = server.start()
        run(swap_until(goes_on.store, lambda swap: swap.phase in ("done", "aborted") or untried(swap)))
        if loses == "power" and committed not in copies:
            assert goes_on.said[0].startswith(f"version {committed} is lost")
            committed = before
        assert server.served() == (committed, float(committed))
        assert server.door(key) == "somebody"
        with refuses(401):
            server.door(None)
        assert server.trained(target + 1, commit=False) == target + 1
        server.forget(target + 1)
        newest = target
        lines += every * share
