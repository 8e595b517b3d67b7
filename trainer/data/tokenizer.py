"""The model's own tokenizer, as transformers and so the engine make it of its directory, and its chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash
from tokenizers import Tokenizer as RustTokenizer

from trainer.config.sections import ModelConfig
from trainer.data.conversation import ChatTemplate, Ids, Tools, normal
from trainer.errors import DataError

PROBES, PROBE_TOKENS = 8, 128  # texts to compare tokenizers by, and about how many tokens they are made of
LINE = "\n"  # no token of SentencePiece's tokenizers goes on behind it
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def model_tokenizer(model: ModelConfig) -> Tokenizer:
    """The tokenizer of a run's model, with the chat template that the configuration says."""
    return Tokenizer(model.path, model.chat_template, model.chat_template_kwargs)


class Tokenizer:
    """Text to token ids and back. `eos_id` is the token that ends an answer. `template` is a file in place of the
    model's own chat template, `given` what templates are given besides the messages."""

    def __init__(
        self, directory: str | Path, template: str | None = None, given: Mapping[str, Any] | None = None
    ) -> None:
        self.directory = Path(directory)
        self._tokenizer = _as_served(self.directory)
        self._spaces = [self._tokenizer.id_to_token(token) for token in self.plain("a")][:1] in (["▁"], ["▁a"])
        self._chat = load_chat_template(self.directory, template, dict(given or {}))
        self._stops = self._named_ends()
        self._tail = self._chat.tail if self._chat else ""
        # Of the tokens at which engines stop the one that the template writes behind an answer, else the first.
        self.eos_id = next((token for token in self.plain(self._tail) if token in self._stops), self._stops[0])
        before, end, _ = self._tail.partition(self._tokenizer.id_to_token(self.eos_id) or "\0")
        self._end = before + end if end else ""  # as the template ends an answer, if an engine stops there

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

    def behind(self, text: str) -> tuple[int, ...]:
        """The tokens of a text that follows another one: without the space that SentencePiece's tokenizers write before
        the first."""
        if not self._spaces:
            return self.plain(text)
        line, both = self.plain(LINE), self.plain(LINE + text)
        return both[len(line) :] if both[: len(line)] == line else self.plain(text)

    def prompt(self, text: str) -> tuple[int, ...]:
        """With the special tokens that the model expects at the start (BOS, where it has one)."""
        return tuple(self._tokenizer.encode(text).ids)

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def continuation(self, text: str) -> tuple[int, ...]:
        """Behind a prompt, without special tokens, then end-of-sequence."""
        return (*self.behind(text), self.eos_id)

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Tools = None) -> tuple[str, Ids]:
        """The prompt that the model's chat template makes of the messages and of the tools that it may call, and its
        ids. Raises ValueError for messages that the template refuses or leaves out, DataError if the model has none."""
        text = self._template.prompt([normal(message) for message in messages], tools)
        return text, self.plain(text)  # the template wrote the special tokens

    def turn(
        self, before: Sequence[Mapping[str, Any]], message: Mapping[str, Any], tools: Tools = None
    ) -> tuple[Ids, Ids]:
        """The prompt of the messages `before`, and the assistant's message behind it as the template writes it, which
        ends as an answer does. Raises as `chat`."""
        prompt, answer = self._template.answer([normal(m) for m in before], normal(message), tools)
        return self.plain(prompt), self._ended(answer)

    def turns(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools = None, start: int = 0
    ) -> Iterator[tuple[Ids, Ids]]:
        """The `turn` of each of the assistant's messages from the place `start` on whose weight is not 0."""
        for place, message in enumerate(messages):
            if place >= start and message["role"] == "assistant" and message.get("weight") != 0:
                yield self.turn(messages[:place], message, tools)

    def reply(self, messages: Sequence[Mapping[str, Any]], after: Sequence[int]) -> Ids:
        """The tokens after a turn of the model that ended with the tokens `after`: the messages, and the beginning of
        the model's next turn, as the chat template writes them. Earlier text is not tokenised again. Raises
        ValueError as `chat`. Without a template the reply is the messages' texts end to end."""
        if self._chat is None:
            return self.behind("".join(message["content"] for message in messages))
        text = self._chat.follow([normal(message) for message in messages])
        ended = bool(after) and after[-1] == self.eos_id
        return self.behind(text.removeprefix(self._end or self._tail) if ended else text)

    @property
    def _template(self) -> ChatTemplate:
        if self._chat is None:
            raise DataError(f"{self.directory} has no chat template. Add chat_template.jinja, or give prompts as text.")
        return self._chat

    def _ended(self, answer: str) -> Ids:
        """An answer as the template writes it, up to the token at which an engine stops."""
        if answer.endswith(self._tail):
            answer = answer.removesuffix(self._tail)
            return self.behind(answer + self._end) if self._end else self.continuation(answer)
        ids = self.behind(answer)
        places = [place for place, token in enumerate(ids) if token in self._stops]
        return ids[: places[-1] + 1] if places else (*ids, self.eos_id)

    def _named_ends(self) -> list[int]:
        """The tokens at which engines stop, the tokenizer's own first. Raises DataError if there is none."""
        named = _token(_tokenizer_config(self.directory).get("eos_token"))
        own = None if named is None else self._tokenizer.token_to_id(named)
        stops = [*([] if own is None else [own]), *_model_eos(self.directory)]
        if not stops:
            raise DataError(f"{self.directory} names no eos_token_id. Add it to config.json.")
        return stops

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text, without special tokens or with them."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        return text


def _as_served(directory: Path) -> RustTokenizer:
    """Of some families transformers makes another tokenizer than `tokenizer.json` says. It is that file's where only
    the model's own code, which nothing runs here, could make one. Raises DataError."""
    from transformers import AutoTokenizer  # takes a second; a process that is given a tokenizer needs none

    path = directory / "tokenizer.json"
    try:
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True).backend_tokenizer
        except Exception:  # a class may raise anything
            tokenizer = RustTokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception for every cause
        raise DataError(f"cannot read {path} ({error}). Put the model's tokenizer.json there.") from None
    tokenizer.no_truncation()  # which the file may ask for, and engines do not do
    tokenizer.no_padding()
    return tokenizer


def _model_eos(directory: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        if (directory / name).exists():
            value = json.loads((directory / name).read_text()).get("eos_token_id")
            if value is not None:
                return value if isinstance(value, list) else [value]
    return []


def load_chat_template(directory: Path, file: str | None, given: Mapping[str, Any]) -> ChatTemplate | None:
    """The template in the `file`, else in `chat_template.jinja` or `tokenizer_config.json`; None if there is none."""
    config = _tokenizer_config(directory)
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    path = Path(file) if file is not None else directory / "chat_template.jinja"
    if file is not None or path.exists():
        try:
            source = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the chat template {path} ({error}). Name a Jinja file.") from None
    tokens = {key: _token(value) for key, value in config.items() if key in TOKENS}
    return ChatTemplate(source, {**tokens, **given}) if isinstance(source, str) else None


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def _token(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value
