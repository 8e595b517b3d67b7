"""Cache scopes: a name per API key that reveals nothing of the key and is the same in every gateway.

The name is an HMAC of the key's digest under a secret in the store, made by the first gateway that asks. Until the
store has answered, a secret of this process alone is used: blocks are then found by fewer requests, never by more.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets

from server.gateway.access.keys import Principal
from server.prefixes import scope_line
from weightsync.errors import Conflict, StoreError
from weightsync.store import MISSING, Store

log = logging.getLogger("hotswap.gateway")

STORE_KEY = "gateway/cache-scope-secret"
PUBLIC = b"public"
RETRY_S = 1.0


class CacheScopes:
    """The header line for each principal. `shared`: all are one."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._secret = secrets.token_bytes(32)
        self._lines: dict[bytes, bytes] = {}

    def line(self, principal: Principal) -> bytes:
        """`x-hotswap-cache-scope` for requests of `principal`; "public" where no key was asked for."""
        line = self._lines.get(principal.digest)
        if line is None:
            line = self._lines[principal.digest] = scope_line(self._name(principal.digest))
        return line

    def session(self, principal: Principal, name: bytes) -> bytes:
        """A name for the session that a client of `principal` calls so; no other key has a session of that name."""
        return hmac.new(self._secret, principal.digest + b"|" + name, hashlib.sha256).hexdigest()[:32].encode()

    async def adopt(self, store: Store) -> None:
        """Takes the store's secret, which is made if there is none. Raises StoreError."""
        found = await store.get(STORE_KEY)
        if found is None:
            with contextlib.suppress(Conflict):
                await store.compare_and_swap(STORE_KEY, MISSING, secrets.token_bytes(32).hex().encode())
            found = await store.get(STORE_KEY)
            assert found is not None
        self._secret = bytes.fromhex(found.value.decode())
        self._lines.clear()

    async def keep_adopting(self, store: Store) -> None:
        """Returns when the store's secret is in use, however long the store is away."""
        while True:
            try:
                return await self.adopt(store)
            except StoreError as exc:
                log.warning("cache scopes are this process's own until the store answers: %s", exc)
                await asyncio.sleep(RETRY_S)

    def _name(self, digest: bytes) -> bytes:
        if self._shared or not digest:
            return PUBLIC
        return hmac.new(self._secret, digest, hashlib.sha256).hexdigest()[:32].encode()
