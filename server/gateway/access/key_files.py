"""Keys in files: inference keys one a line, and the admin key. Read again when they change, without a restart.

A file that cannot be used when it changes leaves the keys as they were and is said in the log: an editor that empties a
file before it writes it locks nobody out.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import stat
from pathlib import Path

from server.errors import ConfigError
from server.files import write_new_file
from server.gateway.access.keys import ADMIN, INFER, KeyRing, Principal
from server.gateway.config import GatewayConfig
from weightsync.tls import Stamp, stamp

log = logging.getLogger("hotswap.gateway")

MIN_KEY_LENGTH = 16
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")


def load_keys(config: GatewayConfig) -> KeyRing:
    """The keys of `config`; writes a new admin key to `config.key_path` (0600) if there is none. Raises ConfigError."""
    return KeyRing(read_keys(config), required=config.require_key or config.api_key_file is not None)


def read_keys(config: GatewayConfig) -> dict[bytes, Principal]:
    """Digest -> principal, of every file. Raises ConfigError."""
    keys = _read_keys(config.api_key_file) if config.api_key_file is not None else {}
    digest = _admin_digest(config)
    keys[digest] = Principal("admin", frozenset({ADMIN, INFER}), digest)
    return keys


def read_admin_key(path: Path) -> str:
    """The key in `path`. Raises ConfigError if it is unreadable, too short or readable by others."""
    key = _read_private(path).strip()
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(f"The key in {path} has under {MIN_KEY_LENGTH} characters; delete the file for a new one.")
    return key


class KeyFiles:
    """Looks whether the files have changed, and gives their keys to the ring."""

    def __init__(self, config: GatewayConfig, ring: KeyRing) -> None:
        self._config = config
        self._ring = ring
        self._paths = [config.api_key_file] if config.api_key_file is not None else []
        self._paths += [config.key_path] if config.admin_key is None else []
        self._seen = self._stamps()

    def reload(self) -> None:
        """To be called now and then; a few microseconds while nothing has changed."""
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            if None in stamps:
                raise ConfigError("A key file is gone.")
            self._ring.use_files(read_keys(self._config))
        except ConfigError as exc:
            log.error("the keys of before stay in use: %s", exc)
        else:
            log.info("key files were read again")

    def _stamps(self) -> list[Stamp]:
        return [stamp(path) for path in self._paths]


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
        raise ConfigError(f"HOTSWAP_ADMIN_KEY: use {MIN_KEY_LENGTH} characters or more, or unset it to have one made.")
    return hashlib.sha256(key.encode()).digest()


def _generated(path: Path) -> str:
    """The key in `path`, written first if it is not there; another gateway may be doing the same."""
    if path.exists():
        return read_admin_key(path)
    key = "hs-admin-" + secrets.token_urlsafe(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new_file(path, key + "\n")
    except FileExistsError:
        return read_admin_key(path)
    except OSError as exc:
        raise ConfigError(f"No admin key could be written to {path} ({exc.strerror}); set --admin-key-file.") from exc
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
