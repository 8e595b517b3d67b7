"""The records of keys in the store, for all gateways: never a key, only the SHA-256 of one.

    gateway/keys/{id}       KeyRecord
    gateway/keys/.door      DoorRecord; beside the keys, so that whoever lists or watches them sees it too
    gateway/usage/{gateway} UsageRecord (sharing.py), under the gateway's lease
    gateway/spent/{YYYY-MM}/{key}  SpentRecord (budgets.py)
    gateway/added/{gateway} the gateway's last addition to one (budgets.py), under a lease
    gateway/usage/round     changed with every share that grows (sharing.py)
    gateway/feedback/{model}/{id}  what was said of another gateway's answer (server/answers/feedback.py)

A SHA-256 without salt or stretching is enough: keys are 256 random bits made here, not words that somebody chose.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from server.gateway.config import ROLES
from server.key_limits import KeyLimits
from weightsync.control.strict_json import Record

KEYS_PREFIX = "gateway/keys/"
DOOR = KEYS_PREFIX + ".door"  # no key has such an id
USAGE_PREFIX = "gateway/usage/"
SPENT_PREFIX = "gateway/spent/"
USAGE_ROUND = USAGE_PREFIX + "round"
FEEDBACK_PREFIX = "gateway/feedback/"
Scope = Literal["infer", "viewer", "operator", "publisher", "admin"]
INFER: Scope = "infer"
ADMIN: Scope = "admin"
Standing = Literal["active", "disabled", "expired", "revoked"]


@dataclass(frozen=True)
class By:
    """The author of an action on the admin port and its reason, for the ledger.

    `digest` tells owners of credentials apart. `admin`: the credential has the highest role, and may name
    any path of the gateway's host.
    """

    who: str
    reason: str = ""
    digest: bytes = b""
    admin: bool = False


@dataclass(frozen=True)
class KeyRecord(Record):
    """One key. Times are unix seconds; `digest` is the key's SHA-256 in hexadecimal.

    `models`: the names of models, aliases and adapters that it may ask for; none named: all.

    `collect`: the answers it gets are kept for training (docs/feedback.md).

    `old_digest` is that of the key before the last rotation, which works until `old_until`. A revoked key's record
    stays: it says why the key fails, and that keys are asked for here.
    """

    id: str
    name: str
    digest: str
    scopes: tuple[Scope, ...]
    created_at: float
    expires_at: float | None = None
    disabled: bool = False
    revoked_at: float | None = None
    rotated_at: float | None = None
    old_digest: str | None = None
    old_until: float = 0.0
    limits: KeyLimits = KeyLimits()  # noqa: RUF009 - it is frozen
    collect: bool = False
    models: tuple[str, ...] = ()

    def standing(self, now: float) -> Standing:
        """Whether it works at `now`, and if not, why."""
        if self.revoked_at is not None:
            return "revoked"
        if self.disabled:
            return "disabled"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"

    def rotated(self, grace_s: float) -> tuple[KeyRecord, str]:
        """The record with a new key, and that key; the one it had works for another `grace_s`."""
        key, now = new_key(self.id), time.time()
        old_digest = self.digest if grace_s else None
        rotated = replace(self, digest=digest_of(key), rotated_at=now, old_digest=old_digest, old_until=now + grace_s)
        return rotated, key


@dataclass(frozen=True)
class DoorRecord(Record):
    """Whether inference asks for a key. The transaction that writes a key for inference writes it too: not `open`.

    It outlives the keys: with the last one gone inference stays closed, until an operator says that it is open.
    """

    open: bool
    since: float


def granted(scopes: Iterable[str]) -> frozenset[str]:
    """`scopes`, and with the highest role among them every lower one."""
    given = frozenset(scopes)
    return given.union(*(ROLES[: ROLES.index(role)] for role in ROLES if role in given))


def digest_of(key: str) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_id() -> str:
    """An id for a key; it is no secret."""
    return secrets.token_hex(6)


def new_key(key_id: str) -> str:
    """A key that says which one it is, and 256 bits that nobody can guess."""
    return f"hs-{key_id}-{secrets.token_urlsafe(32)}"
