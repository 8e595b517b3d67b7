"""An index of which instance has the beginning of a prompt in its prefix cache, by the bytes of the request.

Each instance has a table of prefixes (server/prefixes.py): those that it was sent from here count at once, and those
that it reports to hold count until it reports that it has dropped them. Prefixes that another gateway has sent there,
or that were evicted, become known with the reports, which come with each scrape.

The index is a guess, and only ever costs time when it is wrong: blocks may be evicted by the time a request comes, and
a tokenizer may join what was cut apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from xxhash import xxh3_64_intdigest

from server.prefixes import SIZES, chain, seed, start

V = TypeVar("V")

SENT_S: Final = 15.0  # what an instance that reports has not confirmed by then counts no more, or after as long again
MOST_HELD: Final = 2**17  # prefixes that an instance may report; one engine reports 8192 at most


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
        """The number that decides between instances equal otherwise, the same in every gateway; 0: none does."""
        return self.session or (self.prefixes[0] if self.prefixes else 0)


NO_HINT: Final = Hint([], 0, 0)


def no_hint() -> Hint:
    """For requests of which nothing is known."""
    return NO_HINT


def hint(route: str, body: bytes, scope: bytes, session: bytes | None) -> Hint:
    """The hint for a request. `scope`: whose cache blocks it may hit; requests of two scopes share none."""
    begin = start(route, body)
    if begin < 0:
        return NO_HINT
    link = seed(scope)
    own = xxh3_64_intdigest(session, link) if session else 0
    return Hint(chain(body, begin, link), min(len(body) - begin, SIZES[-1]), own)


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
        """The value that was put last, if it is remembered."""
        found = self._young.get(key)
        return found if found is not None else self._old.get(key)

    def put(self, key: int, value: V) -> None:
        """Remembers `value`, or that it is still of use."""
        self._young[key] = value
        if len(self._young) >= self._limit:
            self._old, self._young = self._young, {}


_HELD: Final = 0  # in place of a generation


class PrefixTable:
    """The prefixes one instance likely holds under one weight version: blocks of another are never hit.

    Those that it was sent are remembered as in `Recent`, at most 2 * `limit`, at least the last `limit`: each has the
    number of the generation in which it was sent last, and there are two. One dictionary has them and those that the
    instance reports: a choice looks up every prefix of a prompt in the table of every instance.
    """

    __slots__ = ("_aged_at", "_generation", "_known", "_limit", "_young", "held")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: dict[int, int] = {}
        self._generation = 1
        self._young = 0  # that have its number
        self._aged_at = 0.0  # monotonic
        self.held = 0  # how many it has reported

    def __len__(self) -> int:
        return len(self._known)

    def share(self, hint: Hint) -> float:
        """How much of the prompt it likely has, 0 to 1."""
        known, prefixes = self._known, hint.prefixes
        for k in range(len(prefixes) - 1, -1, -1):
            if prefixes[k] in known:
                return SIZES[k] / hint.size
        return 0.0

    def add(self, hint: Hint) -> None:
        """It is sent this prompt."""
        known, generation = self._known, self._generation
        for prefix in hint.prefixes:
            before = known.get(prefix, -1)
            if before != _HELD and before != generation:
                known[prefix] = generation
                self._young += 1
        if self._young >= self._limit:
            self._age()

    def reported(self, held: Iterable[int], dropped: Iterable[int], now: float, *, whole: bool) -> int:
        """It says what it has come to hold and what it has dropped; `whole`: it holds nothing else. How many of those
        known here it has dropped."""
        if whole:
            kept = set(held)
            dropped = [prefix for prefix, since in self._known.items() if since == _HELD and prefix not in kept]
        gone = sum([self._forget(prefix) == _HELD for prefix in dropped])
        for prefix in held:
            self._forget(prefix)
            self._known[prefix] = _HELD
            self.held += 1
        if self.held > MOST_HELD:
            self._known, self.held, self._young = {}, 0, 0
        if now - self._aged_at >= SENT_S:
            self._aged_at = now
            self._age()
        return gone

    def _forget(self, prefix: int) -> int:
        """Since when it was known, -1 if it was not."""
        since = self._known.pop(prefix, -1)
        self.held -= since == _HELD
        self._young -= since == self._generation
        return since

    def _age(self) -> None:
        """Forgets what was sent in the last generation, and begins another."""
        keep = (_HELD, self._generation)
        self._known = {prefix: since for prefix, since in self._known.items() if since in keep}
        self._generation += 1
        self._young = 0
