"""Keys: who may ask for what. Only SHA-256 digests are kept; a key never reaches a log, a metric or an instance.

A key is looked up by its digest: how long that takes depends on the digest of the guess, of which a guesser controls no
bit, so timing tells nothing about a key, with any number of keys. Why a key fails is told to who has it, and to nobody
else: "expired" or "revoked" is said of a digest that is on record, anything else is an unknown key.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from server.errors import HttpError
from server.gateway.access.records import INFER, DoorRecord, KeyRecord, granted
from server.key_limits import KeyLimits


@dataclass(frozen=True)
class Principal:
    """The owner of a key, and what the key may do.

    `digest` tells owners apart: a hash of the key, or of the record's id, which a rotated key keeps; empty for
    nobody's. `who` names the owner in the ledger. `priority` is the most urgent class its requests may have (lower goes
    first, as in vLLM), `weight` its share of a class relative to other keys' (queue/). `until` (unix seconds) is when
    the key ends, `limits` None if it has none. `collect`: its owner wants its answers kept (server/answers).
    """

    name: str
    scopes: frozenset[str]
    digest: bytes = b""
    priority: int = 0
    weight: int = 1
    id: str = ""
    until: float | None = None
    limits: KeyLimits | None = None
    who: str = ""
    collect: bool = False
    models: frozenset[str] | None = None  # names that it may ask for; None: any


ANONYMOUS: Final = Principal("anonymous", frozenset({INFER}))


class KeyRing:
    """Digest -> principal, from key files and from the store. `required`: inference asks for a key in any case."""

    def __init__(self, files: Mapping[bytes, Principal], *, required: bool) -> None:
        self._required = required
        self._files = dict(files)
        self._records: dict[bytes, Principal] = {}
        self._barred: dict[bytes, str] = {}  # digests of records that are disabled or revoked
        self._keys = self._files
        self.limits: dict[str, KeyLimits] = {}  # of every record, by id
        self._known = False  # the store has been read
        self._closed = False  # by the store: a key for inference was made
        self._open = False
        self.names_models = False  # some key may ask for certain models alone

    @property
    def open_inference(self) -> bool:
        """Inference asks for no key: none is required, none is in a file, and none was ever made in the store, or an
        operator has opened it since."""
        return self._open

    def use_files(self, keys: Mapping[bytes, Principal]) -> None:
        """The keys of the files, which were read again."""
        self._files = dict(keys)
        self._keys = self._records | self._files

    @property
    def required(self) -> bool:
        """Whether this gateway was started so that inference asks for a key whatever the store says."""
        return self._required

    def use_records(
        self, records: Iterable[KeyRecord], *, unread: bool = False, door: DoorRecord | None = None
    ) -> None:
        """All records of the store, as they are now; `unread`: but for some that cannot be read.

        Without a `door` record what was closed stays closed: a store that has lost its records opens nothing.
        """
        records = list(records)
        self._records = dict(pair for record in records for pair in _working(record))
        self._barred = {d: record.standing(0.0) for record in records if _is_barred(record) for d in _digests(record)}
        self.limits = {record.id: record.limits for record in records}
        self.names_models = any(record.models for record in records)
        self._known = True
        working = (record for record in records if door is None or record.revoked_at is None)
        asked = any(INFER in record.scopes for record in working)
        self._closed = asked or (self._closed if door is None else not door.open)
        self._open = not (self._required or unread or self._closed)
        self._keys = self._records | self._files

    def authorize(self, key: bytes | None, scope: str) -> Principal:
        """The principal of `key` if it has `scope`. Raises HttpError (401, 403, 503)."""
        if self._open and scope == INFER:
            return ANONYMOUS
        if not key:
            raise self._unknown("A key is required: send `Authorization: Bearer KEY`.", code="missing_api_key")
        digest = hashlib.sha256(key).digest()
        principal = self._keys.get(digest)
        if principal is None:
            raise self._not_working(digest)
        if principal.until is not None and principal.until <= time.time():
            raise HttpError(401, "This key has expired; ask the operator for a new one.", code="expired_api_key")
        if scope not in principal.scopes:
            raise lacking(scope)
        return principal

    def knows(self, key: bytes) -> bool:
        """Whether `key` is on record here, whatever it may do."""
        digest = hashlib.sha256(key).digest()
        return digest in self._keys or digest in self._barred

    def _not_working(self, digest: bytes) -> HttpError:
        why = self._barred.get(digest)
        if why is not None:
            return HttpError(401, f"This key was {why}; ask the operator for another.", code="revoked_api_key")
        unknown = "This key is not known here; check it, or ask the operator for one."
        return self._unknown(unknown, code="invalid_api_key")

    def _unknown(self, message: str, *, code: str) -> HttpError:
        if not self._known:
            return HttpError(503, "The keys have not been read from the store yet; try again.", code="keys_unknown")
        return HttpError(401, message, code=code)


def lacking(scope: str) -> HttpError:
    """The answer to a good credential that may do less than `scope`."""
    what = f"the scope {scope!r}" if scope == INFER else f"the role {scope!r}"
    return HttpError(403, f"This key may not do that; it lacks {what}.")


def _working(record: KeyRecord) -> Iterator[tuple[bytes, Principal]]:
    if _is_barred(record):
        return
    limits = record.limits
    principal = Principal(
        record.name,
        granted(record.scopes),
        hashlib.sha256(b"key record " + record.id.encode()).digest(),
        limits.priority,
        limits.weight,
        record.id,
        record.expires_at,
        limits if limits.bounded else None,
        f"key {record.name} ({record.id})",
        record.collect,
        frozenset(record.models) if record.models else None,
    )
    yield bytes.fromhex(record.digest), principal
    if record.old_digest is not None:
        until = min(record.old_until, record.expires_at or record.old_until)
        yield bytes.fromhex(record.old_digest), replace(principal, until=until)


def _is_barred(record: KeyRecord) -> bool:
    return record.standing(0.0) in ("disabled", "revoked")


def _digests(record: KeyRecord) -> Iterator[bytes]:
    yield bytes.fromhex(record.digest)
    if record.old_digest is not None:
        yield bytes.fromhex(record.old_digest)
