"""Which pages may ask while no key is needed: a browser sends what any page has it send, also to this machine's ports.

Programs send no Origin; browsers send one with every POST of a page, which the page cannot change. Keys are protection
enough where they are needed, since no foreign page knows one.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from server.errors import Forbidden
from weightsync.tls import is_loopback


def check_origin(origin: bytes, host: bytes, listening_on: str, allowed: Collection[str]) -> None:
    """Lets pages of this machine pass, those `allowed`, and beyond loopback those of the very `host` that is asked.

    Behind loopback the Host header proves nothing: whoever owns a name can let it lead to 127.0.0.1 (DNS rebinding).
    Raises Forbidden.
    """
    text = origin.decode("latin-1")
    try:
        url = urlsplit(text)
        name, netloc = url.hostname or "", url.netloc
    except ValueError:
        name = netloc = ""
    own = not is_loopback(listening_on) and netloc == host.decode("latin-1")
    if not (name and (is_loopback(name) or own or text in allowed)):
        message = "Pages of this origin may not ask while no key is needed: make a key, or start with --allow-origin."
        raise Forbidden(message, code="origin_not_allowed")
