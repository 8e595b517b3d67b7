"""Editions of an adapter: several of one name side by side, each published by itself and served without a swap.

An adapter that is a part of a version ("lora/NAME", parts.py) changes with a swap, in streams too. An edition never
changes: `NAME@N` is the same weights for as long as its record is there, beside every version of the base, and a
request goes through one edition from its first token to its last. `NAME` alone stands for the newest one, or for the
one before it where the newest has only a share of the requests. N is drawn from the counter of the versions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from weightsync.control.parts import LORA
from weightsync.control.records import Keys, PartRecord
from weightsync.control.strict_json import Record

MARK: Final = "@"
MOST_DIGITS = 20


@dataclass(frozen=True)
class EditionRecord(Record):
    """One edition. `nbytes` counts tensor bytes, `created_at` is unix seconds, `publisher` is the lineage.

    `percent` is its share of the requests for `name` alone that no newer edition gets; with 0 it is on trial: for those
    that pin it. `fingerprint`, `signature` and the slot are as in PartRecord."""

    name: str
    number: int
    slot: str
    manifest_digest: str
    nbytes: int
    publisher: str
    created_at: float
    step: int | None = None
    percent: float = 100.0
    fingerprint: str = ""
    signature: str = ""

    @property
    def full_name(self) -> str:
        """The name that clients pin it by."""
        return f"{self.name}{MARK}{self.number}"

    @property
    def as_part(self) -> PartRecord:
        """As the part of a version: so it is signed."""
        part, at = LORA + self.name, self.slot
        return PartRecord(part, self.number, at, self.manifest_digest, self.nbytes, self.fingerprint, self.signature)


def prefix_of(keys: Keys, name: str = "") -> str:
    """The prefix of the editions of a model, or of one adapter."""
    return f"{keys.root}editions/{name}/" if name else f"{keys.root}editions/"


def key_of(keys: Keys, name: str, number: int) -> str:
    return f"{prefix_of(keys, name)}{number:08d}"


def split_name(name: str) -> tuple[str, int | None]:
    """("math", 7) of "math@7"; ("math", None) of "math"."""
    base, mark, number = name.rpartition(MARK)
    pins = mark and base and number.isdecimal() and len(number) < MOST_DIGITS
    return (base, int(number)) if pins else (name, None)


def drawn(percents: Sequence[tuple[int, float]], draw: float) -> int | None:
    """The edition that a request for the name alone gets, of (number, percent) with the newest first. `draw` is from 0
    to below 1. The oldest gets what the others leave; one that is on trial gets none. None: all are."""
    left, found = draw * 100.0, None
    for number, percent in percents:
        if percent:
            found = number
            if left < percent:
                break
            left = (left - percent) * 100.0 / (100.0 - percent) if percent < 100.0 else 0.0
    return found


def outdated(
    known: Iterable[EditionRecord], new: EditionRecord, keep: int, max_age_s: float | None
) -> list[EditionRecord]:
    """The editions that are to go with a new one: those of its name beyond the `keep` newest, and of every name those
    that are older than `max_age_s`. The newest of a name stays, and the newest that is not on trial. A new one that is
    on trial does not count."""
    by_name: dict[str, list[EditionRecord]] = {}
    for record in sorted([*(r for r in known if r.number != new.number), new], key=lambda r: r.number, reverse=True):
        by_name.setdefault(record.name, []).append(record)
    stay = {new.number, *(found[0].number for found in by_name.values())}
    stay |= {next((r.number for r in found if r.percent), 0) for found in by_name.values()}
    gone = [r for r in by_name[new.name] if r.percent or r is not new][keep:]
    if max_age_s is not None:
        gone += [r for r in itertools.chain(*by_name.values()) if new.created_at - r.created_at > max_age_s]
    return list({r.number: r for r in gone if r.number not in stay}.values())


def readable(found: Mapping[str, bytes]) -> list[EditionRecord]:
    """Those of `found`, records by key, that can be read, oldest first."""
    records = (EditionRecord.readable(key, raw) for key, raw in found.items())
    return sorted((record for record in records if record is not None), key=lambda record: record.number)
