"""Chat messages to a prompt, by the model's own template; rendered as transformers does, without importing it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainer.errors import DataError

TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """`source` is Jinja; `variables` are what it may name besides the messages (bos_token, eos_token)."""

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        self.source, self.variables = source, variables
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise DataError(f"the model's chat template cannot be used ({error}). Correct it.") from None

    def __call__(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt that asks the assistant to go on after `messages`. Raises ValueError for ones it refuses."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self.variables)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses it ({error})") from None


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """The template in `chat_template.jinja` or `tokenizer_config.json`; None if the model has none."""
    config: dict[str, Any] = {}
    if (directory / "tokenizer_config.json").exists():
        config = json.loads((directory / "tokenizer_config.json").read_text())
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if (directory / "chat_template.jinja").exists():
        source = (directory / "chat_template.jinja").read_text()
    tokens = {key: _token(value) for key, value in config.items() if key in TOKENS}
    return ChatTemplate(source, tokens) if isinstance(source, str) else None


def _token(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
