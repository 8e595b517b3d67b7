"""The command as users and the gateway run it: a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.weightsync.tensors import model, read_back, save_safetensors
from weightsync import Publisher
from weightsync.control.records import VersionRecord
from weightsync.errors import StalePublisher
from weightsync.push import main
from weightsync.push import push as pushed


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    save_safetensors(path / "model.safetensors", model(3.0))
    return path


def push(*arguments: object) -> tuple[int, Any]:
    command = [sys.executable, "-m", "weightsync.push", "--json", "--model", "demo", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, timeout=60, check=False)
    return run.returncode, json.loads(run.stdout)


def test_a_checkpoint_becomes_a_version(checkpoint: Path, store_url: str) -> None:
    status, done = push("--store", store_url, "--no-activate", "--step", 7, checkpoint)
    assert status == 0
    assert done["version"] == 1
    assert done["active"] is False
    assert done["tensors"] == 4
    with Publisher(store_url, model="demo") as publisher:
        (record,) = publisher.versions()
        assert (record.step, record.source, record.publisher) == (7, str(checkpoint), "push")
        assert read_back(record)["model.norm.weight"][0] == 3.0


def test_a_small_checkpoint_needs_no_large_import(checkpoint: Path, store_url: str) -> None:
    code = (
        "import sys; from weightsync.push import main; done = main(sys.argv[1:]); print(*sys.modules); sys.exit(done)"
    )
    arguments = ["--store", store_url, "--model", "demo", "--no-activate", "--json", str(checkpoint)]
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, timeout=60, check=True)
    loaded = set(run.stdout.decode().splitlines()[-1].split())
    assert "numpy" in loaded
    assert not loaded & {"numba", "torch", "transformers", "vllm", "safetensors"}


def test_a_waiting_process_gets_its_options_later(checkpoint: Path, store_url: str) -> None:
    command = [sys.executable, "-m", "weightsync.push", "--wait"]
    arguments = ["--store", store_url, "--model", "demo", "--no-activate", "--json", str(checkpoint)]
    run = subprocess.run(command, input=json.dumps(arguments) + "\n", capture_output=True, timeout=60, text=True)
    assert (run.returncode, json.loads(run.stdout)["version"]) == (0, 1)
    assert subprocess.run(command, input="", capture_output=True, timeout=60, text=True).returncode == 0


def test_what_goes_wrong_is_typed(checkpoint: Path, store_url: str, tmp_path: Path) -> None:
    status, done = push("--store", store_url, "--no-activate", tmp_path / "nowhere")
    assert (status, done["error"]["code"], done["version"]) == (1, "checkpoint_error", None)
    status, done = push("--store", f"sqlite://{tmp_path}/none.db", checkpoint)
    assert (status, done["error"]["code"]) == (1, "store_unavailable")
    status, done = push("--store", store_url, "--timeout", 0.2, checkpoint)  # nobody is there to swap it in
    assert (status, done["error"]["code"], done["version"]) == (1, "swap_timeout", 1)


def test_a_checkpoint_that_does_not_fit_names_the_tensor(
    checkpoint: Path, publisher: Publisher, store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    publisher.publish(model(width=16), activate=False)
    assert main(["--store", store_url, "--model", "demo", "--json", str(checkpoint)]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["tensor"]) == ("shape_mismatch", "model.embed_tokens.weight")
    assert [v.version for v in publisher.versions()] == [1]


def test_an_upload_given_to_two_processes_at_once_becomes_one_version(
    checkpoint: Path, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look for a version of the upload before either has claimed one."""
    once: dict[str, Any] = {"upload_id": "one", "store": store_url, "model": "demo", "activate": False}

    class Overtaken(Publisher):
        def versions(self) -> list[VersionRecord]:
            found = super().versions()
            if not found:
                monkeypatch.setattr("weightsync.push.Publisher", Publisher)
                assert pushed(checkpoint, **once) == 1
            return found

    monkeypatch.setattr("weightsync.push.Publisher", Overtaken)
    with pytest.raises(StalePublisher):
        pushed(checkpoint, **once)
    with Publisher(store_url, model="demo") as reader:
        assert [v.version for v in reader.versions()] == [1]


def test_people_get_sentences(checkpoint: Path, store_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--store", store_url, "--model", "demo", "--no-activate", str(checkpoint)]) == 0
    assert capsys.readouterr().out.startswith("version 1 is ready: 4 tensors")
    assert main(["--store", store_url, "--model", "demo", str(checkpoint / "x")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
