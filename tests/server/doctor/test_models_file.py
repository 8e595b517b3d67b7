"""Files of models against a real store and real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from server.doctor.registry import Finding, Status
from server.ports import free_port
from tests.server.asking import answering
from tests.server.doctor.worlds import checkpoint, findings, host, only
from weightsync import open_store
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys


def look(tmp_path: Path, text: str, store: str | None = None) -> list[Finding]:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    return findings("models-file", host(tmp_path, models=file, store=store))


def test_without_a_file_there_is_nothing_to_check(tmp_path: Path) -> None:
    only(findings("models-file", host(tmp_path)), "skip")


def test_a_mistake_is_told_with_its_line(tmp_path: Path) -> None:
    found = only(look(tmp_path, "models:\n  - name: a\naliases:\n  fast: [b]\n"), "fail")
    assert "line 4: alias fast: there is no model b" in found.found


@pytest.mark.parametrize(("there", "status"), [(True, "ok"), (False, "fail")])
def test_a_checkpoint_must_be_there(tmp_path: Path, there: bool, status: Status) -> None:
    place = tmp_path / "model"
    if there:
        checkpoint(place)
    found = look(tmp_path, f"models: [{{name: a, checkpoint: {place}}}]")
    assert only(found[1:], status).found.startswith("a: ")


def test_models_started_elsewhere_are_looked_up_in_the_store(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.db"
    text = "models: [{name: whole}, {name: bare}]"

    async def register() -> None:
        store = open_store(url)
        keys = Keys("whole")
        await store.put(keys.instance("i"), InstanceRecord("i", "http://127.0.0.1:1").to_json())
        await store.put(keys.active, ActiveRecord(1, 1, None, "s", 0.0).to_json())
        await store.close()

    asyncio.run(register())
    told = {(finding.status, finding.found.partition(": ")[0]) for finding in look(tmp_path, text, url)[1:]}
    assert told == {("ok", "whole"), ("warn", "bare")}
    mends = [finding.mend for finding in look(tmp_path, text, url) if finding.status == "warn"]
    assert ["push" in mends[0], "instance" in mends[1]] == [True, True]
    assert len(look(tmp_path, text, f"sqlite://{tmp_path}/none.db")) == 1, "`store` tells of that"


@pytest.fixture
def hosted() -> Iterator[str]:
    def answer(path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        if path != "/v1/models":
            return 404, b"{}"
        return (200, b'{"data": [{"id": "large-1"}]}') if headers["authorization"] == "Bearer right" else (401, b"{}")

    with answering(answer) as url:
        yield url


@pytest.mark.parametrize(
    ("key", "path", "model", "status", "said"),
    [
        ("right", "/v1", "large-1", "ok", "lists large-1"),
        ("right", "/v1", "large-2", "warn", "does not list large-2"),
        ("wrong", "/v1", "large-1", "fail", "does not take the key"),
        ("right", "/v2", "large-1", "warn", "404"),
    ],
)
def test_an_upstream_is_asked(
    tmp_path: Path, hosted: str, monkeypatch: pytest.MonkeyPatch, key: str, path: str, model: str, status: Status,
    said: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("HOSTED_KEY", key)
    upstream = f"{{url: '{hosted}{path}', model: {model}, api-key-env: HOSTED_KEY}}"
    found = only(look(tmp_path, f"models: [{{name: a}}, {{name: hosted, upstream: {upstream}}}]")[1:], status)
    assert said in found.found
    assert key not in found.found + found.mend


def test_an_upstream_that_is_not_there(tmp_path: Path) -> None:
    upstream = f"{{url: 'http://127.0.0.1:{free_port()}/v1'}}"
    found = only(look(tmp_path, f"models: [{{name: a}}, {{name: hosted, upstream: {upstream}}}]")[1:], "fail")
    assert "cannot be reached" in found.found
