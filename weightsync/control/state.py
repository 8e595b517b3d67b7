"""The swap as a pure state machine: what the records say now, in; the one next step, out.

                          together: all STAGED
                 .-------------------------------------------------.
    (target) --> prepare --all STAGED--> canary --flipped, probed--> commit --all confirmed--> done
        |          |      rolling           |                         ^
        |          v                        v                         `-- one transaction with the `active` record
        `------> aborted <------------------'

    (no swap, or one that is done or aborted) --target with a new id--> prepare      or aborted, if it is not ready
    prepare --every participant STAGED, with the published fingerprint--> commit     together
                                                                    `---> canary     rolling
    canary  --the canary flipped ahead, its probe passed, the others still STAGED--> commit
    prepare, canary --error, fingerprint that differs, probe failed, deadline--> aborted
    prepare, canary --participant gone, torn or draining--> aborted, or the same without it (`on_lost`), if any is left
    commit  --every participant confirmed, gone or TORN, or confirmation overdue--> done

A canary flips while it is COMMITTING, which keeps it out of routing; when its swap aborts it goes back by itself, to a
version it still holds. A rolling swap has nothing to try when no version is active, when its target is, or when there
are no participants: it is then done together.

Every step is written by the leader, in a transaction that compares the leader's key and all it was decided on: a
deposed leader writes nothing. A leader that dies leaves records from which the next one goes on; a probe that was under
way is run again.

A `Probe` is the coordinator's callable that judges a canary; a `Trial` runs it beside the watch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from weightsync.control.records import (
    ActiveRecord,
    InstanceRecord,
    Keys,
    SwapMode,
    SwapRecord,
    TargetRecord,
    VersionState,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeResult:
    """Whether the canary may be followed; `detail` says why not, and ends up as the reason of the aborted swap."""

    ok: bool
    detail: str = ""


Probe = Callable[[InstanceRecord, SwapRecord, ActiveRecord | None], Awaitable[ProbeResult]]
"""probe(canary, swap, active): the canary runs `swap.target` already and gets no traffic; `active` is what the others
run. Raising counts as a failed probe. It is cancelled when the swap ends without it, and run again by a new leader."""


class Trial:
    """The probe of one swap's canary, run beside the watch."""

    def __init__(self, probe: Probe | None) -> None:
        self._probe = probe
        self._swap_id = ""
        self._task: asyncio.Task[ProbeResult] | None = None

    def of(self, canary: InstanceRecord, swap: SwapRecord, active: ActiveRecord | None) -> asyncio.Task[ProbeResult]:
        """Begun if it has not been."""
        if self._task is None or self._swap_id != swap.id:
            self.end()
            self._swap_id = swap.id
            self._task = asyncio.create_task(self._run(canary, swap, active), name=f"probe {canary.id}")
        return self._task

    def result(self, swap: SwapRecord | None) -> ProbeResult | None:
        """What the probe of `swap` came to; None if there is none yet. Ends one that has lost its swap."""
        if swap is None or (swap.id, swap.phase) != (self._swap_id, "canary"):
            self.end()
        return self._task.result() if self._task is not None and self._task.done() else None

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self, canary: InstanceRecord, swap: SwapRecord, active: ActiveRecord | None) -> ProbeResult:
        if self._probe is None:
            return ProbeResult(True, "no probe is set")
        try:
            return await self._probe(canary, swap, active)
        except Exception as error:
            log.exception("the probe of %s failed", canary.id)
            return ProbeResult(False, f"{type(error).__name__}: {error}")


CONFIRM_S = (
    45.0  # how long a commit waits for an instance to say that it flipped: 30 s for its `finish` requests, and more
)
PARTICIPATING = frozenset({"SERVING", "STAGING", "STAGED", "COMMITTING"})


@dataclass(frozen=True)
class View:
    """The records of one model at a time `now` (unix seconds).

    `target_state` and `target_fingerprint` are of the version in question: the swap's while one is in flight, else the
    target's; None and "" if there is no such version. `probe` is what the probe of this swap's canary came to.
    """

    now: float
    target: TargetRecord | None
    target_state: VersionState | None
    swap: SwapRecord | None
    active: ActiveRecord | None
    instances: Mapping[str, InstanceRecord]
    target_fingerprint: str = ""
    probe: ProbeResult | None = None


