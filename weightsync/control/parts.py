"""Parts of a version beside the base model: the speculative draft model ("draft") and LoRA adapters ("lora/NAME")."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson
import xxhash

from weightsync.control.hosts import local_path
from weightsync.control.records import PartRecord, VersionRecord
from weightsync.control.strict_json import shown
from weightsync.errors import ManifestError, PublishError, SlotBusy
from weightsync.format.naming import WRAPPERS
from weightsync.memory.receiver import SlotReader

if TYPE_CHECKING:
    from typing import Self  # Python 3.10 lacks it

BASE = ""
DRAFT = "draft"
LORA = "lora/"
ADAPTER_CONFIG = "adapter_config"  # manifest metadata of an adapter: PEFT's adapter_config.json
LORA_URL = "hotswap:"  # in vLLM's `lora_path`: the adapter comes from the swap transaction
EDITION_URL = "hotswap-edition:"  # there, too: it is an edition (editions.py), and no swap changes it
_LORA_NAME = re.compile(r"lora(?=.{2,129}\Z)(/[A-Za-z0-9][A-Za-z0-9._:@-]*)+")
NAME_RULE = "1 to 128 letters, digits and . _ : @ - /, with a letter or digit first and after each /"


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter to publish: tensors under PEFT's names, and what PEFT writes into adapter_config.json (or a
    configuration of PEFT's)."""

    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]
    config: Mapping[str, Any] | Any

    @classmethod
    def from_peft(cls, model: Any, adapter_name: str = "default") -> Self:
        """An adapter of a `peft.PeftModel`, which DDP or torch.compile may wrap. Raises PublishError."""
        while inside := [part for name, part in getattr(model, "_modules", {}).items() if name in WRAPPERS]:
            model = inside[0]
        configs = getattr(model, "peft_config", {})
        if adapter_name not in configs:
            kind, there = type(model).__name__, ", ".join(configs) or "none"
            raise PublishError(
                f"a {kind} has no adapter {adapter_name!r} (it has {there}): pass a peft.PeftModel", code="bad_part"
            )
        if (kind := configs[adapter_name].peft_type) != "LORA":
            raise PublishError(
                f"the adapter {adapter_name!r} is of the kind {kind.value}: make it with peft.LoraConfig",
                code="bad_part",
            )
        from peft import get_peft_model_state_dict  # a program with such a model has loaded it

        # "auto", the default, asks the hub each time whether the base model's vocabulary has grown.
        tensors = get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
        return cls(tensors, configs[adapter_name])

    @property
    def metadata(self) -> dict[str, str]:
        """The configuration as the manifest has it. Raises PublishError."""
        try:
            config = dict(self.config.to_dict() if hasattr(self.config, "to_dict") else self.config)
            return {ADAPTER_CONFIG: orjson.dumps(config, _listed, orjson.OPT_NON_STR_KEYS).decode()}
        except (TypeError, ValueError) as error:
            problem = f"the adapter's configuration cannot be written as JSON ({error})"
            raise PublishError(f"{problem}: pass what adapter_config.json holds", code="bad_part") from None


