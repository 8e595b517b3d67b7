"""Publishing the engine's weights as a version, by all ranks together.

Rank 0 opens a draft; its ticket goes to the other ranks; every rank writes the slices it speaks for straight into the
slot: each pipeline stage its layers, each expert-parallel rank its experts, one of the replicas of each. The digests
come back to rank 0, which commits and activates. The old version goes on serving until the whole fleet has the new one,
and stays if anything fails.

Versions are written into memory of rank 0's host, and of the other hosts of its ranks (several_hosts.py).

Quantised weights have scales that belong to rows, groups or blocks, which a cut may go through. So a matrix that is to
be quantised comes together on one of the ranks that hold it, on each of them in turn, and is quantised there.

A run that trains an adapter publishes it alone, as a part of the version, which keeps the base model and other parts.

A bucket gets each version out of its slot, by a process beside rank 0 (weightsync/bucket/carrier.py): training goes on
meanwhile. Without a server's store, the slots are those of a store that lasts as long as the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import weightsync
from trainer.config import PublishConfig
from trainer.errors import ConfigError, PublishError
from trainer.megatron.convert import Slice
from trainer.megatron.engine import Engine
from trainer.megatron.lora import adapter_config
from trainer.megatron.parallel import broadcast_json, gather_json, on_rank_zero
from trainer.several_hosts import SeveralHosts
from weightsync.bucket.carrier import Carrier, Outcome
from weightsync.control.arenas import ensure_arena
from weightsync.control.hosts import local_path
from weightsync.control.parts import BASE, Adapter, part_of
from weightsync.errors import ArenaError, BucketError, StalePublisher, WeightSyncError
from weightsync.format.manifest import Schema
from weightsync.memory.arena import DEFAULT_ROOT
from weightsync.store import SyncStore


@dataclass(frozen=True)
class Published:
    """`version` is that of the server, None without one; `write_ms` from the start of the draft to the committed
    record, `swap_ms` until the fleet serves it. `carried` says what became of earlier versions on their way to the
    bucket, in the fields of `Outcome`."""

    version: int | None
    write_ms: float
    swap_ms: float
    carried: tuple[dict[str, Any], ...] = ()


class WeightPublisher:
    """Holds the lineage (rank 0) for as long as the run lasts. All methods are collective."""

    def __init__(self, config: PublishConfig, engine: Engine) -> None:
        """Raises PublishError when the store does not let it, ConfigError for hosts that cannot reach each other, for
        weights that are not quantised as the served ones are, and for a model that is not served while others are."""
        self._config, self._engine = config, engine
        exported = weightsync.as_schema(engine.schema(config.dtype))
        self._part, self._metadata = BASE, dict[str, str]()
        if (lora := engine.config.lora) is not None:
            described = adapter_config(engine.shape, lora, engine.config.model.path)
            self._part, self._metadata = lora.part, Adapter((), described).metadata
        self._hosts = SeveralHosts(config)
        self._scratch: Scratch | None = None
        self._carrier: Carrier | None = None
        self._publisher: Any = None
        try:
            self._publisher = on_rank_zero(self._open)
            self._carrier = on_rank_zero(self._open_carrier)
            said = broadcast_json(on_rank_zero(lambda: self._chosen(exported)))
            on_rank_zero(lambda: typed(self._hold))
        except BaseException:
            self.close()
            raise
        self._quantizer = None if said is None else weightsync.Quantizer(**said | {"keep": tuple(said["keep"])})
        self._schema = exported if self._quantizer is None else self._quantizer.schema(exported)
        same = exported.tensors.items() & self._schema.tensors.items()
        self._quantized = exported.tensors.keys() - {name for name, _ in same}
        self._hosts.carry(self._schema)

    def publish(self, step: int) -> Published:
        """Publish the current weights and wait until they serve. Raises PublishError on every rank."""
        began = time.perf_counter()
        about = {"step": step, "part": self._slot_part, "metadata": self._metadata}
        begun: Any = on_rank_zero(lambda: self._begin(about))
        draft, *places = begun or (None,)
        try:
            outcomes = gather_json(self._write(draft, places))
            manifest = on_rank_zero(lambda: self._complete(draft, outcomes))
            problem = self._hosts.accept(manifest)
            version: Any = on_rank_zero(lambda: self._commit(draft, outcomes, problem))
        except BaseException:
            self._hosts.close_slot()
            raise
        committed = time.perf_counter()
        published: dict[str, Any] | None = on_rank_zero(lambda: self._swapped(version, committed - began))
        return Published(**broadcast_json(published))

    def finish(self) -> list[dict[str, Any]]:
        """Wait until the bucket has the last version; what became of those on their way, as in `Published`."""
        if self._config.bucket is None:
            return []
        outcomes = on_rank_zero(lambda: self._carrier.finish(self._config.timeout_s) if self._carrier else [])
        found: list[dict[str, Any]] = broadcast_json(list(map(dataclasses.asdict, outcomes or [])))
        return found

    def close(self) -> None:
        """Let another trainer have the lineage. The uploads on their way to the bucket do not get there."""
        with contextlib.ExitStack() as last_first:
            for opened in (self._scratch, self._publisher, self._carrier, self._hosts):
                if opened is not None:
                    last_first.callback(opened.close)

    def _chosen(self, exported: Schema) -> dict[str, Any] | None:
        """The fields of the quantizer, if there is to be one."""
        if self._part != BASE:
            return None  # an adapter is served as it is over weights of any kind
        quantizer = quantizer_for(self._config, self._publisher.schema(), exported)
        return None if quantizer is None else dataclasses.asdict(quantizer)

    def _open(self) -> Any:
        c = self._config
        if not c.store_url:
            self._scratch = typed(Scratch)
        store = self._scratch.url if self._scratch is not None else c.store_url
        return typed(weightsync.Publisher, store, model=c.model, lineage=c.lineage, new_model=c.new_model)

    def _hold(self) -> None:
        """A run that this one replaces publishes no more. Raises ConfigError for a model that is likely mistyped."""
        try:
            self._publisher.hold()
        except weightsync.PublishError as error:
            if error.code != "unknown_model":
                raise
            advice = "Write a served model's name, or set publish.new_model for the first version of a new one"
            raise ConfigError("publish.model", vars(error)["problem"], advice) from error

    def _open_carrier(self) -> Carrier | None:
        """Raises ConfigError for a bucket that cannot be written."""
        if (bucket := self._config.bucket) is None:
            return None
        how: dict[str, Any] = {"keep": bucket.keep, "full_every": bucket.full_every, "metrics": bucket.metrics or ""}
        try:
            return Carrier(bucket.url, model=self._config.model, **how)
        except BucketError as error:
            advice = "hotswap doctor --bucket URL says what is wrong"
            raise ConfigError("publish.bucket", str(error).rstrip(".?"), advice) from error

    def _begin(self, about: dict[str, Any]) -> tuple[Any, dict[str, str], list[str]]:
        """A draft, the hosts that keep what is written there, and which versions stay there."""
        draft = typed(self._publisher.begin, self._schema, **about)
        try:
            spread = self._part == BASE and not self._hosts.one and self._carrier is None  # it carries whole slots
            if not spread:
                return draft, {}, []
            return draft, typed(self._publisher.share_hosts), typed(self._publisher.kept)
        except BaseException:
            draft.abort()
            raise

    def _write(self, draft: Any, places: list[Any]) -> dict[str, Any]:
        """This rank's share into the slot: what `seal` says of it, or what went wrong."""
        alone, writer, problem = dist.get_world_size() == 1, draft, ""
        begun: Any = None if alone else broadcast_json([draft.ticket, *places] if draft is not None else None)
        slices = self._slices()
        try:
            writer = draft if alone else self._hosts.writer(*begun) or draft
            for name, tensor, dim, start in slices:
                if tensor.shape == self._schema.tensors[name].shape:
                    writer.write(name, tensor)
                else:
                    writer.write_slice(name, tensor, start, dim)
        except WeightSyncError as error:
            deque(slices, maxlen=0)  # other ranks may be gathering with this one (see Engine.slices)
            problem = str(error)
        if not self._hosts.one:
            problem = self._hosts.bring(writer, problem)
        return {"problem": problem, "part": self._sealed(writer, problem)}

    def _slices(self) -> Iterator[Slice]:
        """This rank's share, quantised where it is to be."""
        for piece in self._engine.slices(self._config.dtype, self._quantized):
            if self._quantizer is None or piece.name not in self._quantized:
                yield piece
            else:
                made = self._quantizer.tensors([(piece.name, piece.tensor)])
                yield from (Slice(name, tensor, 0, 0) for name, tensor in made)

    def _sealed(self, writer: Any, problem: str) -> Any:
        """The part that a rank beside the slot wrote there, and lets go of, or that came from a host where nothing
        stays; rank 0's draft stays open."""
        if not self._hosts.beside:
            return self._hosts.part
        if not isinstance(writer, weightsync.SlotWriter):
            return None
        return writer.release() if problem else writer.seal()

    def _complete(self, draft: Any, outcomes: list[dict[str, Any]]) -> str | None:
        """The manifest, if hosts are to keep shares."""
        for rank, outcome in enumerate(outcomes):
            if outcome["problem"]:
                draft.abort()
                raise PublishError(f"rank {rank} could not write its share: {outcome['problem']}")
        shares = self._hosts.shares
        return typed(draft.spread, _parts(outcomes), shares).decode() if shares else None

    def _commit(self, draft: Any, outcomes: list[dict[str, Any]], problem: str) -> int:
        if problem:
            draft.abort()
            raise PublishError(problem)
        how = {"activate": self._scratch is None, "timeout_s": self._config.timeout_s}
        version: int = typed(draft.commit, _parts(outcomes), **how)
        return version

    def _swapped(self, version: int, write_s: float) -> dict[str, Any]:
        """Once it is active, if there is a server; the fields of `Published`."""
        began, served = time.perf_counter(), self._scratch is None
        if served:
            typed(self._publisher.wait_active, version, self._config.timeout_s)
        swap_s = time.perf_counter() - began
        return {
            "version": version if served else None,
            "write_ms": round(write_s * 1e3, 3),
            "swap_ms": round(swap_s * 1e3, 3),
            "carried": [dataclasses.asdict(outcome) for outcome in self._hand_over(version)],
        }

    @property
    def _slot_part(self) -> str:
        """As what it is in the store: one that lasts as long as the run holds nothing but what is trained."""
        return self._part if self._config.store_url else BASE

    def _hand_over(self, version: int) -> list[Outcome]:
        """The version is on its way to the bucket; what became of those before it."""
        if self._carrier is None:
            return []
        found = self._carrier.outcomes()
        record = next(v for v in typed(self._publisher.versions) if v.version == version)
        part = part_of(record, self._slot_part)
        assert part is not None
        path = local_path(part.slot, self._publisher.host)
        assert path is not None, "a version lies in slots of the host that wrote it"
        try:
            self._carrier.hand(path, part.manifest_digest, part=self._part, source=self._config.lineage)
        except WeightSyncError as error:
            found.append(Outcome(error=str(error), code=error.code))
        return found


