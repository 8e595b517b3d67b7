"""The swap as a pure state machine: what the records say now, in; the one next step, out.

                          together: all STAGED
                 .-------------------------------------------------.
    (target) --> prepare --all STAGED--> canary --flipped, probed--> commit --all confirmed--> done
        |          |      rolling           |                         ^
        |          v                        v                         `-- one transaction with the `active` record
        `------> aborted <------------------'

    (no swap, or one that is done or aborted) --target with a new id--> prepare      or aborted, if it is not ready
    prepare --every participant STAGED, with the published fingerprint--> commit     together
                                                                    `---> canary     rolling, with a trial
    canary  --the canary runs its trial, its probe passed, the others still STAGED--> commit
    prepare, canary --error, fingerprint that differs, probe failed, deadline--> aborted
    prepare, canary --participant gone, torn or draining--> aborted, or the same without it (`on_lost`), if any is left
    commit  --every participant confirmed, gone or TORN, or confirmation overdue--> done
            `--likewise, but none confirmed, and one is TORN--> revert, with the `active` record before
    revert  --every participant that is left confirmed, or overdue--> aborted

A trial is a share of the commit record that gets no requests: the version that stands stays active, and the canary runs
another. Like every instance it runs what the commit record says of it; while that is a trial it is COMMITTING, which
keeps it out of routing. The commit gives all instances what the canary runs already. An abort takes the trial out, and
the commit record is as it was. A rolling swap has nothing to try when no version is active, when its target is, or when
there are no participants: it is then done together.

Every step is written by the leader, in a transaction that compares the leader's key and all it was decided on: a
deposed leader writes nothing. A leader that dies leaves records from which the next one goes on; a probe (`trial`) that
was under way is run again.

A version whose tensors differ from those of the active one takes other engines. Its swap is rolling, and no instance
stages before its `turn`. The one whose turn it is, the canary for its trial first, drains, starts its process anew with
the form of the version (`forms`), stages the version and flips. One restarts at a time, and while it is away its record
may be, too. A failure before the commit aborts the swap. A failure after the commit reverts it, and the instances that
have restarted return, one by one, likewise:

    canary  --as above, but the others need not have staged it--> commit
    commit  --each in its turn has come back with the version--> done
            `--one does not start, does not load it, or is not back in time--> revert, with the `active` record before
    revert  --each in its turn has come back with the version before--> aborted

A commit may carry a split: each participant is then asked for the version of its share, and is ready when it has staged
that or runs it already. The leader computes who runs what when it opens the swap (`placement`). When instances come or
go, so that versions of the committed split have other numbers of them than they should, the leader opens a swap by
itself that places them anew; after one that failed it waits for REPLACE_S.

A version that is asked for while no instance is there is committed, and the swap stays in its phase commit until one
has run it (`untried`). If the version turns out to be one that no instance can run, the one before serves again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from weightsync.control import placement
from weightsync.control.records import (
    ActiveRecord,
    ErrorInfo,
    InstanceRecord,
    ShareRecord,
    SplitRecord,
    StartRecord,
    SwapMode,
    SwapRecord,
    TargetRecord,
    VersionRecord,
    VersionState,
    shared_versions,
)
from weightsync.control.trial import ProbeResult
from weightsync.errors import SwapError

CONFIRM_S = 45.0  # for an instance to say after a commit that it flipped: 30 s for its `finish` requests, and more
ROLLING_DRAIN_S = 30.0
RESTART_S = 600.0  # for an instance to start anew and to load a version; one that fails says so sooner
REPLACE_S = 30.0
TOO_OLD = "one of an older release never does: swap with mode together until all instances are upgraded"
CANNOT_READ = "one of an older release never is, as it cannot read of its trial: upgrade all instances first"
NOT_RUN = "a newer version was asked for before an instance had run it"
MISFITS = frozenset({"config_mismatch", "missing_tensor", "unexpected_tensor", "shape_mismatch", "dtype_mismatch"})
PARTICIPATING = frozenset({"SERVING", "STAGING", "STAGED", "COMMITTING"})


@dataclass(frozen=True)
class View:
    """The records of one model at a time `now` (unix seconds), when the leader has seen the swap in its phase for
    `lasted_s`.

    Only `lasted_s` ends a phase: leaders have different clocks, and one whose clock is ahead would cut short what the
    leader before it has begun.
    `target_state` and `target_fingerprint` are of the version in question: the swap's while one is in flight, else the
    target's; None and "" if there is no such version. `probe` is what the probe of this swap's canary came to.
    `changes` says why engines of the version before cannot take the target, "" if they can; `starts` what became of
    restarts.
    `refused` says why a version that the target asks for may not be swapped in, "" if it may. `shared` has the versions
    that splits name, and that of the commit record, as far as they exist.
    """

    now: float
    target: TargetRecord | None
    target_state: VersionState | None
    swap: SwapRecord | None
    active: ActiveRecord | None
    instances: Mapping[str, InstanceRecord]
    target_fingerprint: str = ""
    probe: ProbeResult | None = None
    changes: str = ""
    refused: str = ""
    starts: Mapping[str, StartRecord] = field(default_factory=dict)
    shared: Mapping[int, VersionRecord] = field(default_factory=dict)
    lasted_s: float = 0.0

    def left_s(self, swap: SwapRecord) -> float:
        """Seconds that the phase of this view's swap may still last."""
        return phase_s(swap) - self.lasted_s


