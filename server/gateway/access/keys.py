"""Keys: who may ask for what. Only SHA-256 digests are kept; a key never reaches a log, a metric or an instance.

A key is looked up by its digest: how long that takes depends on the digest of the guess, of which a guesser controls no
bit, so timing tells nothing about a key, with any number of keys.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from server.errors import ConfigError, Forbidden, Unauthorized
from server.gateway.config import GatewayConfig

log = logging.getLogger("hotswap.gateway")

INFER = "infer"
ADMIN = "admin"
MIN_KEY_LENGTH = 16
MIN_PRIORITY, MAX_PRIORITY = -9, 9
MAX_WEIGHT = 1000
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a key belongs to and what it may do. `digest` is the key's, empty for nobody's.

    `priority` is the most urgent class its requests may have (lower goes first, as in vLLM), `weight` its share of a
    class relative to other keys' (queue/).
    """

    name: str
    scopes: frozenset[str]
    digest: bytes = b""
    priority: int = 0
    weight: int = 1


ANONYMOUS = Principal("anonymous", frozenset({INFER}))


class KeyRing:
    """Digest -> principal. `open_inference`: no key is asked for inference."""

    def __init__(self, keys: Mapping[bytes, Principal], *, open_inference: bool) -> None:
        self._keys = dict(keys)
        self._open_inference = open_inference

    def authorize(self, key: bytes | None, scope: str) -> Principal:
        """The principal of `key` if it has `scope`. Raises Unauthorized (401) or Forbidden (403)."""
        if scope == INFER and self._open_inference:
            return ANONYMOUS
        if not key:
            raise Unauthorized("A key is required: send `Authorization: Bearer KEY`.", code="missing_api_key")
        digest = hashlib.sha256(key).digest()
        principal = self._keys.get(digest)
        if principal is None:
            raise Unauthorized("This key is not known here; check it, or ask the operator for one.")
        if scope not in principal.scopes:
            raise Forbidden(f"This key may not do that; it lacks the scope {scope!r}.")
        return principal


def load_keys(config: GatewayConfig) -> KeyRing:
    """The keys of `config`; writes a new admin key to `config.key_path` (0600) if there is none. Raises ConfigError."""
    keys = _read_keys(config.api_key_file) if config.api_key_file is not None else {}
    digest = _admin_digest(config)
    keys[digest] = Principal("admin", frozenset({ADMIN, INFER}), digest)
    return KeyRing(keys, open_inference=config.api_key_file is None)


def read_admin_key(path: Path) -> str:
    """The key in `path`. Raises ConfigError if it is unreadable, too short or readable by others."""
    key = _read_private(path).strip()
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(f"The key in {path} has under {MIN_KEY_LENGTH} characters; delete the file for a new one.")
    return key


def _read_private(path: Path) -> str:
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(
                f"Others can read {path}. Run `chmod 600 {path}`, and change its keys if others had them."
            )
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The key file {path} cannot be read: {exc}.") from exc


def _admin_digest(config: GatewayConfig) -> bytes:
    key = config.admin_key
    if key is None:
        key = _generated(config.key_path)
    hashed = _HASHED.fullmatch(key)
    if hashed is not None:
        return bytes.fromhex(hashed[1])
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(f"--admin-key: use {MIN_KEY_LENGTH} characters or more, or leave it out to have one made.")
    return hashlib.sha256(key.encode()).digest()


def _generated(path: Path) -> str:
    """The key in `path`, written first if it is not there; another gateway may be doing the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_admin_key(path)
    except OSError as exc:
        raise ConfigError(f"No admin key could be written to {path} ({exc.strerror}); set --admin-key-file.") from exc
    key = "hs-admin-" + secrets.token_urlsafe(32)
    with os.fdopen(handle, "w") as file:
        file.write(key + "\n")
    log.info("wrote a new admin key to %s", path)
    return key


def _read_keys(path: Path) -> dict[bytes, Principal]:
    """One key a line, `sha256:HEX NAME` or the key itself; `#` begins a comment."""
    keys: dict[bytes, Principal] = {}
    for number, line in enumerate(_read_private(path).splitlines(), 1):
        key, _, name = line.strip().partition(" ")
        if not key or key.startswith("#"):
            continue
        hashed = _HASHED.fullmatch(key)
        if hashed is None and len(key) < MIN_KEY_LENGTH:
            raise ConfigError(f"{path}, line {number}: use {MIN_KEY_LENGTH} characters or more, or `sha256:HEX`.")
        digest = bytes.fromhex(hashed[1]) if hashed else hashlib.sha256(key.encode()).digest()
        keys[digest] = Principal(name.strip() or f"key-{number}", frozenset({INFER}), digest)
    if not keys:
        raise ConfigError(f"{path} holds no key, so nobody could ask anything; add one a line.")
    return keys
