"""Checkpoints that a source holds, and how one is fetched from it and verified."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

from server.cli.admin import AdminClient
from server.cli.follow import open_source
from server.errors import CliError, ConfigError
from server.follow import sources
from server.follow.config import FollowConfig
from server.follow.sources import BAD, Candidate, FollowError, Source, lacking, verify
from server.follow.state import KEPT, Current, FollowState, StateFile
from tests.server.follow.checkpoints import write
from weightsync.publish.checkpoint import INDEX, Checkpoint

NOBODY = AdminClient(None, None, None)  # who fetches checkpoints asks nobody


def opened(url: object, **options: Any) -> Source:
    return open_source(FollowConfig(source=str(url), **options))


def names(source: Source) -> list[str]:
    return [candidate.name for candidate in source.candidates()]


def first(source: Source) -> Candidate:
    return next(source.candidates())


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    """An object store with one run: step-9 and step-10."""
    url = f"memory://bucket-{uuid.uuid4().hex}/run"
    for number in (9, 10):
        write(tmp_path / f"step-{number}", number, shards=2, sums=True)
    files, root = fsspec.core.url_to_fs(url)
    for path in tmp_path.glob("*/*"):
        files.pipe_file(f"{root}/{path.relative_to(tmp_path)}", path.read_bytes())
    return url


def test_directories_by_name_or_by_time(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "tmp-step-11", ".step-12"):
        write(tmp_path / name)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "out.txt").touch()
    for path in (tmp_path / "step-10").iterdir():
        os.utime(path, (1, 1))
    for url in (tmp_path, f"dir://{tmp_path}", f"file://{tmp_path}"):
        assert names(opened(url)) == ["step-10", "step-9"]
        assert names(opened(url, newest_by="time")) == ["step-9", "step-10"]
    assert names(opened(tmp_path / "step-9")) == ["step-9"]


def test_a_directory_is_read_where_it_is_and_its_identity_changes_with_its_content(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "run" / "step-1", 1.0).parent)
    assert source.fetch(first(source), tmp_path / "cache", NOBODY) == tmp_path / "run" / "step-1"
    assert set(first(source).files) == {"config.json", "model.safetensors"}
    before = first(source).identity
    assert first(source).identity == before
    write(tmp_path / "run" / "step-1", 2.0)
    assert first(source).identity != before


def test_what_is_needed_is_fetched_once_and_older_copies_go(bucket: str, tmp_path: Path) -> None:
    source, cache = opened(bucket), tmp_path / "cache"
    newest, older = source.candidates()
    assert (newest.name, older.name) == ("step-10", "step-9")
    old = source.fetch(older, cache, NOBODY)
    home = source.fetch(newest, cache, NOBODY)
    assert not old.exists()
    verify(home, "config.json")
    assert sorted(path.name for path in home.iterdir()) == sorted(newest.files)
    assert "optimizer.pt" not in newest.files
    (lost, kept) = sorted(home.glob("*.safetensors"))
    lost.unlink()
    stamp = kept.stat().st_mtime_ns
    assert source.fetch(newest, cache, NOBODY) == home
    assert (lost.exists(), kept.stat().st_mtime_ns) == (True, stamp)


def test_shards_that_the_index_does_not_name_stay_where_they_are(bucket: str, tmp_path: Path) -> None:
    files, root = fsspec.core.url_to_fs(bucket)
    files.pipe_file(f"{root}/step-10/consolidated.safetensors", b"as large as all shards together")
    source = opened(bucket)
    home = source.fetch(first(source), tmp_path, NOBODY)
    assert len(Checkpoint(home).schema.tensors) == 4
    assert not (home / "consolidated.safetensors").exists()


def test_what_comes_cut_off_is_not_kept(bucket: str, tmp_path: Path) -> None:
    source = opened(bucket)
    candidate = first(source)
    files, root = fsspec.core.url_to_fs(bucket)
    shard = f"{root}/step-10/model-00002-of-00002.safetensors"
    whole = files.cat_file(shard)
    files.pipe_file(shard, whole[:-1])
    with pytest.raises(FollowError, match="was cut off, or is changing"):
        source.fetch(candidate, tmp_path, NOBODY)
    files.pipe_file(shard, whole)
    verify(source.fetch(candidate, tmp_path, NOBODY), "config.json")


def test_a_cache_without_room_is_said(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(bucket)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(FollowError, match=r"no room for [\d,]+ bytes") as refused:
        source.fetch(first(source), tmp_path, NOBODY)
    assert refused.value.code == "CacheFull"


def test_what_cannot_be_reached_or_named(tmp_path: Path) -> None:
    for url in (tmp_path / "none", "memory://none-such/run"):
        with pytest.raises(FollowError, match="cannot be read"):
            list(opened(url).candidates())
    for url in ("dir://models/run", "nothing://x"):
        with pytest.raises(ConfigError):
            opened(url)
    for options in ({"interval_s": 0.0}, {"settle_s": -1.0}):
        with pytest.raises(ConfigError, match="--"):
            opened(tmp_path, **options)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (["config.json", "model.safetensors"], ""),
        (["model.safetensors"], "no config.json"),
        (["config.json", INDEX], "no *.safetensors"),
        (["config.json", INDEX, "m-00001-of-00002.safetensors"], "1 of 2 shards"),
        (["config.json", "m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"], "no model.safetensors.index"),
        (["config.json", INDEX, "m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"], ""),
    ],
)
def test_whether_all_files_are_there(files: list[str], problem: str) -> None:
    said = lacking(files, "config.json")
    assert (said == "") == (problem == "")
    assert problem in said


def bad(match: str) -> pytest.RaisesExc[FollowError]:
    """Inside, a checkpoint is refused for good."""
    return pytest.raises(FollowError, match=match, check=lambda error: error.code == BAD)


def test_what_is_damaged_is_refused(tmp_path: Path) -> None:
    verify(write(tmp_path / "good", shards=2, sums=True), "config.json")
    cut = write(tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    with bad("cut off"):
        verify(cut.parent, "config.json")
    (write(tmp_path / "config") / "config.json").write_text("{")
    with bad("not JSON"):
        verify(tmp_path / "config", "config.json")


def test_sums_are_held_against_the_files(tmp_path: Path) -> None:
    home = write(tmp_path / "sums", 1.0, sums=True)
    write(home, 2.0)
    with bad(r"has SHA-256 .*, and should have"):
        verify(home, "config.json")
    listed = home / "SHA256SUMS"
    listed.write_text("".join(line for line in listed.read_text().splitlines(True) if "safetensors" not in line))
    with bad(r"does not name model\.safetensors"):
        verify(home, "config.json")
    listed.unlink()
    beside = home / "model.safetensors.sha256"
    beside.write_text("0" * 64 + "\n")
    with bad("should have 0000"):
        verify(home, "config.json")
    beside.write_text("a sum\n")
    with bad("is no list of SHA-256 sums"):
        verify(home, "config.json")
    beside.write_text(f"{sources._digest(home / 'model.safetensors').upper()} *elsewhere/model.safetensors\n")
    verify(home, "config.json")


def test_the_state_is_one_follower_s_and_one_source_s(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "dir:///a")
    with pytest.raises(CliError, match="another follower"):
        StateFile(tmp_path, "dir:///a")
    state = FollowState("dir:///a", Current("step-1", "i" * 32, 1.5, version=3))
    for number in range(KEPT + 1):
        state = FollowState("dir:///a", Current(f"step-{number}", str(number)), state.tried).ended("refused", "bad")
    file.write(state)
    file.close()
    with pytest.raises(CliError, match="belongs to dir:///a"):
        StateFile(tmp_path, "dir:///b")
    again = StateFile(tmp_path, "dir:///a")
    assert again.state == state
    assert (len(state.tried), state.tried[-1].reason, "0" in state.refused) == (KEPT, "bad", False)
    again.close()
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(CliError, match="cannot be read"):
        StateFile(tmp_path, "dir:///a")
