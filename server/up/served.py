"""The models that `hotswap up` starts instances of: the one of its command line, and those of the file of models that
have a checkpoint there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from server.errors import CliError, ConfigError, as_cli_error
from server.gateway.models.file import ModelEntry, read
from server.instance.config import check_vllm_args
from server.up.config import UpConfig
from server.up.paths import readable, resolve_model

OWN_DRAFTS = ("draft_model", "eagle", "eagle3")  # ways to speculate whose weights are a checkpoint of their own


@dataclass(frozen=True)
class Served:
    """One of them. `tag` is in the names of its processes, logs and directories; the first model's is ""."""

    name: str
    checkpoint: Path
    instances: int
    kv_cache_gib: float | None
    vllm_args: tuple[str, ...]
    tag: str = ""

    def named(self, what: str) -> str:
        """The name of a process or a directory of this model."""
        return f"{what}-{self.tag}" if self.tag else what

    @property
    def draft(self) -> Path | None:
        """The draft model that its instances speculate with. Raises CliError."""
        return draft_dir(self.vllm_args)


def served(config: UpConfig) -> tuple[Served, ...]:
    """The models, the command line's first. Raises CliError, before anything is started."""
    entries: list[ModelEntry] = []
    if config.models is not None:
        with as_cli_error(ConfigError):
            entries = [entry for entry in read(config.models).own.values() if entry.checkpoint]
    found: list[Served] = []
    if config.model is not None:
        checkpoint = resolve_model(config.model)
        name = config.name or (checkpoint.name if Path(config.model).expanduser().is_dir() else config.model)
        if name in [entry.name for entry in entries]:
            raise CliError(
                f"--model {config.model}: {config.models} has a checkpoint for {name} too; leave one of them out"
            )
        found.append(Served(name, checkpoint, config.instances, config.kv_cache_gib, config.vllm_args))
    elif not entries:
        raise CliError(
            f"--models {config.models}: no model there has a checkpoint; give it one, or name one with --model"
        )
    for entry in entries:
        with as_cli_error(ConfigError, prefix=f"model {entry.name}: "):
            check_vllm_args(entry.vllm_args)
        args = (*config.vllm_args, *entry.vllm_args)
        tag = readable(entry.name) if found else ""
        kv_cache_gib = entry.kv_cache_gib or config.kv_cache_gib
        found.append(Served(entry.name, resolve_model(entry.checkpoint), entry.instances, kv_cache_gib, args, tag))
    return tuple(found)


def draft_dir(vllm_args: Sequence[str]) -> Path | None:
    """The draft model that `--speculative-config` names, if it has weights of its own to publish. Raises CliError."""
    joined = [
        word for argument in vllm_args for word in (argument.split("=", 1) if argument[:2] == "--" else [argument])
    ]
    if "--speculative-config" not in joined[:-1]:
        return None
    try:
        config = json.loads(joined[joined.index("--speculative-config") + 1])
    except json.JSONDecodeError as error:
        raise CliError(f"--speculative-config is not JSON ({error})") from error
    own = isinstance(config, dict) and "model" in config and config.get("method", "draft_model") in OWN_DRAFTS
    return resolve_model(config["model"]) if own else None
