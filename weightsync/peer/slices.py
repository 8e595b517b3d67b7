"""The slices of each version that the instances of a host need, and the records that say so.

    slices/{model}/{host}/{instance}        SlicesRecord: what an instance reads on that host, under its lease
    copies/{model}/parts/{digest}/{host}    PartCopyRecord: a copy that has those, and not all, under the peer's lease

Instances state their needs for each host, and most say "everything". Those of a release that knows nothing of slices
say nothing: so a peer fetches everything as long as an instance of the fleet has not said what it needs on any host.
When all instances of a host have gone, its peer keeps to what they needed last: they are likely to come back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from weightsync.control.records import Keys
from weightsync.control.strict_json import Record
from weightsync.errors import ManifestError, RecordError
from weightsync.format.slices import Slices
from weightsync.store.protocol import KeyValue, Store

log = logging.getLogger("hotswap.peer")

LOOK_S, LOOK_AGAIN_S = 30.0, 2.0  # between looks for instances that say nothing, and when there was one


@dataclass(frozen=True)
class SlicesRecord(Record):
    """The slices of the base model that an instance needs on a host, as `Slices.to_text` has them; "": everything."""

    host: str
    instance: str
    slices: str = ""


@dataclass(frozen=True)
class PartCopyRecord(Record):
    """A host's copy of a slot that lacks chunks, but none that its instances need.

    `slot` is its name; `slices` are the digests (`Slices.digest`) of what it has: of each instance's, and of all of
    them together. Its `CopyRecord` says `fetching` meanwhile, so that nobody takes it for the whole slot.
    """

    host: str
    slot: str
    digest: str
    slices: tuple[str, ...]


def slices_prefix(keys: Keys, host: str = "") -> str:
    """Of the records of all hosts, or of one. Outside the model's root, as each peer follows its own host's alone."""
    return f"slices/{keys.model}/{f'{host}/' if host else ''}"


def part_copy_key(keys: Keys, digest: str, host: str) -> str:
    """Below `copies`, where no slot has this name."""
    return f"{keys.copies}parts/{digest}/{host}"


class Needs:
    """The needs of the instances of `host`. `changed` is called when these may be others than before."""

    def __init__(self, keys: Keys, host: str, changed: Callable[[], None]) -> None:
        self._keys, self._host, self._changed = keys, host, changed
        self._said: dict[str, Slices | None] = {}  # by key; None: everything
        self._last: tuple[Slices, ...] = ()  # of the latest records there were; (): everything
        self._is_known = False  # whether every instance of the fleet has said what it needs
        self._looked_at = float("-inf"), ""  # when, and at which occasion

    async def read(self, store: Store) -> int:
        """Read the records of this host; returns the revision to watch from. Raises StoreUnavailable."""
        found, revision = await store.list(slices_prefix(self._keys, self._host))
        self._said = {kv.key: _parsed(kv) for kv in found}
        self._note()
        return revision

    async def follow(self, store: Store, revision: int) -> None:
        """For ever. Raises StoreUnavailable, WatchCompacted."""
        async with contextlib.aclosing(store.watch(slices_prefix(self._keys, self._host), revision + 1)) as events:
            async for event in events:
                if event.kind == "put":
                    self._said[event.kv.key] = _parsed(event.kv)
                else:
                    self._said.pop(event.kv.key, None)
                self._note()
                self._changed()

    async def look(self, store: Store, occasion: str) -> None:
        """Look for instances that say nothing, at every new `occasion` and from time to time; only where less than
        everything would be fetched. Raises StoreUnavailable."""
        if not self._last:
            return
        since, last = self._looked_at
        if last == occasion and time.monotonic() - since < (LOOK_S if self._is_known else LOOK_AGAIN_S):
            return
        said = {kv.key.rpartition("/")[2] for kv in (await store.list(slices_prefix(self._keys)))[0]}
        there = {kv.key.removeprefix(self._keys.instances) for kv in (await store.list(self._keys.instances))[0]}
        self._looked_at = time.monotonic(), occasion
        if silent := there - said:
            log.info("everything is fetched: %s does not say what it reads", min(silent))
        self._is_known = not silent

    def of(self, schema: str) -> Slices | None:
        """Of a slot with this schema; None: everything."""
        if not self._last or not self._is_known or any(slices.schema != schema for slices in self._last):
            return None
        return _joined(self._last)

    @property
    def group(self) -> str:
        """Equal for hosts that need the same of the base model; "": everything."""
        schemas = {slices.schema for slices in self._last}
        joined = self.of(min(schemas)) if len(schemas) == 1 else None
        return joined.digest if joined is not None else ""

    def met(self, schema: str) -> tuple[str, ...]:
        """The digests of slices that a copy with all of `of(schema)` can be opened for."""
        joined = self.of(schema)
        return () if joined is None else tuple(sorted({joined.digest, *(slices.digest for slices in self._last)}))

    def _note(self) -> None:
        if self._said:
            told = dict.fromkeys(self._said.values())
            self._last = () if None in told else tuple(slices for slices in told if slices is not None)


@functools.lru_cache(maxsize=16)
def _joined(all_of_them: tuple[Slices, ...]) -> Slices:
    return functools.reduce(Slices.joined, all_of_them)


def _parsed(kv: KeyValue) -> Slices | None:
    """The slices in a record; a record that cannot be read, of another release say, needs everything."""
    try:
        record = SlicesRecord.from_json(kv.value)
        return Slices.from_text(record.slices) if record.slices else None
    except (RecordError, ManifestError) as error:
        log.warning("%s is taken for everything: %s", kv.key, error)
        return None
