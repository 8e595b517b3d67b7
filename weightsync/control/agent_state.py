"""An instance's side of a swap as a pure state machine: its record and what it sees, in; the one next action, out.

    STARTING  --the committed version runs, with its fingerprint (or nothing was committed)--> SERVING
    SERVING   --swap opens--> STAGING --built--> STAGED      or SERVING with `error`: the coordinator aborts the swap
    STAGED    --commit record (together)--> SERVING, the new version
    STAGED    --commit record (rolling), its turn--> COMMITTING --drained, flipped--> SERVING, the new version
    STAGED    --it is the canary--> COMMITTING --drained, flipped ahead--> COMMITTING, `active_epoch` 0: on trial
    on trial  --commit record--> SERVING, the new version
              `--swap aborted--> SERVING, the old version, by one more flip
    STAGING, STAGED, COMMITTING before its flip  --swap aborted--> SERVING, the old version
    any       --flip failed--> TORN: what it runs is unknown; it must not serve, and be restarted
    any       --cannot follow a commit--> STARTING with `error`: out of routing, and tried again

    its turn in a swap to a version of another form, or a commit record of another form than its engine's:
    any       --> COMMITTING --drained--> the process starts itself anew --> STARTING, with an engine of that form

COMMITTING is out of routing: draining, or running weights that are not committed. An instance may see the swap record
and the commit record of one transaction one after the other, in any order; no decision relies on seeing both at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from weightsync.control.records import ActiveRecord, ErrorInfo, InstanceRecord, SwapRecord
from weightsync.control.state import PARTICIPATING, in_flight, on_trial

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
    """Say SERVING: it runs what `active` asks for already (None: nothing was committed)."""

    active: ActiveRecord | None


@dataclass(frozen=True)
class Stage:
    """Build the version of this swap."""

    swap: SwapRecord


@dataclass(frozen=True)
class StandDown:
    """Drop what was staged: its swap was aborted."""


@dataclass(frozen=True)
class Drain:
    """Leave routing, and let streams end for up to `swap.drain_s`."""

    swap: SwapRecord


@dataclass(frozen=True)
class Flip:
    """Run `active.version`, staging it first if need be. `ahead`: of the commit, as the canary."""

    active: ActiveRecord
    ahead: bool = False


@dataclass(frozen=True)
class Restart:
    """Start the process anew, with an engine for the form that is asked for now."""


Action = Rest | Serve | Stage | StandDown | Drain | Flip | Restart


def decide(record: InstanceRecord, view: View) -> Action:
    """What the instance does next."""
    view = view.of(record.id)
    active, swap = view.active, view.swap
    if record.state in OUT_FOR_GOOD:
        return Rest()
    trial = swap is not None and swap.changes and swap.phase == "canary" and swap.canary == record.id
    if swap is not None and trial and active is not None:
        return Rest() if on_trial(record, swap) else _come_back(record, swap, active, view)
    if active is not None and active.epoch != record.active_epoch:
        return _follow(record, active, view)
    mine = swap is not None and swap.id == record.swap_id and in_flight(swap)
    if record.state == "STARTING":
        return Serve(active)
    if swap is not None and swap.phase == "prepare" and not swap.changes and _asked(record, swap, active):
        return Stage(swap)
    if swap is not None and mine and swap.phase == "canary" and swap.canary == record.id and active is not None:
        return _go_ahead(record, swap, active, view)
    if record.state in ("STAGING", "STAGED", "COMMITTING") and not mine:
        return StandDown()
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


def same(fingerprint: str | None, expected: str) -> bool:
    return not fingerprint or not expected or fingerprint == expected


def _asked(record: InstanceRecord, swap: SwapRecord, active: ActiveRecord | None) -> bool:
    interrupted = record.state == "STAGING"  # the store went away before staging began
    stays = active is not None and active.version == swap.target and runs(record, active)
    return record.id in swap.participants and not stays and (record.swap_id != swap.id or interrupted)


def _follow(record: InstanceRecord, active: ActiveRecord, view: View) -> Action:
    """The commit record is not the one it flipped for."""
    swap = view.swap
    if swap is not None and on_trial(record, swap) and in_flight(swap) and active.swap_id != swap.id:
        return Rest()  # on trial still, or committed and the commit record is the next thing it sees
    if runs(record, active):
        return Serve(active)
    rolling = swap is not None and swap.id == active.swap_id and in_flight(swap) and swap.mode == "rolling"
    if swap is not None and rolling and record.id in swap.participants and record.state in PARTICIPATING:
        if swap.changes and swap.turn != record.id:
            return Rest()
        if not swap.changes and not _turn(record, swap, active, view):
            return Rest()
        if view.drained != swap.id:
            return Drain(swap)
    return Flip(active) if _can_run(record, active.version, view) else Restart()


def _can_run(record: InstanceRecord, version: int, view: View) -> bool:
    """Whether its engine has the form of that version, as far as is known."""
    form = view.forms.get(version)
    return record.form is None or form is None or record.form == form


def _come_back(record: InstanceRecord, swap: SwapRecord, active: ActiveRecord, view: View) -> Action:
    """The canary of a swap that takes another engine: it leaves with the one it has, and comes back on trial."""
    if record.swap_id == swap.id and _can_run(record, swap.target, view):
        return Rest() if record.error is not None else Flip(provisional(swap, active, ""), ahead=True)
    if record.state in PARTICIPATING and (record.state != "COMMITTING" or view.drained != swap.id):
        return Drain(swap)
    return Restart()


def _turn(record: InstanceRecord, swap: SwapRecord, active: ActiveRecord, view: View) -> bool:
    """Whether every participant before it has flipped or has given up."""
    before = (view.instances.get(name) for name in swap.participants[: swap.participants.index(record.id)])
    return all(i is None or i.active_epoch >= active.epoch or i.state not in PARTICIPATING for i in before)


def _go_ahead(record: InstanceRecord, swap: SwapRecord, active: ActiveRecord, view: View) -> Action:
    """The canary, before its flip."""
    if record.staged_version != swap.target:
        return Rest()
    if record.state != "COMMITTING" or view.drained != swap.id:
        return Drain(swap)
    return Flip(provisional(swap, active, record.staged_fingerprint), ahead=True)


def provisional(swap: SwapRecord, active: ActiveRecord, fingerprint: str | None) -> ActiveRecord:
    """The commit record as it will be if the canary passes."""
    return ActiveRecord(swap.target, active.epoch + 1, active.version, swap.id, swap.opened_at, fingerprint or "")


# What it says of itself afterwards.


def serving(record: InstanceRecord, active: ActiveRecord | None) -> InstanceRecord:
    epoch = active.epoch if active is not None else record.active_epoch
    return replace(_unstaged(record), state="SERVING", active_epoch=epoch, error=None)


def staging(record: InstanceRecord, swap: SwapRecord) -> InstanceRecord:
    return replace(_unstaged(record), state="STAGING", swap_id=swap.id, error=None)


def staged(record: InstanceRecord, version: int, fingerprint: str | None) -> InstanceRecord:
    return replace(record, state="STAGED", staged_version=version, staged_fingerprint=fingerprint)


def refused(record: InstanceRecord, error: ErrorInfo) -> InstanceRecord:
    """It could not stage; it serves on what it runs."""
    return replace(_unstaged(record), state="SERVING", error=error)


def stood_down(record: InstanceRecord) -> InstanceRecord:
    return replace(_unstaged(record), state="SERVING")


def leaving(record: InstanceRecord) -> InstanceRecord:
    return replace(record, state="COMMITTING")


def flipped(record: InstanceRecord, active: ActiveRecord, fingerprint: str | None, *, ahead: bool) -> InstanceRecord:
    return replace(
        _unstaged(record),
        state="COMMITTING" if ahead else "SERVING",
        active_version=active.version,
        active_epoch=0 if ahead else active.epoch,
        fingerprint=fingerprint,
        error=None,
    )


def behind(record: InstanceRecord, error: ErrorInfo) -> InstanceRecord:
    """It runs a version that the fleet has left; STARTING keeps it out of routing until it has caught up."""
    return replace(_unstaged(record), state="STARTING", error=error)


def torn(record: InstanceRecord, error: ErrorInfo) -> InstanceRecord:
    return replace(record, state="TORN", error=error)


def _unstaged(record: InstanceRecord) -> InstanceRecord:
    return replace(record, staged_version=None, staged_fingerprint=None)