@dataclass(frozen=True)
class Step:
    """Write `swap`, and `active` where that changes: with a trial, its end, a commit or its revert; and which version
    an instance has `refused`."""

    kind: Literal["open", "refuse", "leave", "try", "commit", "turn", "revert", "abort", "finish"]
    swap: SwapRecord
    active: ActiveRecord | None = None
    refused: int | None = None


@dataclass(frozen=True)
class Ask:
    """Probe this canary, and decide again with the result; at the latest in `left_s` seconds."""

    swap: SwapRecord
    canary: InstanceRecord
    left_s: float


@dataclass(frozen=True)
class Wait:
    """Nothing to do until a record changes, or for `left_s` seconds."""

    left_s: float | None = None


def decide(view: View) -> Step | Ask | Wait:
    """The next step of the model's swap."""
    swap = view.swap
    if swap is not None and swap.phase == "prepare":
        return _prepare(view, swap)
    if swap is not None and swap.phase == "canary":
        return _canary(view, swap)
    if swap is not None and swap.phase in ("commit", "revert"):
        active = view.active
        if active is None or active.swap_id != swap.id:
            return Step("finish", replace(swap, phase="done", reason="overtaken by a later commit"))
        return _take_turns(view, swap, active) if swap.changes else _confirm(view, swap, active)
    if view.target is not None and (swap is None or not swap.answers(view.target)):
        return _open(view, view.target)
    return _replace(view)


def in_flight(swap: SwapRecord | None) -> bool:
    return swap is not None and swap.phase in ("prepare", "canary", "commit", "revert")


def untried(swap: SwapRecord | None) -> bool:
    """Whether it was committed while no instance was there to try it, and no instance has run it yet."""
    if swap is None or swap.phase != "commit" or swap.participants:
        return False
    return swap.former is None or swap.former.version != swap.target


def phase_of(swap: SwapRecord | None) -> tuple[str, ...]:
    """Names a phase of a swap, or in it a turn: no other one has the same name."""
    return (swap.id, swap.phase, swap.turn or "") if swap is not None else ()


def phase_s(swap: SwapRecord) -> float:
    """How many seconds the phase of a swap in flight may last, under each leader anew; with turns, each turn. Infinite
    while it waits for an instance to come."""
    if untried(swap):
        return math.inf
    if swap.phase == "prepare":
        return swap.deadline - swap.opened_at
    if swap.changes:
        return swap.drain_s + RESTART_S
    if swap.phase == "canary":
        return swap.drain_s + swap.deadline - swap.opened_at  # the time of the request once more
    return confirm_within_s(swap)


def confirm_within_s(swap: SwapRecord) -> float:
    """How long after its commit a swap is done whoever has not confirmed; who flip in turn get their time each."""
    each = RESTART_S if swap.changes else CONFIRM_S
    return CONFIRM_S if swap.mode == "together" else len(swap.participants) * (each + swap.drain_s)


def on_trial(instance: InstanceRecord, active: ActiveRecord | None) -> bool:
    """Whether it is the canary, and runs what it is to try."""
    asked = active.of(instance.id) if active is not None else None
    if asked is None or asked.trial is None:
        return False
    runs = (instance.active_version, instance.active_epoch) == (asked.version, asked.epoch)
    return runs and instance.state == "COMMITTING"


