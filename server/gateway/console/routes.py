"""`GET /console` and the files of the page, by name and read once: nothing outside the table can be asked for.

The public port has the chat and nothing else: the pages and scripts of the fleet are on the admin port only. No key is
asked for, since a browser sends none and the files hold no data; what the page shows it asks of `/admin/*`, with the
key that is typed into it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi import Path as PathParameter

from server.errors import HttpError

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


router = APIRouter(tags=["console"])
PREFIX = "/console"

FileName = Annotated[str, PathParameter(description="one of the page's own files")]
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file", "content": {t.partition(";")[0]: {} for t in TYPES.values()}},
    304: {"description": "The client has it already (`If-None-Match`)"},
}


@router.get(PREFIX, response_class=Response, responses=_ANSWERS)
async def console(request: Request) -> Response:
    """The page: on the admin port the whole console, on the public port its chat."""
    return _answer(request, "")


@router.get(PREFIX + "/{name}", response_class=Response, responses={**_ANSWERS, 404: {"description": "No such file"}})
async def console_file(request: Request, name: FileName) -> Response:
    """A script, style sheet or picture of the page."""
    return _answer(request, name)


router.get(PREFIX + "/", include_in_schema=False)(console)
router.head(PREFIX, include_in_schema=False)(console)
router.head(PREFIX + "/{name}", include_in_schema=False)(console_file)


def _answer(request: Request, name: str) -> Response:
    file = find(name, public=not request.state.admin_port)
    if file is None:
        raise HttpError(404, f"There is no public route {request.method} {request.url.path}.")
    headers = {**HEADERS, "etag": file.etag}
    if file.unchanged(request.headers.get("if-none-match")):
        return Response(status_code=304, headers=headers)
    headers |= {"content-type": file.media_type, "content-length": str(len(file.body))}
    return Response(b"" if request.method == "HEAD" else file.body, headers=headers)


def is_open(path: str) -> bool:
    """Whether `path` is the console's, and so asked for without a key."""
    return path == PREFIX or path.startswith(PREFIX + "/")
