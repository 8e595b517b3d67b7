"""Editions of adapters, as the gateway knows them: which one a request for a name gets (control/editions.py)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Container

from weightsync.control.editions import MARK, EditionRecord, drawn, split_name


class Editions:
    """Those of one model."""

    def __init__(self) -> None:
        self._records: dict[str, EditionRecord] = {}  # by key
        self._shares: dict[str, dict[int, float]] = {}  # of each name: percent by number, the newest first
        self._newest = 0

    def __bool__(self) -> bool:
        return bool(self._records)

    @property
    def records(self) -> list[EditionRecord]:
        """By name, the newest first."""
        return sorted(self._records.values(), key=lambda record: (record.name, -record.number))

    def get(self, key: str) -> EditionRecord | None:
        return self._records.get(key)

    def put(self, key: str, raw: bytes) -> None:
        """Raises RecordError."""
        record = EditionRecord.from_json(raw)
        self._records[key] = record
        shares = {**self._shares.get(record.name, {}), record.number: record.percent}
        self._shares[record.name] = dict(sorted(shares.items(), reverse=True))
        self._newest = max(self._newest, record.number)

    def drop(self, key: str) -> None:
        if (record := self._records.pop(key, None)) is None:
            return
        self._shares[record.name].pop(record.number, None)
        if not self._shares[record.name]:
            del self._shares[record.name]

    def keep(self, present: Container[str]) -> None:
        """Drop those whose keys are not `present`."""
        for key in [key for key in self._records if key not in present]:
            self.drop(key)

    def knows(self, name: str) -> bool:
        """Whether there is an edition of the adapter that is asked for by this name."""
        return split_name(name)[0] in self._shares

    def concern(self, name: str) -> bool:
        """Whether a request for `name` goes through an edition, or would if that were still there, or were known here
        already: its publisher may know a number before the gateway, and the instance waits for it."""
        base, number = split_name(name)
        return base in self._shares or (number is not None and number > self._newest)

    def find(self, name: str, session: bytes | None = None) -> str | None:
        """The full name of the edition for a request that names `name`; None if it is no longer there. Requests of one
        `session` get one edition for as long as the shares stay."""
        base, number = split_name(name)
        shares = self._shares.get(base, {})
        if number is None:
            draw = random.random() if session is None else _place(base, session)  # noqa: S311 - no secret
            number = drawn(list(shares.items()), draw)
            return f"{base}{MARK}{number}" if number is not None else None
        if number not in shares and number <= self._newest:
            return None
        return f"{base}{MARK}{number}"


def _place(name: str, session: bytes) -> float:
    digest = hashlib.blake2b(session, key=name.encode()[:64], digest_size=7).digest()
    return int.from_bytes(digest) / 2**56
