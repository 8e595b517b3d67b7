"""Two-person approval: what one identity asks for waits until another one approves it, or lapses.

    gateway/policy               PolicyRecord: which requests wait, and for how long
    gateway/pending/{model}/{id} PendingRecord: one that waits

Without a policy nothing waits. The approval, the removal of what waited and the request itself are one transaction with
their entries in the ledger: a request is approved once, and what was approved is what was asked for. Identities are
told apart by their credentials: keys by their ids, tokens by issuer and subject.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Literal, get_args

from server.errors import HttpError
from server.gateway.access.records import By
from weightsync.control import swap
from weightsync.control.chain import Action, LedgerEntry, append
from weightsync.control.records import Keys, TargetRecord
from weightsync.control.strict_json import Record
from weightsync.control.swap import Approval
from weightsync.errors import Conflict as StoreConflict
from weightsync.store import MISSING, KeyValue, Store

Guarded = Literal["activate", "split", "rollback", "release", "policy"]
GUARDED: tuple[Guarded, ...] = get_args(Guarded)
POLICY = "gateway/policy"
PENDING = "gateway/pending/"
BY_RELEASE: frozenset[Guarded] = frozenset({"activate", "split"})  # what a release does by itself
MOST = 100  # requests of one model that wait


@dataclass(frozen=True)
class PolicyRecord(Record):
    """`approvals`: the requests that need a second identity; what waits lapses after `lapse_s` seconds."""

    approvals: tuple[Guarded, ...] = ()
    lapse_s: float = 3600.0


@dataclass(frozen=True)
class ReleaseWish(Record):
    """A release that was asked for, by the policy in `text`."""

    version: int
    text: str


@dataclass(frozen=True)
class PendingRecord(Record):
    """A request that waits, for a version (`target`), a `release` or a `policy`. `digest` tells who asked from others;
    times are unix seconds."""

    id: str
    action: Guarded
    who: str
    digest: str
    reason: str
    since: float
    until: float
    target: TargetRecord | None = None
    policy: PolicyRecord | None = None
    release: ReleaseWish | None = None

    @property
    def version(self) -> int | None:
        """That it is about."""
        return self.target.version if self.target is not None else self.release.version if self.release else None

    @property
    def subject(self) -> str:
        """The request in words, for the ledger."""
        if self.policy is not None:
            return f"policy: {in_words(self.policy)}"
        return f"{self.action} asked for by {self.who}"


def in_words(policy: PolicyRecord) -> str:
    """For the ledger."""
    needed = ", ".join(policy.approvals) or "nothing"
    return f"{needed} needs approval, within {policy.lapse_s:g} s"


class Approvals:
    """The policy, and what waits for approval to change the weights of `model`. Every method raises StoreError."""

    def __init__(self, store: Store, model: str) -> None:
        self._store, self._keys, self._prefix = store, Keys(model), f"{PENDING}{model}/"

    async def policy(self) -> PolicyRecord:
        """The one in force."""
        return (await self._policy())[0]

    async def hold(
        self,
        action: Guarded,
        by: By,
        target: TargetRecord | None = None,
        policy: PolicyRecord | None = None,
        release: ReleaseWish | None = None,
    ) -> PendingRecord | None:
        """Has a request wait, if the policy says so; None: it may go on. Raises SwapError, HttpError (409)."""
        rule = await self.policy()
        needed = BY_RELEASE | {action} if action == "release" else {action}
        if not needed & set(rule.approvals):
            return None
        if target is not None:
            await swap.ready_revisions(self._store, self._keys, target)
        if len(await self.waiting()) >= MOST:
            raise HttpError(409, f"{MOST} requests wait for approval; approve or refuse some.", code="approvals_full")
        now = time.time()
        until = now + rule.lapse_s
        digest = by.digest.hex()
        about = target, policy, release
        pending = PendingRecord(secrets.token_hex(6), action, by.who, digest, by.reason, now, until, *about)
        entry = self._entry("approval_wait", by.who, pending, by.reason)
        await append(self._store, {self._key(pending.id): MISSING}, {self._key(pending.id): pending.to_json()}, entry)
        return pending

    async def waiting(self) -> list[PendingRecord]:
        """Oldest first; those that have lapsed are taken away."""
        found = []
        for kv in (await self._store.list(self._prefix))[0]:
            pending = PendingRecord.from_json(kv.value)
            if not await self._lapsed(kv, pending):
                found.append(pending)
        return sorted(found, key=lambda pending: pending.since)

    async def find(self, pending_id: str) -> tuple[PendingRecord, int]:
        """One that waits, and its revision. Raises HttpError (404; 409 when it has lapsed)."""
        kv = await self._store.get(self._key(pending_id))
        if kv is None:
            raise HttpError(
                404, f"No request {pending_id!r} waits; `hotswap approve` lists those.", code="unknown_approval"
            )
        pending = PendingRecord.from_json(kv.value)
        if await self._lapsed(kv, pending):
            raise HttpError(409, f"The request {pending_id} has lapsed; ask for it again.", code="approval_lapsed")
        return pending, kv.mod_revision

    def consent(self, pending: PendingRecord, revision: int, by: By) -> Approval:
        """The approval of `by`. Raises HttpError (403) for whoever asked."""
        if pending.digest == by.digest.hex():
            raise HttpError(
                403,
                "Who has asked for it cannot approve it; somebody else must, with a key or token of their own.",
                code="same_identity",
            )
        return Approval(self._key(pending.id), revision, by.who, by.reason)

    async def refuse(self, pending_id: str, by: By) -> PendingRecord:
        """Takes it away; who has asked may do so, too. Raises HttpError (404, 409)."""
        pending, revision = await self.find(pending_id)
        entry = self._entry("refuse", by.who, pending, by.reason)
        try:
            await append(self._store, {self._key(pending_id): revision}, {self._key(pending_id): None}, entry)
        except StoreConflict:
            raise gone(pending_id) from None
        return pending

    async def put_policy(self, policy: PolicyRecord, by: By, approval: Approval | None = None) -> None:
        """In force at once, in every gateway. Raises StoreConflict when `approval` fell or is needed by now, or another
        was quicker."""
        rule, revision = await self._policy()
        if approval is None and "policy" in rule.approvals:  # since `hold` has looked
            raise StoreConflict(POLICY, 0, revision)
        compares, puts, entries = {POLICY: revision}, {POLICY: policy.to_json()}, []
        if approval is not None:
            compares[approval.key] = approval.revision
            entries.append(LedgerEntry("approve", approval.who, reason=approval.reason, subject="policy"))
        subject = f"approved by {approval.who}" if approval is not None else ""
        entries.append(LedgerEntry("policy", by.who, reason=by.reason, subject=subject, outcome=in_words(policy)))
        gone_with_it: dict[str, bytes | None] = {approval.key: None} if approval is not None else {}
        await append(self._store, compares, {**puts, **gone_with_it}, *entries)

    async def _policy(self) -> tuple[PolicyRecord, int]:
        found = await self._store.get(POLICY)
        return (PolicyRecord.from_json(found.value), found.mod_revision) if found is not None else (PolicyRecord(), 0)

    async def _lapsed(self, kv: KeyValue, pending: PendingRecord) -> bool:
        if time.time() < pending.until:
            return False
        try:
            entry = self._entry("lapse", "gateway", pending)
            await append(self._store, {kv.key: kv.mod_revision}, {kv.key: None}, entry)
        except StoreConflict:  # somebody else has taken it away
            pass
        return True

    def _entry(self, action: Action, who: str, pending: PendingRecord, reason: str = "") -> LedgerEntry:
        version, swap = pending.version, pending.target.id if pending.target is not None else ""
        model = self._keys.model if version is not None else ""
        subject, outcome = pending.subject, f"request {pending.id}"
        return LedgerEntry(
            action, who, model=model, version=version, swap=swap, subject=subject, reason=reason, outcome=outcome
        )

    def _key(self, pending_id: str) -> str:
        return f"{self._prefix}{pending_id}"


def gone(pending_id: str) -> HttpError:
    """The error where another user has just approved or refused the request."""
    return HttpError(409, f"The request {pending_id} does not wait any more.", code="approval_gone")
