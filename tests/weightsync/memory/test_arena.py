from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.weightsync.codes import refused
from tests.weightsync.tensors import model, read_back
from weightsync import Arena, Publisher
from weightsync.errors import SlotBusy
from weightsync.memory import arena as arenas
from weightsync.memory.arena import MAPPINGS, SlotLock, prefault

SIZE = 64 << 10


@pytest.fixture
def arena(arena_directory: Path) -> Arena:
    return Arena(arena_directory)


def test_slots_are_private_files_of_allocated_pages(arena: Arena) -> None:
    lock = arena.claim("m", SIZE, set())
    found = lock.path.stat()
    assert found.st_size == SIZE
    assert found.st_blocks * 512 >= SIZE
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert lock.path.parent == arena.directory


def test_a_held_slot_is_not_given_out_twice_and_a_released_one_is(arena: Arena) -> None:
    first = arena.claim("m", SIZE, set())
    second = arena.claim("m", SIZE, set())
    assert first.path != second.path
    first.release()
    assert arena.claim("m", SIZE, set()).path == first.path
    assert len(arena.slots("m")) == 2


def test_a_slot_that_a_record_names_is_not_given_out(arena: Arena) -> None:
    lock = arena.claim("m", SIZE, set())
    lock.release()
    assert arena.claim("m", SIZE, {str(lock.path)}).path != lock.path


def test_writers_share_a_slot_that_nobody_else_can_claim(arena: Arena) -> None:
    lock = arena.claim("m", SIZE, set())
    with pytest.raises(SlotBusy):
        SlotLock.shared(lock.path)
    lock.admit_writers()
    other = SlotLock.shared(lock.path)
    lock.release()
    assert SlotLock.try_exclusive(lock.path) is None
    other.release()
    assert SlotLock.try_exclusive(lock.path) is not None


