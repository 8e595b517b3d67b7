"""The swap as a pure state machine: what the records say now, in; the one next step, out.

    (no swap, or one that is done or aborted) --target with a new id--> prepare      or aborted, if it is not ready
    prepare --every participant STAGED--> commit     (with the `active` record, in one transaction)
    prepare --error, participant gone, deadline, fingerprints that differ--> aborted
    commit  --every participant confirmed, gone or TORN, or confirmation overdue--> done

Every step is a compare-and-swap on what it was decided on, so any number of coordinators may run: one wins, the others
look again. A coordinator that dies leaves records from which the next one goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from weightsync.records import ActiveRecord, InstanceRecord, Keys, SwapRecord, TargetRecord, VersionState

CONFIRM_S = 30.0  # how long a commit waits for instances to say that they flipped
PARTICIPATING = frozenset({"SERVING", "STAGING", "STAGED", "COMMITTING"})


@dataclass(frozen=True)
class View:
    """The records of one model at a time `now` (unix seconds). `target_state` is that of the version in question:

    the swap's while one is in flight, else the target's; None if there is no such version.
    """

    now: float
    target: TargetRecord | None
    target_state: VersionState | None
    swap: SwapRecord | None
    active: ActiveRecord | None
    instances: Mapping[str, InstanceRecord]


@dataclass(frozen=True)
class Step:
    """Write `swap`, and with a commit `active`."""

    kind: Literal["open", "refuse", "commit", "abort", "finish"]
    swap: SwapRecord
    active: ActiveRecord | None = None


@dataclass(frozen=True)
class Wait:
    """Nothing to do until a record changes, or until the time `until` (unix seconds)."""

    until: float | None = None


def decide(view: View) -> Step | Wait:
    """The next step of the model's swap."""
    swap = view.swap
    if swap is not None and swap.phase == "prepare":
        return _prepare(view, swap)
    if swap is not None and swap.phase == "commit":
        return _confirm(view, swap)
    if view.target is not None and (swap is None or swap.id != view.target.id):
        return _open(view, view.target)
    return Wait()


def depends_on(step: Step, keys: Keys) -> list[str]:
    """The keys a step was decided on: it must be written only if none of them has changed."""
    found = [keys.swap, keys.active]
    if step.kind in ("open", "refuse"):
        found.append(keys.target)
    if step.kind in ("open", "commit"):
        found.append(keys.version(step.swap.target))
    if step.kind == "commit":  # who staged must still be there, and still staged, in the moment of the commit
        found += [keys.instance(name) for name in step.swap.participants]
    return found


def in_flight(swap: SwapRecord | None) -> bool:
    return swap is not None and swap.phase in ("prepare", "commit")


def _open(view: View, target: TargetRecord) -> Step:
    participants = tuple(sorted(i.id for i in view.instances.values() if i.state in PARTICIPATING))
    swap = SwapRecord(
        id=target.id,
        target=target.version,
        phase="prepare",
        participants=participants,
        deadline=view.now + target.deadline_s,
        opened_at=view.now,
    )
    if view.target_state != "ready":
        what = "does not exist" if view.target_state is None else f"is {view.target_state}"
        reason = f"version {target.version} {what}: choose one that is ready"
        return Step("refuse", replace(swap, phase="aborted", reason=reason))
    return Step("open", swap)


def _prepare(view: View, swap: SwapRecord) -> Step | Wait:
    if view.target_state != "ready":
        return _abort(swap, f"version {swap.target} is no longer ready")
    waiting = []
    for name in swap.participants:
        instance = view.instances.get(name)
        if instance is None:
            return _abort(swap, f"instance {name} is gone")
        if instance.state not in PARTICIPATING:
            return _abort(swap, f"instance {name} is {instance.state}")
        if instance.swap_id == swap.id and instance.error is not None:
            return _abort(swap, f"instance {name}: {instance.error.message}", instance.error.tensor)
        if not _staged(instance, swap):
            waiting.append(name)
    if waiting and view.now >= swap.deadline:
        seconds = swap.deadline - swap.opened_at
        return _abort(swap, f"not staged within {seconds:g} s by {', '.join(waiting)}")
    if waiting:
        return Wait(swap.deadline)
    if (odd := _odd_fingerprint(view, swap)) is not None:
        return _abort(swap, f"instance {odd} staged other weights than the rest (fingerprints differ)")
    return _commit(view, swap)


def _staged(instance: InstanceRecord, swap: SwapRecord) -> bool:
    return instance.swap_id == swap.id and instance.state == "STAGED" and instance.staged_version == swap.target


def _odd_fingerprint(view: View, swap: SwapRecord) -> str | None:
    """An instance that says it built something else than another one that builds the same way."""
    seen: dict[str, str] = {}
    for name in swap.participants:
        instance = view.instances[name]
        if instance.fingerprint and seen.setdefault(instance.path, instance.fingerprint) != instance.fingerprint:
            return name
    return None


def _commit(view: View, swap: SwapRecord) -> Step:
    before = view.active
    previous = before.version if before is not None else None
    if before is not None and before.version == swap.target:
        previous = before.previous  # committing what is active already must not lose the way back
    active = ActiveRecord(
        version=swap.target,
        epoch=before.epoch + 1 if before is not None else 1,
        previous=previous,
        swap_id=swap.id,
        committed_at=view.now,
    )
    return Step("commit", replace(swap, phase="commit"), active)


def _confirm(view: View, swap: SwapRecord) -> Step | Wait:
    active = view.active
    if active is None or active.swap_id != swap.id:
        return Step("finish", replace(swap, phase="done", reason="overtaken by a later commit"))
    alive = [view.instances[name] for name in swap.participants if name in view.instances]
    late = [i.id for i in alive if i.active_epoch < active.epoch and i.state in PARTICIPATING]
    if not late:
        return Step("finish", replace(swap, phase="done", reason=_torn(swap, view)))
    overdue = active.committed_at + CONFIRM_S
    if view.now >= overdue:
        return Step("finish", replace(swap, phase="done", reason=f"no confirmation from {', '.join(late)}"))
    return Wait(overdue)


def _torn(swap: SwapRecord, view: View) -> str | None:
    """The commit stands; who could not follow it is out of routing and named here."""
    epoch = view.active.epoch if view.active is not None else 0
    missing = [n for n in swap.participants if n not in view.instances or view.instances[n].active_epoch < epoch]
    return f"not flipped: {', '.join(missing)}" if missing else None


def _abort(swap: SwapRecord, reason: str, tensor: str | None = None) -> Step:
    return Step("abort", replace(swap, phase="aborted", reason=reason, tensor=tensor))
