"""Publishes versions of a model from any program that has new weights: blocking, and a few milliseconds for small ones.

    pub = weightsync.Publisher("sqlite:///run/store.db", model="demo")
    version = pub.publish(model.named_parameters(), step=10)
    version = pub.publish(Adapter(lora_tensors, adapter_config), part="lora/math")  # the base stays as it is

One publisher holds a lineage at a time, from its first version, activation or rollback on. When a second one takes it,
the first may write no more (StalePublisher). Each of its calls that publish or activate fails with PublishError alone.
Reading takes nothing. Everything a publisher has in the store before a commit hangs on its lease, so a killed trainer
leaves nothing behind. A version that is being written is a `Draft` (`draft.py`).
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.control import outcome, swap
from weightsync.control.arenas import ensure_arena
from weightsync.control.chain import LedgerEntry
from weightsync.control.editions import MARK, EditionRecord
from weightsync.control.hosts import this_host
from weightsync.control.parts import ADAPTER_CONFIG, BASE, LORA, Adapter, check_name, content_of
from weightsync.control.records import (
    ActiveRecord,
    CopyRecord,
    Keys,
    OnLost,
    PartRecord,
    SwapMode,
    TargetRecord,
    VersionRecord,
)
from weightsync.control.strict_json import shown
from weightsync.errors import PublishError, publishing
from weightsync.format import fingerprint
from weightsync.format.manifest import (
    CUTS,
    Layout,
    Manifest,
    Schema,
    TensorSpec,
    content_sha256,
    is_derived,
    require_same_schema,
)
from weightsync.memory.arena import MAPPINGS
from weightsync.peer.copies import own_copies, share_hosts
from weightsync.publish.cast import converted
from weightsync.publish.draft import Claim, Draft, commit_all
from weightsync.publish.session import PublishSession
from weightsync.publish.writer import spec_of
from weightsync.running import STORE_ENV, store_of
from weightsync.store import SyncStore

if TYPE_CHECKING:
    from typing import Self  # Python 3.10 lacks it

    from weightsync.signing import Signer


SIGN_ENV = "HOTSWAP_SIGN_KEY"
MOST_LEASE_S = 3600  # a publisher that was killed keeps its slots for so long
NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
SchemaLike = Schema | Iterable[tuple[str, Any, Iterable[int]]]


class Version(int):
    """The number of a version. `not_flipped` names the instances that could not follow its swap: they are out of
    routing, and start anew with it. If none can follow, SwapError is raised and the version before is back."""

    not_flipped: tuple[str, ...]

    def __new__(cls, number: int, not_flipped: Iterable[str] = ()) -> Self:
        made = super().__new__(cls, number)
        made.not_flipped = tuple(not_flipped)
        return made


class Publisher:
    """The one publisher of `lineage` for `model`. Ready versions that nobody has asked for are retired but for `keep`.

    Threads and the store connection do not survive a fork: make the publisher in the process that publishes. Once it is
    closed, all that asks the store raises StoreError.
    """

    def __init__(
        self,
        store: str | None = None,
        *,
        model: str,
        lineage: str = "trainer",
        lease_ttl_s: float = 5.0,
        keep: int = 2,
        requested_by: str = "",
        reason: str = "",
        sign: Path | str | None = None,
        new_model: bool = False,
    ) -> None:
        """`store` is a URL; without it HOTSWAP_STORE is read, else it is that of the server that `hotswap up` runs on
        this host (of several, of the one that serves the model); `url` says which. `new_model`: the first version of a
        model may come although the servers on the store serve other models alone. Raises StoreUnavailable, ArenaError,
        PeerError.

        Among several hosts HOTSWAP_HOST says which one this is. The ledger names `requested_by` (default: the lineage,
        host and process) as who publishes, and the `reason`. Versions are signed with the private key in the PEM file
        `sign` (default: HOTSWAP_SIGN_KEY; none: not signed). Raises WeightSyncError.
        """
        self.url = store or os.environ.get(STORE_ENV) or store_of(model)
        self.model, self.lineage, self.host = model, lineage, this_host()
        self._keys = Keys(model)
        self._keys.publisher(lineage)
        if not isinstance(lease_ttl_s, int | float) or not 0 < lease_ttl_s <= MOST_LEASE_S:
            raise PublishError(
                f"lease_ttl_s cannot be {shown(lease_ttl_s)}: pass more than 0, at most {MOST_LEASE_S} s"
            )
        if not isinstance(keep, int) or keep < 0:
            raise PublishError(f"keep cannot be {shown(keep)}: pass a number of versions")
        self._asked: dict[int, TargetRecord] = {}
        self._layouts: dict[str, tuple[Schema, Layout]] = {}
        self._store = SyncStore(self.url, create=False, owner="publisher")
        self._signer = signer_of(sign)
        self._name = requested_by or f"{lineage}@{socket.gethostname()}:{os.getpid()}"
        TargetRecord(0, "", self._name, 1.0).to_json()  # refused before anything is written
        LedgerEntry("publish", "", reason=reason).to_json()
        self._session = PublishSession(self._store.store, self._keys, lineage, lease_ttl_s, keep, self.host)
        self._session.who, self._session.reason = self._name, reason
        self._session.new_model = new_model
        try:
            self.arena = self._store.run(ensure_arena(self._store.store, host=self.host))
        except BaseException:
            self._store.close()
            raise

    @publishing
    def hold(self) -> None:
        """Take the lineage now; else the first version, activation or rollback does. Raises PublishError, and
        PublishError (`unknown_model`) as the first version would."""
        self._store.run(self._session.require_model())
        self._store.run(self._session.hold())

    @publishing
    def publish(
        self,
        named_tensors: NamedTensors | Adapter | None,
        *,
        part: str = BASE,
        parts: Mapping[str, NamedTensors | Adapter] | None = None,
        without: Collection[str] = (),
        onto: int | None = None,
        step: int | None = None,
        activate: bool = True,
        wait: bool = True,
        timeout_s: float = 60.0,
        mode: SwapMode = "together",
        metadata: Mapping[str, str] | None = None,
        source: str = "",
        config: Mapping[str, Any] | None = None,
        cast: bool = False,
        strip: str = "",
    ) -> Version:
        """Write all tensors as a new version, make it ready, with `activate` have it swapped in; returns its number.

        `named_tensors` are (Hugging Face name, torch.Tensor | numpy array). A generator is consumed one tensor at a
        time, except for the first version of a model, which defines the schema. With `wait`, returns when the version
        is active. With `part` they are the draft model's ("draft") or an `Adapter` ("lora/NAME"); `parts` adds further
        ones to the same version. Parts that a version does not bring come from version `onto` (default: the one that is
        active or about to be), but for the parts that it is to be `without`. With None for the tensors a version takes
        parts away, and brings what is in `parts` alone. `mode` as in `activate`.

        `config`: the config.json of the base model's checkpoint. With it, a version may have other tensors than that
        version. If they differ in tensors or configuration, instances restart one by one, which takes longer than a
        swap; see `timeout_s`. Without it the configuration is that version's.

        `cast`: floating-point tensors are converted to the dtypes that are served, as those of a trainer with float32
        masters. It concerns versions that take their tensors and configuration from the ones before.
        `strip`: what is taken away where a name begins with it ("module.", "_orig_mod."), but in adapters.

        Raises PublishError, whatever fails, with the code and the attributes of what has failed. Of these TensorError
        and `unknown_model` mean that nothing was published, and SwapError that the version is ready.
        """
        if activate:
            self._target(0, timeout_s, mode=mode)  # refused before anything is written
        check_metadata(metadata or {})
        given = {**({check_name(part): named_tensors} if named_tensors is not None else {}), **(parts or {})}
        text = config_text(config) if config is not None else None
        anew = text is not None
        contents = {check_name(n): self._content(n, what, onto, strip, anew=anew) for n, what in given.items()}
        with contextlib.ExitStack() as stack:
            pieces = {name: (schema, {**(metadata or {}), **more}) for name, (_, schema, more) in contents.items()}
            about: dict[str, Any] = {"onto": onto, "step": step, "source": source}
            at_once = activate and mode == "together"
            within_s = timeout_s if at_once else None
            if pieces:
                begun = self.begin_all(pieces, **about, config=text, without=without)
                drafts = [stack.enter_context(draft) for draft in begun]
                for draft in drafts:
                    wanted = contents[draft.part][1] if cast else Schema({})
                    for name, tensor in contents[draft.part][0]:
                        draft.write(name, converted(tensor, wanted.tensors.get(name)))
                version = Version(commit_all(drafts, [], within_s=within_s))
            else:
                version = Version(self.take_away(without, within_s=within_s, **about))
        if activate and not at_once:
            return self.activate(version, wait=wait, timeout_s=timeout_s, mode=mode)
        return self.wait_active(version, timeout_s) if activate and wait else version

    def begin(
        self,
        schema: SchemaLike,
        *,
        part: str = BASE,
        onto: int | None = None,
        step: int | None = None,
        base: int | None = None,
        metadata: Mapping[str, str] | None = None,
        source: str = "",
    ) -> Draft:
        """Claim a slot for a new version; `schema`: (name, dtype, shape) of every tensor. The rest as in `publish`.

        Raises PublishError as `publish`; TensorError against the model's reference schema.
        """
        pieces = {check_name(part): (as_schema(schema), metadata or {})}
        return self.begin_all(pieces, onto=onto, step=step, base=base, source=source)[0]

    @publishing
    def begin_all(
        self,
        pieces: Mapping[str, tuple[Schema, Mapping[str, str]]],
        *,
        onto: int | None = None,
        step: int | None = None,
        base: int | None = None,
        source: str = "",
        config: str | None = None,
        without: Collection[str] = (),
    ) -> list[Draft]:
        """One draft per part of one version, from {part: (schema, metadata)}; `draft.commit_all` makes it ready.

        `config` is the text of the base model's config.json: with it, its tensors may be others than those before.
        `without` are parts that it takes away.

        Raises as `begin`.
        """
        fingerprint.warm(sum(schema.nbytes for schema, _ in pieces.values()))
        self._blank(Schema({}), base_version=onto, step=step, base=base, source=source).to_json()
        self._store.run(self._session.check_without(check_names(without), pieces, onto))
        for part, (schema, metadata) in pieces.items():
            check_name(part, self.model)
            if part == BASE:
                self._store.run(self._session.check(schema, config, onto))
            elif (reference := self.schema(part)) is not None:
                require_same_schema(reference, schema)
            if part.startswith(LORA) and ADAPTER_CONFIG not in metadata:
                raise PublishError(f"{part} needs PEFT's configuration: publish an `Adapter`", code="bad_part")
            check_metadata(metadata)
            if CUTS in metadata:
                raise PublishError(f"{CUTS!r} in the metadata is written by the publisher itself: leave it out")
        layouts = {part: self._layout_of(part, schema) for part, (schema, _) in pieces.items()}
        sizes = {part: layout.total_nbytes for part, layout in layouts.items()}
        blank = self._blank(next(iter(pieces.values()))[0], base_version=onto, step=step, base=base, source=source)
        record, revision, locks = self._store.run(self._session.claim(self.arena, blank, sizes))
        try:
            drafts = []
            for part, (schema, metadata) in pieces.items():
                claim = Claim(record, revision, locks[part], MAPPINGS.get(locks[part].path, locks[part].fd), part)
                drafts.append(Draft(self, claim, schema, layouts[part], metadata, config, without))
            return drafts
        except BaseException:
            for lock in locks.values():
                lock.release()
            self._forget(record.version, revision)
            raise

    @publishing
    def take_away(
        self,
        without: Collection[str],
        *,
        onto: int | None = None,
        step: int | None = None,
        source: str = "",
        within_s: float | None = None,
    ) -> int:
        """Make a version ready that brings nothing and is without these parts; returns it. `within_s` as in
        `commit_all`. Raises PublishError, and as `begin`."""
        if not check_names(without):
            raise PublishError("a version needs tensors, or a part to take away: pass `without`", code="bad_part")
        self._store.run(self._session.check_without(without, (), onto))
        blank = self._blank(Schema({}), base_version=onto, step=step, base=None, source=source)
        record, revision, _ = self._store.run(self._session.claim(self.arena, blank, {}))
        try:
            self._make_ready(record, revision, [], {}, within_s, None, without)
        except BaseException:
            self._forget(record.version, revision)
            raise
        return record.version

    @publishing
    def publish_edition(
        self,
        name: str,
        adapter: Adapter,
        *,
        step: int | None = None,
        percent: float = 100.0,
        keep: int = 3,
        max_age_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        source: str = "",
    ) -> int:
        """Publish an edition of an adapter beside those before it, without a swap; returns its number N. Clients pin
        it as the model `NAME@N`. Those that ask for `NAME` get it from then on, or with `percent` that share of them;
        with 0 it is on trial.

        `keep`: its newest editions that stay, this one included. `max_age_s`: editions that are older go, but for the
        newest of each name. Requests that run through one that goes are finished. Raises as `publish`.
        """
        items, more = content_of(adapter)
        items = list(items)
        schema = as_schema((each, spec.dtype, spec.shape) for each, t in items if (spec := spec_of(each, t)))
        terms: dict[str, Any] = {"percent": percent, "keep": keep, "max_age_s": max_age_s}
        with self.begin_edition(name, schema, {**(metadata or {}), **more}, step=step, source=source, **terms) as draft:
            for each, tensor in items:
                draft.write(each, tensor)
            return draft.commit_edition()

    @publishing
    def begin_edition(
        self,
        name: str,
        schema: Schema,
        metadata: Mapping[str, str],
        *,
        step: int | None = None,
        percent: float = 100.0,
        keep: int = 3,
        max_age_s: float | None = None,
        source: str = "",
    ) -> Draft:
        """An edition to be written, whose `commit_edition` publishes it. `metadata` has the adapter's configuration.
        Else as `publish_edition`."""
        if not isinstance(name, str) or MARK in name:
            said = f"no adapter with editions can be called {shown(name)}: leave out the {MARK}"
            raise PublishError(said, code="bad_part")
        if not isinstance(percent, int | float) or not 0 <= percent <= 100:
            raise PublishError(f"percent cannot be {shown(percent)}: pass 0 to 100")
        if not isinstance(keep, int) or keep < 1:
            raise PublishError(f"keep cannot be {shown(keep)}: pass a number of editions, at least 1")
        if max_age_s is not None and not (isinstance(max_age_s, int | float) and max_age_s > 0):
            raise PublishError(f"max_age_s cannot be {shown(max_age_s)}: pass a number of seconds, or None")
        pieces = {check_name(LORA + name, self.model): (schema, metadata)}
        (draft,) = self.begin_all(pieces, step=step, source=source)
        draft.edition = (float(percent), keep, max_age_s)
        return draft

    @publishing
    def editions(self, name: str | None = None) -> list[EditionRecord]:
        """The editions of an adapter, or of all, oldest first."""
        return self._store.run(self._session.editions(name or ""))

    @publishing
    def withdraw_edition(self, name: str, number: int | None = None) -> list[int]:
        """Take an edition of an adapter away, or all of it; the numbers of those that were there. Requests that run
        through it are finished. Raises StalePublisher."""
        return self._store.run(self._session.withdraw(name, number))

    def _make_edition(
        self, record: VersionRecord, revision: int, part: PartRecord, percent: float, keep: int, age_s: float | None
    ) -> None:
        made = self._session.make_edition(record, revision, part, percent=percent, keep=keep, age_s=age_s)
        self._store.run(made)

    def _blank(self, schema: Schema, **about: Any) -> VersionRecord:
        """A version as it is before it has a number and slots; `base_version` is the one it carries on."""
        return VersionRecord(
            version=0,
            state="publishing",
            slot="",
            nbytes=schema.nbytes,
            manifest_digest="",
            publisher=self.lineage,
            token=0,
            created_at=time.time(),
            tensors=len(schema.tensors),
            **about,
        )

    def _content(
        self, part: str, what: NamedTensors | Adapter, onto: int | None, strip: str, *, anew: bool
    ) -> tuple[Iterable[tuple[str, Any]], Schema, dict[str, str]]:
        """(named tensors, their schema, metadata) of one part; `anew`: it may be another one than before."""
        items, metadata = content_of(what, strip)
        schema = None if anew else self._store.run(self._session.schema(part, onto))
        if schema is None:
            items = list(items)
            schema = as_schema((name, spec.dtype, spec.shape) for name, t in items if (spec := spec_of(name, t)))
        return items, schema, metadata

    @publishing
    def activate(
        self,
        version: int,
        *,
        wait: bool = True,
        timeout_s: float = 60.0,
        mode: SwapMode = "together",
        drain_s: float | None = None,
        on_lost: OnLost = "abort",
    ) -> Version:
        """Have a ready version swapped in; "rolling": one instance first, probed, then one by one, each drained.

        `on_lost`: an instance that dies before the commit aborts the swap, or the others "continue" without it.

        Raises SwapError, StalePublisher.
        """
        target = self._target(version, timeout_s, mode=mode, drain_s=drain_s, on_lost=on_lost)
        self._store.run(self._session.ask_for(target))
        self._asked = {version: target}
        return self.wait_active(version, timeout_s) if wait else Version(version)

    def _target(self, version: int, timeout_s: float, **options: Any) -> TargetRecord:
        """Raises RecordError."""
        return swap.new_target(version, self._name, timeout_s, deadline_name="timeout_s", **options)

    @publishing
    def rollback(
        self, *, wait: bool = True, timeout_s: float = 60.0, mode: SwapMode = "together", drain_s: float | None = None
    ) -> Version:
        """Swap the previous version in again; returns it. Raises as `activate`; SwapError when there is none."""
        version = self._store.run(swap.previous_version(self._store.store, self._keys))
        return self.activate(version, wait=wait, timeout_s=timeout_s, mode=mode, drain_s=drain_s)

    @publishing
    def wait_active(self, version: int, timeout_s: float = 60.0) -> Version:
        """Return when `version` is the active one. `not_flipped` is of a swap that this publisher asked for.
        `timeout_s` bounds its staging; its drains and flips have their time besides. Raises SwapError: refused,
        superseded, no instance could flip, or no outcome in time."""
        store, asked = self._store.store, self._asked.get(version)
        if asked is not None:
            asked = replace(asked, deadline_s=timeout_s)
            report = self._store.run(outcome.of_request(store, self._keys, asked)).checked()
            return Version(version, report.not_flipped)
        self._store.run(outcome.of_version(store, self._keys, version, timeout_s))
        return Version(version)

    def active(self) -> ActiveRecord | None:
        """The commit record as it stands."""
        found = self._store.get(self._keys.active)
        return ActiveRecord.from_json(found.value) if found else None

    def versions(self) -> list[VersionRecord]:
        """Every version the store knows of, oldest first."""
        return self._store.run(self._session.versions())

    def schema(self, part: str = BASE) -> Schema | None:
        """The tensors that the model's versions have, once there is one; adapters have no such schema."""
        return self._store.run(self._session.schema(part))

    def copies(self) -> dict[str, CopyRecord]:
        """The copies that this host has, by manifest digest; none on the one host."""
        return self._store.run(own_copies(self._store.store, self._keys, self.host))

    def share_hosts(self) -> dict[str, str]:
        """The hosts whose ranks may write a base model into a slot of theirs (`weightsync.publish.spread`), and the
        directory of each one's slots. None where one slot must have the whole version: with a key that signs it, or
        while not every peer, this host's among them, knows of such slots."""
        if self._signer is not None or not self.host:
            return {}
        return self._store.run(share_hosts(self._store.store, self._keys, self.host))

    def kept(self) -> list[str]:
        """The manifest digests of versions in shares that the store has a record of, for `HostShare`."""
        return [v.manifest_digest for v in self.versions() if v.state == "ready" and v.shares]

    def kept_files(self, record: VersionRecord, config: str | None) -> list[str]:
        """The files of its configuration that a base model has of the version before it, as those that were published
        with it, `config`, are without them."""
        return self._store.run(self._session.kept(record.form, config))

    def close(self) -> None:
        """End the lease, and with it any open draft; safe to call twice."""
        if not self._store.closed:
            self._store.run(self._session.close())
            self._store.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_ready(
        self,
        record: VersionRecord,
        revision: int,
        published: Sequence[PartRecord],
        schemas: Mapping[str, Schema],
        activate_within_s: float | None,
        config: str | None,
        without: Collection[str] = (),
    ) -> None:
        """Commit drafts of one version; with a deadline, ask for the swap in the same transaction."""
        target = None
        if activate_within_s is not None:
            target = self._target(record.version, activate_within_s)
        about = record, revision, published, schemas, target, config, without
        self._store.run(self._session.make_ready(*about))
        if target is not None:
            self._asked = {record.version: target}

    def _sign(self, part: str, manifest: Manifest, mapping: mmap.mmap, config: str | None) -> str:
        """The signature of a slot that is complete, and of the base model's config.json; "" without a key."""
        if self._signer is None:
            return ""
        with memoryview(mapping) as slot:
            places = {name: slot[e.offset : e.offset + e.nbytes] for name, e in manifest.tensors.items()}
            digest = content_sha256(manifest.schema, manifest.metadata, places.__getitem__)
            places.clear()
        return self._signer.sign(self.model, part, digest, (config or "") if part == BASE else "")

    def _forget(self, version: int, revision: int) -> None:
        self._store.run(self._session.forget(version, revision))

    def _layout_of(self, part: str, schema: Schema) -> Layout:
        """The layout depends on the schema alone, which hardly ever changes."""
        if part not in self._layouts or self._layouts[part][0] != schema:
            self._layouts[part] = (schema, Layout.of(schema))
        return self._layouts[part][1]


