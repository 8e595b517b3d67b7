"""An instance's side of a swap as a pure state machine: its record and what it sees, in; the one next action, out.

    STARTING  --it runs what the commit record asks of it, with its fingerprint (or nothing was committed)--> SERVING
    SERVING   --swap opens--> STAGING --built--> STAGED      or SERVING with `error`: the coordinator aborts the swap
    STAGED    --commit record (together)--> SERVING, the new version
    STAGED    --commit record (rolling), its turn--> COMMITTING --drained, flipped--> SERVING, the new version
    STAGED    --commit record with its trial--> COMMITTING --drained, flipped--> COMMITTING, on trial
    on trial  --commit of that version--> SERVING, the new version, without another flip
              `--commit record without the trial--> SERVING, the old version, by one more flip
    STAGING, STAGED, COMMITTING before its flip  --swap aborted--> SERVING, the old version
    any       --flip failed--> TORN: what it runs is unknown; it must not serve, and be restarted
    any       --cannot follow a commit--> STARTING with `error`: out of routing, and tried again

    a commit record that asks for a version of another form than its engine's, in its turn if a swap is under way:
    any       --> COMMITTING --drained--> the process starts itself anew --> STARTING, with an engine of that form

COMMITTING is out of routing: draining, or on trial. An instance may see the swap record and the commit record of one
transaction one after the other, in any order; no decision relies on seeing both at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from weightsync.control.records import (
    ActiveRecord,
    ErrorInfo,
    InstanceRecord,
    InstanceState,
    SwapRecord,
    shared_versions,
)
from weightsync.control.state import PARTICIPATING, confirmed, in_flight

OUT_FOR_GOOD = frozenset({"TORN", "DRAINING", "STOPPED"})
ADMITTING = frozenset({"SERVING", "STAGING", "STAGED"})


@dataclass(frozen=True)
class View:
    """The records an instance decides on. `drained` is the id of the swap it has already drained for; `forms` has the
    form of every version."""

    active: ActiveRecord | None
    swap: SwapRecord | None
    instances: Mapping[str, InstanceRecord]
    drained: str | None = None
    forms: Mapping[int, str] = field(default_factory=dict)

    def of(self, name: str) -> View:
        """The same with what the commit and the swap ask of that instance: with a split, that is its own version."""
        active = self.active.of(name) if self.active is not None else None
        swap = self.swap.of(name) if self.swap is not None else None
        return replace(self, active=active, swap=swap)


@dataclass(frozen=True)
class Rest:
    """Nothing to do until a record changes."""


@dataclass(frozen=True)
class Serve:
    """Say SERVING, or COMMITTING on trial: it runs what `active` asks for already (None: nothing was committed). Drop
    what was staged for a swap that has ended."""

    active: ActiveRecord | None


@dataclass(frozen=True)
class Stage:
    """Build the version of this swap."""

    swap: SwapRecord


@dataclass(frozen=True)
class Drain:
    """Leave routing, and let streams end for up to `swap.drain_s`."""

    swap: SwapRecord


@dataclass(frozen=True)
class Flip:
    """Run `active.version`, staging it first if need be."""

    active: ActiveRecord


@dataclass(frozen=True)
class Restart:
    """Start the process anew, with an engine for the form that is asked for now."""


Action = Rest | Serve | Stage | Drain | Flip | Restart


def decide(record: InstanceRecord, view: View) -> Action:
    """The next action of the instance."""
    view = view.of(record.id)
    active, swap = view.active, view.swap
    if record.state in OUT_FOR_GOOD:
        return Rest()
    if active is not None and (active.epoch != record.active_epoch or not runs(record, active)):
        return _follow(record, active, view)
    if active is not None and active.trial is not None and record.state == "COMMITTING":
        return Rest()  # until its trial ends
    mine = swap is not None and swap.id == record.swap_id and in_flight(swap)
    if record.state in ("STARTING", "COMMITTING") or (record.state in ("STAGING", "STAGED") and not mine):
        return Serve(active)
    if swap is not None and swap.phase == "prepare" and not swap.changes and _asked(record, swap, active):
        return Stage(swap)
    return Rest()


def to_stage(record: InstanceRecord, action: Action) -> int | None:
    """The version that has to be staged for `action`, None if none has."""
    if isinstance(action, Stage):
        return action.swap.target
    if isinstance(action, Flip) and record.staged_version != action.active.version:
        return action.active.version
    return None


def gives_up(record: InstanceRecord, action: Action, version: int) -> bool:
    """Whether a staging of `version` that is under way is of no use any more."""
    return not isinstance(action, Rest) and to_stage(record, action) != version


def admits(record: InstanceRecord) -> bool:
    """Whether it may take requests, as far as it knows itself: not on trial, not draining, not torn."""
    return record.state in ADMITTING


def runs(record: InstanceRecord, active: ActiveRecord) -> bool:
    """Whether its weights are those of `active`; fingerprints count when both are known."""
    return record.active_version == active.version and same(record.fingerprint, active.fingerprint)


def withdraws(record: InstanceRecord, active: ActiveRecord) -> bool:
    """Whether that commit takes the version that it runs out of service and gives it an older one."""
    before = record.active_version
    stays = before in (active.version, *shared_versions(active.split))
    return before is not None and not stays and active.of(record.id).version < before


def same(fingerprint: str | None, expected: str) -> bool:
    return not fingerprint or not expected or fingerprint == expected


def _asked(record: InstanceRecord, swap: SwapRecord, active: ActiveRecord | None) -> bool:
    interrupted = record.state == "STAGING"  # the store went away before staging began
    stays = active is not None and active.version == swap.target and runs(record, active)
    return record.id in swap.participants and not stays and (record.swap_id != swap.id or interrupted)


def _follow(record: InstanceRecord, active: ActiveRecord, view: View) -> Action:
    """It does not run what the commit record asks of it, or has not said so."""
    if runs(record, active):
        return Serve(active)
    swap = view.swap
    mine = swap if swap is not None and in_flight(swap) and record.id in swap.participants else None
    if active.trial is not None and mine is None:
        return Rest()  # the swap has ended, and the commit record is the next thing it sees
    rolling = mine is not None and mine.mode == "rolling" and (active.trial is not None or mine.id == active.swap_id)
    if mine is not None and rolling and record.state in PARTICIPATING:
        if not _turn(record, mine, active, view):
            return Rest()
        if view.drained != mine.id:
            return Drain(mine)
    return Flip(active) if _can_run(record, active.version, view) else Restart()


def _can_run(record: InstanceRecord, version: int, view: View) -> bool:
    """Whether its engine has the form of that version, as far as is known."""
    form = view.forms.get(version)
    return record.form is None or form is None or record.form == form


def _turn(record: InstanceRecord, swap: SwapRecord, active: ActiveRecord, view: View) -> bool:
    """Whether it is the canary, or every participant before it has flipped or has given up."""
    if swap.changes:
        return swap.turn == record.id
    return active.trial is not None or _nearest(record, swap, active, view.instances) is None


def may_wait(record: InstanceRecord, view: View) -> bool:
    """Whether it is to flip in a rolling swap, after those before it."""
    active, swap = view.active, view.swap
    if active is None or swap is None or swap.id != active.swap_id or not in_flight(swap) or swap.changes:
        return False
    mine = active.of(record.id)
    return swap.mode == "rolling" and record.id in swap.participants and not confirmed(record, mine) and not mine.trial


def awaited(record: InstanceRecord, view: View) -> str | None:
    """Of the participants before it that are to flip first, the nearest one, as far as `view` has their records."""
    if view.active is None or view.swap is None or not may_wait(record, view):
        return None
    view = view.of(record.id)
    assert view.active is not None
    assert view.swap is not None
    return _nearest(record, view.swap, view.active, view.instances)


def _nearest(
    record: InstanceRecord, swap: SwapRecord, active: ActiveRecord, instances: Mapping[str, InstanceRecord]
) -> str | None:
    before = swap.participants[: swap.participants.index(record.id)]
    found = (instances[name] for name in reversed(before) if name in instances)
    return next((i.id for i in found if i.state in PARTICIPATING and not confirmed(i, active)), None)


# The record of the instance afterwards.


def serving(record: InstanceRecord, active: ActiveRecord | None) -> InstanceRecord:
    epoch = active.epoch if active is not None else record.active_epoch
    return replace(_unstaged(record), state=_state(active), active_epoch=epoch, error=None)


def staging(record: InstanceRecord, swap: SwapRecord) -> InstanceRecord:
    return replace(_unstaged(record), state="STAGING", swap_id=swap.id, error=None)


def staged(record: InstanceRecord, version: int, fingerprint: str | None) -> InstanceRecord:
    return replace(record, state="STAGED", staged_version=version, staged_fingerprint=fingerprint)


def refused(record: InstanceRecord, error: ErrorInfo) -> InstanceRecord:
    """It could not stage; it serves on what it runs."""
    return replace(_unstaged(record), state="SERVING", error=error)


def leaving(record: InstanceRecord, swap: SwapRecord) -> InstanceRecord:
    """It drains in its turn, for a swap that it may not have staged for: its errors are about that swap from now on."""
    return replace(record, state="COMMITTING", swap_id=swap.id, error=None)


def flipped(record: InstanceRecord, active: ActiveRecord, fingerprint: str | None) -> InstanceRecord:
    return replace(serving(record, active), active_version=active.version, fingerprint=fingerprint)


def behind(record: InstanceRecord, active: ActiveRecord, error: ErrorInfo) -> InstanceRecord:
    """It cannot follow that commit; STARTING keeps it out of routing until it has caught up."""
    swap_id = record.swap_id if active.trial is not None else active.swap_id
    return replace(_unstaged(record), state="STARTING", swap_id=swap_id, error=error)


def torn(record: InstanceRecord, error: ErrorInfo) -> InstanceRecord:
    return replace(record, state="TORN", error=error)


def _state(active: ActiveRecord | None) -> InstanceState:
    return "COMMITTING" if active is not None and active.trial is not None else "SERVING"


def _unstaged(record: InstanceRecord) -> InstanceRecord:
    return replace(record, staged_version=None, staged_fingerprint=None)