def confirmed(instance: InstanceRecord, active: ActiveRecord) -> bool:
    """Whether it says that it serves that commit, and not only tries it."""
    return instance.active_epoch >= active.epoch and instance.state != "COMMITTING"


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
        split=target.split,
        former=view.active if participants else _former(view),
    )
    if (reason := _not_ready(view, target)) is not None:
        return Step("refuse", replace(swap, phase="aborted", reason=reason))
    if target.split is not None:
        return _open_split(view, swap, target.split)
    if view.changes and view.active is not None and participants:
        return _open_restarts(view, swap)
    return Step("open", swap)


def _former(view: View) -> ActiveRecord | None:
    """The commit record to return to: the last that an instance has run; None if there is none."""
    active, last = view.active, view.swap
    overtaken = active is not None and last is not None and (last.id, last.reason) == (active.swap_id, NOT_RUN)
    return last.former if last is not None and overtaken else active


def _not_ready(view: View, target: TargetRecord) -> str | None:
    states = {target.version: view.target_state}
    for version in shared_versions(target.split):
        states[version] = view.shared[version].state if version in view.shared else None
    for version, state in states.items():
        if state != "ready":
            what = "does not exist" if state is None else f"is {state}"
            return f"version {version} {what}: choose one that is ready"
    return view.refused or None


def _open_split(view: View, swap: SwapRecord, split: SplitRecord) -> Step:
    """A swap that gives each participant its version."""
    reason = f"a split is of versions that one engine can run ({view.changes})" if view.changes else ""
    try:
        found = placement.place(swap.target, split, {name: view.instances[name] for name in swap.participants})
    except SwapError as error:
        reason = reason or str(error)
    if reason:
        return Step("refuse", replace(swap, phase="aborted", reason=reason))
    shares = tuple(replace(share, fingerprint=view.shared[share.version].fingerprint) for share in found.shares)
    swap = replace(swap, split=replace(found, shares=shares))
    moving = _moving(view, swap)
    return Step("open", swap if moving else replace(swap, mode="together"))


def _replace(view: View) -> Step | Wait:
    """Places the versions of the committed split anew, if instances have come or gone."""
    active, swap = view.active, view.swap
    if active is None or active.split is None or view.target is None:
        return Wait()
    present = {name: i for name, i in view.instances.items() if i.state in PARTICIPATING}
    if any(i.active_epoch != active.epoch for i in present.values()) or not placement.is_off(active, present):
        return Wait()  # somebody still follows the last commit, and says so when it has
    last = swap if swap is not None and "+" in swap.id else None
    if last is not None and last.phase == "aborted" and view.lasted_s < REPLACE_S:
        return Wait(REPLACE_S - view.lasted_s)
    number = int(last.id.partition("+")[2]) + 1 if last is not None else 1
    wish = replace(view.target, version=active.version, split=active.split, mode="together", on_lost="abort")
    known = view.shared.get(active.version)
    seen = replace(view, target_state=known.state if known is not None else None, changes="")
    step = _open(seen, replace(wish, id=f"{view.target.id}+{number}"))
    return step if step.kind == "open" else Wait()


def _moving(view: View, swap: SwapRecord) -> list[str]:
    """The participants that the swap gives another version than they run."""
    return [name for name in swap.participants if not _has(view, view.instances[name], swap)]


def _open_restarts(view: View, swap: SwapRecord) -> Step:
    """A swap that starts the engines anew, if somebody serves meanwhile."""
    drain_s = swap.drain_s if swap.mode == "rolling" else swap.drain_s or ROLLING_DRAIN_S
    swap = replace(swap, mode="rolling", drain_s=drain_s, changes=view.changes)
    fixed = [name for name in swap.participants if not view.instances[name].restarts]
    served = f"version {view.active.version}" if view.active is not None else "none"
    why = f"no engine of {served}, which is active, can run it ({view.changes}), so each instance must restart: "
    if fixed:
        why += f"{fixed[0]} runs on several hosts and cannot; start a fleet of its own with that checkpoint"
    elif len(swap.participants) < 2:
        why += (
            f"{swap.participants[0]} is the only one, and nobody would serve meanwhile; run two (`hotswap up "
            "--instances 2`), or stop the server and start it with that checkpoint (--model DIR --fresh)"
        )
    else:
        return Step("open", swap)
    return Step("refuse", replace(swap, phase="aborted", reason=why))


def _mode(view: View, target: TargetRecord, participants: tuple[str, ...]) -> SwapMode:
    active = view.active
    if active is None or not participants or (active.version == target.version and target.split is None):
        return "together"  # there is nothing to try
    return target.mode


