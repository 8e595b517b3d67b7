"""Base of the records in the store: a frozen dataclass as strict JSON, both ways."""

from __future__ import annotations

import dataclasses
import logging
import textwrap
import types
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import orjson

from weightsync.errors import RecordError, record_refused

if TYPE_CHECKING:
    from typing import Self  # Python 3.10 lacks it

log = logging.getLogger("weightsync.records")
NOT_WRITTEN = "Nothing was written: pass a value of the field's own type"
MOST = 5 << 18  # bytes of a record: etcd takes 1.5 MiB a transaction, and others are written with it
MOST_TEXT = 64 << 10  # characters of one text


class Record:
    """Base of the records: strict JSON both ways.

    A field that has its default is not written. So a release that adds a field writes records that the release before
    it reads, until somebody uses what the field is for.
    """

    LONG_TEXTS = False  # documents, whose size the store bounds

    def to_json(self) -> bytes:
        """Raises RecordError, which names the field, for what `from_json` would refuse or read as another record, and
        for what is too large: in the store, it would stop every reader or every later writer."""
        kind = type(self)
        try:
            raw = orjson.dumps(_written(self))
            same = kind.from_json(raw) == self
        except (TypeError, ValueError) as error:  # a numpy value compares as an array
            raise record_refused(kind.__name__, self._odd_field() or str(error), NOT_WRITTEN) from error
        except RecordError as error:
            named = "" if "field" in error.problem else self._odd_field()
            raise record_refused(
                kind.__name__ if named else error.record, named or error.problem, NOT_WRITTEN
            ) from None
        if not same:
            raise record_refused(kind.__name__, self._odd_field() or "it is read as another record", NOT_WRITTEN)
        if not self.LONG_TEXTS:
            for name, length in _texts(self):
                if length > MOST_TEXT:
                    problem = f"field {name!r} has {length:,} characters, {MOST_TEXT:,} are the most"
                    raise record_refused(kind.__name__, problem, "Nothing was written: shorten it")
            if len(raw) > MOST:
                raise record_refused(kind.__name__, f"it takes {len(raw):,} bytes, {MOST:,} are the most", "Shorten it")
        return raw

    def _odd_field(self) -> str:
        """Names the first field that JSON does not carry as it is; "" if each alone is carried."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # each record is a dataclass
            value = getattr(self, field.name)
            try:
                back = _convert(type(self), field.name, _hints(type(self))[field.name], _through_json(value))  # type: ignore[arg-type]
            except (TypeError, ValueError, RecordError):
                return f"field {field.name!r} cannot be {shown(value)}"
            if back != value:
                return f"field {field.name!r} cannot be {shown(value)}"
        return ""

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


def _through_json(value: Any) -> Any:
    return orjson.loads(orjson.dumps(_written(value)))


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Each text of a record, with the field that it is in or below, and its length."""
    if isinstance(value, str):
        yield name, len(value)
    elif isinstance(value, tuple):
        for item in value:
            yield from _texts(item, name)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _texts(getattr(value, field.name), field.name)


def shown(value: Any) -> str:
    """A value in an error, on one line: Python writes no integers of over 4,300 digits."""
    try:
        return textwrap.shorten(ascii(value[:99] if isinstance(value, str) else value), 200, placeholder="...")
    except ValueError:
        return f"a {type(value).__name__} with so many digits"


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
