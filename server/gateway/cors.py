"""Pages of other origins (CORS, Fetch Standard): which may ask, and what their browsers are told.

A browser asks before it sends JSON or a key to another origin (`OPTIONS`, without the key), and shows the page an
answer only if that names the page's origin. Without either a page can still send: what keeps foreign pages from a
gateway that asks for no key is `Origins.check`, which refuses their requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from server.gateway.access.keys import KeyRing
from server.gateway.wire.head import check_origin
from server.key_limits import RATE_HEADERS
from weightsync.tls import is_loopback

MAX_AGE_S: Final = 600  # for which a browser need not ask again
EXPOSED: Final = ", ".join((
    "x-request-id", "retry-after", "x-hotswap-weight-version", "x-hotswap-weights", "x-hotswap-upstream",
    "x-hotswap-fallback", *RATE_HEADERS,
))  # fmt: skip


class Origins:
    """The origins that an operator allows, "*" among them for any. `host`: where the gateway was told to listen."""

    def __init__(self, keys: KeyRing, host: str) -> None:
        self._keys, self._own_name = keys, host.lower()
        self._allowed: frozenset[str] = frozenset()

    def use(self, allowed: Iterable[str]) -> None:
        """From now on these."""
        self._allowed = frozenset(allowed)

    def check(self, origin: bytes, host: bytes, listening_on: str) -> None:
        """While no key is needed. Raises HttpError (403) for a page that may not ask."""
        if "*" not in self._allowed:
            check_origin(origin, host, listening_on, self._allowed, self._own_name)

    def lines(self, origin: bytes) -> bytes:
        """Header lines for an answer to this page; none if it may not read it."""
        return b"".join([b"%b: %b\r\n" % pair for pair in self.pairs(origin)])

    def pairs(self, origin: bytes) -> list[tuple[bytes, bytes]]:
        """The same as names and values."""
        if not self._may_read(origin):
            return [(b"vary", b"origin")] if self._allowed else []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", EXPOSED.encode()),
            (b"vary", b"origin"),
        ]

    def preflight(self, origin: bytes, headers: bytes, methods: Iterable[str]) -> list[tuple[bytes, bytes]]:
        """The headers that answer a browser's question; `headers` are those it asks for."""
        if not self._may_read(origin):
            return [(b"vary", b"origin")]
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-allow-headers", headers or b"authorization, content-type"),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
            (b"vary", b"origin, access-control-request-headers"),
        ]

    def _may_read(self, origin: bytes) -> bool:
        """Those allowed; and while no key is needed, pages of this machine, which may ask anyway."""
        text = origin.decode("latin-1")
        if text in self._allowed or "*" in self._allowed:
            return True
        try:
            name = urlsplit(text).hostname or ""
        except ValueError:
            return False
        return self._keys.open_inference and bool(name) and is_loopback(name)
