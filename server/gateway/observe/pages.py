"""The page of a scrape, of one worker or of all.

With several workers, the worker that a scrape reaches asks the others, and each sample names its worker. A worker gives
its own page to each connection to its socket in the workers' private directory. Samples are labelled, not added up: a
sum that falls when a worker is started anew would look like a counter that began again.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping

from server.gateway.workers import Place

TIMEOUT_S = 1.0
MOST_KEPT_S = 1.0
SHARE = 9  # times as long as it was made
_FAMILY = re.compile(rb"^(?=# HELP )", re.MULTILINE)
_SAMPLE = re.compile(rb"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(?=(\})?))?", re.MULTILINE)


class Pages:
    """This process's page, `own`, and its siblings'. Without a place there are none."""

    def __init__(self, place: Place | None, make: Callable[[], Awaitable[bytes]]) -> None:
        self._place = place
        self._make = make
        self._making = asyncio.Lock()
        self._page = b""
        self._fresh_until = 0.0

    async def _own(self) -> bytes:
        """Made for all who ask at a time, and kept for so long that making pages takes a tenth of the time at most."""
        async with self._making:
            began = time.monotonic()
            if began >= self._fresh_until:
                self._page = await self._make()
                ended = time.monotonic()
                self._fresh_until = ended + min(MOST_KEPT_S, SHARE * (ended - began))
            return self._page

    async def all(self) -> bytes:
        """The page for a scrape."""
        place = self._place
        if place is None:
            return await self._own()
        others = [i for i in range(place.count) if i != place.index]
        pages = dict(zip(others, await asyncio.gather(*(self._of(place, i) for i in others)), strict=True))
        pages[place.index] = await self._own()
        return merged({i: page for i, page in sorted(pages.items()) if page})

    async def serve(self) -> None:
        """Gives this process's page to its siblings, for ever."""
        if self._place is None:
            return
        path = self._place.page_socket(self._place.index)
        path.unlink(missing_ok=True)  # left by the worker before
        server = await asyncio.start_unix_server(self._answer, path)
        async with server:
            await server.serve_forever()

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await self._own())
        writer.close()

    @staticmethod
    async def _of(place: Place, index: int) -> bytes:
        """The page of a sibling; empty if it is not up."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(place.page_socket(index))
                try:
                    return await reader.read()
                finally:
                    writer.close()
        except OSError:  # TimeoutError is one
            return b""


def merged(pages: Mapping[int, bytes]) -> bytes:
    """One page in Prometheus text format of several, every sample with the label `worker`."""
    heads: dict[bytes, bytes] = {}
    samples: dict[bytes, list[bytes]] = {}
    for worker, page in pages.items():
        for family in _FAMILY.split(page):
            if not family:
                continue
            help_line, type_line, rest = family.split(b"\n", 2)
            name = help_line.split(b" ", 3)[2]
            heads.setdefault(name, help_line + b"\n" + type_line + b"\n")
            samples.setdefault(name, []).append(_labelled(rest, worker))
    return b"".join(head + b"".join(samples[name]) for name, head in heads.items())


def _labelled(lines: bytes, worker: int) -> bytes:
    label = b'worker="%d"' % worker

    def add(match: re.Match[bytes]) -> bytes:
        if match[0].endswith(b"{"):
            return match[0] + label + (b"" if match[2] else b",")
        return match[0] + b"{" + label + b"}"

    return _SAMPLE.sub(add, lines)
