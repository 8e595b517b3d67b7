"""Counting what the answers of a release show, in each gateway, and adding it up.

While a release is in a step, each gateway counts its answers of the two versions, by metric, and writes its sums to the
store a few times a second. The leader adds up what all have written. Sums are of one step: a version that is slow with
half of the traffic was not slow with a hundredth of it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from server.gateway.observe.context import TraceContext
from server.gateway.observe.stats import Finished, Watcher
from server.gateway.release.judge import LOAD, Evidence, key_of
from server.gateway.release.policy import SCORED, Condition
from server.gateway.release.records import Counted, EvidenceRecord, Kind, LostMetric
from server.gateway.release.statistics import NOTHING, Tally, clustered
from server.gateway.wire.head import RequestHead

FLUSH_S: Final = 0.25
_Key = tuple[str, Kind, int, int]


@dataclass(frozen=True)
class Watched:
    """The step of a release that is counted now."""

    release: str
    step: int
    versions: frozenset[int]  # the candidate and the stable one


class Observer:
    """One gateway's sums (stats.Watcher). `observe` and `lose` may be called from any thread."""

    def __init__(self, watchers: list[Watcher] | None = None) -> None:
        """While it counts it is one of `watchers`, and no request costs anything for it otherwise."""
        self._watchers: list[Watcher] = watchers if watchers is not None else []
        self._lock = threading.Lock()
        self._watched: Watched | None = None
        self._sums: dict[_Key, list[float]] = {}
        self._lost: dict[str, str] = {}
        self._changed = False

    @property
    def watched(self) -> Watched | None:
        return self._watched

    def watch(self, watched: Watched | None) -> None:
        """Count for this step from now on, and begin at nothing; None: count nothing."""
        with self._lock:
            if watched != self._watched:
                self._watched, self._sums, self._lost, self._changed = watched, {}, {}, False
        if watched is None and self in self._watchers:
            self._watchers.remove(self)
        elif watched is not None and self not in self._watchers:
            self._watchers.append(self)

    def observe(self, metric: str, value: float, version: int | None, kind: Kind = "live", cluster: int = -1) -> None:
        """One value of a request that `version` was drawn for, and of its answer if that version wrote all of it."""
        watched = self._watched
        if watched is None or version not in watched.versions or not math.isfinite(value):
            return
        assert version is not None
        with self._lock:
            if watched is not self._watched:
                return
            sums = self._sums.setdefault((metric, kind, version, cluster), [0, 0.0, 0.0])
            sums[0] += 1
            sums[1] += value
            sums[2] += value * value
            self._changed = True

    def lose(self, metric: str, reason: str) -> None:
        """It is not measured just now; "": it is again."""
        with self._lock:
            if self._lost.get(metric, "") != reason:
                self._lost[metric] = reason
                self._changed = True

    def taken(self) -> tuple[Watched, EvidenceRecord] | None:
        """The record to write, if it has changed since it was last asked for."""
        with self._lock:
            if self._watched is None or not self._changed:
                return None
            self._changed = False
            counted = tuple(
                Counted(metric, kind, version, int(n), float(total), float(squares), cluster)
                for (metric, kind, version, cluster), (n, total, squares) in self._sums.items()
            )
            lost = tuple(LostMetric(metric, reason) for metric, reason in self._lost.items() if reason)
            return self._watched, EvidenceRecord(counted, lost)

    def again(self) -> None:
        """Marks the record as changed, as the one that was taken could not be written."""
        with self._lock:
            self._changed = True

    # Watcher

    def begin(self, head: RequestHead) -> TraceContext | None:
        return None

    def end(self, finished: Finished) -> None:
        """The metrics that need nothing of what was written."""
        if self._watched is None:
            return
        for metric, value in measured(finished):
            self.observe(metric, value, finished.drawn_version, cluster=finished.cluster)


def measured(finished: Finished) -> Iterable[tuple[str, float]]:
    """The metrics of one request, which are those of the version that was drawn for it.

    A failure counts even if another version has answered: otherwise a version that kills its engine looks well. Of an
    answer, what another version wrote shows nothing; nor does a request that its client asked wrongly.
    """
    wrote = finished.first_version == finished.last_version == finished.drawn_version
    yield "arrived", float(wrote or finished.status not in (200, 429))  # 429: the version had no room
    yield "left", float(finished.status == 499)
    if finished.lost or finished.status >= 500 or (finished.status == 200 and finished.code is not None):
        yield "errors", 1.0
        return
    if finished.status != 200 or finished.usage is None or not wrote:
        return
    yield "errors", 0.0
    yield LOAD, float(finished.load)
    yield "duration_s", finished.duration_s
    tokens = finished.usage.completion_tokens
    yield "tokens", float(tokens)
    if finished.streamed and finished.ttft_s is not None:
        yield "first_token_s", finished.ttft_s
        if tokens > 1:
            yield "token_s", (finished.duration_s - finished.ttft_s) / (tokens - 1)


def summed(
    records: Iterable[EvidenceRecord], conditions: Iterable[Condition], candidate: int, stable: int
) -> Mapping[str, Evidence]:
    """The evidence on each condition, by `key_of`, and on the load, of all gateways."""
    tallies: dict[tuple[str, Kind, int], dict[int, Tally]] = {}
    lost: dict[str, str] = {}
    for record in records:
        for each in record.counted:
            clusters = tallies.setdefault((each.metric, each.kind, each.version), {})
            tally = Tally(each.count, each.total, each.squares)
            clusters[each.cluster] = clusters.get(each.cluster, NOTHING) + tally
        lost |= {each.metric: each.reason for each in record.lost}

    def of(condition: Condition, version: int, *kinds: Kind) -> Tally:
        clusters: dict[int, Tally] = {}
        for kind in kinds:
            for cluster, tally in tallies.get((condition.metric, kind, version), {}).items():
                clusters[cluster] = clusters.get(cluster, NOTHING) + tally
        return clustered(clusters.pop(-1, NOTHING), clusters.values())

    found = {}
    for condition in conditions:
        kinds: tuple[Kind, ...] = ("live", "shadow") if condition.answers == "both" else (condition.answers,)
        of_stable = of(condition, stable, "live")  # nothing is repeated on it
        evidence = Evidence(of(condition, candidate, *kinds), of_stable, lost.get(condition.metric, ""))
        found[key_of(condition)] = evidence

    def load(version: int) -> Tally:
        return sum(tallies.get((LOAD, "live", version), {}).values(), NOTHING)

    found[LOAD] = Evidence(load(candidate), load(stable))
    return found


def needs_text(metric: str) -> bool:
    """Whether a metric needs what was asked and answered, and not only counts and times."""
    return metric in ("cut", "repetition", "refusals", "logprob") or metric.startswith(SCORED)
