"""The plan of a receiver: which chunk it reads from which host next, from what it knows of the holders.

Nothing is done here and nothing remembered: the same arguments give the same answer. No host coordinates the receivers.

All of them compute the same two binary trees over the hosts (`feeders`). Even chunks go down the one, odd chunks down
the other; a parent in one is a leaf in the other, so each host sends no more than it receives (Sanders, Speck,
Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009). Where a tree is broken or slow,
the receiver takes the chunks of that half from anybody, what is rarest first, beginning at another chunk than others
(Cohen, "Incentives Build Robustness in BitTorrent", 2003), and opens the source for them only if nobody else has any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from weightsync.peer.chunks import Bitmap


@dataclass(frozen=True)
class Holder:
    """A host to read from. `distance` grows with it: 0 is the same rack; what lies between is for the caller to say."""

    host: str
    distance: int = 0
    have: Bitmap | None = None  # None: everything
    active: int = 0  # how many others read from it now, as far as known


@dataclass(frozen=True)
class Assignment:
    """Read `chunk` from `host`."""

    chunk: int
    host: str


NOBODY = "", ""  # feeds a receiver
MARGIN, LEAST_MARGIN = 16, 8  # a tree is behind by so many chunks: that part of all, and never fewer


def feeders(hosts: Iterable[tuple[str, str]], source: str, me: str) -> tuple[tuple[str, ...], ...]:
    """Whom the host `me` reads even chunks from, and odd ones, of a version from the host `source`.

    Each is the way up a tree: the host above `me`, the one above that, and so on to `source`. Where `me` is on the
    second side of a host, the one that heads the first side comes next on the way: it is the heir, so that one of two
    climbs where the host fails, and the source goes on sending each chunk once. `hosts` are all that there are, as
    (rack, host): the hosts of a rack lie side by side in both trees, and each tree enters a rack once or twice. Empty:
    `me` is not among them.
    """
    order = sorted({(rack, host) for rack, host in hosts if host != source})
    at = next((n for n, (_, host) in enumerate(order) if host == me), None)
    if at is None:
        return ()
    return _above(order, at, source), _above(order[1:] + order[:1], (at or len(order)) - 1, source)


def _above(order: Sequence[tuple[str, str]], at: int, source: str) -> tuple[str, ...]:
    """The way up from `order[at]` in the tree in which only the hosts at odd places have others below them."""
    first, end, above = 0, len(order), [source]  # `first` is even
    while (root := _root(order, first, end)) != at:
        if at > root:
            above.append(order[_root(order, first, root)][1])
        above.append(order[root][1])
        first, end = (first, root) if at < root else (root + 1, end)
    return tuple(reversed(above))


def _root(order: Sequence[tuple[str, str]], first: int, end: int) -> int:
    """The place of the root: beside the border of two racks that is nearest to the middle, or in the middle."""
    middle = (first + end - 1) / 2
    racks = [n for n in range(first + 1, end) if order[n - 1][0] != order[n][0]]
    border = min(racks, key=lambda n: abs(n - 0.5 - middle), default=(first + end) // 2)
    return min(border - (border + 1) % 2, end - 1) if end - first > 1 else first


class Planner:
    """The plan of one receiver for one slot of `chunks` chunks."""

    def __init__(self, chunks: int, seed: str, per_holder: int, total: int) -> None:
        """At most `total` reads at once, at most `per_holder` of them from one host. `seed` tells receivers apart."""
        assert min(chunks, per_holder, total) > 0, "nothing could ever be read"
        self.chunks, self.per_holder, self.total = chunks, per_holder, total
        self._seed = xxh3_64_intdigest(seed.encode())
        self._all = (1 << chunks) - 1
        self._halves = halves(chunks)
        self._margin = max(LEAST_MARGIN, chunks // MARGIN)

    def loose(self, done: Bitmap, fed: Sequence[str], *, late: bool, lacks: int = 0) -> int:
        """The chunks to read from anybody: those of a tree in which nobody feeds, or that is behind the other, and
        those that the source of both trees `lacks` where it feeds. Or all, if others are done (`late`), but for the
        last few."""
        missing = [(half & ~done.bits).bit_count() for half in self._halves]
        if late and sum(missing) > LEAST_MARGIN:
            return self._all
        behind = [missing[n] > missing[1 - n] + self._margin // (1 if missing[1 - n] else 4) for n in (0, 1)]
        free = sum(half for half, feeder, slow in zip(self._halves, fed, behind, strict=True) if slow or not feeder)
        return free | lacks

    def next(
        self,
        holders: Sequence[Holder],
        done: Bitmap,
        in_flight: Collection[Assignment],
        fed: Sequence[str] = NOBODY,
        *,
        late: bool = False,
        lacks: int = 0,
    ) -> list[Assignment]:
        """The reads to begin, besides those `in_flight`: from each feeder the first chunk of its tree, and the `loose`
        chunks from anybody. Of those the rarest goes first, from the nearest, least busy host; of equally rare ones
        those that a near host has.

        `holders` are those that can be read from, each once; `done` is what is here, or is not wanted here; `fed` says
        who feeds it even chunks and odd ones ("": nobody), `late` that others have all, `lacks` as in `loose`. A read
        that failed is simply in flight no more. Empty means: wait for a read to end, or for a holder to have more.
        """
        capacity = _Capacity(holders, in_flight, self.per_holder)
        wanted = self._all & ~done.bits
        for read in in_flight:
            wanted &= ~(1 << read.chunk)
        loose = self.loose(done, fed, late=late, lacks=lacks)
        begun = self._fed(capacity, fed, wanted & ~loose, self.total - len(in_flight))
        wanted &= loose
        rarity = _Rarity(holders)
        while len(in_flight) + len(begun) < self.total and (offered := capacity.offered(wanted)):
            turn = len(done) + len(in_flight) + len(begun)
            chunk = self._rotated(capacity.near(rarity.rarest(offered)), turn)
            begun.append(Assignment(chunk, capacity.take(chunk)))
            wanted &= ~(1 << chunk)
        return begun

    def _fed(self, capacity: _Capacity, fed: Sequence[str], wanted: int, most: int) -> list[Assignment]:
        """From the feeders, by turns, each the first chunks of its tree."""
        begun: list[Assignment] = []
        turns = [(feeder, half) for feeder, half in zip(fed, self._halves, strict=True) if feeder]
        while turns and len(begun) < most:
            feeder, half = turns.pop(0)
            if offered := capacity.offered(wanted & half, feeder):
                chunk = _lowest(offered)
                begun.append(Assignment(chunk, capacity.take(chunk, feeder)))
                wanted &= ~(1 << chunk)
                turns.append((feeder, half))
        return begun

    def _rotated(self, candidates: int, turn: int) -> int:
        """The first candidate at or after a chunk that differs between receivers and from turn to turn."""
        start = xxh3_64_intdigest(turn.to_bytes(8, "little"), self._seed) % self.chunks
        after = candidates >> start << start
        return _lowest(after or candidates)


class _Capacity:
    """How many more reads each holder may be given."""

    def __init__(self, holders: Sequence[Holder], in_flight: Collection[Assignment], per_holder: int) -> None:
        self._reads = dict.fromkeys((holder.host for holder in holders), 0)
        for read in in_flight:
            self._reads[read.host] = self._reads.get(read.host, 0) + 1
        self._limit = per_holder
        self._open = [holder for holder in holders if self._reads[holder.host] < per_holder]

    def offered(self, wanted: int, host: str | None = None) -> int:
        """Those of `wanted` that a holder with capacity left has, or the one `host`."""
        offered = 0
        for holder in self._open:
            if host not in (None, holder.host):
                continue
            if holder.have is None:
                return wanted
            offered |= holder.have.bits
        return offered & wanted

    def near(self, offered: int) -> int:
        """Those of `offered` that the nearest holder that has any, and others as near, have."""
        found, distance = 0, 0
        for holder in self._open:
            has = offered if holder.have is None else holder.have.bits & offered
            if has and (not found or holder.distance < distance):
                found, distance = has, holder.distance
            elif holder.distance == distance:
                found |= has
        return found

    def take(self, chunk: int, host: str | None = None) -> str:
        """Give the read of `chunk`, which is offered, to the best holder, or to `host`."""
        able = (h for h in self._open if host in (None, h.host) and (h.have is None or chunk in h.have))
        best = min(able, key=lambda holder: (holder.distance, holder.active + self._reads[holder.host]))
        self._reads[best.host] += 1
        if self._reads[best.host] >= self._limit:
            self._open.remove(best)
        return best.host


class _Rarity:
    """How many holders have each chunk, counted for all chunks at once.

    Bit `c` of plane `p` is bit `p` of the count of chunk `c`, so that adding a holder is a binary addition of whole
    bitmaps. Holders of everything count for all chunks alike and are left out.
    """

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._planes: list[int] = []
        for holder in holders:
            if holder.have is not None:
                self._add(holder.have.bits)

    def _add(self, carry: int) -> None:
        for p, plane in enumerate(self._planes):
            self._planes[p], carry = plane ^ carry, plane & carry
            if not carry:
                return
        if carry:
            self._planes.append(carry)

    def rarest(self, candidates: int) -> int:
        """Those of `candidates` of which the fewest copies are known."""
        for plane in reversed(self._planes):
            candidates = candidates & ~plane or candidates
        return candidates


def choose(holders: Sequence[Holder], seed: str, limit: int, turn: int = 0) -> list[Holder]:
    """At most `limit` of `holders` to open, for whom there are too many. `have` is what the store says: an empty bitmap
    for a host that is still fetching.

    A quarter have something already, so that sources feed as many as they admit; half are the nearest; the rest are
    from anywhere, because who reads from neighbours only may wait with them for ever. Equals are told apart by `seed`:
    receivers do not all open the same ones. Call again with another `turn`, without those who have refused lately, when
    some refused, died or have had nothing new for a while.
    """

    def shuffled(holder: Holder) -> int:  # not by CRC: those of two seeds differ by a constant, and so would the orders
        return xxh3_64_intdigest(f"{seed}/{turn}/{holder.host}".encode())

    anywhere = sorted(holders, key=shuffled)
    chosen = [holder for holder in anywhere if holder.have is None or holder.have.bits][: -(-limit // 4)]
    for more, upto in ((sorted(anywhere, key=lambda h: h.distance), limit - limit // 4), (anywhere, limit)):
        taken = {holder.host for holder in chosen}
        chosen += [holder for holder in more if holder.host not in taken][: max(0, upto - len(chosen))]
    return chosen


def halves(chunks: int) -> tuple[int, int]:
    """The even chunks and the odd ones, as bits."""
    every = (1 << chunks) - 1
    even = ((1 << chunks + chunks % 2) - 1) // 3
    return even, every & ~even


def _lowest(bits: int) -> int:
    """The number of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1
