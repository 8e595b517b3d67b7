"""The version of a split that each instance runs: pure functions of the records.

A version has instances by its percent, but never fewer than the split's minimum, as it could not answer otherwise. Each
instance that runs a version which is to have it keeps it: with one flip for each place that is missing, no placement
has fewer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from weightsync.control.records import ActiveRecord, InstanceRecord, ShareRecord, SplitRecord
from weightsync.errors import SwapError, not_enough_instances

EXACT = 1e-6
HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")  # a field name of RFC 9110


def needed(split: SplitRecord) -> int:
    """The instances that a split takes at least."""
    return (len(split.shares) + 1) * split.minimum


def counts(active: int, split: SplitRecord, instances: int) -> dict[int, int]:
    """How many of `instances` run each version. Raises SwapError."""
    if instances < needed(split):
        raise not_enough_instances(len(split.shares) + 1, split.minimum, instances)
    percents = split.percents(active)
    found = dict.fromkeys(percents, split.minimum)
    for _ in range(instances - needed(split)):  # each one more goes where most is lacking
        most = max(found, key=lambda v: percents[v] * instances / 100.0 - found[v])
        found[most] += 1
    return found


def place(active: int, split: SplitRecord, instances: Mapping[str, InstanceRecord]) -> SplitRecord:
    """The split with the names of the instances of each share, by what they run now. Raises SwapError."""
    wanted = counts(active, split, len(instances))
    placed: dict[int, list[str]] = {version: [] for version in wanted}
    free = []
    for name in sorted(instances, reverse=True):  # the first by name are the first to move
        version = instances[name].active_version
        if version in placed and len(placed[version]) < wanted[version]:
            placed[version].append(name)
        else:
            free.append(name)
    for name in reversed(free):
        version = next(v for v, names in placed.items() if len(names) < wanted[v])
        placed[version].append(name)
    shares = (replace(share, instances=tuple(sorted(placed[share.version]))) for share in split.shares)
    return replace(split, shares=tuple(shares))


def suffices(active: int, split: SplitRecord, instances: Iterable[str]) -> bool:
    """Whether each version has enough among these instances."""
    found = _found(active, split, instances)
    return all(found[version] >= split.minimum for version in split.percents(active))


def is_off(active: ActiveRecord, instances: Iterable[str]) -> bool:
    """Whether the committed split would be placed otherwise among these instances, and can be."""
    split, names = active.split, list(instances)
    if split is None or len(names) < needed(split):
        return False
    found = _found(active.version, split, names)
    return any(found[v] != count for v, count in counts(active.version, split, len(names)).items())


def _found(active: int, split: SplitRecord, instances: Iterable[str]) -> Counter[int]:
    shares = (split.share_of(name) for name in instances)
    return Counter(share.version if share is not None else active for share in shares)


def split_of(
    percents: Mapping[int, float],
    active: int | None,
    *,
    sticky: str = "",
    minimum: int = 1,
    shadow: Mapping[int, float] | None = None,
) -> tuple[int, SplitRecord]:
    """The version that is to be active, and the split, for `percents` by version: the active one stays so if it is
    among them, else the one with most becomes it. `shadow`: percent of the requests that are repeated, by version.

    Raises SwapError.
    """
    repeated = {version: float(percent) for version, percent in (shadow or {}).items()}
    if len(percents) < 2:
        raise SwapError("it takes two versions or more; to serve one alone, activate it", code="bad_split")
    if any(not 0 <= percent <= 100 for percent in percents.values()) or abs(sum(percents.values()) - 100) > EXACT:
        raise SwapError(
            f"percentages are from 0 to 100 and make 100 together, and not {sum(percents.values()):g}", code="bad_split"
        )
    if minimum < 1:
        raise SwapError("each version takes an instance at least", code="bad_split")
    name = sticky.removeprefix("header:")
    if sticky not in ("", "key", "session") and not (name != sticky and HEADER.fullmatch(name)):
        raise SwapError(f"requests cannot stick by {sticky!r}; choose key, session or header:NAME", code="bad_split")
    first = active if active in percents else max(percents, key=lambda v: (percents[v], -v))
    assert first is not None
    shares = tuple(
        ShareRecord(v, float(p), shadow=repeated.get(v, 0.0)) for v, p in sorted(percents.items()) if v != first
    )
    others = {share.version for share in shares}
    if repeated.keys() - others or any(not 0 <= percent <= 100 for percent in repeated.values()):
        raise SwapError(
            f"up to 100 % of the requests can be repeated on a version that is not the active one ({first})",
            code="bad_split",
        )
    return first, SplitRecord(shares, sticky.lower(), minimum)


def in_words(split: SplitRecord, active: int) -> str:
    """`version 3: 90 %, version 4: 10 %`."""
    return ", ".join(f"version {version}: {percent:g} %" for version, percent in split.percents(active).items())
