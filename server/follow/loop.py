"""The follower: one candidate at a time is fetched, verified, published and released; the newest goes first.

Each step looks at what there is, the state's file and the gateway's answers alone, and does the next thing. So a step
after a kill does what the one before would have: a publication that was asked for twice is one version (`upload_id`),
and a release that has begun is recognised by its record. `FollowMetrics` is what Prometheus asks for.

    none       --a newer candidate is whole and settled--> fetching
    fetching   --fetched, verified, nothing else is under way--> published    --bad--> refused
    published  --its release or its swap has begun--> released, or refused with the reason
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from server.errors import CliError, RequestFailed
from server.follow.config import FollowConfig
from server.follow.sources import BAD, Admin, Candidate, FollowError, Source, Wish, bad_checkpoint, natural
from server.follow.state import Current, FollowState, Outcome, StateFile
from weightsync.bucket.metrics import SECONDS

log = logging.getLogger("hotswap.follow")

LOOK_S = 1.0  # between two looks at a release under way
MAX_RETRY_S = 60.0
ABORTS = 3  # swaps of a version that may come to nothing before it is refused
NEVER = "-"
REFUSED = (413, 422)  # what the gateway answers to a checkpoint that it can make no version of
WAITS = ("not_whole", "release_under_way")


class Follower:
    """Follows one source. `cache` is for what is fetched; `config` says what becomes of candidates."""

    def __init__(
        self,
        source: Source,
        admin: Admin,
        file: StateFile,
        cache: Path,
        config: FollowConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = FollowMetrics(clock)
        self._source, self._admin, self._file, self._cache, self._config = source, admin, file, cache, config
        self._clock = clock
        self._seen: tuple[str, float] = "", 0.0  # the newest candidate that is not taken yet, and since when it is so
        self._verified: tuple[str, Path] | None = None
        self._missed = False  # an approval was gone at the last look, and nothing had come of it
        self._said: dict[str, str] = {}

    def run(self) -> None:
        """For ever: faults are told, and tried again later each time."""
        failures = 0
        while True:
            try:
                wait_s, failures = self.step(), 0
                self._said.pop("fault", None)
            except (FollowError, CliError) as error:
                self.metrics.failures.labels(getattr(error, "code", "") or type(error).__name__).inc()
                wait_s = min(2.0**failures, MAX_RETRY_S)
                failures = min(failures + 1, 10)
                self._say("fault", f"{error}", logging.WARNING)
            time.sleep(wait_s)

    def step(self) -> float:
        """Does the next thing; returns the seconds until the one after it. Raises FollowError, CliError."""
        now = self._file.state.current
        if now is not None and (now.release or now.pending):
            return self._watch(now)
        newest = self._newest(now)
        if now is not None and newest is not None and newest.identity != now.identity:
            self._end("superseded", f"{newest.name} is newer")
            now = None
        if now is None and newest is not None:
            now = Current(newest.name, newest.identity, newest.modified)
            self._write(now)
            self._say("candidate", f"{newest.name} is new: {newest.nbytes:,} bytes")
        if now is None:
            return self._config.interval_s
        if now.version is None:
            return self._publish(now, newest)
        return self._release(now, now.version)

    # what to take

    def _newest(self, now: Current | None) -> Candidate | None:
        """The newest candidate that is whole, if it is not over with and has stayed as it is for long enough."""
        state = self._file.state
        for candidate in self._source.candidates():
            if candidate.lacks:
                self._say(candidate.name, f"{candidate.name} is not whole yet: {candidate.lacks}")
                continue
            if now is not None and candidate.identity == now.identity:
                return candidate
            if not self._over(candidate, state):
                self.metrics.seen(candidate.identity)
                if self._settled(candidate):
                    return candidate
            if now is None:
                return None
        return None

    def _over(self, candidate: Candidate, state: FollowState) -> bool:
        """Whether the candidate was tried, or is older than one that was: deleted newer ones are no reason to go back.
        A candidate that a user chose is over only if it was the last that was tried."""
        if not state.tried:
            return False
        last = state.tried[-1]
        if last.identity == candidate.identity:
            return last.outcome != "superseded"
        if candidate.chosen:
            return False
        if candidate.identity in state.refused:
            return True
        if self._config.newest_by == "time":
            return candidate.modified < last.modified
        return natural(candidate.name) < natural(last.name)

    def _settled(self, candidate: Candidate) -> bool:
        identity, since = self._seen
        if identity != candidate.identity:
            since = self._clock()
            self._seen = candidate.identity, since
        return self._clock() - since >= self._config.settle_s

    # what becomes of it

    def _publish(self, now: Current, candidate: Candidate | None) -> float:
        if candidate is None:
            self._end("superseded", "it is gone from the source")
            return 0.0
        try:
            directory = self._fetched(candidate)
            if self._busy(now):
                return self._config.interval_s
            version = self._published(now, candidate, directory)
        except FollowError as error:
            if error.code == BAD:
                self._end("refused", str(error))
                return 0.0
            self._verified = None
            raise
        same = self._identity_of(candidate) == now.identity  # else what was published may be half of each
        self._write(replace(now, version=version))
        self._say("candidate", f"{now.name} is version {version}")
        if not same:
            self._end("superseded", "it was changed while it was published")
        return 0.0

    def _fetched(self, candidate: Candidate) -> Path:
        if self._verified is None or self._verified[0] != candidate.identity:
            with self.metrics.seconds.labels("fetch").time():
                directory = self._source.fetch(candidate, self._cache, self._admin)
            self.metrics.fetched.inc(_nbytes(directory) if self._cache in directory.parents else candidate.nbytes)
            self._verified = candidate.identity, directory
        return self._verified[1]

    def _identity_of(self, candidate: Candidate) -> str:
        """The present identity of the candidate of that name."""
        return next((one.identity for one in self._source.candidates() if one.name == candidate.name), "")

    def _published(self, now: Current, candidate: Candidate, directory: Path) -> int:
        """The version. Raises FollowError (BAD) for what the gateway can make none of."""
        wish = Wish(
            now.upload_id, now.attempt, self._why(now), self._config.part, self._config.sign_key, self._config.cast
        )
        try:
            with self.metrics.seconds.labels("publish").time():
                return self._source.publish(candidate, directory, self._admin, wish)
        except RequestFailed as error:
            if error.status in REFUSED:
                raise bad_checkpoint(str(error)) from error
            raise

    def _busy(self, now: Current) -> bool:
        """Whether something else is under way in the fleet, which is to end first."""
        release = self._last_release()
        split = self._active()["split"] if release is None or release["ended"] else None
        if release is not None and not release["ended"]:
            self._say("waits", f"{now.name} waits: the release of version {release['version']} is under way")
        elif split:
            self._say("waits", f"{now.name} waits: versions share the traffic")
        return bool(split) or (release is not None and not release["ended"])

    def _release(self, now: Current, version: int) -> float:
        active = self._active()
        if active["version"] == version and not active["split"]:
            self._end("released")
            return 0.0
        release = self._last_release()
        before = release["id"] if release is not None else NEVER
        if self._ours(now, release):
            self._write(replace(now, release=before))  # begun before this process was
            return 0.0
        if waiting := self._waiting_for(version):
            self._write(replace(now, pending=waiting))
            return 0.0
        if self._busy(now):
            return self._config.interval_s
        try:
            if self._config.activate or active["version"] is None:
                return self._activate(now, version)
            now = replace(now, before=before)
            self._write(now)
            body = {"version": version, "policy": self._config.policy}
            begun = self._admin.call("POST", "/admin/releases", body, self._why(now))
        except RequestFailed as error:
            if error.code == "unknown_version":  # retired since
                self._write(replace(now, version=None, attempt=now.attempt + 1))
            elif error.code not in WAITS:
                raise
            return self._config.interval_s
        if "pending" in begun:
            return self._wait(now, begun["pending"]["id"])
        self._write(replace(now, release=begun["id"]))
        begins = f"the release of version {version} ({now.name}) has begun, by policy {self._config.policy}"
        self._say("candidate", begins)
        return LOOK_S

    @staticmethod
    def _ours(now: Current, release: dict[str, Any] | None) -> bool:
        """Whether it is that of the current version: it is under way, or was not there before this follower asked."""
        if release is None or release["version"] != now.version:
            return False
        return not release["ended"] or bool(now.before and release["id"] != now.before)

    def _waiting_for(self, version: int) -> str:
        """The id of a request for this version that waits for approval; "" if none does."""
        waiting = self._admin.call("GET", "/admin/approvals")["pending"]
        about = ((one["id"], one["target"] or one["release"]) for one in waiting)
        return next((name for name, wish in about if wish is not None and wish["version"] == version), "")

    def _wait(self, now: Current, pending: str) -> float:
        self._write(replace(now, pending=pending))
        self._say("waits", f"version {now.version} ({now.name}) waits for approval: hotswap approve {pending}")
        return LOOK_S

    def _activate(self, now: Current, version: int) -> float:
        try:
            done = self._admin.call("POST", "/admin/weights/activate", {"version": version}, self._why(now))
        except RequestFailed as error:
            if error.code != "swap_aborted":
                raise
            if now.aborted + 1 >= ABORTS:
                self._end("refused", str(error))
                return 0.0
            self._write(replace(now, aborted=now.aborted + 1))
            raise
        if "pending" in done:
            return self._wait(now, done["pending"]["id"])
        self._end("released")
        return 0.0

    def _watch(self, now: Current) -> float:
        """Looks how the release, or the approval, stands."""
        if now.pending:
            return self._watch_approval(now)
        release = self._last_release()
        if release is None or release["id"] != now.release:
            if self._active()["version"] == now.version:
                self._end("released")
            else:
                self._end("refused", "another release has begun since; `hotswap ledger list` says how this one ended")
            return 0.0
        if not release["ended"]:
            why = f": {release['reason']}" if release["reason"] else ""
            self._say("release", f"version {now.version}: step {release['step'] + 1}, {release['state']}{why}")
            return LOOK_S
        if release["state"] == "done":
            self._end("released")
        else:
            self._end("refused", f"{release['state'].replace('_', ' ')}: {release['reason']}")
        return 0.0

    def _watch_approval(self, now: Current) -> float:
        waiting = {one["id"] for one in self._admin.call("GET", "/admin/approvals")["pending"]}
        swap = self._admin.call("GET", "/admin/swap")["swap"]
        if self._ours(now, release := self._last_release()):
            assert release is not None
            self._write(replace(now, pending="", release=release["id"]))
            return 0.0
        if self._active()["version"] == now.version:
            self._end("released")
            return 0.0
        if now.pending in waiting or (swap is not None and swap["in_flight"]):
            self._missed = False
        elif self._missed:
            self._end("refused", "its approval was refused, or has lapsed")
        else:
            self._missed = True  # approved in this moment, perhaps
        return LOOK_S

    def _end(self, outcome: Outcome, reason: str = "") -> None:
        state = self._file.state.ended(outcome, reason)
        self._file.write(state)
        self._missed = False
        one = state.tried[-1]
        self.metrics.over(one.identity, one.outcome, one.version)
        what = f"version {one.version} ({one.name})" if one.version is not None else one.name
        self._said.clear()
        self._say("candidate", f"{what} is {outcome}" + (f": {reason}" if reason else ""))

    def _write(self, now: Current) -> None:
        self._file.write(replace(self._file.state, current=now))

    def _active(self) -> dict[str, Any]:
        """The commit record, with `split`."""
        return {"split": None, **self._admin.call("GET", "/admin/weights/active")}

    def _last_release(self) -> dict[str, Any] | None:
        """The release under way or the last one."""
        found: dict[str, Any] | None = self._admin.call("GET", "/admin/releases")["release"]
        return found

    def _why(self, now: Current) -> str:
        """For the ledger."""
        return f"{now.name} of {self._file.state.source}"[:500]

    def _say(self, about: str, text: str, level: int = logging.INFO) -> None:
        """Once, until there is something else to say about it."""
        if self._said.get(about) != text:
            log.log(level, "%s", text)
        self._said[about] = text


def _nbytes(directory: Path) -> int:
    """Of all files below it."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


