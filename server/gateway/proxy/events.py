"""The events of streams, read as far as journal.py needs them."""

from __future__ import annotations

import msgspec

from server.resume import Span


class Said(msgspec.Struct):
    """What an event says of its tokens: a choice of it, or the whole event on /generate."""

    token_ids: list[int] = []
    weight_versions: list[Span] = []
    prompt_weight_versions: list[Span] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Thing(msgspec.Struct):
    """An object of which only its being there counts."""


class Event(Said):
    """A streamed event of any route, as far as a continuation needs it."""

    id: str | None = None
    created: int | None = None
    choices: list[Said] = []
    usage: _Thing | None = None
    error: _Thing | str | None = None
    weight_version: int | None = None


decode_event = msgspec.json.Decoder(Event).decode
