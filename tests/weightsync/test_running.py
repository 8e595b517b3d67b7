"""A publisher without a store takes the running server's; a model that nobody serves is refused at once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.weightsync.codes import refused
from tests.weightsync.tensors import model
from weightsync import Publisher, SyncStore
from weightsync.control.records import InstanceRecord, Keys
from weightsync.errors import StoreUnavailable

ENDED = 2**22 + 1  # the id of no process


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTSWAP_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("HOTSWAP_STORE", raising=False)
    return tmp_path / "state"


def describe(root: Path, names: list[str], store: str, pid: int | None = None) -> None:
    about = {"url": "", "admin_url": "", "model": names[0], "models": names, "store": store, "admin_key_file": ""}
    (root / names[0]).mkdir(parents=True)
    (root / names[0] / "server.json").write_text(json.dumps(about | {"pid": os.getpid() if pid is None else pid}))


@pytest.mark.parametrize("others", [[], [(["other"], None)], [(["demo"], ENDED)]])
def test_the_store_is_that_of_the_server_with_the_model(
    root: Path, others: list[tuple[list[str], int | None]], store_url: str
) -> None:
    describe(root, ["first", "demo"], store_url)
    for names, pid in others:
        describe(root, names, "sqlite:///nowhere.db", pid)
    with Publisher(model="demo") as publisher:
        assert publisher.url == store_url
        publisher.publish(model(1), activate=False)


@pytest.mark.parametrize(
    ("servers", "said"),
    [
        ([], "no server runs with its state under"),
        ([(["ended"], ENDED)], "no server runs with its state under"),
        ([(["a"], None), (["b"], None)], r"none of the servers that run here have the model 'demo' .they serve a, b."),
        ([(["a", "demo"], None), (["b", "demo"], None)], r"several of the servers .*they serve a, b, demo"),
    ],
)
def test_no_store_is_guessed(root: Path, servers: list[tuple[list[str], int | None]], said: str) -> None:
    for names, pid in servers:
        describe(root, names, "sqlite:///nowhere.db", pid)
    with pytest.raises(StoreUnavailable, match=rf"{said}.*HOTSWAP_STORE"):
        Publisher(model="demo")


def test_a_model_that_nobody_serves_is_refused_with_the_names_of_the_others(
    store_url: str, store_sync: SyncStore
) -> None:
    for name in ("team/one", "two"):
        store_sync.put(f"{Keys(name).instances}i-0", InstanceRecord("i-0", "http://i-0").to_json())
    with Publisher(store_url, model="twoo") as publisher:
        with refused("unknown_model", r".instances serve 'team/one', 'two'.: .*new_model=True"):
            publisher.publish(model(1))
        with refused("unknown_model"):
            publisher.hold()
        assert publisher.versions() == []
    for name, new in (("team/one", False), ("three", True)):
        with Publisher(store_url, model=name, new_model=new) as publisher:
            publisher.publish(model(1), activate=False)
    with Publisher(store_url, model="three") as publisher:
        publisher.publish(model(2), activate=False)
