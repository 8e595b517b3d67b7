"""The script that publishes the first version, on a real store with a real coordinator."""

from __future__ import annotations

import os
import runpy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.coordinating import coordinating
from tests.k8s.helm import CHART, arguments, release
from tests.weightsync.tensors import model, save_safetensors
from weightsync.control.records import ActiveRecord, Keys
from weightsync.store import SyncStore

FILES = CHART / "files"


@pytest.fixture
def script() -> dict[str, Any]:
    """first_version.py as a module."""
    return runpy.run_path(str(FILES / "first_version.py"))


@pytest.fixture
def led(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """As by a gateway."""
    url = f"sqlite://{tmp_path}/store.db"
    monkeypatch.setenv("HOTSWAP_ARENA", f"/dev/shm/hotswap-test-{os.getpid()}-{time.monotonic_ns()}")
    monkeypatch.setenv("HOTSWAP_HOST", "pod-0")
    with coordinating(url, "demo"):
        yield url
    for slot in (arena := Path(os.environ["HOTSWAP_ARENA"])).glob("*"):
        slot.unlink()
    arena.rmdir()


def active(url: str) -> int | None:
    store = SyncStore(url)
    found = store.get(Keys("demo").active)
    store.close()
    return None if found is None else ActiveRecord.from_json(found.value).version


def test_the_first_pod_publishes_the_first_version(led: str, script: dict[str, Any], tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    save_safetensors(directory / "model.safetensors", model(3.0))
    publish = ["--store", led, "--model", "demo", "--gone-after", "0", str(directory)]
    assert script["main"]([*publish, "--ordinal", "1"]) == 0
    assert active(led) is None
    assert script["main"](publish) == 0
    assert active(led) == 1
    for when in ("first", "lost"):  # it lies here
        assert script["main"]([*publish, "--when", when]) == 0
        assert active(led) == 1
    for slot in Path(os.environ["HOTSWAP_ARENA"]).glob("slot-*"):  # the pod has lost its memory
        slot.unlink()
    assert script["main"]([*publish, "--when", "first"]) == 0
    assert active(led) == 1
    assert script["main"]([*publish, "--when", "lost"]) == 0
    assert active(led) == 2


def test_the_manifest_publishes_with_options_that_the_script_takes(script: dict[str, Any]) -> None:
    for name in ("minimal", "leaderworkerset"):
        container = release(name).pod("rollout").container("publish")
        python, path, *options = arguments(container)
        assert (python, Path(path).name) == ("python", "first_version.py")
        parsed = script["parser"]().parse_args(options)
        assert (parsed.ordinal, parsed.when) == (0, "lost")
        assert str(parsed.directory) == "/models/model"
