"""The most tokens a request may be answered with: what it asks for, and a key's own bound on it.

vLLM reads these fields with some latitude ("8", 8.0), so a key that has a bound may only send plain integers. Bodies go
on byte for byte; where a bounded key says nothing, and the route would let an answer fill the context, the bound is
written in at the end: of two fields of one name, the last counts.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from server.errors import BadRequest

Field = msgspec.Raw | msgspec.UnsetType

_UNSET = msgspec.UNSET
MOST_DIGITS = 18
USUAL_OUTPUT = 256  # tokens, for what a request that names no bound is expected to be answered with
# What bounds an answer on each route that generates, the one that counts first; and the bound where none is sent.
_FIELDS: dict[str, tuple[tuple[str, ...], int | None]] = {
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


def expected(asked: Asked, route: str) -> int:
    """Output tokens to reckon with, of all choices together; 0 on routes that generate nothing."""
    found = _FIELDS.get(route)
    if found is None:
        return 0
    names, default = found
    most = USUAL_OUTPUT if default is None else default
    for name in names:
        value = getattr(asked, name)
        if value is not _UNSET and (sent := _integer(value)) is not None:
            most = sent
            break
    return most if asked.n is _UNSET else most * (_integer(asked.n) or 1)


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