def _prepare(view: View, swap: SwapRecord) -> Step | Wait:
    if (blocked := _blocked(view, swap)) is not None:
        return blocked
    if swap.changes:
        canary = min(swap.participants)
        return _try(view, replace(swap, turn=canary), canary)
    waiting = [name for name in swap.participants if not _ready(view, view.instances[name], swap)]
    if waiting and view.left_s(swap) <= 0:
        return abort(view, swap, f"not staged within {phase_s(swap):g} s by {', '.join(waiting)}")
    if waiting:
        return Wait(view.left_s(swap))
    moving = _moving(view, swap) if swap.mode == "rolling" else []
    # Others may have left, so that no instance is to try anything.
    return _try(view, swap, min(moving)) if moving else _commit(view, swap)


def _try(view: View, swap: SwapRecord, canary: str) -> Step:
    """Have the canary run what the commit will ask of it."""
    assert view.active is not None
    asked = _committed(view, swap).of(canary)
    trial = ShareRecord(asked.version, 0.0, (canary,), asked.fingerprint)
    return Step("try", replace(swap, phase="canary", canary=canary), replace(view.active, trial=trial))


def _canary(view: View, swap: SwapRecord) -> Step | Ask | Wait:
    if (blocked := _blocked(view, swap)) is not None:
        return blocked
    if swap.changes and (problem := _failed_start(view, swap)) is not None:
        return abort(view, swap, problem)
    if view.active is None or view.active.trial is None:
        return abort(view, swap, "the commit record was written anew meanwhile, without the trial")
    canary = view.instances.get(swap.canary or "")
    if canary is None:  # it restarts
        problem = f"canary {swap.canary} is not back in time; {CANNOT_READ}"
        return abort(view, swap, problem) if view.left_s(swap) <= 0 else Wait(view.left_s(swap))
    for name in () if swap.changes else swap.participants:
        if name != canary.id and not _ready(view, view.instances[name], swap):
            what = f"is {view.instances[name].state} and has not staged it any more"
            return abort(view, swap, f"instance {name} {what}")
    tries = on_trial(canary, view.active)
    if tries and view.probe is not None:
        if view.probe.ok:
            return _commit(view, swap)
        detail = view.probe.detail or "no detail given"
        return abort(view, swap, f"the probe of canary {canary.id} failed: {detail}")
    leaves = (canary.state, canary.swap_id) == ("COMMITTING", swap.id)
    if not (tries or leaves or swap.changes or _staged(canary, swap)):
        return abort(view, swap, f"canary {canary.id} is {canary.state} and has not staged it any more")
    if view.left_s(swap) <= 0:
        what = "was not probed in time" if tries else f"did not flip in time; {TOO_OLD}"
        return abort(view, swap, f"canary {canary.id} {what}")
    return Ask(swap.of(canary.id), canary, view.left_s(swap)) if tries else Wait(view.left_s(swap))


def _blocked(view: View, swap: SwapRecord) -> Step | None:
    """Why this swap cannot be committed any more."""
    for version in shared_versions(swap.split):
        if version not in view.shared or view.shared[version].state != "ready":
            return abort(view, swap, f"version {version} is no longer ready")
    if view.target_state != "ready":
        return abort(view, swap, f"version {swap.target} is no longer ready")
    staying = [name for name in swap.participants if name != swap.turn]  # whose turn it is may be away for it
    lost = {name: what for name in staying if (what := _lost(view, name)) is not None}
    if lost:
        return _without(view, swap, lost)
    for instance in filter(None, map(view.instances.get, swap.participants)):
        if instance.swap_id == swap.id and instance.error is not None:
            step = abort(view, swap, f"instance {instance.id}: {instance.error.message}", instance.error.tensor)
            return replace(step, refused=swap.of(instance.id).target) if _at_fault(instance.error) else step
    if (reason := _odd_fingerprint(view, swap)) is not None:
        return abort(view, swap, reason)
    return None


def _at_fault(error: ErrorInfo) -> bool:
    """Whether the version is at fault, and not the instance."""
    return error.tensor is not None or error.code == "config_mismatch"


def _lost(view: View, name: str) -> str | None:
    """Why this participant will not take part any more."""
    instance = view.instances.get(name)
    state = instance.state if instance is not None else "gone"
    return None if state in PARTICIPATING else state


def _without(view: View, swap: SwapRecord, lost: Mapping[str, str]) -> Step:
    """The swap among those that are left, if that was asked for; the canary cannot be left out of its own trial."""
    left = tuple(name for name in swap.participants if name not in lost)
    whole = swap.split is None or placement.suffices(swap.target, swap.split, left)
    if swap.on_lost == "continue" and left and whole and swap.canary not in lost:
        return Step("leave", replace(swap, participants=left))
    name, what = next(iter(lost.items()))
    return abort(view, swap, f"instance {name} is {what}")


