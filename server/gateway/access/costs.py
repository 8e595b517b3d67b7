"""The tokens that a request costs: the most it may take, as its body tells, and the tokens it took in the end.

Its prompts are charged, and for each of them `n` (or `best_of`) answers of the length that the request, its key or its
route bounds them to. Text is taken for a token in four bytes (OpenAI's rule of thumb), ids are counted; an answer that
nothing bounds is taken for `USUAL_OUTPUT` tokens. The queue reckons alike. If the client leaves an answer that comes as
a whole, the answer is taken for the tokens that its instance writes in that time (`Pace`).

**Fields.** vLLM reads the fields that bound an answer with some latitude ("8", 8.0), and so does `reckon`. A key that
has a bound may only send plain integers. Bodies go on byte for byte; where a bounded key says nothing, and the route
would let an answer fill the context, the bound is written in at the end: of two fields of one name, the last counts.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from server import api
from server.errors import HttpError
from server.gateway.wire.bodies import Usage, size_of, within

Field = msgspec.Raw | msgspec.UnsetType

_UNSET: Final = msgspec.UNSET
MOST_DIGITS: Final = 18
BYTES_PER_TOKEN: Final = 4
USUAL_OUTPUT: Final = 256  # tokens, for an answer that nothing bounds; vLLM would let it fill the context
MOST: Final = 1 << 40  # tokens; nobody means more
WEIGHT: Final = 0.1  # of the last answer in an instance's pace
_MOST_TEXT: Final = 32  # characters of a number
# The fields that bound an answer, by route that generates, the one that counts first; and the bound without one.
_FIELDS: Final = {route.path: (route.bounds, route.unbounded) for route in api.ROUTES if route.bounds}
_NESTED: Final = {route.path: route.nested for route in api.ROUTES if route.nested}
_PROMPTS: Final = {route.path: route.prompts for route in api.ROUTES if route.prompts}
_PAIRS: Final = {route.path: route.pairs for route in api.ROUTES if route.pairs}
_MOST_COMMAS: Final = 1 << 18  # in an array that is decoded to count its elements: some milliseconds
_decode_array: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Asked(Protocol):
    """A body's fields, as they were sent: these, and those that `prompts` of a route names."""

    sampling_params: Field
    max_tokens: Field
    max_completion_tokens: Field
    max_output_tokens: Field
    n: Field
    best_of: Field
    stream: Field


class Cost:
    """Tokens of a request's `prompt`s, and of all answers it may get (`output`), which are `bounded` or a guess.

    `whole`: so many of them come at the end, and their tokens are not seen before; 0: they are streamed.
    """

    __slots__ = ("bounded", "output", "prompt", "whole")

    def __init__(self, prompt: int, output: int, *, bounded: bool = True, whole: int = 1) -> None:
        self.prompt = prompt
        self.output = output
        self.bounded = bounded
        self.whole = whole

    @property
    def total(self) -> int:
        """The tokens that are reserved."""
        return self.prompt + self.output

    def used(self, usage: Usage | None, status: int) -> int:
        """The tokens that the request cost in the end."""
        prompt, answers = self.spent(usage, status)
        return prompt + answers

    def spent(self, usage: Usage | None, status: int) -> tuple[int, int]:
        """The tokens that the request's prompts and its answers cost in the end.

        `usage` is what is known of the tokens; one that is not exact tells no prompt. An answer that says nothing cost
        nothing if it failed, else (499: the client left before an instance had it) its prompt.
        """
        if usage is None:
            return self.prompt if status < 400 or status == 499 else 0, 0
        return usage.prompt_tokens if usage.exact else self.prompt, usage.completion_tokens