class FollowMetrics:
    """The candidates that were tried, the time that this took, and how far the fleet is behind its source."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self.registry = registry = CollectorRegistry()
        self._clock, self._behind = clock, dict[str, float]()
        self.tried = Counter(
            "hotswap_follow_candidates",
            "Candidates by what became of them: released, refused, superseded",
            ["outcome"],
            registry=registry,
        )
        self.fetched = Counter("hotswap_follow_fetched_bytes", "Bytes of candidates fetched", registry=registry)
        self.seconds = Histogram(
            "hotswap_follow_seconds",
            "Seconds until a candidate was fetched and verified (fetch), was a version of the fleet (publish)",
            ["phase"],
            buckets=SECONDS,
            registry=registry,
        )
        self.failures = Counter(
            "hotswap_follow_failures", "Steps that failed and are tried again", ["code"], registry=registry
        )
        self.version = Gauge(
            "hotswap_follow_released_version", "The fleet's number of what was released last", registry=registry
        )
        self._lag = Gauge(
            "hotswap_follow_lag_candidates", "Candidates seen that are neither released nor over", registry=registry
        )
        self._lag_s = Gauge(
            "hotswap_follow_lag_seconds", "Since when the oldest of these was seen; 0 without", registry=registry
        )
        self._lag.set_function(lambda: float(len(self._behind)))
        self._lag_s.set_function(self._lag_seconds)

    def seen(self, identity: str) -> None:
        """A candidate that is to be taken."""
        self._behind.setdefault(identity, self._clock())

    def over(self, identity: str, outcome: str, version: int | None) -> None:
        """A candidate is over; so are those seen before one that is released, as the newest goes first."""
        self.tried.labels(outcome).inc()
        since = self._behind.pop(identity, 0.0)
        if outcome == "released":
            self._behind = {other: seen for other, seen in self._behind.items() if seen > since}
            self.version.set(version or 0)

    def _lag_seconds(self) -> float:
        return self._clock() - min(self._behind.values()) if self._behind else 0.0
