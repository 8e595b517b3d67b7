"""Base of the records in the store: a frozen dataclass as strict JSON, both ways."""

from __future__ import annotations

import dataclasses
import logging
import types
from functools import cache, lru_cache
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import orjson

from weightsync.errors import RecordError

log = logging.getLogger("weightsync.records")
NOT_WRITTEN = "Nothing was written: pass a value of the field's own type"


class Record:
    """Base of the records: strict JSON both ways.

    A field that has its default is not written. So a release that adds a field writes records that the release before
    it reads, until somebody uses what the field is for.
    """

    def to_json(self) -> bytes:
        """Raises RecordError for what `from_json` would refuse: in the store, it would stop every reader."""
        try:
            raw = orjson.dumps(_written(self))
            self.from_json(raw)
        except TypeError as error:
            raise RecordError(type(self).__name__, str(error), NOT_WRITTEN) from error
        except RecordError as error:
            raise RecordError(error.record, error.problem, NOT_WRITTEN) from None
        return raw

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Raises RecordError on malformed JSON, an unknown or missing field, or a value of the wrong type."""
        try:
            data = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise RecordError(cls.__name__, f"not JSON ({error})") from error
        record: Self = _build(cls, data)
        return record

    @classmethod
    def readable(cls, key: str, raw: bytes) -> Self | None:
        """None for what `from_json` refuses. The log says so once: one bad record must not stop all others."""
        record: Self | None = _readable(cls, key, raw)  # type: ignore[arg-type]  # a class can be hashed
        return record


def _written(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        given = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: _written(found) for f, found in given if f.default is dataclasses.MISSING or found != f.default}
    return [_written(item) for item in value] if isinstance(value, tuple) else value


@lru_cache(maxsize=1024)
def _readable(cls: Any, key: str, raw: bytes) -> Any:
    try:
        return cls.from_json(raw)
    except RecordError as error:
        log.warning("ignoring %s: %s", key, error)
        return None


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _build(cls: type[Any], data: object) -> Any:
    if not isinstance(data, dict):
        raise RecordError(cls.__name__, f"expected an object, got {type(data).__name__}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if unknown := data.keys() - fields.keys():
        raise RecordError(cls.__name__, f"unknown field {min(unknown)!r}")
    for name, field in fields.items():
        if name not in data and field.default is dataclasses.MISSING:
            raise RecordError(cls.__name__, f"field {name!r} is missing")
    hints: dict[str, Any] = _hints(cls)  # type: ignore[arg-type]
    return cls(**{name: _convert(cls, name, hints[name], value) for name, value in data.items()})


def _convert(cls: type, name: str, hint: Any, value: Any) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = next(a for a in get_args(hint) if a is not type(None))
        return None if value is None else _convert(cls, name, inner, value)
    if origin is Literal and value in get_args(hint):
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(cls, name, get_args(hint)[0], item) for item in value)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value)  # type: ignore[arg-type]
    if hint is float and type(value) is int:
        return float(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise RecordError(cls.__name__, f"field {name!r} cannot be {value!r}")
