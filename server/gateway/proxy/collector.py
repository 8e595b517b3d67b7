"""What the parser tells of a request's head, line by line: compiled, for it is called once for each header."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Reader(Protocol):
    """The connection that a head is read for. Its methods are httptools' callbacks."""

    def on_message_begin(self) -> None: ...

    def on_headers_complete(self) -> None: ...

    def on_body(self, body: bytes) -> None: ...

    def on_message_complete(self) -> None: ...


class HeadCollector:
    """httptools' callbacks: those of a head's lines here, all others the reader's own."""

    def __init__(self, reader: Reader) -> None:
        self.on_message_begin: Callable[[], None] = reader.on_message_begin
        self.on_headers_complete: Callable[[], None] = reader.on_headers_complete
        self.on_body: Callable[[bytes], None] = reader.on_body
        self.on_message_complete: Callable[[], None] = reader.on_message_complete
        self.reading = False
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []

    def begin(self) -> None:
        """A head begins. Until then, and after `end`, lines are dropped: they are trailers, or nobody listens."""
        self.reading = True
        self.url = b""
        self.headers = []

    def end(self) -> None:
        """It is complete."""
        self.reading = False

    def on_url(self, url: bytes) -> None:
        if self.reading:
            self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.reading:
            self.headers.append((name.lower(), value))
