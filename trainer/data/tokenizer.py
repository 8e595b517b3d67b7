"""The model's own tokenizer, straight from `tokenizer.json`, and its chat template.

transformers renders the template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash
from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer as RustTokenizer

from trainer.errors import DataError

PROBES, PROBE_TOKENS = 8, 128  # texts to compare tokenizers by, and about how many tokens they are made of
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_ANSWER = "an answer"  # behind which a template is asked what it writes


class Tokenizer:
    """Text to token ids and back. `eos_id` is the token that ends an answer."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        try:
            self._tokenizer = RustTokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises plain Exception for every cause
            raise DataError(f"cannot read {path} ({error}). Put the model's tokenizer.json there.") from None
        self._chat = load_chat_template(self.directory)
        self.eos_id = self._end_of_answers()

    @property
    def size(self) -> int:
        """Number of tokens it can produce."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def digest(self) -> str:
        """A digest of everything that decides which ids a text becomes."""
        template = json.dumps([self._chat.source, self._chat.variables] if self._chat else [], sort_keys=True)
        return xxhash.xxh3_128_hexdigest(f"{self._tokenizer.to_str()}\n{self.eos_id}\n{template}".encode())

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token and its id."""
        return dict(self._tokenizer.get_vocab())

    def texts(self) -> list[str]:
        """Texts that need tokens from all over the vocabulary, and every special one, to compare tokenizers by."""
        step = max(self.size // (PROBES * PROBE_TOKENS), 1)
        spread = [self._tokenizer.decode([i], skip_special_tokens=False) for i in range(0, self.size, step)]
        pieces = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()] + spread
        return ["".join(pieces[i : i + PROBE_TOKENS]) for i in range(0, len(pieces), PROBE_TOKENS)]

    def plain(self, text: str) -> tuple[int, ...]:
        """The text's tokens and no others."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(self, text: str) -> tuple[int, ...]:
        """With the special tokens that the model expects at the start (BOS, where it has one)."""
        return tuple(self._tokenizer.encode(text).ids)

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def continuation(self, text: str) -> tuple[int, ...]:
        """Without special tokens, then end-of-sequence."""
        return (*self._tokenizer.encode(text, add_special_tokens=False).ids, self.eos_id)

    def chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> tuple[str, tuple[int, ...]]:
        """The prompt that the model's chat template makes of the messages and of the tools that it may call, and its
        ids. Raises ValueError for messages that the template refuses, DataError if the model has no template."""
        if self._chat is None:
            raise DataError(f"{self.directory} has no chat template. Add chat_template.jinja, or give prompts as text.")
        text = self._chat(messages, tools=tools)
        return text, tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)  # the template wrote them

    def call(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> tuple[int, ...]:
        """The last of the messages, in which the model calls tools, as the chat template writes it; it ends with
        end-of-sequence. Raises ValueError for messages that the template refuses, DataError if there is none."""
        before, _ = self.chat(messages[:-1], tools)
        assert self._chat is not None  # `chat` has looked
        whole = self._chat(messages, go_on=False, tools=tools)
        if not whole.startswith(before) or len(whole) == len(before):
            raise ValueError("the chat template writes no calls of tools behind what came before them")
        ids = tuple(self._tokenizer.encode(whole[len(before) :], add_special_tokens=False).ids)
        end = ids.index(self.eos_id) if self.eos_id in ids else len(ids)
        return (*ids[:end], self.eos_id)

    def reply(self, messages: Sequence[dict[str, Any]], after: Sequence[int]) -> tuple[int, ...]:
        """What follows a turn of the model that ended with the tokens `after`: the messages, and the beginning of the
        model's next turn, as the chat template writes them. What was written before is not tokenised again. Raises
        ValueError for messages that the template refuses. Without a template it is the messages' texts end to end."""
        if self._chat is None:
            text = "".join(message["content"] for message in messages)
            return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        end = self._tokenizer.id_to_token(self.eos_id) or ""
        begun = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}]
        before, whole = self._chat(begun, go_on=False), self._chat([*begun, *messages])
        if not whole.startswith(before):
            raise ValueError("the chat template writes a conversation anew with each turn, so none can be appended")
        if not end or end not in before:  # it ends no turns
            text = whole[len(before) :]
        else:
            text = whole[before.rindex(end) + len(end) :]
            text = text if after and after[-1] == self.eos_id else end + text
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _end_of_answers(self) -> int:
        """Of the tokens at which engines stop the one that the chat template writes behind an answer; where it writes
        none of them, the tokenizer's own, then the model's first. Raises DataError if there is none."""
        named = _token(_tokenizer_config(self.directory).get("eos_token"))
        own = None if named is None else self._tokenizer.token_to_id(named)
        stops = [*([] if own is None else [own]), *_model_eos(self.directory)]
        if not stops:
            raise DataError(f"{self.directory} names no eos_token_id. Add it to config.json.")
        if self._chat is None:
            return stops[0]
        said = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _ANSWER}]
        try:
            behind = self.plain(self._chat(said, go_on=False).rpartition(_ANSWER)[2])
        except ValueError:  # the template refuses it
            behind = ()
        return next((token for token in behind if token in stops), stops[0])

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def _model_eos(directory: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        if (directory / name).exists():
            value = json.loads((directory / name).read_text()).get("eos_token_id")
            if value is not None:
                return value if isinstance(value, list) else [value]
    return []


class ChatTemplate:
    """`source` is Jinja; `variables` are what it may name besides the messages (bos_token, eos_token)."""

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        self.source, self.variables = source, variables

    def __call__(
        self, messages: Sequence[dict[str, Any]], *, go_on: bool = True, tools: Sequence[dict[str, Any]] | None = None
    ) -> str:
        """The messages as text, and if it is to `go_on` the beginning of the assistant's next one. Raises ValueError
        for messages that it refuses, DataError if it is no template."""
        from transformers.utils.chat_template_utils import render_jinja_template  # takes a second, and few need it

        options = {"chat_template": self.source, "add_generation_prompt": go_on, **self.variables}
        try:
            texts, _ = render_jinja_template([list(messages)], tools=tools, **options)
        except TemplateSyntaxError as error:
            raise DataError(f"the model's chat template cannot be used ({error}). Correct it.") from None
        except Exception as error:  # a template may do anything with what it is given
            raise ValueError(f"the chat template refuses it ({error})") from None
        return texts[0]


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """The template in `chat_template.jinja` or `tokenizer_config.json`; None if the model has none."""
    config = _tokenizer_config(directory)
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if (directory / "chat_template.jinja").exists():
        source = (directory / "chat_template.jinja").read_text()
    tokens = {key: _token(value) for key, value in config.items() if key in TOKENS}
    return ChatTemplate(source, tokens) if isinstance(source, str) else None


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def _token(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value
