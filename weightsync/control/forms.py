"""The form of a version: the tensors it has, and the configuration that an engine must be started with to run them.

The configuration is config.json, and generation_config.json and chat template with it (publish/checkpoint.py): they say
where an answer ends and what the model is asked. A version that is published without them has those of the version that
it follows, and the first one those of the model directory, which each instance tells (`Keys.config`).

Versions of one form are swapped into a running engine. A version of another form takes a new engine: its instances
restart one by one (`state`), and each learns here what to start with. A form is published with the first version that
has it, and its configuration comes with that version's checkpoint. Equal tensors are computed with otherwise, or end
elsewhere, under another configuration (rope_theta, eos_token_id), so each key counts but for BOOKKEEPING. Everything
else, the tokenizer above all, stays that of the instances' model directory, so a configuration that does not fit to it
is refused.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from weightsync.control.board import Board
from weightsync.control.records import ActiveRecord, FormRecord, SwapRecord
from weightsync.control.state import untried
from weightsync.errors import PublishError, config_mismatch
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
BOOKKEEPING = frozenset({
    "_name_or_path", "_commit_hash", "_from_model_config", "transformers_version", "unsloth_version", "unsloth_fixed",
    "dtype", "torch_dtype",
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "use_cache", "return_dict",
    "output_attentions", "output_hidden_states", "output_router_logits", "gradient_checkpointing", "initializer_range",
    "attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "router_aux_loss_coef",
    "router_jitter_noise",
})  # fmt: skip
"""Where a checkpoint comes from, what training alone reads, and what its tensors, or an engine's options, say."""
OWN = "hotswap."
GENERATION, TEMPLATE = f"{OWN}generation_config", f"{OWN}chat_template"
BESIDE: Mapping[str, str] = {GENERATION: "generation_config.json", TEMPLATE: "chat template"}
"""Fields of a configuration that are files beside config.json, and what these are called."""
MOST_STARTS = 2  # of one instance for one swap: a process that was killed gets a second try


def check_config(served: str, wanted: str) -> None:
    """Whether instances whose model directory has the config.json `served` can be started with `wanted`.

    Raises PublishError.
    """
    before, after = _fields(served), _fields(wanted)
    for name in KEPT:
        if before.get(name) != after.get(name):
            raise config_mismatch(name, f"{after.get(name)!r}, served is {before.get(name)!r}")


@lru_cache(maxsize=16)
def differing(served: str, wanted: str) -> tuple[str, ...]:
    """The keys in which an engine would read something else from the config.json `wanted`. Raises PublishError.

    Releases of transformers give keys other names, and write defaults or leave them out. Where transformers is
    installed, what its class for the model makes of both counts, and the keys are those of the class.
    """
    before, after = (_meant(_fields(text, object_hook=_number)) for text in (served, wanted))
    own, given = ({name: fields.pop(name) for name in BESIDE if name in fields} for fields in (before, after))
    if isinstance(generation := given.get(GENERATION), dict):  # without the file, vLLM takes what config.json says
        own.setdefault(GENERATION, {name: before[name] for name in generation if name in before})
    if before != after:
        with contextlib.suppress(Exception):  # not installed, a model that it does not know, values that it refuses
            from transformers import AutoConfig

            before, after = (_meant(AutoConfig.for_model(**fields).to_dict()) for fields in (before, after))
    return _unlike(before | own, after | own | given)  # a file that is not given stays as it is


def completed(served: str, wanted: str) -> str:
    """`wanted` with the fields of BESIDE that only `served` has. Raises PublishError."""
    before, after = _fields(served), _fields(wanted)
    kept = {name: before[name] for name in BESIDE if name in before and name not in after}
    return json.dumps(after | kept, sort_keys=True) if kept else wanted


def kept_files(served: str, wanted: str | None) -> list[str]:
    """The files of the configuration `served` that a checkpoint does not have whose text is `wanted` (None: it has no
    config.json). Raises PublishError."""
    before, after = _fields(served), _fields(wanted or "{}")
    beside = [file for name, file in BESIDE.items() if name in before and name not in after]
    return [*(["config.json"] if wanted is None else []), *beside]


