"""The rules of the swap: what the records of one model may become, over writes in their order.

A simulated store feeds `Rules` each write before it does it, and the checker feeds it those of a recorded history. It
needs no clock and no process: all it knows is what was written.

    phases       a swap opens after the one before has ended, and moves only along NEXT
    leader       a swap or a commit is written while the key `leader` is held, by one holder at a time
    commit       the commit record changes by a commit, a revert or a trial of the swap written with it
    participants a commit comes while each participant takes part
    versions     what the commit record names is not retired, and every version has its form
    serving      an instance that takes requests runs a committed version with its fingerprint
    rest         afterwards: no swap is in flight, the last wish has its answer, all instances serve what is committed
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from weightsync.control import agent_state, placement
from weightsync.control.records import (
    ActiveRecord,
    InstanceRecord,
    Keys,
    LeaderRecord,
    SwapRecord,
    TargetRecord,
    VersionRecord,
    shared_versions,
)
from weightsync.control.state import PARTICIPATING, confirmed, in_flight, untried
from weightsync.control.strict_json import Record
from weightsync.errors import SwapError

R = TypeVar("R", bound=Record)
NEXT = {
    "prepare": {"canary", "commit", "aborted"},
    "canary": {"commit", "aborted"},
    "commit": {"done", "revert"},
    "revert": {"aborted", "done"},
}


class Violation(AssertionError):
    """Something that must never be was seen. `rule` is the name of the rule, "" for one of the simulation alone."""

    def __init__(self, what: str, rule: str = "") -> None:
        self.what, self.rule = what, rule
        super().__init__(what)


def require(condition: object, what: str, rule: str = "") -> None:
    if not condition:
        raise Violation(what, rule)


class Rules:
    """`found` has the records as they are; `seen` counts what happened, `committed` has every version that ever was."""

    def __init__(self, keys: Keys, found: Mapping[str, bytes] | None = None) -> None:
        """`found`: what there was before the first write that is known; it is taken as it is."""
        self.keys = keys
        self.found = dict(found or {})
        self.seen: Counter[str] = Counter()
        self.committed: set[int | None] = {record.active_version for record in self.instances.values()}
        self._commits(self.active)

    @property
    def active(self) -> ActiveRecord | None:
        return self._record(ActiveRecord, self.keys.active)

    @property
    def swap(self) -> SwapRecord | None:
        return self._record(SwapRecord, self.keys.swap)

    @property
    def instances(self) -> dict[str, InstanceRecord]:
        """By id."""
        found = (_read(InstanceRecord, raw) for key, raw in self.found.items() if key.startswith(self.keys.instances))
        return {record.id: record for record in found}

    def version(self, version: int) -> VersionRecord | None:
        return self._record(VersionRecord, self.keys.version(version))

    def write(self, puts: Mapping[str, bytes | None]) -> None:
        """One transaction: new values by key, None for a key that goes. Raises Violation, and has taken it in then."""
        before, self.found = self.found, {k: v for k, v in {**self.found, **puts}.items() if v is not None}
        self._before = before
        try:
            self._leader(puts)
            if puts.get(self.keys.swap) is not None:
                self._swap()
            if self.keys.active in puts:
                self._active()
            self._versions(puts)
            for key in puts:
                if key.startswith(self.keys.instances) and key in self.found:
                    self._instance(_read(InstanceRecord, self.found[key]))
        finally:
            self._commits(self.active)

    def unrest(self) -> str | None:
        """A fault that is left once nothing fails any more and all has come to rest."""
        swap, target, committed = self.swap, self._record(TargetRecord, self.keys.target), self.active
        if swap is not None and in_flight(swap):
            return f"the swap stays in phase {swap.phase}"
        if target is not None and (swap is None or not swap.answers(target)):
            return "the last wish got no answer"
        for record in self.instances.values():
            if record.state != "SERVING":
                return f"instance {record.id} stays {record.state}"
            active = committed.of(record.id) if committed is not None else None
            if active is not None and (record.active_epoch, record.active_version) != (active.epoch, active.version):
                return f"instance {record.id} runs version {record.active_version}, committed is {active.version}"
        return self._misplaced(committed) if committed is not None else None

    def _misplaced(self, active: ActiveRecord) -> str | None:
        """A version of the split that has not the instances it is to have, where there are enough."""
        if active.split is None:
            return None
        with contextlib.suppress(SwapError):
            wanted = placement.counts(active.version, active.split, len(self.instances))
            run = Counter(record.active_version for record in self.instances.values())
            return f"{dict(run)} instances run the versions, not {wanted}" if run != Counter(wanted) else None
        return None

    def _leader(self, puts: Mapping[str, bytes | None]) -> None:
        key, before = self.keys.leader, self._before
        taken = puts.get(key)
        if taken is not None and key in before:
            same = _read(LeaderRecord, taken).holder == _read(LeaderRecord, before[key]).holder
            require(same, "one takes the lead that another holds", "leader")
        if {self.keys.swap, self.keys.active} & puts.keys():
            require(key in before, "a step while no leader holds the key", "leader")

    def _swap(self) -> None:
        before, after = self._record(SwapRecord, self.keys.swap, self._before), self.swap
        assert after is not None
        if before is not None and before.id == after.id:
            left = set(after.participants)
            if after.phase == before.phase and left < set(before.participants):
                require(after.on_lost == "continue" and left, "a participant was left out unasked", "phases")
                require(after.canary in (None, *left), "the canary was left out of its own trial", "phases")
                self.seen["left out"] += 1
                return
            if after.phase == before.phase and after.changes and after.turn != before.turn:
                self.seen["turns"] += 1
                return
            require(after.phase in NEXT.get(before.phase, ()), f"from {before.phase} to {after.phase}", "phases")
        else:
            require(not in_flight(before), "two swaps at once", "phases")
            require(after.phase in ("prepare", "aborted"), f"opened in phase {after.phase}", "phases")
        self.seen[f"{'restarting' if after.changes else after.mode} {after.phase}"] += 1
        self.seen[f"untried {after.phase}"] += untried(before)
        self.seen[f"split {after.phase}"] += after.split is not None
        self.seen[f"placed anew {after.phase}"] += "+" in after.id
        if after.phase == "aborted" and before is not None and before.phase == "canary":
            self.seen["canary aborted"] += 1
        if after.phase in ("commit", "revert"):
            changed = self.active != self._active_before
            require(changed, f"in phase {after.phase} without its commit record", "commit")

    @property
    def _active_before(self) -> ActiveRecord | None:
        return self._record(ActiveRecord, self.keys.active, self._before)

    def _active(self) -> None:
        before, active, swap = self._active_before, self.active, self.swap
        require(active, "the commit record was deleted", "commit")
        assert active is not None
        if before is not None and before.epoch == active.epoch:
            return self._trial(before, active)
        require(active.epoch == (before.epoch if before is not None else 0) + 1, "a commit was lost", "commit")
        require(active.trial is None, "a commit with a trial", "commit")
        was = self._record(SwapRecord, self.keys.swap, self._before)
        require(swap and swap.id == active.swap_id, "a commit of no swap", "commit")
        assert swap is not None
        if was is not None and was.phase == "commit":
            return self._revert(before, active, was)
        require(swap.phase == "commit", f"a commit by a swap in phase {swap.phase}", "commit")
        require(active.version == swap.target and active.split == swap.split, "another version was committed", "commit")
        if before is not None:
            former = swap.former or before
            previous = former.previous if former.version == active.version else former.version
            require(active.previous == previous, "the way back was lost", "commit")
        for name in swap.participants if not swap.changes else ():
            record = self.instances.get(name)  # None: it has gone since the decision, as if right after the commit
            state = record.state if record is not None else "SERVING"
            require(state in PARTICIPATING, f"committed, but {name} is {state}", "participants")
            self.seen["gone in the commit"] += record is None
        return None

    def _revert(self, before: ActiveRecord | None, active: ActiveRecord, swap: SwapRecord) -> None:
        served = before and not swap.changes and any(confirmed(i, before) for i in self.instances.values())
        require(not served, "reverted, and an instance serves it", "commit")
        former = swap.former
        same = former and (former.version, former.previous) == (active.version, active.previous)
        require(same, "reverted wrongly", "commit")

    def _trial(self, before: ActiveRecord, active: ActiveRecord) -> None:
        """One begins or ends; what is committed stays."""
        require(replace(before, trial=active.trial) == active, "a commit was changed", "commit")
        require((before.trial is None) != (active.trial is None), "a trial in place of another", "commit")
        self.seen["trials" if active.trial is not None else "trials ended"] += 1

    def _versions(self, puts: Mapping[str, bytes | None]) -> None:
        keys, active = self.keys, self.active
        written = {key: raw for key, raw in puts.items() if key.startswith((keys.versions, keys.forms))}
        if not written:
            return
        kept = (active.version, active.previous, *shared_versions(active.split)) if active is not None else ()
        for version in kept:
            if version is not None and keys.version(version) in written:
                record = self.version(version)
                lives = record is not None and record.state != "retired"
                require(lives, "a version was retired that is needed", "versions")
        of = [_read(VersionRecord, raw).form for key, raw in self.found.items() if key.startswith(keys.versions)]
        named, forms = {keys.form(form) for form in of if form}, {k for k in self.found if k.startswith(keys.forms)}
        require(forms >= named, "a form was dropped that a version has", "versions")
        require(forms <= named, "a form stays that no version has", "versions")
        self.seen["forms dropped"] += sum(key.startswith(keys.forms) for key, raw in written.items() if raw is None)

    def _instance(self, record: InstanceRecord) -> None:
        if not agent_state.admits(record):
            return None
        active, version = self.active, record.active_version
        if version is None:
            dummy = record.active_epoch > 0
            return require(not dummy, f"{record.id} serves dummy weights after a commit", "serving")
        require(version in self.committed, f"{record.id} serves an uncommitted version", "serving")
        epoch = active.epoch if active is not None else 0
        require(record.active_epoch <= epoch, f"{record.id} is ahead of the commit record", "serving")
        known = self.version(version)
        right = known is None or agent_state.same(record.fingerprint, known.fingerprint)
        return require(right, f"{record.id} serves wrong weights", "serving")

    def _commits(self, active: ActiveRecord | None) -> None:
        if active is not None:
            self.committed |= {active.version, *shared_versions(active.split)}

    def _record(self, kind: type[R], key: str, found: Mapping[str, bytes] | None = None) -> R | None:
        raw = (self.found if found is None else found).get(key)
        return _read(kind, raw) if raw is not None else None


@lru_cache(maxsize=4096)
def _cached(kind: type[Record], raw: bytes) -> Any:
    return kind.from_json(raw)


def _read(kind: type[R], raw: bytes) -> R:
    found: R = _cached(kind, raw)  # type: ignore[arg-type]  # a class can be hashed
    return found
