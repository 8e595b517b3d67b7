"""The form of a version: the tensors it has, and the configuration that an engine must be started with to run them.

Versions of one form are swapped into a running engine. A version of another form takes a new engine: its instances
restart one by one (`state`), and each learns here what to start with. A form is published with the first version that
has it, and its configuration comes with that version's checkpoint. Everything else, the tokenizer above all, stays that
of the instances' model directory, so a configuration that does not fit to it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from weightsync.control.board import Board
from weightsync.control.records import SwapRecord
from weightsync.errors import (
    ConfigMismatch,
    DtypeMismatch,
    MissingTensor,
    ShapeMismatch,
    TensorMismatch,
    UnexpectedTensor,
)
from weightsync.format.manifest import Schema, diff_schema

KEPT = (
    "model_type",
    "architectures",
    "auto_map",
    "vocab_size",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""What must stay: tokenizer, code and limits come from the model directory, or were told to clients."""
MOST_STARTS = 2  # of one instance for one swap: a process that was killed gets a second try


def check_config(served: str, wanted: str) -> None:
    """Whether instances whose model directory has the config.json `served` can be started with `wanted`.

    Raises ConfigMismatch.
    """
    try:
        before, after = json.loads(served), json.loads(wanted)
    except ValueError as error:
        raise ConfigMismatch("config.json", f"not JSON ({error})") from None
    if not isinstance(before, dict) or not isinstance(after, dict):
        raise ConfigMismatch("config.json", "not a JSON object")
    for name in KEPT:
        if before.get(name) != after.get(name):
            raise ConfigMismatch(name, f"{after.get(name)!r}, served is {before.get(name)!r}")


WORDS: Mapping[type[TensorMismatch], str] = {
    UnexpectedTensor: "new",
    MissingTensor: "gone",
    ShapeMismatch: "of another shape",
    DtypeMismatch: "of another dtype",
}


@lru_cache(maxsize=16)
def changes(before: str, after: str) -> str:
    """What differs between the tensors of two forms (the JSON of their schemas), in words; "" if nothing does."""
    found: dict[str, list[str]] = {}
    for mismatch in diff_schema(Schema.from_json(before.encode()), Schema.from_json(after.encode())):
        found.setdefault(WORDS[type(mismatch)], []).append(mismatch.tensor)
    return ", ".join(
        f"{names[0]} is {what}" if len(names) == 1 else f"{len(names)} tensors are {what} ({names[0]}, ...)"
        for what, names in found.items()
    )


def changes_to(board: Board, version: int) -> str:
    """Why `version` takes other engines than the active version has, in words; "" if the running ones can take it."""
    active, wanted = board.active, board.version(version)
    serving = board.version(active.version) if active is not None else None
    if serving is None or wanted is None or serving.form == wanted.form:
        return ""
    before, after = board.form(serving.form), board.form(wanted.form)
    if before is None or after is None:
        return "its form is not known"
    return changes(before.tensors, after.tensors)


@dataclass(frozen=True)
class Start:
    """What an instance is to be started with: the form of `version`, for the swap `swap_id` if one asked for it."""

    version: int | None
    form: str | None
    swap_id: str | None = None


def start_of(board: Board, name: str) -> Start | None:
    """How the instance `name` is to be started now; None: it has failed in the swap under way, which ends first."""
    active, swap = board.active, board.swap
    if active is None:
        return Start(None, None)
    version = active.of(name).version
    if swap is None or not is_turn(swap, name) or swap.phase == "revert":
        return _start(board, version)
    tried = board.starts.get(name)
    if tried is not None and tried.swap_id == swap.id and tried.error is not None:
        return None
    return _start(board, version, swap.id)


def is_turn(swap: SwapRecord, name: str) -> bool:
    """Whether the swap has this instance restart now."""
    return swap.turn == name and swap.phase in ("canary", "commit", "revert")


def _start(board: Board, number: int, swap_id: str | None = None) -> Start:
    version = board.version(number)
    return Start(number, version.form if version is not None else None, swap_id)