def _staged(instance: InstanceRecord, swap: SwapRecord) -> bool:
    target = swap.of(instance.id).target
    return instance.swap_id == swap.id and instance.state == "STAGED" and instance.staged_version == target


def _has(view: View, instance: InstanceRecord, swap: SwapRecord) -> bool:
    """Whether it runs already what the swap asks of it, as the commit that stands asked of it, too."""
    if view.active is None or instance.active_epoch != view.active.epoch:
        return False
    active, target = view.active.of(instance.id), swap.of(instance.id).target
    known = bool(instance.fingerprint and active.fingerprint)
    same = not known or instance.fingerprint == active.fingerprint
    return instance.state in PARTICIPATING and same and instance.active_version == active.version == target


def _ready(view: View, instance: InstanceRecord, swap: SwapRecord) -> bool:
    return _staged(instance, swap) or _has(view, instance, swap)


def _odd_fingerprint(view: View, swap: SwapRecord) -> str | None:
    """Names an instance that built something else than was published, or than another one that builds the same way."""
    seen: dict[tuple[str, int], str] = {}
    digests: dict[tuple[str, int], tuple[str, str]] = {}
    shares = {share.version: share.fingerprint for share in swap.split.shares} if swap.split is not None else {}
    for instance in filter(None, map(view.instances.get, swap.participants)):
        name, built = instance.id, _built(view, instance, swap)
        if not built:
            continue
        version = swap.of(name).target
        published = shares.get(version, view.target_fingerprint)
        layout, _, digest = instance.built.partition(":")
        first, expected = digests.setdefault((layout, version), (name, digest))
        if digest != expected:
            return (
                f"instances {first} and {name} made different weights of the same version (digests {expected} and "
                f"{digest}): one of them is faulty; restart both, and activate the version again"
            )
        if published and built != published:
            return (
                f"instance {name} built other weights than were published (fingerprint {built}, published "
                f"{published}): nothing is served of them; publish the version again"
            )
        if seen.setdefault((instance.path, version), built) != built:
            return f"instance {name} staged other weights than the rest (fingerprints differ)"
    return None


def _built(view: View, instance: InstanceRecord, swap: SwapRecord) -> str | None:
    """The fingerprint of what it built for this swap, if it has and if it says."""
    if on_trial(instance, view.active):
        return instance.fingerprint
    mine = instance.swap_id == swap.id and instance.staged_version == swap.of(instance.id).target
    return instance.staged_fingerprint if mine else None


def _committed(view: View, swap: SwapRecord) -> ActiveRecord:
    """The commit record of this swap."""
    before = view.active
    former = swap.former or before
    previous = former.version if former is not None else None
    if former is not None and former.version == swap.target:
        previous = former.previous  # committing what is active already must not lose the way back
    return ActiveRecord(
        version=swap.target,
        epoch=before.epoch + 1 if before is not None else 1,
        previous=previous,
        swap_id=swap.id,
        committed_at=view.now,
        fingerprint=view.target_fingerprint,
        split=swap.split,
    )


def _commit(view: View, swap: SwapRecord) -> Step:
    active, former = view.active, swap.former
    if active is not None and any(confirmed(i, active) for i in view.instances.values()):
        former = active  # an instance has come since it opened
    if not swap.participants and former is not None:
        # It may take days until an instance comes, and each version that can be returned to holds a slot.
        swap = replace(swap, former=replace(former, previous=None, split=None))
    return Step("commit", replace(swap, phase="commit"), _committed(view, swap))


def _confirm(view: View, swap: SwapRecord, active: ActiveRecord) -> Step | Wait:
    if untried(swap):
        return _first_try(view, swap, active)
    alive = [view.instances[name] for name in swap.participants if name in view.instances]
    late = [i.id for i in alive if not confirmed(i, active) and i.state in PARTICIPATING]
    if late and view.left_s(swap) > 0:
        return Wait(view.left_s(swap))
    if swap.phase == "revert":
        return Step("abort", replace(swap, phase="aborted"))
    torn = next((i for i in alive if i.state == "TORN"), None)
    if torn and swap.former is not None and not any(confirmed(i, active) for i in view.instances.values()):
        why = torn.error.message if torn.error is not None else "TORN"
        return _revert(view, swap, f"no instance could flip ({torn.id}: {why})")
    reason = f"no confirmation from {', '.join(late)}" if late else _torn(swap, view)
    return Step("finish", replace(swap, phase="done", reason=reason))