@dataclass(frozen=True)
class Step:
    """Write `swap`, and with a commit `active`."""

    kind: Literal["open", "refuse", "leave", "try", "commit", "abort", "finish"]
    swap: SwapRecord
    active: ActiveRecord | None = None


@dataclass(frozen=True)
class Ask:
    """Probe this canary, and decide again with the result; at the latest at the time `until` (unix seconds)."""

    swap: SwapRecord
    canary: InstanceRecord
    until: float


@dataclass(frozen=True)
class Wait:
    """Nothing to do until a record changes, or until the time `until` (unix seconds)."""

    until: float | None = None


def decide(view: View) -> Step | Ask | Wait:
    """The next step of the model's swap."""
    swap = view.swap
    if swap is not None and swap.phase == "prepare":
        return _prepare(view, swap)
    if swap is not None and swap.phase == "canary":
        return _canary(view, swap)
    if swap is not None and swap.phase == "commit":
        return _confirm(view, swap)
    if view.target is not None and (swap is None or swap.id != view.target.id):
        return _open(view, view.target)
    return Wait()


def depends_on(step: Step, keys: Keys) -> list[str]:
    """The keys a step was decided on: it must be written only if none of them has changed."""
    found = [keys.leader, keys.swap, keys.active]
    if step.kind in ("open", "refuse"):
        found.append(keys.target)
    if step.kind in ("open", "try", "commit"):
        found.append(keys.version(step.swap.target))
    if step.kind in ("try", "commit"):  # who staged must still be there, and still staged, in the moment of the commit
        found += [keys.instance(name) for name in step.swap.participants]
    return found


def in_flight(swap: SwapRecord | None) -> bool:
    return swap is not None and swap.phase in ("prepare", "canary", "commit")


def confirm_within_s(swap: SwapRecord) -> float:
    """How long after its commit a swap is done whoever has not confirmed; who flip in turn get their time each."""
    return CONFIRM_S if swap.mode == "together" else len(swap.participants) * (CONFIRM_S + swap.drain_s)


def on_trial(instance: InstanceRecord, swap: SwapRecord) -> bool:
    """Whether this is the canary, and it has flipped ahead of the commit."""
    return (
        (instance.id, instance.swap_id, instance.active_version) == (swap.canary, swap.id, swap.target)
        and instance.state == "COMMITTING"
        and instance.active_epoch == 0
    )


def _open(view: View, target: TargetRecord) -> Step:
    participants = tuple(sorted(i.id for i in view.instances.values() if i.state in PARTICIPATING))
    swap = SwapRecord(
        id=target.id,
        target=target.version,
        phase="prepare",
        participants=participants,
        deadline=view.now + target.deadline_s,
        opened_at=view.now,
        mode=_mode(view, target, participants),
        drain_s=target.drain_s,
        on_lost=target.on_lost,
    )
    if view.target_state != "ready":
        what = "does not exist" if view.target_state is None else f"is {view.target_state}"
        reason = f"version {target.version} {what}: choose one that is ready"
        return Step("refuse", replace(swap, phase="aborted", reason=reason))
    return Step("open", swap)


def _mode(view: View, target: TargetRecord, participants: tuple[str, ...]) -> SwapMode:
    nothing_to_try = view.active is None or view.active.version == target.version or not participants
    return "together" if nothing_to_try else target.mode


def _prepare(view: View, swap: SwapRecord) -> Step | Wait:
    if (blocked := _blocked(view, swap)) is not None:
        return blocked
    waiting = [name for name in swap.participants if not _staged(view.instances[name], swap)]
    if waiting and view.now >= swap.deadline:
        return abort(swap, f"not staged within {swap.deadline - swap.opened_at:g} s by {', '.join(waiting)}")
    if waiting:
        return Wait(swap.deadline)
    if swap.mode == "together":
        return _commit(view, swap)
    again = swap.deadline - swap.opened_at  # the canary gets the time of the request once more, after its drain
    canary = min(swap.participants)
    return Step("try", replace(swap, phase="canary", canary=canary, deadline=view.now + swap.drain_s + again))


