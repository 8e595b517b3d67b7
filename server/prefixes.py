"""Prefixes of prompts, as gateways and instances name them, and what an instance says of those that its cache holds.

vLLM's cache finds blocks of 16 tokens by a chain of hashes. Here the same is done with bytes, and without reading the
JSON: from the field that holds the prompt on, the body is cut at SIZES, and the hash of each piece begins from that of
the piece before it, so that one number stands for a whole prefix. The pieces grow: a prompt of any length costs at most
len(SIZES) hashes, and of a shared prefix at least two thirds are recognized.

A gateway sends bodies on as it has hashed them, so both sides come to the same numbers and never send them along. An
instance answers `GET /hotswap/prefixes?after=CURSOR` with a `Report`: what has changed since the report that carried
the cursor, or all that it holds where the cursor is empty, too old, or another process's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from xxhash import xxh3_64_intdigest

from server import api

SIZES: Final = tuple(n for exponent in range(8, 16) for n in (2**exponent, 3 * 2 ** (exponent - 1)))  # 256 B to 48 KiB
LOOK: Final = 4096  # where the prompt's field is looked for; if it is further on, the body counts from its start
# The fields that come first in the prompt that a route makes of its body. Inside a JSON string such a name cannot
# occur: its quotes would be escaped.
PROMPT_FIELDS: Final = {route.path: route.prompt for route in api.ROUTES if route.prompt}
SCOPE: Final = b"x-hotswap-cache-scope"  # the header that says whose cache blocks a request may hit

PATH: Final = "/hotswap/prefixes"


def scope_line(name: bytes) -> bytes:
    """The header line for a cache scope."""
    return b"%b: %b\r\n" % (SCOPE, name)


def seed(scope: bytes) -> int:
    """The seed of a prompt's chain. `scope`: a `scope_line`; prompts of two have no number in common."""
    return int(xxh3_64_intdigest(scope))


def start(route: str, body: bytes) -> int:
    """Where the prompt begins in the body; -1 for a route without one."""
    fields = PROMPT_FIELDS.get(route)
    if fields is None:
        return -1
    return min((at for field in fields if (at := body.find(field, 0, LOOK)) >= 0), default=0)


def chain(body: bytes, start: int, link: int) -> list[int]:
    """One number for each of SIZES that fits into the body from `start` on. `link`: the `seed`."""
    found: list[int] = []
    view, at = memoryview(body), start
    for size in SIZES:
        end = start + size
        if end > len(body):
            break
        link = xxh3_64_intdigest(view[at:end], link)
        found.append(link)
        at = end
    return found


class Report:
    """The prefixes that an instance's cache holds, or how they have changed.

    The next question is asked with `cursor`. `whole`: all that is held, under any version, is in `held`. `held` and
    `dropped` are prefixes by the version of the weights that computed their blocks, 0 for those before the first one.
    """

    def __init__(
        self, cursor: str, whole: bool, held: Mapping[int, Iterable[int]], dropped: Mapping[int, Iterable[int]]
    ) -> None:
        self.cursor = cursor
        self.whole = whole
        self.held = held
        self.dropped = dropped

    def encode(self) -> bytes:
        """As it is sent: msgpack, with the prefixes of a version in 8 bytes each."""
        sides = [{version: pack(prefixes) for version, prefixes in side.items()} for side in (self.held, self.dropped)]
        return msgspec.msgpack.encode((self.cursor, self.whole, *sides))


_WIRE: Any = tuple[str, bool, dict[int, bytes], dict[int, bytes]]


def decode(raw: bytes) -> Report:
    """The report that `encode` has written. Raises ValueError for anything else."""
    cursor, whole, held, dropped = msgspec.msgpack.decode(raw, type=_WIRE)
    if not cursor.isascii() or not cursor.replace("-", "").isalnum():
        raise ValueError("its cursor is none")
    sides = [{version: unpack(packed) for version, packed in side.items()} for side in (held, dropped)]
    return Report(cursor, whole, sides[0], sides[1])


def pack(prefixes: Iterable[int]) -> bytes:
    """8 bytes each, the lowest first."""
    each = tuple(prefixes)
    return struct.pack(f"<{len(each)}Q", *each)


def unpack(packed: bytes) -> tuple[int, ...]:
    """The prefixes that `pack` has packed. Raises ValueError."""
    if len(packed) % 8:
        raise ValueError("prefixes have 8 bytes each")
    return struct.unpack(f"<{len(packed) // 8}Q", packed)