def _first_try(view: View, swap: SwapRecord, active: ActiveRecord) -> Step | Wait:
    """No instance was there to refuse the version. The first that runs it ends the swap; the word of the first that
    cannot, for the version's fault, has the version before committed again. A newer wish does not wait for either."""
    if any(confirmed(i, active) for i in view.instances.values()):
        return Step("finish", replace(swap, phase="done"))
    failed = {name: start.error for name, start in view.starts.items() if start.swap_id == swap.id}
    behind = {i.id: i.error for i in view.instances.values() if i.state == "STARTING" and i.swap_id == swap.id}
    for name, error in (failed | behind).items():
        if error is None or (error.code in MISFITS and not view.changes):
            continue  # what it runs does not fit this fleet's versions, and the one before would not either
        if swap.former is not None and (name in failed or _at_fault(error)):
            return replace(_revert(view, swap, f"instance {name}: {error.message}"), refused=swap.target)
    if view.target is not None and not swap.answers(view.target):
        return Step("finish", replace(swap, phase="done", reason=NOT_RUN))
    return Wait()


def _failed_start(view: View, swap: SwapRecord) -> str | None:
    """Why the instance whose turn it is has not come back with the version, if it says so."""
    name = swap.turn or ""
    tried, instance = view.starts.get(name), view.instances.get(name)
    if tried is not None and tried.swap_id == swap.id and tried.error is not None:
        return f"instance {name} did not start with it: {tried.error.message}"
    if instance is not None and instance.state == "TORN":
        return f"instance {name} is TORN"
    if instance is not None and instance.swap_id == swap.id and instance.error is not None:
        return f"instance {name}: {instance.error.message}"
    return None


def _take_turns(view: View, swap: SwapRecord, active: ActiveRecord) -> Step | Wait:
    """After the commit: who does not run the active version yet restarts, one at a time."""
    names, here = swap.participants, view.instances
    behind = [name for name in names if name not in here or not confirmed(here[name], active)]
    if swap.turn in behind and view.left_s(swap) > 0:
        problem = _failed_start(view, swap) if swap.phase == "commit" else None
        return _revert(view, swap, problem) if problem is not None else Wait(view.left_s(swap))
    tried = view.starts.get(swap.turn or "")
    began = swap.turn in here or (tried is not None and tried.swap_id == swap.id)
    if swap.turn in behind and swap.phase == "commit" and began:
        return _revert(view, swap, f"instance {swap.turn} is not back in time")
    passed = names[: names.index(swap.turn) + 1] if swap.turn in names else ()
    left = [name for name in behind if name not in passed and name in here]  # who has gone comes back by itself
    if left:
        return Step("turn", replace(swap, turn=left[0]))
    if swap.phase == "revert":
        return Step("abort", replace(swap, phase="aborted", turn=None))
    return Step("finish", replace(swap, phase="done", turn=None, reason=_torn(swap, view)))


def _revert(view: View, swap: SwapRecord, problem: str) -> Step:
    """Commit the version before again; who has restarted returns to it, the one whose turn it is first."""
    assert swap.former is not None
    assert view.active is not None
    active = replace(swap.former, epoch=view.active.epoch + 1, swap_id=swap.id, committed_at=view.now)
    order = tuple(sorted(swap.participants, key=lambda name: name != swap.turn))
    back = replace(swap, phase="revert", participants=order, reason=problem)
    return Step("revert", back, active)


def _torn(swap: SwapRecord, view: View) -> str | None:
    """The commit stands; who could not follow it is out of routing and named here."""
    missing = not_flipped(swap, view.active, view.instances)
    return f"not flipped: {', '.join(missing)}" if missing else None


def not_flipped(
    swap: SwapRecord, active: ActiveRecord | None, instances: Mapping[str, InstanceRecord]
) -> tuple[str, ...]:
    """The participants that are gone or do not run what the swap has committed; none once another commit came."""
    if active is None or active.swap_id != swap.id:
        return ()
    return tuple(n for n in swap.participants if n not in instances or instances[n].active_epoch < active.epoch)


def abort(view: View, swap: SwapRecord, reason: str, tensor: str | None = None) -> Step:
    """The version before goes on serving, and a trial of another ends; the record says why."""
    active = view.active
    ends = replace(active, trial=None) if active is not None and active.trial is not None else None
    return Step("abort", replace(swap, phase="aborted", reason=reason, tensor=tensor), ends)