def _listed(value: Any) -> list[Any]:
    """A set in an order that is always the same. Raises TypeError for anything else."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} is none")


def content_of(
    what: Adapter | Mapping[str, Any] | Iterable[tuple[str, Any]], strip: str = ""
) -> tuple[Iterable[tuple[str, Any]], dict[str, str]]:
    """(name, tensor) pairs of what is published, taken one at a time, and its metadata. `strip` is taken away where a
    name begins with it, but for an adapter. Raises PublishError, also at the first item that is no pair."""
    if not isinstance(strip, str):
        raise PublishError(f"strip cannot be {shown(strip)}: pass a text that names begin with")
    given, metadata = (what.tensors, what.metadata) if isinstance(what, Adapter) else (what, {})
    pairs = _pairs(given.items() if isinstance(given, Mapping) else given)
    return (pairs if isinstance(what, Adapter) else ((n.removeprefix(strip), t) for n, t in pairs)), metadata


def _pairs(given: Any) -> Iterator[tuple[str, Any]]:
    for item in given if isinstance(given, Iterable) else (given,):
        if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
            found = f"this is a {type(item).__name__}, not a (name, tensor)"
            raise PublishError(f"{found}: pass model.named_parameters(), or a state dict")
        yield item[0], item[1]


def check_name(part: str, model: str = "") -> str:
    """`part` itself. Raises PublishError unless it is "" (the base), "draft" or "lora/NAME", with another NAME than
    `model`: clients ask for either by name, and instances look for adapters first."""
    if model and part == LORA + model:
        raise PublishError(
            f"{part!r} would take the requests for the model {model!r} itself: give the adapter another name",
            code="bad_part",
        )
    if part in (BASE, DRAFT) or (isinstance(part, str) and _LORA_NAME.fullmatch(part)):
        return part
    raise PublishError(
        f'no part can be called {shown(part)}: use "draft" or "lora/NAME" (NAME: {NAME_RULE})', code="bad_part"
    )


def join(fingerprints: Mapping[str, str]) -> str:
    """The fingerprint of a version from those of its parts by name, BASE among them; "" where one is unknown.

    Without parts it is the base's; else xxh3_128 of the lines `name=fingerprint`, sorted by name (the base first).
    """
    if set(fingerprints) == {BASE}:
        return fingerprints[BASE]
    if not all(fingerprints.values()):
        return ""
    lines = "\n".join(f"{name}={fingerprints[name]}" for name in sorted(fingerprints))
    digest: str = xxhash.xxh3_128_hexdigest(lines.encode())
    return digest


def combined(reports: Sequence[Mapping[str, Any]]) -> str:
    """The fingerprint of a staged version from every worker's report: `sums` of the base, and of each of its `parts`.

    "" where a worker does not report sums. Raises TensorError.
    """
    from weightsync.format.fingerprint import (
        combine,  # numba, which vLLM does not bear to be imported before it has started
    )

    def one(found: Iterable[Mapping[str, Any]]) -> str:
        return combine([report.get("sums") or {} for report in found])

    names = reports[0].get("parts", {})
    return join({BASE: one(reports)} | {name: one(r["parts"][name] for r in reports) for name in names})


def check_without(without: Collection[str], brought: Container[str], basis: VersionRecord | None) -> None:
    """Raises PublishError unless each of `without` is a part of `basis` that the new version does not bring."""
    there = sorted(part.name for part in basis.parts) if basis is not None else []
    for name in without:
        if name in brought:
            raise PublishError(
                f"{shown(name)} cannot be brought and taken away in one version: leave it out of one of both",
                code="bad_part",
            )
        if name not in there:
            known = f"it has {', '.join(there)}" if there else "it has none"
            raise PublishError(f"the version before has no part {shown(name)} to take away: {known}", code="bad_part")


def compose(
    record: VersionRecord,
    published: Iterable[PartRecord],
    basis: VersionRecord | None,
    without: Container[str] = (),
) -> VersionRecord:
    """`record` as it becomes ready: what it publishes itself, and all else carried on from `basis`, but for the parts
    `without` which it is to be.

    A part named BASE in `published` is the base model. Raises PublishError when there is no base to carry on.
    """
    own = {part.name: part for part in published}
    tensors = record.tensors if BASE in own or basis is None else basis.tensors
    base = own.pop(BASE, None) or base_of(basis)
    if base is None:
        what = ", ".join(sorted(own)) or "a version without parts"
        raise PublishError(
            f"there is no base model yet to publish {what} for: publish one first, or with it", code="bad_part"
        )
    parts = {part.name: part for part in basis.parts if part.name not in without} if basis is not None else {}
    parts |= own
    fingerprints = {BASE: base.fingerprint, **{name: part.fingerprint for name, part in parts.items()}}
    return replace(
        record,
        slot=base.slot,
        manifest_digest=base.manifest_digest,
        nbytes=base.nbytes,
        tensors=tensors,
        base_version=None if base.version == record.version else base.version,
        base_fingerprint=base.fingerprint,
        signature=base.signature,
        shares=base.shares,
        parts=tuple(parts[name] for name in sorted(parts)),
        fingerprint=join(fingerprints),
    )


def still_there(
    record: VersionRecord, bringing: Container[str], host: str = "", copied: Container[str] = ()
) -> VersionRecord | None:
    """The version with the parts that are left, besides those that a new one is `bringing`: on `host`, or `copied`.

    Slots live in memory: after a restart of the host an etcd store still names those from before. `copied` are manifest
    digests of which hosts have copies. None without a base.
    """

    def is_left(part: PartRecord) -> bool:
        return part.name in bringing or part.manifest_digest in copied or _is_held(part, host)

    base = base_of(record)
    if base is None or not is_left(base):
        return None
    return replace(record, parts=tuple(part for part in record.parts if is_left(part)))


def _is_held(part: PartRecord, host: str) -> bool:
    path = local_path(part.slot, host)
    if path is None:
        return False
    try:
        SlotReader.open(path, manifest_digest=part.manifest_digest, populate=False).close()
    except SlotBusy:
        return True  # somebody looks for a free slot, and has it for a moment
    except (ManifestError, OSError):
        return False
    return True


def base_of(record: VersionRecord | None) -> PartRecord | None:
    """The base model of a version, as if it were a part."""
    if record is None:
        return None
    fingerprint = record.base_fingerprint or ("" if record.parts else record.fingerprint)
    version = record.base_version if record.base_version is not None else record.version
    return PartRecord(
        BASE, version, record.slot, record.manifest_digest, record.nbytes, fingerprint, record.signature, record.shares
    )


def part_of(record: VersionRecord, name: str) -> PartRecord | None:
    """The part of that name, BASE among them; None if the version has none."""
    return base_of(record) if name == BASE else next((part for part in record.parts if part.name == name), None)


def own_digest(version: Mapping[str, Any]) -> str:
    """The manifest digest of the part that a version itself has published, the base model's if that is among them.
    `version` is a record as the admin port gives it."""
    own = [part for part in version["parts"] if part["version"] == version["version"]]
    of_base = version["base_version"] is None or not own
    return str(version["manifest_digest"] if of_base else own[0]["manifest_digest"])


def has_schema(part: str) -> bool:
    """Whether every version of the part has the same tensors; an adapter may change its rank and its layers."""
    return not part.startswith(LORA)


def slots_of(record: VersionRecord) -> set[str]:
    """Every slot the version lies in, by its name."""
    return {record.slot, *(part.slot for part in record.parts)} - {""}
