"""An index of which instance has the beginning of a prompt in its prefix cache, by the bytes of the request.

vLLM's cache finds blocks of 16 tokens by a chain of hashes. Here the same is done with bytes, and without reading the
JSON: from the field that holds the prompt on, the body is cut at SIZES, and the hash of each piece begins from that of
the piece before it, so that one number stands for a whole prefix. Each instance has a table of the prefixes it was
sent. The pieces grow: a prompt of any length costs at most len(SIZES) hashes, and of a shared prefix at least two
thirds are recognized.

It is a guess, and only ever costs time when it is wrong: the instance may have evicted the blocks, a tokenizer may join
what was cut apart, and another gateway's requests are unknown here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from xxhash import xxh3_64_intdigest

from server import api

V = TypeVar("V")

SIZES: Final = tuple(n for exponent in range(8, 16) for n in (2**exponent, 3 * 2 ** (exponent - 1)))  # 256 B to 48 KiB
LOOK: Final = 4096  # where the prompt's field is looked for; if it is further on, the body counts from its start
# What comes first in the prompt that a route makes of its body. Inside a JSON string such a name cannot occur: its
# quotes would be escaped.
PROMPT_FIELDS: Final = {route.path: route.prompt for route in api.ROUTES if route.prompt}


@dataclass
class Hint:
    """A request as routing sees it. Made once, and only if there is a choice.

    `prefixes[k]` stands for the first SIZES[k] bytes of the prompt, of which `size` are looked at; `session` for the
    client's session id, 0 without one. `home` is the instance that answered that session last, as far as is known.
    """

    prefixes: list[int]
    size: int
    session: int
    home: str = ""

    @property
    def key(self) -> int:
        """What decides between instances that are equal otherwise, in the same way in every gateway; 0: nothing."""
        return self.session or (self.prefixes[0] if self.prefixes else 0)


NO_HINT: Final = Hint([], 0, 0)


def no_hint() -> Hint:
    """For requests of which nothing is known."""
    return NO_HINT


def hint(route: str, body: bytes, scope: bytes, session: bytes | None) -> Hint:
    """The hint for a request. `scope`: whose cache blocks it may hit; requests of two scopes share none."""
    fields = PROMPT_FIELDS.get(route)
    if fields is None:
        return NO_HINT
    seed = xxh3_64_intdigest(scope)
    own = xxh3_64_intdigest(session, seed) if session else 0
    start = min((at for field in fields if (at := body.find(field, 0, LOOK)) >= 0), default=0)
    return Hint(_chain(body, start, seed), min(len(body) - start, SIZES[-1]), own)


def _chain(body: bytes, start: int, link: int) -> list[int]:
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


def tie_break(key: int, instance_seed: int) -> int:
    """Rendezvous hashing: of equal instances the one with the highest number takes `key`, whichever gateway asks."""
    return int(xxh3_64_intdigest(key.to_bytes(8, "little"), instance_seed))


class Recent(Generic[V]):
    """A mapping that forgets what has not been put for long: at most 2 * `limit` entries, at least the last `limit`.

    Two generations instead of an order of use: when the young one is full it becomes the old one, whose entries go.
    """

    __slots__ = ("_limit", "_old", "_young")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._young: dict[int, V] = {}
        self._old: dict[int, V] = {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    def get(self, key: int) -> V | None:
        """What was put last, if it is remembered."""
        found = self._young.get(key)
        return found if found is not None else self._old.get(key)

    def put(self, key: int, value: V) -> None:
        """Remembers `value`, or that it is still of use."""
        self._young[key] = value
        if len(self._young) >= self._limit:
            self._old, self._young = self._young, {}


class PrefixTable:
    """The prefixes one instance was sent under one weight version: blocks of another are never hit."""

    __slots__ = ("_seen",)

    def __init__(self, limit: int) -> None:
        self._seen: Recent[bool] = Recent(limit)

    def __len__(self) -> int:
        return len(self._seen)

    def share(self, hint: Hint) -> float:
        """How much of the prompt it has been sent before, 0 to 1."""
        seen = self._seen
        for k in range(len(hint.prefixes) - 1, -1, -1):
            if seen.get(hint.prefixes[k]):
                return SIZES[k] / hint.size
        return 0.0

    def add(self, hint: Hint) -> None:
        """It is sent this prompt."""
        for prefix in hint.prefixes:
            self._seen.put(prefix, True)
