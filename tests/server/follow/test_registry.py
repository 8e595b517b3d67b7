"""A registered model's alias in a real MLflow, and a bucket in moto's S3, are followed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from server.cli.admin import AdminClient
from server.cli.follow import open_source
from server.errors import ConfigError
from server.follow.config import FollowConfig
from server.follow.sources import FollowError, Source
from tests.server.follow.checkpoints import write
from tests.server.follow.following import AT_ONCE, Follow
from tests.servers import MLFLOW_PASSWORD, MLFLOW_USER, Server, mlflow_server, s3_server, s3_variables

pytestmark = pytest.mark.timeout(900)  # the first test waits for MLflow, and perhaps for its installation
ALIAS = "champion"
WRONG = "http://nobody:not-the-password@127.0.0.1"


@pytest.mark.parametrize(
    ("url", "tracking_uri", "problem"),
    [
        ("models:/demo/3", "http://127.0.0.1:1", "models:/NAME@ALIAS"),
        ("models:/demo@", "http://127.0.0.1:1", "models:/NAME@ALIAS"),
        ("models:/demo@champion", "", "--tracking-uri"),
        ("models:/demo@champion", "sqlite:///mlflow.db", "--tracking-uri"),
    ],
)
def test_what_names_no_alias_or_no_server(url: str, tracking_uri: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_source(FollowConfig(source=url, tracking_uri=tracking_uri))


def test_a_server_that_is_away_is_told_without_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FollowError, match="is MLflow running there") as told:
        list(registry(f"{WRONG}:1").candidates())
    assert "not-the-password" not in str(told.value)
    assert told.value.__cause__ is None


def registry(tracking_uri: str, model: str = "demo") -> Source:
    return open_source(FollowConfig(source=f"models:/{model}@{ALIAS}", tracking_uri=tracking_uri))


class Models:
    """A registered model whose versions a person makes and chooses."""

    def __init__(self, server: Server) -> None:
        from mlflow import MlflowClient

        self.server, self.client, self.name = server, MlflowClient(server.url), f"model-{uuid.uuid4().hex}"
        self.client.create_registered_model(self.name)
        self.experiment = self.client.create_experiment(self.name)

    def source(self) -> Source:
        return registry(self.server.url, self.name)

    def add(self, directory: Path, home: str = "") -> str:
        """The number of a version that has the files of `directory` below `home`."""
        run = self.client.create_run(self.experiment).info.run_id
        self.client.log_artifacts(run, str(directory), f"net/{home}".rstrip("/"))
        made = self.client.create_model_version(self.name, f"runs:/{run}/net", run, await_creation_for=0)
        return str(made.version)

    def choose(self, number: str) -> None:
        self.client.set_registered_model_alias(self.name, ALIAS, number)


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@pytest.fixture
def models(mlflow: Server, monkeypatch: pytest.MonkeyPatch) -> Models:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", MLFLOW_USER)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", MLFLOW_PASSWORD)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return Models(mlflow)


@pytest.mark.broad
def test_an_alias_is_followed_forward_and_back(models: Models, follow: Follow, tmp_path: Path) -> None:
    """The first version has its checkpoint at the root, the second where MLflow's `transformers` flavour has it."""
    follow.store_policy(AT_ONCE)
    one = models.add(write(tmp_path / "one", 1.0, shards=2, sums=True))
    two = models.add(write(tmp_path / "two", 2.0), "model")
    models.choose(one)
    follow.again(models.source())
    follow.until_tried("version 1", "released")
    assert follow.active == 2
    follow.follower.step()
    assert follow.file.state.current is None
    models.choose(two)
    follow.until_tried("version 2", "released")
    assert follow.active == 3
    models.choose(one)
    follow.until_tried("version 1", "released")
    assert (follow.active, len(follow.deeds("publish"))) == (2, 3)
    reasons = [entry.reason for entry in follow.deeds("release")]
    assert [reason.partition(" of ")[0] for reason in reasons] == ["version 1", "version 2", "version 1"]


@pytest.mark.broad
def test_what_is_wrong_in_the_registry_is_said(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = models.server.url
    with pytest.raises(FollowError, match=r"alias champion not found.*: set the alias"):
        list(models.source().candidates())
    with pytest.raises(FollowError, match=r"name=none not found.*: register the model"):
        list(registry(url, model="none").candidates())
    models.choose(models.add(write(tmp_path / "good", shards=2)))
    (found,) = models.source().candidates()
    home = models.source().fetch(found, tmp_path / "cache", AdminClient(None, None, None))
    assert {path.name for path in home.iterdir()} == found.files.keys()
    (empty := tmp_path / "empty").mkdir()
    (empty / "notes.txt").write_text("no checkpoint")
    models.choose(models.add(empty))
    (found,) = models.source().candidates()
    assert (found.files, found.lacks) == ({}, "it has no config.json")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "not-the-password")
    with pytest.raises(FollowError, match=r"401.*: set MLFLOW_TRACKING_USERNAME") as told:
        list(models.source().candidates())
    assert "not-the-password" not in str(told.value)


@pytest.mark.broad
def test_an_mlflow_that_was_away_is_asked_again(models: Models, follow: Follow, tmp_path: Path) -> None:
    follow.store_policy(AT_ONCE)
    models.choose(models.add(write(tmp_path / "one", 1.0)))
    follow.again(models.source())
    models.server.stop()
    with pytest.raises(FollowError, match="is MLflow running there"):
        follow.follower.step()
    models.server.start()
    follow.until_tried("version 1", "released")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.mark.broad
def test_a_bucket_is_followed(s3: Server, follow: Follow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_variables(s3).items():
        monkeypatch.setenv(name, value)
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.mkdir("models")
    follow.store_policy(AT_ONCE)

    def put(name: str, value: float, **how: Any) -> None:
        for path in write(tmp_path / name, value, shards=2, **how).iterdir():
            files.put_file(str(path), f"models/run/{name}/{path.name}")

    follow.again(open_source(FollowConfig(source="s3://models/run")))
    put("step-9", 1.0, sums=True)
    follow.until_tried("step-9", "released")
    put("step-10", 2.0)
    follow.until_tried("step-10", "released")
    assert (follow.active, follow.sources()[0]) == (3, "base")
    put("step-10", 3.0)
    follow.until(lambda state: state.current is None and state.tried[-1].version == 4)
    files.rm("models/run", recursive=True)
    put("step-11", 4.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    fsspec.filesystem("s3").clear_instance_cache()
    away = open_source(FollowConfig(source="s3://models/run"))
    with pytest.raises(FollowError, match=r"s3://models/run cannot be read") as told:
        list(away.candidates())
    assert "a-secret-of-the-tests" not in str(told.value)
