"""Slots' file system and arena: a real tmpfs that is too small, real leftovers, real locks."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.doctor.processes import arenas_in_environments, locked_files
from server.doctor.world import World
from tests.lacking import unable
from tests.server.doctor.worlds import checkpoint, findings, host, only
from tests.waiting import wait_until
from weightsync import SyncStore
from weightsync.control.records import ARENA_KEY, ArenaRecord

ROOT = Path(__file__).parents[3]
DOCTOR = [sys.executable, "-m", "server.cli", "doctor", "--json"]


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in shared memory that stands for all of it."""
    directory = Path(tempfile.mkdtemp(prefix="doctor-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


def on_a_small_tmpfs(place: Path, script: str) -> list[dict[str, Any]]:
    """The doctor's findings after `script`, in a mount namespace where `place` is a tmpfs of 4 MiB."""
    mounted = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-e", "-c"]
    if subprocess.run([*mounted, f"mount -t tmpfs none {place}"], check=False).returncode:
        unable("no mount namespaces can be made here")
    command = [*mounted, f"mount -t tmpfs -o size=4m none {place}\n{script}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1)
    return list(found["checks"])


def test_a_model_that_does_not_fit_a_real_tmpfs(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    small, large = checkpoint(tmp_path / "small-model", 0), checkpoint(tmp_path / "large-model", 1)
    doctor = " ".join([*DOCTOR, "--only", "shared-memory", "--arena", f"{place}/arena", "--model"])
    (fits,) = on_a_small_tmpfs(place, f"{doctor} {small}")
    assert fits["status"] == "ok"
    (too_large,) = on_a_small_tmpfs(place, f"{doctor} {large}")
    assert too_large["status"] == "fail"
    assert "3 slots of 1 MiB and 3 layouts of 1 MiB" in too_large["found"]
    assert "sizeLimit" in too_large["mend"]
    (full,) = on_a_small_tmpfs(place, f"head -c 4190208 /dev/zero > {place}/other\n{doctor} {small}")
    assert full["status"] == "fail"
    assert "leftovers" in full["mend"]


def test_a_store_on_a_file_system_that_is_read_only(tmp_path: Path) -> None:
    place = tmp_path / "readonly"
    place.mkdir()
    url = f"sqlite://{place}/store.db"
    make = f"{sys.executable} -c 'import weightsync; weightsync.SyncStore(\"{url}\").close()'"
    doctor = " ".join([*DOCTOR, "--only", "store", "--store", url])
    (found,) = on_a_small_tmpfs(place, f"{make}\nmount -o remount,ro {place}\n{doctor}")
    assert (found["status"], "may write to" in found["mend"]) == ("fail", True)
    (found,) = on_a_small_tmpfs(place, f"{make}\n{doctor}")
    assert found["status"] == "ok"
    (found,) = on_a_small_tmpfs(place, f"mount -o remount,ro {place}\n{doctor}")
    assert (found["status"], "cannot be made" in found["found"]) == ("fail", True)


def test_a_small_file_system_is_warned_of_without_a_model(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(shm)
    small = os.statvfs_result((4096, 4096, 16_384, 100, 100, *tuple(real)[5:]))
    monkeypatch.setattr("os.statvfs", lambda path: small)
    assert "--shm-size" in only(findings("shared-memory", World(shm=shm, environ={})), "warn").mend


def test_a_directory_that_is_no_checkpoint_is_told(shm: Path, tmp_path: Path) -> None:
    found = only(findings("shared-memory", World(shm=shm, environ={}, model_dir=tmp_path)), "fail")
    assert "safetensors" in found.found


@pytest.mark.parametrize(
    ("mode", "expected", "mend"), [(0o700, "ok", ""), (0o750, "warn", "chmod 700"), (0o777, "fail", "chmod 700")]
)
def test_the_arenas_mode(shm: Path, mode: int, expected: Any, mend: str) -> None:
    arena = shm / "arena"
    arena.mkdir()
    arena.chmod(mode)
    assert mend in only(findings("arena", World(environ={"HOTSWAP_ARENA": str(arena)})), expected).mend


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_an_arena_of_another_user(shm: Path) -> None:
    os.chown(shm, 65534, 65534)
    assert "of user 65534" in only(findings("arena", World(arena=shm)), "fail").found


def test_an_arena_on_a_disk(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    world = host(tmp_path, {"/proc/mounts": f"none /dev tmpfs rw 0 0\nnone {tmp_path} ext4 rw 0 0\n"}, arena=tmp_path)
    assert [f.status for f in findings("arena", world)] == ["ok", "warn"]


@pytest.mark.parametrize(
    ("files", "uid", "warned"),
    [
        ({"/run/systemd/system/x": ""}, 65534, True),
        ({"/run/systemd/system/x": "", "/etc/systemd/logind.conf": "[Login]\n#RemoveIPC=no\n"}, 65534, True),
        ({"/run/systemd/system/x": "", "/etc/systemd/logind.conf": "[Login]\nRemoveIPC = no\n"}, 65534, False),
        ({"/run/systemd/system/x": "", "/etc/systemd/logind.conf.d/a.conf": "[Login]\nRemoveIPC=0\n"}, 65534, False),
        ({"/run/systemd/system/x": "", "/var/lib/systemd/linger/nobody": ""}, 65534, False),
        ({"/run/systemd/system/x": ""}, 0, False),
        ({}, 65534, False),
    ],
)
def test_a_login_that_ends_takes_the_arena_along(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], uid: int, warned: bool
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: uid)
    world = host(tmp_path / "root", files, shm=shm, arena=shm / "hotswap-x")
    told = [finding for finding in findings("arena", world) if "logind" in finding.found]
    assert [finding.status for finding in told] == ["warn"] * warned


def test_the_store_says_where_the_arena_is(shm: Path, tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.db"
    store = SyncStore(url)
    store.put(ARENA_KEY, ArenaRecord(str(shm / "recorded")).to_json())
    store.close()
    assert f"{shm}/recorded" in only(findings("arena", World(store=url, environ={})), "ok").found


def test_leftovers_are_those_that_nobody_locks_maps_or_was_told_of(shm: Path) -> None:
    only(findings("leftovers", World(shm=shm, environ={})), "ok")
    names = ["hotswap-dead", "hotswap-locked", "hotswap-mapped", "hotswap-told", "hotswap-asked", "hotswap-deep/below"]
    for name in names:
        (shm / name).mkdir(parents=True)
        (shm / name / "slot-1-000").write_bytes(bytes(8192))
    for name in ("psm_dead", "psm_mapped", "vllm_dist_dead", "another"):
        (shm / name).write_bytes(bytes(4096))
    waits = ["sleep", "600"]
    told = subprocess.Popen(waits, env={"PATH": os.environ["PATH"], "HOTSWAP_ARENA": str(shm / "hotswap-told")})
    try:
        with (
            (shm / "hotswap-locked/slot-1-000").open() as locked,
            (shm / "hotswap-mapped/slot-1-000").open("r+b") as slot,
            (shm / "psm_mapped").open("r+b") as segment,
            (shm / "hotswap-deep/below/slot-1-000").open("r+b") as deep,
            mmap.mmap(deep.fileno(), 0),
            mmap.mmap(slot.fileno(), 0),
            mmap.mmap(segment.fileno(), 0),
        ):
            fcntl.flock(locked, fcntl.LOCK_SH)
            world = World(shm=shm, environ={"HOTSWAP_ARENA": str(shm / "hotswap-asked")})
            wait_until(lambda: shm / "hotswap-told" in arenas_in_environments(world), process=told)
            found = only(findings("leftovers", world), "warn")
    finally:
        told.kill()
        told.wait()
    assert found.mend.endswith(f"rm -r {shm}/hotswap-dead {shm}/psm_dead {shm}/vllm_dist_dead")
    assert "16 KiB" in found.found


def test_a_process_in_the_midst_of_an_exec_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a process has no environment and no maps for a moment. This one is there again and again."""
    again, arena = 'exec sh -c "$AGAIN"', tmp_path / "arena"
    env = {"PATH": os.environ["PATH"], "AGAIN": again, "HOTSWAP_ARENA": str(arena)}
    with subprocess.Popen(["sh", "-c", again], env=env) as process:
        try:
            (tmp_path / str(process.pid)).symlink_to(f"/proc/{process.pid}")
            monkeypatch.setattr(World, "path", lambda *_: tmp_path)
            wait_until(lambda: arena in arenas_in_environments(World()), process=process)  # Popen may have yet to exec
            for _ in range(1000):
                assert arenas_in_environments(World()) == {arena}
        finally:
            process.kill()


def test_a_lock_that_some_readings_of_the_kernels_list_miss_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = "{}: FLOCK  ADVISORY  WRITE 700 00:1c:{} 0 EOF\n"
    listed = [lock.format(1, 11) + lock.format(2, 12), lock.format(1, 12), "", ""]
    monkeypatch.setattr(World, "read", lambda *_: listed.pop() if listed else None)
    assert locked_files(World()) == {11, 12}


def test_arenas_and_segments_that_others_remove_meanwhile_break_no_check(shm: Path) -> None:
    ended = threading.Event()

    def make_and_remove() -> None:
        while not ended.is_set():
            (shm / "hotswap-brief").mkdir()
            for path in (shm / "hotswap-brief/slot-1-000", shm / "psm_brief"):
                path.write_bytes(b"x")
                path.unlink()
            (shm / "hotswap-brief").rmdir()

    other = threading.Thread(target=make_and_remove)
    other.start()
    try:
        for name in ("leftovers", "arena", "shared-memory") * 8:
            assert findings(name, World(shm=shm, environ={}, arena=shm / "hotswap-brief"))
            assert findings(name, World(shm=shm, environ={}))
    finally:
        ended.set()
        other.join()
