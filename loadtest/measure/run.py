"""The begin and the end of every benchmark: a server, checkpoints that tell who wrote a token, the file of figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from loadtest.measure.machine import machine
from loadtest.models.checkpoints import make_constant_checkpoint
from server.up.config import UpConfig
from server.up.server import Server

OPTIONS = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def up(model: Path, name: str, state: Path, vllm_args: tuple[str, ...], **options: Any) -> Server:
    """`hotswap up` on a free port, with a state directory that nobody needs later. It is started as a context.
    `options` are those of UpConfig."""
    config = UpConfig(
        model=str(model), name=name, port=0, throwaway=True, state_dir=state, vllm_args=vllm_args, **options
    )
    return Server(config)


def saying(work: Path, tokens: range) -> list[Path]:
    """For each token a checkpoint that answers it whatever it is asked, made once in `work`."""
    paths = [work / f"say-{number}" for number in range(len(tokens))]
    return [
        path if (path / "config.json").exists() else make_constant_checkpoint(path, token=token)
        for path, token in zip(paths, tokens, strict=True)
    ]


def with_machine(figures: Mapping[str, Any], json: Path | None) -> dict[str, Any]:
    """The figures and, under "machine", what they belong to; written to `json` if it is given."""
    found = {"machine": machine(), **figures}
    write(found, json)
    return found


def write(found: Mapping[str, Any], json: Path | None) -> None:
    """Figures that say already which machine they belong to."""
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_bytes(orjson.dumps(found, option=OPTIONS) + b"\n")
