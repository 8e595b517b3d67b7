"""A registered model of an MLflow server, whose alias says which version is wanted: models:/NAME@ALIAS.

MLflow's own client asks, with its own variables for credentials and certificates. A checkpoint lies at the root of a
version's artifacts, or in `model/`, where MLflow's `transformers` flavour has it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from server.errors import ConfigError
from server.follow.sources import (
    Admin,
    Candidate,
    Checkpoints,
    File,
    fetched,
    lacking,
    reading,
    verify,
    wanted,
)
from weightsync.bucket.objects import redacted

SCHEME = "models:/"
HOMES = ("", "model")  # where the configuration may be; the first goes before the second
# The follower itself asks again, and says why meanwhile. It reports to nobody, and its log has no bars.
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
_ALIAS = re.compile(r"models:/([^@/]+)@([^@/]+)")
_ADVICE = {  # by MLflow's error code
    "UNAUTHENTICATED": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
    "PERMISSION_DENIED": "its user must be allowed to read the model",
    "INVALID_PARAMETER_VALUE": "set the alias, or name another one",
    "RESOURCE_DOES_NOT_EXIST": "register the model and set the alias, or name others",
}
AWAY = "is MLflow running there?"


class Registry(Checkpoints):
    """Follows one alias. The version that it points at is the one candidate, older than what was tried or not."""

    def __init__(self, url: str, tracking_uri: str, main: str) -> None:
        """Raises ConfigError."""
        named = _ALIAS.fullmatch(url)
        if named is None:
            raise ConfigError(f"{url} names no alias of a registered model: write models:/NAME@ALIAS.")
        if not tracking_uri.startswith(("http://", "https://")):
            raise ConfigError(f"{url} is on a server: name it with --tracking-uri http://HOST:PORT.")
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            self._client = importlib.import_module("mlflow").MlflowClient(tracking_uri)
            self._artifacts: Any = importlib.import_module("mlflow.artifacts")
        except ImportError as error:
            raise ConfigError(f"{url} needs MLflow's client ({error}): pip install mlflow-skinny.") from error
        self._name, self._alias = named.groups()
        self._tracking_uri, self._main = tracking_uri, main
        self.told = f"{url} of {redacted(tracking_uri)}"

    def candidates(self) -> Iterator[Candidate]:
        with self._told():
            version = self._client.get_model_version_by_alias(self._name, self._alias)
            root = str(self._client.get_model_version_download_uri(self._name, version.version)).rstrip("/")
        listings = (self.ls(f"{root}/{home}".rstrip("/"))[1] for home in HOMES)
        files = next((found for found in listings if self._main in found), {})
        tagged = {name: replace(file, tag=str(version.creation_timestamp)) for name, file in files.items()}
        found = wanted(tagged, self._main)
        yield Candidate(self.told, f"version {version.version}", found, lacking(found, self._main), chosen=True)

    def fetch(self, candidate: Candidate, cache: Path, admin: Admin) -> Path:
        home = fetched(candidate, cache, self)
        verify(home, self._main)
        return home

    def ls(self, path: str) -> tuple[dict[str, str], dict[str, File]]:
        with self._told():
            entries = self._artifacts.list_artifacts(artifact_uri=path, tracking_uri=self._tracking_uri)
        directories, files = {}, {}
        for entry in entries:
            name = str(entry.path).rpartition("/")[2]
            if entry.is_dir:
                directories[name] = f"{path}/{name}"
            else:
                files[name] = File(f"{path}/{name}", int(entry.file_size or 0), "")
        return directories, files

    def read(self, file: File, target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".mlflow-") as room, self._told():
            how = {"artifact_uri": file.path, "tracking_uri": self._tracking_uri, "dst_path": room}
            Path(self._artifacts.download_artifacts(**how)).replace(target)

    def _told(self) -> contextlib.AbstractContextManager[None]:
        return reading(self.told, lambda error: _ADVICE.get(getattr(error, "error_code", ""), AWAY))