def config_text(config: Mapping[str, Any]) -> str:
    """As versions have it. Raises PublishError."""
    try:
        json.dumps(dict(config), ensure_ascii=False).encode()  # readers refuse lone surrogates
        return json.dumps(dict(config), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise PublishError(f"config cannot be written as JSON ({error}): pass what config.json holds") from None


def check_names(without: Collection[str]) -> Collection[str]:
    """`without` itself. Raises PublishError for what is no collection of names of parts."""
    if isinstance(without, str) or not isinstance(without, Collection) or BASE in [check_name(n) for n in without]:
        raise PublishError(
            f"without cannot be {shown(without)}: pass the names of draft or adapters, as a list", code="bad_part"
        )
    return without


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises PublishError unless it is a mapping of texts to texts, as a slot's header holds it."""
    try:
        good = all(isinstance(text, str) and text.encode() is not None for pair in metadata.items() for text in pair)
    except (AttributeError, UnicodeEncodeError):
        good = False
    if not good:
        raise PublishError("metadata must map texts to texts, without lone surrogates")


def signer_of(path: Path | str | None) -> Signer | None:
    """With the key at `path`, or at HOTSWAP_SIGN_KEY; None without either. Raises WeightSyncError."""
    if not (key := path or os.environ.get(SIGN_ENV)):
        return None
    from weightsync.signing import Signer  # cryptography: not for those who do not sign

    return Signer(key)


def as_schema(schema: SchemaLike) -> Schema:
    """Accepts dtypes as torch has them, or by name; leaves derived tensors out. Raises TensorError."""
    if isinstance(schema, Schema):
        return schema
    rows = ((name, str(dtype).removeprefix("torch."), tuple(shape)) for name, dtype, shape in schema)
    return Schema({name: TensorSpec(dtype, shape) for name, dtype, shape in rows if not is_derived(name, shape)})
