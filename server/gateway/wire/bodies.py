"""The parts of JSON bodies that the gateway reads: fields of a request, events of a stream, tokens of an answer.

Whether a request's body is one JSON object is checked without building it: a body of empty lists would cost seconds of
the loop and 20 times its size in memory, and a long prompt 20 times the time, if it were turned into Python objects
only to be thrown away. The inside of long texts is the instance's to judge, as it reads them anyway: here only their
ends are looked for, which takes an eighth of the time. Bodies that the gateway writes anew are checked whole.

The tokens of an answer are read once, from its last kilobytes; nothing is parsed while an answer passes. An instance
writes the counts where its answers end: `usage` in whole answers and in the last event of those streams that were asked
for it, `hotswap_usage` in the last chunk of all others, and in each event of a stream that has had more tokens than
events (see server/instance/provenance.py): one that is cut without either has cost a token an event. In JSON a key can
only stand outside of strings, for inside of one its quotes are escaped; that it is a key of the outermost object, and
not of a tool schema a client sent, is seen from the brackets that close after it.

mypyc compiles neither msgspec structures nor slices whose bounds may cross, so this module stays Python.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from server.errors import HttpError
from server.resume import Span

KEPT = 4096  # at least so many of the last bytes are kept, where there are as many, and at most twice that

_OBJECT = re.compile(rb'"(?:hotswap_)?usage"\s*:\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}')
# How a whole answer of vLLM's ends, nothing but flat fields after its usage: read in a third of the time.
_PLAIN_BEGINS = b'"usage":{"prompt_tokens":'
_PLAIN = re.compile(
    _PLAIN_BEGINS.replace(b"{", rb"\{")
    + rb'(\d{1,12}),"total_tokens":\d+,"completion_tokens":(\d{1,12})[^{}]*\}[^{}]*\}\s*\Z'
)
_COUNT = re.compile(rb'"(prompt|input|completion|output)_tokens"\s*:\s*(\d{1,12})')
_NESTED = re.compile(rb"\{[^{}]*\}")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_NO_BRACKET = bytes(set(range(256)) - set(b"{}[]"))
_VERSION = re.compile(rb'"weight_version"\s*:\s*(\d{1,18})')
MOST_CACHE_KEY = 514  # bytes, with its quotes
LONG = 2048  # bytes between quotes that are worth leaving out
_LEFT_OUT = b"." * 44 + b"%020d"  # stands for so many: neither the name of a field nor a number
_LEFT_OUT_SIZE = re.compile(rb'"\.{44}(\d{20})"')
_FIRST_STEPS = 32  # quotes that are looked at before a long text must have been found
_MOST_ESCAPES = 64  # backslashes in a row
_BACKSLASH = ord("\\")
_PLAIN_WITHIN = 512  # bytes from the end
_EVENTS_AFTER = 3  # the usage chunk, [DONE], and one for a route that ends otherwise


# requests


class Fields(msgspec.Struct):
    """Any object: its fields are skipped, but checked. Those named are what the gateway looks at, as they were sent."""

    hotswap: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    max_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    max_completion_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    max_output_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    n: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    best_of: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    stream: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    token_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    sampling_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    query: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    queries: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    documents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    items: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text_1: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text_2: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data_1: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data_2: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt_cache_key: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def has_wish(self) -> bool:
        """Whether the field `hotswap` was sent (terms.py)."""
        return self.hotswap is not msgspec.UNSET

    @property
    def cache_key(self) -> bytes:
        """OpenAI's name for requests whose prompts begin alike, as it was sent; empty without one, or if it is too
        long for a name."""
        sent = bytes(self.prompt_cache_key) if self.prompt_cache_key is not msgspec.UNSET else b""
        return sent if sent.startswith(b'"') and 2 < len(sent) <= MOST_CACHE_KEY else b""


NONE = Fields()  # of a request without a JSON body
_decoder = msgspec.json.Decoder(Fields)
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def check_object(body: bytes) -> Fields:
    """The fields that `body` has. Raises HttpError (400) if `body` is not a JSON object in UTF-8; faults inside of long
    texts are overlooked, and long texts in the fields are only told by how they begin and end."""
    if len(body) > 2 * LONG:
        body = without_texts(body)
    try:
        found = _decoder.decode(body)
        if not body.isascii():
            body.decode()
        return found
    except _FAULTS as exc:
        raise _no_object(exc) from exc


def within(value: msgspec.Raw | msgspec.UnsetType) -> Fields:
    """The fields of an object that is a field itself; none of what is no object, which its instance refuses."""
    try:
        return NONE if isinstance(value, msgspec.UnsetType) else _decoder.decode(value)
    except _FAULTS:
        return NONE


def raw_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of an object, as they were sent, to write it anew. Raises HttpError (400) if it is not one through and
    through."""
    try:
        found = _raw_decoder.decode(body)
        if not body.isascii():
            body.decode()
        return found
    except _FAULTS as exc:
        raise _no_object(exc) from exc


def _no_object(fault: Exception) -> HttpError:
    if isinstance(fault, msgspec.ValidationError):
        message = "The body must be a JSON object."
    elif isinstance(fault, RecursionError):
        message = "The body is nested too deeply."
    else:
        message = f"The body is not valid JSON: {fault}."
    return HttpError(400, message, code="invalid_json")


