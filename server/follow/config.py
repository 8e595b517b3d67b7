"""The options of `hotswap follow`. Imports nothing that takes long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from server.errors import ConfigError
from server.options import Option

NewestBy = Literal["name", "time"]


@dataclass(frozen=True)
class FollowConfig:
    """The source that is followed, and how its checkpoints are taken and used. Times in seconds. Raises ConfigError."""

    source: Annotated[
        str,
        Option(
            "dir:///DIRECTORY, a URL of fsspec's such as s3://BUCKET/RUN, models:/NAME@ALIAS of MLflow, or "
            "versions+URL for what a BucketPublisher has put there",
            positional=True,
        ),
    ]
    tracking_uri: Annotated[str, Option("the MLflow server of models:/NAME@ALIAS", env="MLFLOW_TRACKING_URI")] = ""
    policy: Annotated[str, Option("stored policy that each new version is released by")] = "default"
    activate: Annotated[bool, Option("swap each new version in at once; there is no release")] = False
    interval_s: Annotated[float, Option("seconds between two looks at the source")] = 10.0
    settle_s: Annotated[float, Option("seconds for which a checkpoint must stay as it is before it is taken")] = 10.0
    newest_by: Annotated[
        NewestBy, Option("which checkpoint is the newest: the last by name (step-9 before step-10), or by time")
    ] = "name"
    part: Annotated[str, Option('what the checkpoints are: "draft" or "lora/NAME"; default: the base model')] = ""
    cast: Annotated[bool, Option("convert floating-point tensors to the dtypes that are served")] = False
    sign_key: Annotated[str, Option("name of the gateway's --sign-key that signs versions")] = ""
    cache_dir: Annotated[
        Path | None, Option("what was fetched and what was tried; the gateway reads it too; default: beside the state")
    ] = None
    metrics: Annotated[str, Option("ADDRESS:PORT that answers /metrics for Prometheus; default: none")] = ""
    state_dir: Annotated[Path | None, Option("state directory of `up`; default: the latest server started here")] = None
    url: Annotated[str | None, Option("admin port; default: from the state directory", env="HOTSWAP_ADMIN_URL")] = None
    admin_key_file: Annotated[Path | None, Option("file with the admin key", env="HOTSWAP_ADMIN_KEY_FILE")] = None

    def __post_init__(self) -> None:
        if not self.interval_s > 0:
            raise ConfigError(f"--interval {self.interval_s:g}: must be a positive number of seconds.")
        if self.settle_s < 0:
            raise ConfigError(f"--settle {self.settle_s:g}: must be 0 or more seconds.")

    @property
    def main(self) -> str:
        """The file without which a directory is no checkpoint."""
        return "adapter_config.json" if self.part.startswith("lora/") else "config.json"