def meaning(config: str) -> str:
    """The config.json without the keys that no engine reads. Raises PublishError."""
    return json.dumps(_meant(_fields(config)), sort_keys=True)


def _number(value: dict[str, Any]) -> Any:
    """The number that transformers writes as an object, since JSON has none that is infinite."""
    written = value.get("__float__")
    return float(written) if written in ("Infinity", "-Infinity") else value


def _fields(text: str, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """Raises PublishError."""
    try:
        fields = json.loads(text, object_hook=object_hook)
    except ValueError as error:
        raise config_mismatch("config.json", f"not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise config_mismatch("config.json", "not a JSON object")
    return fields


def _meant(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that count; null is no value."""
    counts = {name: value for name, value in fields.items() if name not in BOOKKEEPING and value is not None}
    return {name: _meant(value) if isinstance(value, dict) else value for name, value in counts.items()}


def _unlike(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    """The keys in which they differ."""
    names = (name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return tuple(sorted(name.removeprefix(OWN) for name in names))


WORDS = {
    "unexpected_tensor": "new",
    "missing_tensor": "gone",
    "shape_mismatch": "of another shape",
    "dtype_mismatch": "of another dtype",
}


@lru_cache(maxsize=16)
def changes(before: FormRecord, after: FormRecord) -> str:
    """The differences between two forms, in words."""
    found: dict[str, list[str]] = {}
    for mismatch in diff_schema(Schema.from_json(before.tensors.encode()), Schema.from_json(after.tensors.encode())):
        found.setdefault(WORDS[mismatch.code], []).append(mismatch.tensor)
    if found:
        told = ", ".join(
            f"{names[0]} is {what}" if len(names) == 1 else f"{len(names)} tensors are {what} ({names[0]}, ...)"
            for what, names in found.items()
        )
        return (
            f"{told}, which `hotswap weights push --cast` converts" if [*found] == [WORDS["dtype_mismatch"]] else told
        )
    keys: tuple[str, ...] = ()
    with contextlib.suppress(PublishError):  # no configuration is known of one of them
        keys = _unlike(_meant(_fields(before.config)), _meant(_fields(after.config)))
    return f"config.json has another {', '.join(keys) or 'text'}"


def changes_to(board: Board, version: int, since: ActiveRecord | None = None) -> str:
    """Why `version` takes other engines than the active version has, or the one of `since`, in words; "" if those can
    take it."""
    active, wanted = since or board.active, board.version(version)
    serving = board.version(active.version) if active is not None else None
    if serving is None or wanted is None or serving.form == wanted.form:
        return ""
    before, after = board.form(serving.form), board.form(wanted.form)
    if before is None or after is None:
        return "its form is not known"
    return changes(before, after)


@dataclass(frozen=True)
class Start:
    """The way to start an instance: with the form of `version`, for the swap `swap_id` if one asked for it."""

    version: int | None
    form: str | None
    swap_id: str | None = None


def start_of(board: Board, name: str) -> Start | None:
    """How the instance `name` is to be started now; None: it has failed in the swap under way, which ends first."""
    active, swap = board.active, board.swap
    if active is None:
        return Start(None, None)
    version = active.of(name).version
    if swap is None or not _tries(board, swap, name):
        return _start(board, version)
    tried = board.starts.get(name)
    if tried is not None and tried.swap_id == swap.id and tried.error is not None:
        return None
    return _start(board, version, swap.id)


def _tries(board: Board, swap: SwapRecord, name: str) -> bool:
    """Whether the swap learns from this instance's start if its version can be started with."""
    if untried(swap):
        return bool(changes_to(board, swap.target, swap.former))
    return swap.turn == name and swap.phase in ("canary", "commit")


def _start(board: Board, number: int, swap_id: str | None = None) -> Start:
    version = board.version(number)
    return Start(number, version.form if version is not None else None, swap_id)