class Pace:
    """How fast an instance writes whole answers."""

    __slots__ = ("seconds_a_token",)

    def __init__(self) -> None:
        self.seconds_a_token = 0.0  # of one answer, from request to end; 0.0: none has ended

    def settle(self, cost: Cost, usage: Usage | None, status: int, seconds: float) -> Usage | None:
        """The tokens of an answer that ended `seconds` after its request, estimated if its client left before it told
        them. All that is reserved is charged while the pace is not known."""
        if not cost.whole:
            return usage
        before = self.seconds_a_token
        if usage is None and status == 499:
            written = int(seconds / before) * cost.whole if before else cost.output
            return Usage(0, min(written, cost.output), exact=False)
        if usage is not None and usage.completion_tokens >= cost.whole:
            now = seconds / (usage.completion_tokens // cost.whole)
            self.seconds_a_token = before + (now - before) * WEIGHT if before else now
        return usage


def reckon(asked: Asked, route: str, size: int, bound: int | None = None) -> Cost:
    """The most a request may cost whose body has `size` bytes. `bound`: of its key, on each answer."""
    field = _PROMPTS.get(route)
    sent: Field = _UNSET if field is None else getattr(asked, field)
    prompts, ids = 1, 0
    if sent is not _UNSET:
        raw = bytes(sent)  # type: ignore[arg-type]
        prompts, ids = (_elements(raw), 0) if field == "messages" else _prompts(raw)
    prompt = max(size // BYTES_PER_TOKEN + 1, ids) + _repeated(asked, route)
    found = _FIELDS.get(route)
    if found is None:
        return Cost(prompt, 0)
    names, default = found
    wanted = _wanted(asked, route)
    most = 0
    for name in names:
        if not most:
            most = _number(getattr(wanted, name))
    most = most or default or bound or 0
    answers = min(prompts * max(_number(wanted.n), _number(wanted.best_of), 1), MOST)
    whole = 0 if asked.stream is not _UNSET and bytes(asked.stream) == b"true" else answers  # type: ignore[arg-type]
    return Cost(prompt, min((most or USUAL_OUTPUT) * answers, MOST), bounded=bool(most), whole=whole)


def _wanted(asked: Asked, route: str) -> Asked:
    """The fields that say what answers are wanted."""
    nested = _NESTED.get(route)
    return asked if nested is None else within(getattr(asked, nested))


def _repeated(asked: Asked, route: str) -> int:
    """The tokens of what is computed once more for each further text that it is paired with."""
    tokens = 0
    for first, second in _PAIRS.get(route, ()):
        one: Field = getattr(asked, first)
        many: Field = getattr(asked, second)
        if one is not _UNSET and many is not _UNSET:
            raw = bytes(one)  # type: ignore[arg-type]
            texts = b'"' in raw
            if not (texts and _elements(raw) > 1):  # of several, each has a partner of its own
                each = size_of(raw) // BYTES_PER_TOKEN if texts else raw.count(b",") + 1
                tokens += each * (_elements(bytes(many)) - 1)  # type: ignore[arg-type]
    return min(tokens, MOST)


def _prompts(raw: bytes) -> tuple[int, int]:
    """How many prompts the field has, and how many ids in all. Nothing is built of it: it may have megabytes."""
    if not raw.startswith(b"["):
        return 1, 0
    quotes = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    texts = quotes.count(b'"') // 2
    ids = 0 if texts else raw.count(b",") + 1
    return max(1, texts + raw.count(b"[") - 1), ids


def _elements(raw: bytes) -> int:
    """How many the field has, 1 if it is no array. Of so many that decoding would stop the loop, all arrays in it are
    counted."""
    try:
        return max(1, len(_decode_array(raw))) if raw.count(b",") < _MOST_COMMAS else raw.count(b"[")
    except msgspec.ValidationError:
        return 1


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
    """The body for a key that may have `bound` tokens an answer. Raises HttpError (400)."""
    found = _FIELDS.get(route)
    if found is None:
        return body
    names, default = found
    wanted, nested = _wanted(asked, route), _NESTED.get(route)
    named = [name for name in names if _is_set(getattr(wanted, name))]
    for name in named:
        _check(name, getattr(wanted, name), bound)
    if named or (default is not None and default <= bound):
        return body
    if nested is not None:  # what is written in at the end would stand beside it
        message = f"This key may ask for {bound} tokens an answer at most: send {names[0]} in {nested}."
        raise HttpError(400, message, code="max_output_exceeded", param=nested)
    return _with(body, names[0], bound)


def _check(name: str, value: Field, bound: int) -> None:
    most = _integer(value)
    if most is None:
        raise HttpError(400, f"{name}: send a whole number.", code="invalid_parameter", param=name)
    if most > bound:
        message = f"{name}: this key may ask for {bound} tokens an answer at most."
        raise HttpError(400, message, code="max_output_exceeded", param=name)


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