def _canary(view: View, swap: SwapRecord) -> Step | Ask | Wait:
    if (blocked := _blocked(view, swap)) is not None:
        return blocked
    canary = view.instances[swap.canary or ""]
    for name in swap.participants:
        if name != canary.id and not _staged(view.instances[name], swap):
            return abort(swap, f"instance {name} is {view.instances[name].state} and has not staged it any more")
    if on_trial(canary, swap):
        if view.probe is not None and not view.probe.ok:
            return abort(swap, f"the probe of canary {canary.id} failed: {view.probe.detail or 'no detail given'}")
        if view.probe is not None:
            return _commit(view, swap)
    elif not _staged(canary, swap) and (canary.state, canary.swap_id) != ("COMMITTING", swap.id):
        return abort(swap, f"canary {canary.id} is {canary.state} and has not staged it any more")
    if view.now >= swap.deadline:
        what = "was not probed" if on_trial(canary, swap) else "did not flip"
        return abort(swap, f"canary {canary.id} {what} in time")
    return Ask(swap, canary, swap.deadline) if on_trial(canary, swap) else Wait(swap.deadline)


def _blocked(view: View, swap: SwapRecord) -> Step | None:
    """Why this swap cannot be committed any more."""
    if view.target_state != "ready":
        return abort(swap, f"version {swap.target} is no longer ready")
    lost = {name: what for name in swap.participants if (what := _lost(view, name)) is not None}
    if lost:
        return _without(swap, lost)
    for name in swap.participants:
        instance = view.instances[name]
        if instance.swap_id == swap.id and instance.error is not None:
            return abort(swap, f"instance {name}: {instance.error.message}", instance.error.tensor)
    if (reason := _odd_fingerprint(view, swap)) is not None:
        return abort(swap, reason)
    return None


def _lost(view: View, name: str) -> str | None:
    """Why this participant will not take part any more."""
    instance = view.instances.get(name)
    if instance is None:
        return "gone"
    return instance.state if instance.state not in PARTICIPATING else None


def _without(swap: SwapRecord, lost: Mapping[str, str]) -> Step:
    """The swap among those that are left, if that was asked for; the canary cannot be left out of its own trial."""
    left = tuple(name for name in swap.participants if name not in lost)
    if swap.on_lost == "continue" and left and swap.canary not in lost:
        return Step("leave", replace(swap, participants=left))
    name, what = next(iter(lost.items()))
    return abort(swap, f"instance {name} is {what}")


def _staged(instance: InstanceRecord, swap: SwapRecord) -> bool:
    return instance.swap_id == swap.id and instance.state == "STAGED" and instance.staged_version == swap.target


def _odd_fingerprint(view: View, swap: SwapRecord) -> str | None:
    """Names an instance that built something else than was published, or than another one that builds the same way."""
    seen: dict[str, str] = {}
    digests: dict[str, tuple[str, str]] = {}
    for name in swap.participants:
        built = _built(view.instances[name], swap)
        if not built:
            continue
        layout, _, digest = view.instances[name].built.partition(":")
        first, expected = digests.setdefault(layout, (name, digest))
        if digest != expected:
            return (
                f"instances {first} and {name} made different weights of the same version (digests {expected} and "
                f"{digest}): one of them is faulty; restart both, and activate the version again"
            )
        if view.target_fingerprint and built != view.target_fingerprint:
            return (
                f"instance {name} built other weights than were published (fingerprint {built}, published "
                f"{view.target_fingerprint}): nothing is served of them; publish the version again"
            )
        if seen.setdefault(view.instances[name].path, built) != built:
            return f"instance {name} staged other weights than the rest (fingerprints differ)"
    return None


def _built(instance: InstanceRecord, swap: SwapRecord) -> str | None:
    """The fingerprint of what it built for this swap, if it has and if it says."""
    if on_trial(instance, swap):
        return instance.fingerprint
    mine = instance.swap_id == swap.id and instance.staged_version == swap.target
    return instance.staged_fingerprint if mine else None


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
        fingerprint=view.target_fingerprint,
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
    overdue = active.committed_at + confirm_within_s(swap)
    if view.now >= overdue:
        return Step("finish", replace(swap, phase="done", reason=f"no confirmation from {', '.join(late)}"))
    return Wait(overdue)


def _torn(swap: SwapRecord, view: View) -> str | None:
    """The commit stands; who could not follow it is out of routing and named here."""
    epoch = view.active.epoch if view.active is not None else 0
    missing = [n for n in swap.participants if n not in view.instances or view.instances[n].active_epoch < epoch]
    return f"not flipped: {', '.join(missing)}" if missing else None


def abort(swap: SwapRecord, reason: str, tensor: str | None = None) -> Step:
    """The version before goes on serving; the record says why."""
    return Step("abort", replace(swap, phase="aborted", reason=reason, tensor=tensor))
