"""A publisher's side of the store: the lineage it holds, the slots it claims, the versions it makes ready.

hold        models/{m}/publishers/{lineage}: token + 1, before the first write; writes compare that record's revision
claim       counter + 1 and the `publishing` record, under the lease, in one transaction
make_ready  the record loses its lease and becomes `ready`, with what it does not publish itself carried on from the
            version it is based on; with it the schemas, if they are the first, its form, if it is a new one, and the
            target
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weightsync.control import swap
from weightsync.control.board import readable_versions
from weightsync.control.chain import LedgerEntry, append
from weightsync.control.editions import EditionRecord, key_of, outdated, prefix_of, readable
from weightsync.control.forms import check_config, completed, differing, kept_files
from weightsync.control.hosts import host_of, local_name, slot_name
from weightsync.control.lease import LeaseKeeper
from weightsync.control.parts import BASE, LORA, check_without, compose, has_schema, slots_of, still_there
from weightsync.control.records import (
    MODELS_PREFIX,
    ActiveRecord,
    CounterRecord,
    FormRecord,
    Keys,
    PartRecord,
    PublisherRecord,
    SwapRecord,
    TargetRecord,
    VersionRecord,
)
from weightsync.control.strict_json import shown
from weightsync.errors import (
    ArenaError,
    Conflict,
    LeaseLost,
    PublishError,
    StalePublisher,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    unknown_model,
)
from weightsync.format.manifest import Schema, diff_schema, require_names, require_same_schema
from weightsync.memory.arena import Arena, SlotLock, pool_of
from weightsync.peer.copies import kept_digests
from weightsync.store.protocol import MISSING, KeyValue, Store

CLAIM_ATTEMPTS = 100
Write = tuple[str, dict[str, int], dict[str, bytes | None], Sequence[LedgerEntry]]
"""The write that ends a claim: the key that shows it, revisions that must hold, values, and entries of the ledger."""
_SLOT = re.compile(rb'"slot":"([^"\\]+)"')


class PublishSession:
    """Belongs to the event loop of its store. Every method raises StoreUnavailable."""

    def __init__(self, store: Store, keys: Keys, lineage: str, lease_ttl_s: float, keep: int, host: str = "") -> None:
        self.store, self.keys, self.lineage, self.host = store, keys, lineage, host
        self._lease_ttl_s, self._keep = lease_ttl_s, keep
        self._lease: LeaseKeeper | None = None
        self._schemas: dict[str, Schema] = {}
        self._form: tuple[str, FormRecord, Schema] | None = None  # the last one asked for, by its digest
        self._other_slots: set[str] = set()  # of editions, and of versions that cannot be read
        self._claimed_again: dict[int, int] = {}  # the revisions of claims, by version
        self._token = self._fence = 0
        self._holding = asyncio.Lock()
        self.who = self.reason = ""  # for the ledger
        self.new_model = False  # others may be served alone

    async def hold(self) -> None:
        """Become the holder of the lineage, once; a publisher that held it before is stale from now on."""
        key = self.keys.publisher(self.lineage)
        async with self._holding:
            while not self._fence:
                found = await self.store.get(key)
                self._token = PublisherRecord.from_json(found.value).token + 1 if found else 1
                mine = PublisherRecord(self._token, os.getpid(), socket.gethostname()).to_json()
                with contextlib.suppress(Conflict):
                    self._fence = await self.store.compare_and_swap(key, _revision(found), mine)

    async def schema(self, part: str = BASE, onto: int | None = None) -> Schema | None:
        """The tensors of the version that a new one carries on (`onto`, if one is asked for), or of a part of it;
        adapters have none. Raises PublishError."""
        if not has_schema(part):
            return None
        if part == BASE and (basis := (await self._basis(onto))[0]) is not None and basis.form:
            return (await self._form_of(basis.form))[1]
        if part not in self._schemas and (found := await self.store.get(self.keys.part_schema(part))) is not None:
            self._schemas[part] = Schema.from_json(found.value)
        return self._schemas.get(part)

    async def check_without(self, without: Collection[str], brought: Container[str], onto: int | None) -> None:
        """Whether a version may take these parts away. Raises PublishError."""
        if without:
            check_without(without, brought, (await self._basis(onto))[0])

    async def check(self, schema: Schema, config: str | None, onto: int | None) -> None:
        """Whether a base model of these tensors may be published: those of the version before it, or others with a
        configuration. `config`, the text of config.json, must fit. Raises TensorError, PublishError.
        """
        await self._form_for((await self._basis(onto))[0], schema, config)

    async def kept(self, form: str, config: str | None) -> list[str]:
        """The files that a version of this form has of the one before it, or of the instances' model directory, as its
        checkpoint with the `config` does not have them. Raises PublishError."""
        served = (await self._form_of(form))[0].config if form else await self._own_config()
        return kept_files(served, config) if served else []

    async def claim(
        self, arena: Arena, record: VersionRecord, sizes: Mapping[str, int]
    ) -> tuple[VersionRecord, int, dict[str, SlotLock]]:
        """A free slot for each part, of `sizes` bytes, and a `publishing` record that names them.

        Raises ArenaError, PublishError.
        """
        for _ in range(CLAIM_ATTEMPTS):
            counter = await self.store.get(self.keys.counter)  # before the list: every later claim moves it
            if counter is None:
                await self.require_model()
            known = await self.versions()
            if sum(v.state == "ready" for v in known) > self._keep + 2:  # active and previous besides
                await swap.retire(self.store, self.keys, spare=self._keep)
            locks = await self._claim_slots(arena, known, sizes)
            idle = await self._idle_slots(arena, known, sizes)
            try:
                await self.hold()
                version = CounterRecord.from_json(counter.value).version + 1 if counter else 1
                named = replace(naming(record, version, locks, sizes, self.host), token=self._token)
                revision = await self._write_claim(named, _revision(counter))
                for lock in idle:  # no claim has come between: nobody names them
                    lock.path.unlink()
                for lock in locks.values():
                    lock.admit_writers()
                return named, revision, locks
            except Conflict:
                _release(locks)
                await self._require_lineage()
            except BaseException:
                _release(locks)
                await self.close()  # the record may be there all the same: it goes with its lease
                raise
            finally:
                for lock in idle:
                    lock.release()
        raise PublishError(
            f"{CLAIM_ATTEMPTS} other claims came first: are hundreds of publishers at work on one model?"
        )

    async def make_ready(
        self,
        record: VersionRecord,
        revision: int,
        published: Sequence[PartRecord],
        schemas: Mapping[str, Schema],
        target: TargetRecord | None,
        config: str | None = None,
        without: Collection[str] = (),
    ) -> int:
        """Make a claimed version visible, in one step; returns its revision. `config` as in `check`, `without` as in
        `check_without`.

        `record.base_version` is the version to carry on, if one was asked for. Raises PublishError, StalePublisher;
        StoreUnavailable when it was not made ready, or when the store does not say whether it was.
        """
        key, form = self.keys.version(record.version), ""

        async def write() -> Write:
            nonlocal form
            basis, compares = await self._basis(record.base_version)
            form, new = basis.form if basis is not None else "", None
            if BASE in schemas:
                form, new = await self._form_for(basis, schemas[BASE], config)
            check_without(without, schemas, basis)
            basis = await self._still_there(basis, schemas) if basis is not None else None
            ready = compose(replace(record, state="ready", form=form), published, basis, without)
            puts: dict[str, bytes | None] = {key: ready.to_json()}
            if new is not None:
                puts[self.keys.form(form)] = new.to_json()
            for part, schema in schemas.items():
                if part == BASE and form:
                    continue
                if has_schema(part) and await self.schema(part) is None:
                    name = self.keys.part_schema(part)
                    compares[name], puts[name] = MISSING, schema.to_json()
            if target is not None:
                puts[self.keys.target] = target.to_json()
            return key, compares, puts, self._entries(ready, target, without)

        done = await self._commit(record, revision, published, schemas, write)
        self._schemas |= {p: schema for p, schema in schemas.items() if has_schema(p) and (p != BASE or not form)}
        return done

    async def make_edition(
        self, record: VersionRecord, revision: int, part: PartRecord, *, percent: float, keep: int, age_s: float | None
    ) -> int:
        """Make a claimed version an edition of its adapter, in one step, and take away the editions that are outdated
        by it. Raises as `make_ready`."""
        name, number = part.name.removeprefix(LORA), record.version
        made = EditionRecord(
            name, number, part.slot, part.manifest_digest, part.nbytes, self.lineage, time.time(), record.step,
            percent, part.fingerprint, part.signature,
        )  # fmt: skip
        key = key_of(self.keys, name, number)

        async def write() -> Write:
            known = await self.editions("" if age_s is not None else name)
            gone = outdated(known, made, keep, age_s)
            puts = {key_of(self.keys, old.name, old.number): None for old in gone}
            outcome = f"manifest {part.manifest_digest}"
            about: dict[str, Any] = {"model": self.keys.model, "version": number, "subject": f"{part.name}@{number}"}
            entry = LedgerEntry("publish", self.who, reason=self.reason, outcome=outcome, **about)
            return key, {}, {**puts, self.keys.version(number): None, key: made.to_json()}, [entry]

        return await self._commit(record, revision, [part], {}, write)

    async def _commit(
        self,
        record: VersionRecord,
        revision: int,
        published: Sequence[PartRecord],
        schemas: Mapping[str, Schema],
        write: Callable[[], Awaitable[Write]],
    ) -> int:
        """End a claim by what `write` says, which is asked anew after a conflict; the store's revision."""
        claimed = self.keys.version(record.version)
        while True:
            key, compares, puts, entries = await write()
            compares |= {claimed: revision, self.keys.publisher(self.lineage): self._fence}
            try:
                return await append(self.store, compares, puts, *entries)
            except Conflict as conflict:
                await self._explain(conflict, schemas)
                if conflict.key == claimed:
                    with contextlib.suppress(Conflict):  # the next round says of what
                        revision = await self._claim_again(record, published)
            except StoreUnavailable:
                await self.forget(record.version, revision)  # a commit that is still on its way comes too late then
                found = await self.store.get(key)
                if found is None or found.value != puts[key]:
                    raise
                return found.mod_revision

    async def editions(self, name: str = "") -> list[EditionRecord]:
        """Those that can be read of an adapter, or of all, oldest first."""
        found = (await self.store.list(prefix_of(self.keys, name)))[0]
        return [record for record in readable({kv.key: kv.value for kv in found}) if name in ("", record.name)]

    async def withdraw(self, name: str, number: int | None) -> list[int]:
        """Take one edition of an adapter away, or all; the numbers of those that were there."""
        await self.hold()
        gone = [e.number for e in await self.editions(name) if number in (None, e.number)]
        if gone:
            subject = f"{LORA}{name}" if number is None else f"{LORA}{name}@{number}"
            entry = LedgerEntry("withdraw", self.who, model=self.keys.model, subject=subject, reason=self.reason)
            fence = {self.keys.publisher(self.lineage): self._fence}
            try:
                await append(self.store, fence, {key_of(self.keys, name, each): None for each in gone}, entry)
            except Conflict:
                await self._require_lineage()
                raise
        return gone

    async def ask_for(self, target: TargetRecord) -> int:
        """Write the target; returns its revision. Raises SwapError, StalePublisher."""
        await swap.ready_revisions(self.store, self.keys, target)  # before another publisher loses the lineage
        await self.hold()
        fence = {self.keys.publisher(self.lineage): self._fence}
        try:
            return await swap.request(self.store, self.keys, target, fence)
        except Conflict:
            await self._require_lineage()
            raise

    def _entries(
        self, ready: VersionRecord, target: TargetRecord | None, without: Collection[str]
    ) -> list[LedgerEntry]:
        """The entries of the ledger for a version that becomes ready, and for the request for it."""
        brought = [part.name for part in ready.parts if part.version == ready.version]
        parts = ", ".join([*brought, *(f"without {name}" for name in without)])
        about: dict[str, Any] = {"model": self.keys.model, "version": ready.version, "subject": parts}
        outcome = f"manifest {ready.manifest_digest}"
        made = LedgerEntry("publish", self.who, reason=self.reason, outcome=outcome, **about)
        return [made] if target is None else [made, swap.asking(self.keys, target, self.reason)]

    async def _basis(self, asked: int | None) -> tuple[VersionRecord | None, dict[str, int]]:
        """The version that a new one carries on, and revisions that must still hold when it does.

        It is the one `asked` for; else the one that is wanted (its swap may be under way); else the active one.
        """
        found = {key: await self.store.get(key) for key in (self.keys.target, self.keys.active, self.keys.swap)}
        compares = {key: _revision(found[key]) for key in (self.keys.target, self.keys.active)}
        if asked is not None and (not isinstance(asked, int) or not 0 < asked < 2**63):
            raise PublishError(f"onto cannot be {shown(asked)}: pass the number of a version")
        for version in [asked] if asked is not None else wanted(*found.values()):
            key = self.keys.version(version)
            kv = await self.store.get(key)
            record = VersionRecord.readable(kv.key, kv.value) if kv else None
            if record is not None and record.state == "ready":
                return record, {**(compares if asked is None else {}), key: _revision(kv)}
        if asked is not None:
            raise PublishError(f"version {asked} cannot be built upon: it is not ready, or has been retired")
        return None, compares

    async def _form_for(
        self, basis: VersionRecord | None, schema: Schema, config: str | None
    ) -> tuple[str, FormRecord | None]:
        """The form of a version with these tensors that carries on `basis`, and its record if that is to be written.

        Raises TensorError, PublishError.
        """
        served: Schema | None = None
        if basis is not None and basis.form:
            form, served = await self._form_of(basis.form)
            before = form.config
        else:
            before = await self._own_config()
            if (found := await self.store.get(self.keys.schema)) is not None:
                served = Schema.from_json(found.value)
        alike, keys = served is not None and not diff_schema(served, schema), tuple[str, ...]()
        if alike and config:  # without an instance that has told its own it may be another, and is the version's then
            keys = await asyncio.to_thread(differing, before, config) if before else ("config.json",)
        if alike and not keys:
            return (basis.form if basis is not None else ""), None
        if served is not None:
            (require_same_schema if config is None else require_names)(served, schema)
        if config is None:
            return "", None
        check_config(before or config, config)
        new = FormRecord(schema.to_json().decode(), completed(before or config, config))
        return new.digest, new

    async def _own_config(self) -> str:
        """The configuration of the instances' model directory; "" if none has told it."""
        found = await self.store.get(self.keys.config)
        return found.value.decode() if found is not None else ""

    async def _form_of(self, digest: str) -> tuple[FormRecord, Schema]:
        """Raises PublishError."""
        if self._form is None or self._form[0] != digest:
            found = await self.store.get(self.keys.form(digest))
            if found is None:
                raise PublishError(f"the form {digest} of the version before is not in the store: is it another store?")
            record = FormRecord.from_json(found.value)
            self._form = digest, record, Schema.from_json(record.tensors.encode())
        return self._form[1:]

    async def _still_there(self, basis: VersionRecord, schemas: Mapping[str, Schema]) -> VersionRecord | None:
        several = self.host or any(host_of(slot) for slot in slots_of(basis))
        copied = await kept_digests(self.store, self.keys, [basis]) if several else set()
        return await asyncio.to_thread(still_there, basis, schemas.keys(), self.host, copied)

    async def forget(self, version: int, revision: int) -> None:
        """Remove a `publishing` record that is still ours; if the store is away, let its lease end."""
        revision = self._claimed_again.pop(version, revision)
        try:
            await self.store.txn({self.keys.version(version): revision}, {self.keys.version(version): None})
        except Conflict:
            pass
        except StoreError:
            if self._lease is not None:
                await self._lease.stop()

    async def versions(self) -> list[VersionRecord]:
        """Those that can be read. The slots that other records name stay in use."""
        found = (await self.store.list(self.keys.versions))[0]
        unread = (kv.value for kv in found if VersionRecord.readable(kv.key, kv.value) is None)
        editions = (kv.value for kv in (await self.store.list(prefix_of(self.keys)))[0])
        self._other_slots = {slot.decode() for raw in (*unread, *editions) for slot in _SLOT.findall(raw)}
        return readable_versions(found)

    async def require_model(self) -> None:
        """Raises PublishError if instances serve other models alone, and this one, which may not be new, has no
        version."""
        if self.new_model or await self.store.get(self.keys.counter) is not None:
            return
        with contextlib.suppress(StoreRefused):  # an etcd with roles shows no other model
            found = (await self.store.list(MODELS_PREFIX))[0]
            served = {name.removeprefix(MODELS_PREFIX) for kv in found if (name := kv.key.rpartition("/instances/")[0])}
            if served and self.keys.model not in served:
                raise unknown_model(self.keys.model, served)

    async def close(self) -> None:
        """End the lease, and with it open drafts; the next claim takes a new one."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            with contextlib.suppress(StoreError):
                await lease.end()

    async def _claim_slots(
        self, arena: Arena, known: list[VersionRecord], sizes: Mapping[str, int]
    ) -> dict[str, SlotLock]:
        locks: dict[str, SlotLock] = {}
        try:
            for part, nbytes in sizes.items():
                locks[part] = await self._claim_slot(arena, known, part, nbytes)
        except BaseException:
            _release(locks)
            raise
        return locks

    async def _idle_slots(self, arena: Arena, known: list[VersionRecord], sizes: Mapping[str, int]) -> list[SlotLock]:
        """The slots of parts that no version has, locked: the parts were taken away, or their publisher failed."""
        kept = {part.name for v in known if v.state != "retired" for part in v.parts} | sizes.keys()
        return await asyncio.to_thread(arena.idle, self.keys.model, kept, self._slots_in_use(known))

    async def _claim_slot(self, arena: Arena, known: list[VersionRecord], part: str, nbytes: int) -> SlotLock:
        pool = pool_of(self.keys.model, part)
        try:
            return await asyncio.to_thread(arena.claim, pool, nbytes, self._slots_in_use(known))
        except ArenaError as error:
            if error.code != "arena_full" or not await swap.retire(self.store, self.keys, spare=0):
                raise
            in_use = self._slots_in_use(await self.versions())
            return await asyncio.to_thread(arena.claim, pool, nbytes, in_use)

    def _slots_in_use(self, versions: list[VersionRecord]) -> set[str]:
        """Paths on this host."""
        named = {slot for v in versions if v.state != "retired" for slot in slots_of(v)} | self._other_slots
        return {path for slot in named if (path := local_name(slot, self.host)) is not None}

    async def _write_claim(self, record: VersionRecord, counter_revision: int) -> int:
        compares = {self.keys.counter: counter_revision, self.keys.publisher(self.lineage): self._fence}
        return await self._on_lease(record, compares, {self.keys.counter: CounterRecord(record.version).to_json()})

    async def _claim_again(self, record: VersionRecord, published: Sequence[PartRecord]) -> int:
        """The revision of a new `publishing` record for a version whose lease has ended, as the lease of a process does
        that was stopped for a while. No other claim can have its slots: the draft has them locked. Raises PublishError.
        """
        key = self.keys.version(record.version)
        if any(part.shares for part in published) or await self.store.get(key) is not None:
            raise PublishError(
                f"the lease of version {record.version} ended before its commit (was the process stopped for longer "
                f"than {self._lease_ttl_s:g} s?), and other hosts may have freed its shares: publish it again",
                code="draft_lost",
            )
        compares = {key: MISSING, self.keys.publisher(self.lineage): self._fence}
        self._claimed_again[record.version] = revision = await self._on_lease(record, compares, {})
        return revision

    async def _on_lease(
        self, record: VersionRecord, compares: Mapping[str, int], puts: Mapping[str, bytes | None]
    ) -> int:
        key = self.keys.version(record.version)
        puts = {**puts, key: record.to_json()}
        with contextlib.suppress(LeaseLost):
            return await self.store.txn(compares, puts, {key: await self._live_lease()})
        self._lease = None  # ended behind our back (the process was stopped for a while): once more under a new one
        return await self.store.txn(compares, puts, {key: await self._live_lease()})

    async def _live_lease(self) -> int:
        if self._lease is None or self._lease.lost.is_set():
            self._lease = await LeaseKeeper.grant(self.store, self._lease_ttl_s)
        return self._lease.id

    async def _explain(self, conflict: Conflict, schemas: Mapping[str, Schema]) -> None:
        """Raise what a refused commit means; return when it is worth another try."""
        await self._require_lineage()
        for part, schema in schemas.items():  # what the base may have is seen in the next round
            if part != BASE and (reference := await self.schema(part)) is not None:
                require_same_schema(reference, schema)

    async def _require_lineage(self) -> None:
        found = await self.store.get(self.keys.publisher(self.lineage))
        if found is None or found.mod_revision != self._fence:
            holder = PublisherRecord.from_json(found.value) if found else PublisherRecord(0, 0, "nobody")
            raise StalePublisher(self.lineage, holder.token, f"{holder.host}:{holder.pid}")


def naming(
    record: VersionRecord, version: int, locks: Mapping[str, SlotLock], sizes: Mapping[str, int], host: str
) -> VersionRecord:
    """`record` under its number, naming the slots it is written to, so that nobody else takes them."""
    slots = {part: slot_name(lock.path, host) for part, lock in locks.items()}
    parts = tuple(PartRecord(p, version, slot, "", sizes[p]) for p, slot in slots.items() if p != BASE)
    slot = slots.get(BASE, "")
    return replace(record, version=version, slot=slot, parts=parts)


def wanted(target: KeyValue | None, active: KeyValue | None, swap: KeyValue | None) -> list[int]:
    """The versions to base a new one on, best first: the one asked for unless it was refused, the active one."""
    versions: list[int] = []
    if target is not None:
        asked = TargetRecord.readable(target.key, target.value)
        last = SwapRecord.from_json(swap.value) if swap is not None else None
        if asked is not None and (last is None or last.id != asked.id or last.phase != "aborted"):
            versions.append(asked.version)
    if active is not None:
        versions.append(ActiveRecord.from_json(active.value).version)
    return versions


def _release(locks: Mapping[str, SlotLock]) -> None:
    for lock in locks.values():
        lock.release()


def _revision(found: KeyValue | None) -> int:
    return found.mod_revision if found else MISSING