def _parts(outcomes: list[dict[str, Any]]) -> list[Any]:
    return [outcome["part"] for outcome in outcomes if outcome["part"] is not None]


class Scratch:
    """A store and slots that nobody else uses, in memory, until `close`."""

    def __init__(self) -> None:
        """Raises ArenaError, StoreUnavailable."""
        root = DEFAULT_ROOT
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="hotswap-bucket-", dir=root))
        except OSError as error:
            message = f"{root} cannot be written ({error.strerror}): mount a tmpfs there"
            raise ArenaError(message, code="arena_unavailable") from error
        self.url = f"sqlite://{self._directory}/store.db"
        try:
            with contextlib.closing(SyncStore(self.url)) as store:
                store.run(ensure_arena(store.store, self._directory / "slots"))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def typed(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call into weightsync; its errors become PublishError. A lost lineage is final, so it says so."""
    try:
        return function(*args, **kwargs)
    except StalePublisher as error:
        raise PublishError(f"another trainer has taken over this lineage: {error}", final=True) from error
    except WeightSyncError as error:
        raise PublishError(str(error)) from error


def quantizer_for(config: PublishConfig, served: Schema | None, exported: Schema) -> weightsync.Quantizer | None:
    """The quantizer of the export as configured, checked against the served tensors. Raises ConfigError."""
    wanted, form, problem = config.quantize, None, ""
    try:
        form = weightsync.Quantizer.like(served)
    except WeightSyncError as error:
        problem = str(error)
    if wanted is None:
        if form is not None:
            problem = f"missing, but {config.model} is served in {form}"
            raise ConfigError("publish.quantize", problem, "Set publish.quantize.scheme to served")
        return None
    if wanted.scheme != "served":
        quantizer = weightsync.Quantizer(wanted.scheme, wanted.group_size, wanted.block)
        if form is not None:
            quantizer = dataclasses.replace(quantizer, keep=form.keep, scale_dtype=form.scale_dtype)
    elif form is not None:
        quantizer = form
    else:
        advice = "Leave publish.quantize out for a server that quantises; name the scheme of a model's first version"
        raise ConfigError("publish.quantize.scheme", problem, advice)
    return _checked(quantizer, form, config.model, served, exported)


def _checked(
    quantizer: weightsync.Quantizer,
    form: weightsync.Quantizer | None,
    model: str,
    served: Schema | None,
    exported: Schema,
) -> weightsync.Quantizer:
    """The quantizer, if it makes what is served. Raises ConfigError."""
    try:
        schema = quantizer.schema(exported)
    except WeightSyncError as error:
        raise ConfigError("publish.quantize.group_size", str(error), "It must divide every matrix") from error
    if served is not None and (mismatches := weightsync.diff_schema(served, schema)):
        problem = f"{quantizer} does not make what {model} is served in, {form or 'which is not quantised'}"
        advice = "Set it to served, or serve a checkpoint that is quantised so"
        raise ConfigError("publish.quantize.scheme", f"{problem}: {mismatches[0]}", advice)
    return quantizer
