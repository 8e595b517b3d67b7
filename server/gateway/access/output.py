"""What a request may cost in tokens: its prompts, and the most it may be answered with. Limits and queue reckon alike.

Reserved beforehand is the most it can cost: what all prompts are taken for, and for each of them `n` (or `best_of`)
answers of the length that the request, its key or its route bounds them to. Text is taken for a token in four bytes
(OpenAI's rule of thumb), ids are counted. An answer that nothing bounds is taken for `USUAL_OUTPUT` tokens. The true
count replaces all that when the answer has ended (`Cost.used`).

vLLM reads these fields with some latitude ("8", 8.0), and so does `reckon`. A key that has a bound may only send plain
integers. Bodies go on byte for byte; where a bounded key says nothing, and the route would let an answer fill the
context, the bound is written in at the end: of two fields of one name, the last counts.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from server.errors import BadRequest
from server.gateway.wire.bodies import Usage

Field = msgspec.Raw | msgspec.UnsetType

_UNSET: Final = msgspec.UNSET
MOST_DIGITS: Final = 18
BYTES_PER_TOKEN: Final = 4
USUAL_OUTPUT: Final = 256  # tokens, for an answer that nothing bounds; vLLM would let it fill the context
MOST: Final = 1 << 40  # tokens; nobody means more
_MOST_TEXT: Final = 32  # characters of a number
# What bounds an answer on each route that generates, the one that counts first; and the bound where none is sent.
_FIELDS: Final[dict[str, tuple[tuple[str, ...], int | None]]] = {
    "/v1/completions": (("max_tokens",), 16),
    "/v1/chat/completions": (("max_completion_tokens", "max_tokens"), None),
    "/v1/chat/completions/batch": (("max_completion_tokens", "max_tokens"), None),
    "/v1/responses": (("max_output_tokens",), None),
    "/v1/messages": (("max_tokens",), None),
    "/generate": (("max_tokens",), 16),
}


class Asked(Protocol):
    """A body's fields, as they were sent."""

    max_tokens: Field
    max_completion_tokens: Field
    max_output_tokens: Field
    n: Field
    best_of: Field
    prompt: Field


class Cost:
    """Tokens of a request's `prompt`s, and of all answers it may get (`output`), which are `bounded` or a guess."""

    __slots__ = ("bounded", "output", "prompt")

    def __init__(self, prompt: int, output: int, *, bounded: bool = True) -> None:
        self.prompt = prompt
        self.output = output
        self.bounded = bounded

    @property
    def total(self) -> int:
        """What is reserved."""
        return self.prompt + self.output

    def used(self, usage: Usage | None, status: int) -> int:
        """What it cost in the end. `usage` is what is known of its tokens; one that is not exact tells no prompt.

        An answer that says nothing cost nothing if it failed, else (499: the client left it) its prompt.
        """
        if usage is None:
            return self.prompt if status < 400 or status == 499 else 0
        return (usage.prompt_tokens if usage.exact else self.prompt) + usage.completion_tokens


def reckon(asked: Asked, route: str, size: int, bound: int | None = None) -> Cost:
    """The most a request may cost whose body has `size` bytes. `bound`: of its key, on each answer."""
    prompts, ids = (1, 0) if asked.prompt is _UNSET else _prompts(bytes(asked.prompt))  # type: ignore[arg-type]
    prompt = max(size // BYTES_PER_TOKEN + 1, ids)
    found = _FIELDS.get(route)
    if found is None:
        return Cost(prompt, 0)
    names, default = found
    most = 0
    for name in names:
        if not most:
            most = _number(getattr(asked, name))
    most = most or default or bound or 0
    answers = max(_number(asked.n), _number(asked.best_of), 1)
    return Cost(prompt, min(prompts * (most or USUAL_OUTPUT) * answers, MOST), bounded=bool(most))


def _prompts(raw: bytes) -> tuple[int, int]:
    """How many prompts the field has, and how many ids in all. Nothing is built of it: it may have megabytes."""
    if not raw.startswith(b"["):
        return 1, 0
    quotes = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    texts = quotes.count(b'"') // 2
    ids = 0 if texts else raw.count(b",") + 1
    return max(1, texts + raw.count(b"[") - 1), ids


def _number(value: Field) -> int:
    """The positive number that vLLM would read, 0 if it would read none."""
    if value is _UNSET:
        return 0
    raw = bytes(value)  # type: ignore[arg-type]
    if len(raw) <= MOST_DIGITS and raw.isdigit():
        return int(raw)
    try:
        number = float(raw.strip(b'"')) if len(raw) <= _MOST_TEXT else float(MOST)
    except ValueError:
        return 0
    return int(min(number, float(MOST))) if number > 0 else 0


def bounded(asked: Asked, route: str, bound: int, body: bytes) -> bytes:
    """The body for a key that may have `bound` tokens an answer. Raises BadRequest."""
    found = _FIELDS.get(route)
    if found is None:
        return body
    names, default = found
    named = [name for name in names if _is_set(getattr(asked, name))]
    for name in named:
        _check(name, getattr(asked, name), bound)
    if named or (default is not None and default <= bound):
        return body
    return _with(body, names[0], bound)


def _check(name: str, value: Field, bound: int) -> None:
    most = _integer(value)
    if most is None:
        raise BadRequest(f"{name}: send a whole number.", code="invalid_parameter", param=name)
    if most > bound:
        message = f"{name}: this key may ask for {bound} tokens an answer at most."
        raise BadRequest(message, code="max_output_exceeded", param=name)


def _with(body: bytes, name: str, value: int) -> bytes:
    start = body.rstrip()[:-1].rstrip()
    comma = b"" if start.endswith(b"{") and not start[:-1].strip() else b","
    return b'%b%b"%b":%d}' % (start, comma, name.encode(), value)


def _is_set(value: Field) -> bool:
    return not isinstance(value, msgspec.UnsetType) and bytes(value) != b"null"


def _integer(value: Field) -> int | None:
    """None if it is no plain integer."""
    raw = bytes(value)  # type: ignore[arg-type]
    return int(raw) if len(raw) <= MOST_DIGITS and raw.isdigit() else None