def without_texts(body: bytes) -> bytes:
    """`body` with `_LEFT_OUT` in the place of what stands in its long texts: the same JSON otherwise, or as wrong.

    It goes from quote to quote for as long as that pays: a step is paid for by 256 bytes that were left out.
    """
    kept: list[bytes] = []
    begin = at = 0  # what is kept next, and where the next text may begin
    steps = _FIRST_STEPS
    while steps > 0 and (start := body.find(b'"', at)) >= 0:
        end = body.find(b'"', start + 1)
        while end > 0 and body[end - 1] == _BACKSLASH:
            near = body[max(start + 1, end - _MOST_ESCAPES) : end]
            escapes = len(near) - len(near.rstrip(b"\\"))
            if escapes == _MOST_ESCAPES:
                steps = 0  # they may go on before, and looking for where they begin takes long
            elif not escapes % 2:
                break
            steps -= 1
            end = body.find(b'"', end + 1) if steps > 0 else -1
        if end < 0:
            break
        size = end - start - 1
        if size > LONG:
            kept.append(body[begin : start + 1] + _LEFT_OUT % size)
            begin = end
            steps += size >> 8
        at = end + 1
        steps -= 1
    return b"".join((*kept, body[begin:])) if kept else body


def size_of(raw: bytes) -> int:
    """The bytes of a field as it was sent; `raw` may have been made without its texts."""
    return len(raw) + sum(int(size) - 64 for size in _LEFT_OUT_SIZE.findall(raw))


def named(fields: Fields) -> str | None:
    """The model that a body names; None if it names none, or with what is no text: that is for the instance to say."""
    raw = fields.model
    if isinstance(raw, msgspec.UnsetType):
        return None
    name = bytes(raw)
    if b"\\" not in name and name.startswith(b'"'):
        return name[1:-1].decode()
    found = msgspec.json.decode(name)
    return found if isinstance(found, str) else None


def with_model(body: bytes, name: str) -> bytes:
    """The body, an object, that names this model; its other fields stay the bytes they are."""
    fields = raw_fields(body)
    fields["model"] = msgspec.Raw(msgspec.json.encode(name))
    return msgspec.json.encode(fields)


# the events of streams, as far as journal.py needs them


class Told(msgspec.Struct):
    """A span as the client has it: with `return_weight_versions` the version is a text."""

    version: int | str
    start: int
    end: int


class Said(msgspec.Struct):
    """The tokens of an event: a choice of it, or the whole event on /generate."""

    token_ids: list[int] = []
    weight_versions: list[Told] = []
    hotswap_weight_versions: list[Told] = []
    prompt_weight_versions: list[Span] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Thing(msgspec.Struct):
    """An object of which only its being there counts."""


class Event(Said):
    """A streamed event of any route, as far as the gateway reads it."""

    id: str | None = None
    created: int | None = None
    choices: list[Said] = []
    usage: _Thing | None = None
    error: _Thing | str | None = None
    type: str | None = None
    weight_version: int | None = None


decode_event = msgspec.json.Decoder(Event).decode


# the tokens of an answer


class Usage(NamedTuple):
    """Tokens of one answer. If not `exact`, a stream was cut that told none: completion tokens are estimated, prompt
    ones 0."""

    prompt_tokens: int
    completion_tokens: int
    exact: bool = True


def read_usage(tail: bytes) -> Usage | None:
    """The counts that an answer ending in `tail` reports, None if it reports none."""
    end = len(tail)
    at = tail.rfind(_PLAIN_BEGINS, max(0, end - _PLAIN_WITHIN))
    plain = _PLAIN.match(tail, at) if at >= 0 else None
    if plain is not None:
        return Usage(int(plain[1]), int(plain[2]))
    while (at := tail.rfind(b'usage"', 0, end)) >= 0:
        end = at
        start = at - 8 if tail[at - 8 : at] == b"hotswap_" else at
        found = _OBJECT.match(tail, start - 1) if start else None
        if found is None:
            continue
        event, _, after = tail[found.end() :].partition(b"\n\n")
        if after.count(b"\n\n") >= _EVENTS_AFTER:
            return None
        if event == b"}" or _ends_outermost(event):
            return _counts(found[1])
    return None


def _counts(fields: bytes) -> Usage:
    if b"{" in fields:
        fields = _NESTED.sub(b"", fields)
    counts = dict(_COUNT.findall(fields))
    prompt = counts.get(b"prompt") or counts.get(b"input") or 0
    return Usage(int(prompt), int(counts.get(b"completion") or counts.get(b"output") or 0))


def _ends_outermost(rest: bytes) -> bool:
    """Whether `rest` closes exactly one object more than it opens, and with its last bracket."""
    brackets = _STRING.sub(b"", rest).translate(None, _NO_BRACKET)
    depth = 1
    for bracket in brackets[:-1]:
        depth += 1 if bracket in b"{[" else -1
        if not depth:
            return False
    return depth == 1 and brackets.endswith(b"}")


def estimate_usage(tail: bytes, body_bytes: int) -> Usage | None:
    """The cost of a cut stream of `body_bytes`: its events, at the mean size of those in `tail`; a token in each."""
    events = tail.count(b"\n\n")
    if body_bytes > len(tail) and events > 1:
        whole_ones = tail.rfind(b"\n\n") - tail.find(b"\n\n")
        events = round(body_bytes * (events - 1) / whole_ones)
    return Usage(0, events, exact=False) if events else None


def last_version(tail: bytes) -> int | None:
    """The weight version that wrote the last token, where the answer names it."""
    found = _VERSION.match(tail, at) if (at := tail.rfind(b'"weight_version"')) >= 0 else None
    return int(found[1]) if found else None
