"""The division of requests between versions (`SplitRecord`): which version a request is for, before an instance is
chosen. Without a split nothing here is asked.

Requests that are equal in what the split is sticky by go the same way in every gateway, without a memory: by weighted
rendezvous hashing (Schindelhauer and Schomaker, 2005) each value draws a number for each version, scaled by the
version's percent, and the least one wins. A version that grows against all others only ever gains values, and one that
cannot be asked gives its own to the others, and no more.

All other requests take turns by smooth weighted round-robin, as nginx does it: after any number of requests each
version has had its share to within one.

A request's own constraint comes first: a pinned version is what it is, and `min_version` leaves those versions between
which the request is then divided. When no instance of its version can be asked, others answer it (`elsewhere`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

from xxhash import xxh3_64_intdigest

from server.gateway.access.keys import Principal
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.routing import Need
from server.gateway.wire.head import RequestHead
from weightsync.control.records import ActiveRecord, SplitRecord

HEADER: Final = "header:"
CLUSTERS: Final = 64  # into which the values that requests stick by are hashed, for statistics of bounded size


class Divided(Protocol):
    """A request, as the split sees it."""

    head: RequestHead
    principal: Principal
    need: Need | None
    share: int | None
    """The version that it is for; None as long as it was not chosen."""
    drawn: int | None
    """The version drawn for it first, if all versions of the split could have been: what a comparison goes by."""
    cluster: int
    """Of the value that it sticks by, from 0 to CLUSTERS - 1; -1 if it sticks by none."""
    lost: bool
    """An instance failed it, or every instance of the version drawn is ejected."""


class Splits:
    """The split of one gateway, and the turns of its requests."""

    def __init__(self) -> None:
        self.on = False
        self.header = b""  # the name of the header that requests stick by, b"" if they do not
        self.elsewhere: Counter[int] = Counter()  # requests that others answered, by the version they were for
        self._record: SplitRecord | None = None
        self._percents: dict[int, float] = {}
        self._seeds: dict[int, int] = {}
        self._needs: dict[int, Need] = {}
        self._turns: dict[tuple[int, ...], dict[int, float]] = {}  # by the versions that take them
        self._serving: Sequence[Instance] = ()
        self._well: set[int | None] = set()  # versions with an instance that nothing speaks against

    @property
    def percents(self) -> dict[int, float]:
        """By version; empty without a split."""
        return self._percents

    def follow(self, active: ActiveRecord | None, serving: Sequence[Instance]) -> None:
        """The commit record, and who may be asked."""
        split = active.split if active is not None else None
        self.on = split is not None
        self._serving = serving
        self._well = {i.record.active_version for i in serving if i.health.well} if split is not None else set()
        version = active.version if active is not None else 0
        before = self._record.sticky if self._record is not None else None
        if split is not None and (split.sticky, split.percents(version)) == (before, self._percents):
            return  # it was placed anew at most, and the turns go on
        self._record = split
        self._percents = split.percents(version) if split is not None else {}
        self._seeds = {v: xxh3_64_intdigest(b"%d" % v) for v in self._percents}
        self._needs = {v: Need(v, None, 0.0) for v in self._percents}
        self._turns = {}
        sticky = split.sticky if split is not None else ""
        self.header = sticky.removeprefix(HEADER).encode() if sticky.startswith(HEADER) else b""

    def need(self, request: Divided) -> Need | None:
        """The versions that may answer it: that of its share, if an instance of it can be asked."""
        own = request.need
        if own is not None and own.version is not None:
            return own
        request.share = self._choice(request, own)
        return self._needs.get(request.share, own) if request.share is not None else own

    def passed_on(self, request: Divided) -> None:
        """Its version had nobody left to ask, so others do."""
        if request.share is not None:
            self.elsewhere[request.share] += 1

    def _choice(self, request: Divided, own: Need | None) -> int | None:
        meant = [v for v in self._percents if own is None or own.met_by(v)]
        value = self._value(request)
        chosen = request.share if request.share in meant else self._choose(meant, value)
        if request.share is None and len(meant) == len(self._percents):
            request.drawn = chosen
            request.cluster = xxh3_64_intdigest(value) % CLUSTERS if value else -1
        if chosen is None or self._can_answer(chosen):
            return chosen
        self.elsewhere[chosen] += 1
        if chosen == request.drawn and any(i.record.active_version == chosen for i in self._serving):
            request.lost = True
        return self._choose([v for v in meant if self._can_answer(v)], value)

    def _choose(self, versions: list[int], value: bytes) -> int | None:
        able = [v for v in versions if self._percents[v] > 0]
        if len(able) < 2:
            return able[0] if able else None
        return self._drawn(able, value) if value else self._turn(able)

    def _drawn(self, versions: list[int], value: bytes) -> int:
        def distance(version: int) -> float:
            drawn = (xxh3_64_intdigest(value, self._seeds[version]) + 1) / 2**64
            return -math.log(drawn) / self._percents[version]

        return min(versions, key=distance)

    def _turn(self, versions: list[int]) -> int:
        key = tuple(versions)
        credit = self._turns.setdefault(key, dict.fromkeys(versions, 0.0))
        for version in versions:
            credit[version] += self._percents[version]
        chosen = max(versions, key=credit.__getitem__)
        credit[chosen] -= sum(self._percents[version] for version in versions)
        return chosen

    def _value(self, request: Divided) -> bytes:
        """The value that the request sticks by; b"" if it has none."""
        sticky = self._record.sticky if self._record is not None else ""
        if sticky == "key":
            return request.principal.digest
        if sticky == "session":
            return request.head.session or b""
        headers = request.head.sticky
        return headers.get(self.header, b"") if sticky and headers is not None else b""

    def _can_answer(self, version: int) -> bool:
        """Whether an instance of it can be asked; one that fails is tried once in a while (`Health`)."""
        if version in self._well:
            return True
        now = time.monotonic()
        return any(i.record.active_version == version and i.health.admits(now) for i in self._serving)
