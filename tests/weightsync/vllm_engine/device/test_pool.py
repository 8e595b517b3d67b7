"""Layout slots: built once, shared, reused, and built anew after a builder that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.weightsync.memory.test_arena import small_file_system
from weightsync.vllm_engine.device.pool import LayoutPool, LayoutPoolError, Notes


def test_slot_is_built_once_and_shared(tmp_path: Path) -> None:
    pool, other = LayoutPool(tmp_path, "f", 1000), LayoutPool(tmp_path, "f", 1000)
    slot = pool.acquire("v1")
    assert not slot.built
    slot.data.fill_(7)
    notes = Notes({"w": [[1, 2, 0, 1, 0, 2, 7]]}, {"attn._k_scale_float": 0.5})
    slot.seal("v1", notes)
    again = other.acquire("v1")
    assert again.built
    assert int(again.data.sum()) == 7000
    assert again.notes == notes
    assert len(list(tmp_path.glob("layout-f-[0-9]*"))) == 1


def test_slots_in_use_are_kept_and_released_ones_reused(tmp_path: Path) -> None:
    pool = LayoutPool(tmp_path, "f", 64)
    slots = []
    for key in ("v1", "v2", "v3"):
        slots.append(pool.acquire(key))
        slots[-1].seal(key, Notes())
    assert len({s.path for s in slots}) == 3
    slots[0].release()
    fourth = pool.acquire("v4")
    assert fourth.path == slots[0].path
    assert pool.acquire("v2").path == slots[1].path


def test_what_a_killed_builder_left_is_built_again(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from weightsync.vllm_engine.device.pool import LayoutPool\n"
        "slot = LayoutPool(Path(sys.argv[1]), 'f', 64).acquire('v1'); print('building', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "building\n"
        pool = LayoutPool(tmp_path, "f", 64)
        with pytest.raises(LayoutPoolError, match="building v1"):
            pool.acquire("v1", timeout_s=0.05)
        os.kill(builder.pid, signal.SIGKILL)
        builder.wait()
        slot = pool.acquire("v1")
    assert not slot.built


def test_a_process_that_is_killed_while_it_makes_a_slot_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(fd: int, begin: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes // 2)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", killed)
        with pytest.raises(Killed):
            LayoutPool(tmp_path, "f", 64).reserve(1)
    pool = LayoutPool(tmp_path, "f", 64)
    pool.reserve(2)
    assert {pool.acquire(key).data.numel() for key in ("v1", "v2")} == {64}
    assert len(list(tmp_path.glob("layout-f-*[0-9]"))) == 2


def test_a_full_shared_memory_is_a_typed_error() -> None:
    room = 1 << 20
    with small_file_system(room) as directory:
        pool = LayoutPool(directory, "f", 2 * room)
        with pytest.raises(LayoutPoolError, match="no room"):
            pool.acquire("v1")
        assert not list(directory.glob("layout-f-[0-9]*"))