@pytest.mark.parametrize("there_before", [0, SIZE // 2], ids=["being made", "of another size"])
def test_two_who_claim_at_once_get_two_slots(arena: Arena, monkeypatch: pytest.MonkeyPatch, there_before: int) -> None:
    """The second claims between the first one's `open` and its `flock`: a slot that is made has no size yet."""
    if there_before:
        arena.claim("m", there_before, set()).release()
    flock, second = fcntl.flock, []

    def once_another_has_claimed(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        second.append(arena.claim("m", SIZE, set()))
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", once_another_has_claimed)
    locks = [arena.claim("m", SIZE, set()), *second]
    assert len(locks) == 2
    assert locks[0].path != locks[1].path
    assert all(os.path.samestat(os.fstat(lock.fd), lock.path.stat()) for lock in locks)


def test_models_have_slots_of_their_own(arena: Arena) -> None:
    arena.claim("a", SIZE, set()).release()
    assert arena.claim("b/with:odd*characters", SIZE, set()).path not in arena.slots("a")


def test_a_slot_of_another_size_is_replaced_while_old_maps_live_on(arena: Arena) -> None:
    old = arena.claim("m", SIZE, set())
    mapping = MAPPINGS.get(old.path, old.fd)
    mapping[:3] = b"old"
    old.release()
    new = arena.claim("m", 2 * SIZE, set())
    assert new.path == old.path
    assert len(MAPPINGS.get(new.path, new.fd)) == 2 * SIZE
    assert mapping[:3] == b"old"
    assert len(arena.slots("m")) == 1


def test_mappings_are_kept_and_hold_no_lock(arena: Arena) -> None:
    lock = arena.claim("m", SIZE, set())
    mapping = MAPPINGS.get(lock.path, lock.fd)
    lock.release()
    again = arena.claim("m", SIZE, set())
    assert again.path == lock.path
    assert MAPPINGS.get(again.path, again.fd) is mapping


def test_pages_are_resident_before_they_are_used(arena: Arena) -> None:
    lock = arena.claim("m", 1 << 20, set())
    mapping = MAPPINGS.get(lock.path, lock.fd)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for page in range(0, len(mapping), 4096):
        mapping[page] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100  # 256 pages


@pytest.mark.parametrize("threads", [1, 3])
def test_prefaulting_keeps_what_is_there(arena: Arena, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    lock = arena.claim("m", SIZE, set())
    mapping = MAPPINGS.get(lock.path, lock.fd)
    mapping[:] = bytes(range(256)) * (SIZE // 256)
    monkeypatch.setattr(arenas, "PREFAULT_CHUNK", 4 * arenas.PAGE)
    prefault(mapping, write=True, threads=threads)
    monkeypatch.setattr("weightsync.memory.arena._libc.madvise", lambda *_: -1)  # a kernel before 5.14
    prefault(mapping, write=True, threads=threads)
    prefault(mapping, write=False, threads=threads)
    assert mapping[:] == bytes(range(256)) * (SIZE // 256)


def test_memory_that_begins_within_a_page_is_faulted_in_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As memory of malloc does. Page by page, Python would hold its lock for seconds."""
    asked: list[tuple[int, int]] = []

    def madvise(address: ctypes.c_void_p, size: ctypes.c_size_t, _advice: int) -> int:
        asked.append((address.value or 0, size.value))
        return 0

    monkeypatch.setattr(arenas, "PREFAULT_CHUNK", 4 * arenas.PAGE)
    monkeypatch.setattr(arenas._libc, "madvise", madvise)
    with mmap.mmap(-1, 8 * arenas.PAGE) as mapping, memoryview(mapping) as view, view[64 : 6 * arenas.PAGE] as part:
        first, end = arenas.address_of(view), arenas.address_of(part) + len(part)
        prefault(part, write=True)
    assert asked == [(first, 4 * arenas.PAGE), (first + 4 * arenas.PAGE, end - first - 4 * arenas.PAGE)]


FORKS_WHILE_HOLDING = """
import os, sys, time
from pathlib import Path
from weightsync.memory.arena import SlotLock
lock = SlotLock.try_exclusive(Path(sys.argv[1]))
if os.fork() == 0:
    print("forked", flush=True)  # by now the child has let go of what it inherited
time.sleep(60)
"""


def test_a_forked_child_does_not_keep_the_lock_of_a_dead_parent(arena: Arena) -> None:
    path = arena.claim("m", SIZE, set()).path
    command = [sys.executable, "-c", FORKS_WHILE_HOLDING, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"forked\n"
            assert SlotLock.try_exclusive(path) is None
            parent.kill()
            parent.wait()
            assert SlotLock.try_exclusive(path) is not None
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_unlocking_does_not_wait_for_a_child_to_close_its_copy(arena: Arena) -> None:
    lock = arena.claim("m", SIZE, set())
    copy = os.dup(lock.fd)
    lock.release()
    assert SlotLock.try_exclusive(lock.path) is not None
    os.close(copy)


@pytest.mark.parametrize("place", ["/proc/arena", "/dev/null/arena"])
def test_a_directory_that_cannot_be_made(place: str) -> None:
    with refused("arena_unavailable", match="choose"):
        Arena(place)


def test_a_directory_that_others_may_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with refused("arena_unavailable", match="chmod 700"):
        Arena(tmp_path)


def test_a_publisher_outlives_the_directory_of_its_arena(publisher: Publisher) -> None:
    """A cleaner takes it, or logind at a logout (`RemoveIPC`): before a publication, and before a look at its room."""
    first = publisher.publish(model(1.0), activate=False)
    shutil.rmtree(publisher.arena.directory)
    assert publisher.arena.free_nbytes() > 0
    shutil.rmtree(publisher.arena.directory)
    second = publisher.publish(model(2.0), activate=False)
    last = publisher.versions()[-1]
    assert (first, second, last.version) == (1, 2, 2)
    assert read_back(last).keys() == model(2.0).keys()
    assert stat.S_IMODE(publisher.arena.directory.stat().st_mode) == 0o700


@contextlib.contextmanager
def small_file_system(nbytes: int) -> Iterator[Path]:
    """A directory that takes no more than `nbytes`: a tmpfs where this user may mount one, else a file size limit."""
    with tempfile.TemporaryDirectory() as directory:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=700", "tmpfs", directory]
        if subprocess.run(mount, capture_output=True).returncode == 0:
            try:
                yield Path(directory)
            finally:
                subprocess.run(["umount", "-l", directory], check=True)
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
        try:
            yield Path(directory)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_shared_memory_is_an_error_that_says_what_to_do() -> None:
    with small_file_system(1 << 20) as directory:
        arena = Arena(directory)
        with refused("arena_full", r"4,194,304 bytes.*retire versions") as full:
            arena.claim("m", 4 << 20, set())
        assert full.value.needed == 4 << 20
        assert arena.slots("m") == []
        assert arena.claim("m", SIZE, set()).nbytes == SIZE


def test_when_memory_is_full_versions_nobody_needs_make_room(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_file_system(1 << 20) as directory:
        monkeypatch.setenv("HOTSWAP_ARENA", str(directory))
        with Publisher(store_url, model="demo", keep=100) as publisher:
            tensors = model(width=64)  # about 150 kB a version
            versions = [publisher.publish(tensors, activate=False) for _ in range(20)]
            last = publisher.versions()[-1]
            assert (last.version, last.state) == (versions[-1], "ready")
            assert read_back(last).keys() == tensors.keys()
            assert {v.state for v in publisher.versions()} == {"ready", "retired"}


def test_a_version_that_does_not_fit_leaves_the_others_alone(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_file_system(1 << 20) as directory:
        monkeypatch.setenv("HOTSWAP_ARENA", str(directory))
        with Publisher(store_url, model="small") as small, Publisher(store_url, model="large") as large:
            small.publish(model(1.0), activate=False)
            with refused("arena_full"):
                large.publish(model(width=512), activate=False)
            assert large.versions() == []
            (record,) = small.versions()
            assert read_back(record)["model.norm.weight"][0] == 1.0
