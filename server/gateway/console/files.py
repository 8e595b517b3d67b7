"""The console's files by name, read once; what is not in the table cannot be asked for, however it is spelt.

The public port has the chat and nothing else: the pages and scripts of the fleet are on the admin port only. None of
the files holds data; what the page shows it asks of `/admin/*`, with the key that is typed into it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
PUBLIC = frozenset(
    {
        "chat.html",
        "chat_page.js",
        "announce.js",
        "api.js",
        "chat.css",
        "chat.js",
        "dom.js",
        "icon.svg",
        "key.js",
        "sse.js",
        "style.css",
        "talk.js",
        "versions.js",
    }
)
ADMIN_PAGE, PUBLIC_PAGE = "index.html", "chat.html"

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-cache",  # kept, but asked about every time: an upgrade is seen at once
}


@dataclass(frozen=True, slots=True)
class File:
    """One file as it is answered."""

    body: bytes
    media_type: str
    etag: str

    def unchanged(self, if_none_match: str | None) -> bool:
        """Whether the client has this very file already (RFC 9110, 13.1.2: `W/` is no difference)."""
        tags = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
        return self.etag in tags or tags == ["*"]


@cache
def load() -> dict[str, File]:
    """Every file of the console, by name."""
    return {path.name: _file(path) for path in sorted(STATIC.iterdir()) if path.suffix in TYPES}


def find(name: str, *, public: bool) -> File | None:
    """The file of that name; on the public port, if it belongs to the chat. An empty name is the page itself."""
    name = name or (PUBLIC_PAGE if public else ADMIN_PAGE)
    return None if public and name not in PUBLIC else load().get(name)


def _file(path: Path) -> File:
    body = path.read_bytes()
    return File(body, TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
