"""The public routes that are forwarded, and the only ones.

A request target is looked up here and what goes upstream is built from the entry found, never from the client's
bytes. vLLM's control, RL and development routes are therefore unreachable however a path is spelt: what is not in
this table has no upstream spelling.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote_to_bytes


@dataclass(frozen=True)
class Route:
    """One forwarded route. `name` labels metrics; `json_body` is checked to be a JSON object before forwarding.

    `works` is what it occupies an instance with: it waits in the queue for that ("" if it never waits). `continued`:
    an instance can go on with a stream that another one began (failover.py).
    """

    name: str
    method: bytes
    json_body: bool
    takes_query: bool = False
    works: Literal["", "prefill", "generate"] = ""
    continued: bool = False


@dataclass(frozen=True)
class Target:
    """A route and the exact request target that goes upstream."""

    route: Route
    upstream: bytes


_POSTS: dict[bytes, Literal["", "prefill", "generate"]] = {
    b"/v1/completions": "generate",
    b"/v1/chat/completions": "generate",
    b"/v1/responses": "generate",
    b"/v1/embeddings": "prefill",
    b"/v1/messages": "generate",
    b"/tokenize": "",
    b"/detokenize": "",
    b"/generate": "generate",
}
_CONTINUED = frozenset({b"/v1/completions", b"/v1/chat/completions", b"/generate"})
_EXACT: dict[bytes, tuple[Target, ...]] = {
    b"/v1/models": (Target(Route("/v1/models", b"GET", json_body=False), b"/v1/models"),),
    **{
        p: (Target(Route(p.decode(), b"POST", True, works=w, continued=p in _CONTINUED), p),) for p, w in _POSTS.items()
    },
}
_RESPONSE_GET = Route("/v1/responses/{id}", b"GET", json_body=False, takes_query=True)
_RESPONSE_CANCEL = Route("/v1/responses/{id}/cancel", b"POST", json_body=False)
_CONSOLE = frozenset({"/v1/models", "/v1/chat/completions", "/generate"})
_RESPONSE_ID = re.compile(rb"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel)?")
_ENCODED_DELIMITER = re.compile(rb"%(?:2f|5c|00|25|3f|23|3b)", re.IGNORECASE)


def find(url: bytes) -> tuple[Target, ...]:
    """The forwarded routes at `url` (a request target), one per method; empty if it is not a public one.

    The path is compared whole and case-sensitively after decoding percent escapes once; escapes that would decode to
    a delimiter (`/ \\ % ? # ;` and NUL) never match, nor do doubled or trailing slashes, `;` parameters, fragments and
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


def for_console(targets: tuple[Target, ...]) -> tuple[Target, ...]:
    """Those of `targets` that the console's chat asks for: they answer on the admin port too, so that the page there
    stays with its own origin."""
    return tuple(target for target in targets if target.route.name in _CONSOLE)


def public_routes() -> list[Route]:
    """Every forwarded route."""
    exact = [target.route for targets in _EXACT.values() for target in targets]
    return [*exact, _RESPONSE_GET, _RESPONSE_CANCEL]


def public_names() -> list[str]:
    """Their names, for metrics and documentation."""
    return sorted(route.name for route in public_routes())
