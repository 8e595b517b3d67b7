"""The routes that are forwarded, and the only ones: the rows of server/api.py.

A request target is looked up here and what goes upstream is built from the entry found, never from the client's
bytes. vLLM's control, RL and development routes are therefore unreachable however a path is spelt: what is not in
this table has no upstream spelling.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import unquote_to_bytes

from server import api


@dataclass(frozen=True)
class Route:
    """One forwarded route. `name` labels metrics; `json_body` is checked to be a JSON object before forwarding.

    `works` is what it occupies an instance with: it waits in the queue for that ("" if it never waits). `continued`:
    an instance can go on with a stream that another one began (fleet/retries.py).
    """

    name: str
    method: bytes
    json_body: bool
    takes_query: bool = False
    works: Literal["", "prefill", "generate"] = ""
    continued: bool = False
    admin: bool = False  # on the admin port alone, and with an admin key


@dataclass(frozen=True)
class Target:
    """A route and the exact request target that goes upstream."""

    route: Route
    upstream: bytes


_FORWARDED: Final = tuple(
    Route(
        row.path, row.method.encode(), json_body=row.method == "POST" and row.body, takes_query=row.query,
        works=row.works, continued=row.continued, admin=row.admin,
    )
    for row in api.ROUTES
)  # fmt: skip
_BY_NAME: Final = {route.name: route for route in _FORWARDED}
_EXACT: Final = {
    route.name.encode(): (Target(route, route.name.encode()),) for route in _FORWARDED if "{" not in route.name
}
# Paths that stock vLLM answers and no route here does, and what to ask instead; on either port.
_ELSEWHERE: Final = {
    "/docs": "GET /openapi.json has the document that such a page shows.",
    "/redoc": "GET /openapi.json has the document that such a page shows.",
    "/invocations": "POST the same body to the route of its kind, such as /v1/chat/completions.",
}
_JOBS: Final = re.compile(r"/v1/(fine_tuning|files|uploads)(/.*)?")
GENERATE: Final = _EXACT[b"/generate"][0]
CLASSIFY: Final = _EXACT[b"/classify"][0]
COMPLETIONS: Final = _EXACT[b"/v1/completions"][0]
_RESPONSE_GET: Final = _BY_NAME["/v1/responses/{id}"]
_RESPONSE_CANCEL: Final = _BY_NAME["/v1/responses/{id}/cancel"]
_RESPONSE_ID: Final = re.compile(rb"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel)?")
_ENCODED_DELIMITER: Final = re.compile(rb"%(?:2f|5c|00|25|3f|23|3b)", re.IGNORECASE)


def find(url: bytes) -> tuple[Target, ...]:
    """The forwarded routes at `url` (a request target), one per method; empty if it is not a public one.

    The path is compared whole and case-sensitively after decoding percent escapes once; escapes that would decode to
    a delimiter (`/ \\ % ? # ;` and NUL) never match, nor do doubled slashes, `;` parameters, fragments and
    absolute-form targets.
    """
    exact = _EXACT.get(url)
    if exact is not None:
        return exact
    path, _, query = url.partition(b"?")
    if b"%" in path:
        if _ENCODED_DELIMITER.search(path):
            return ()
        path = unquote_to_bytes(path)
    if b"#" in url:
        return ()
    exact = _EXACT.get(path)
    if exact is not None:
        return exact  # none of them takes a query: it is dropped
    match = _RESPONSE_ID.fullmatch(path)
    if match is None:
        return ()
    if match[2]:
        return (Target(_RESPONSE_CANCEL, path),)
    return (Target(_RESPONSE_GET, path + b"?" + query if query else path),)


def without_slash(url: bytes) -> bytes:
    """The request target without one slash at the end of its path: clients join base URLs and paths carelessly."""
    if not url.endswith(b"/") and b"/?" not in url:
        return url
    path, mark, query = url.partition(b"?")
    once = len(path) > 1 and path.startswith(b"/") and path.endswith(b"/") and not path.endswith(b"//")
    return path[:-1] + mark + query if once else url


def elsewhere(path: str, *, admin_port: bool) -> str:
    """The message for a path that has no route."""
    hint = _ELSEWHERE.get(path)
    if hint is None and _JOBS.fullmatch(path) is not None:
        hint = "`hotswap train-server` answers it, on a port of its own: send files and fine-tuning jobs there."
    elif hint is None:
        hint = "GET /openapi.json names the routes of this port."
        hint = hint if admin_port else f"{hint} Routes that control the server are on the admin port."
    return f"There is no public route at {path}. {hint}" if not admin_port else f"There is no route at {path}. {hint}"


def public_names() -> list[str]:
    """Names of the routes that are forwarded from the public port."""
    return sorted(route.name for route in _FORWARDED if not route.admin)


def admin_names() -> list[str]:
    """Those of the routes that are forwarded from the admin port alone."""
    return sorted(route.name for route in _FORWARDED if route.admin)
