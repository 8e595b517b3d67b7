"""TLS with a certificate that may be replaced while connections are open: renewed ones need no restart.

The files are looked at when a client shakes hands, once a second at most. New ones are loaded into a context of their
own, so that a certificate whose key has not been written yet harms nobody: the one of before goes on.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.gateway.access.key_files import stamp

log = logging.getLogger("hotswap.gateway")

INTERVAL_S = 1.0


class Certificate:
    """The certificate chain and key in two files."""

    def __init__(self, certfile: Path, keyfile: Path) -> None:
        self._paths = (certfile, keyfile)
        self._seen = [stamp(path) for path in self._paths]
        self._looked_at = time.monotonic()
        self._make: Callable[[], ssl.SSLContext]
        self._current: ssl.SSLContext

    def context(self, _: Any, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        """The context to listen with (uvicorn's hook); `make` builds one from the files. Raises OSError."""
        self._make = make
        self._current = make()
        listening = make()
        listening.sni_callback = self._greet
        return listening

    def _greet(self, connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        """A client shakes hands: it gets the certificate of now."""
        now = time.monotonic()
        if now - self._looked_at >= INTERVAL_S:
            self._looked_at = now
            self._look()
        connection.context = self._current

    def _look(self) -> None:
        seen = [stamp(path) for path in self._paths]
        if seen == self._seen:
            return
        try:
            self._current = self._make()
        except OSError as exc:  # ssl.SSLError is one
            log.error("the certificate of before stays in use: %s cannot be used (%s)", self._paths[0], exc)
        else:
            log.info("the certificate was read again")
        self._seen = seen
