"""A version's contents: finds it, opens its slots on this host, verifies it, and compares it with another.

`verify` reads every byte again and looks whether each instance runs what was published. It finds bytes that changed in
a slot (memory faults, a stray writer), a manifest that differs from the record, and instances that built something
else, and reports all problems, not the first alone. `diff` tells which tensors two versions differ in, and by how much,
with numpy over the slots, without torch.

`python -m weightsync.versions URL MODEL A B` prints the diff as one line of JSON, or {"error": {"code", "message"}}
with exit status 1: for the gateway, whose own process reads no weights.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

from weightsync.control.board import readable_versions
from weightsync.control.hosts import host_of, local_path, this_host
from weightsync.control.parts import BASE, join
from weightsync.control.records import ActiveRecord, FormRecord, InstanceRecord, Keys, VersionRecord
from weightsync.errors import (
    ManifestError,
    PublishError,
    SlotBusy,
    TensorError,
    WeightSyncError,
    checksum_mismatch,
    unknown_version,
)
from weightsync.format import fingerprint
from weightsync.format.delta_codec import WORD
from weightsync.format.dtypes import ITEMSIZE
from weightsync.memory.receiver import SlotReader
from weightsync.peer.copies import Copies, local_slot, own_copies, with_local_slots
from weightsync.store import SyncStore


@dataclass(frozen=True)
class Records:
    """Everything the store says of one model, read at once; of copies, those on this host."""

    active: ActiveRecord | None
    versions: dict[int, VersionRecord]
    instances: dict[str, InstanceRecord]
    host: str = ""
    copies: Copies = field(default_factory=dict)
    configs: dict[str, str] = field(default_factory=dict)  # config.json by form

    @classmethod
    def read(cls, store_url: str, model: str) -> Records:
        """Raises StoreUnavailable, RecordError, PeerError."""
        keys, host = Keys(model), this_host()
        with contextlib.closing(SyncStore(store_url, create=False)) as store:
            items, _ = store.list(keys.root)
            copies = store.run(own_copies(store.store, keys, host))
        active = next((ActiveRecord.from_json(kv.value) for kv in items if kv.key == keys.active), None)
        versions = readable_versions(kv for kv in items if kv.key.startswith(keys.versions))
        instances = [InstanceRecord.from_json(kv.value) for kv in items if kv.key.startswith(keys.instances)]
        forms = {kv.key.removeprefix(keys.forms): kv.value for kv in items if kv.key.startswith(keys.forms)}
        configs = {digest: FormRecord.from_json(value).config for digest, value in forms.items()}
        return cls(active, {v.version: v for v in versions}, {i.id: i for i in instances}, host, copies, configs)

    def ready(self, version: int | None) -> VersionRecord:
        """A version that is still held, with the paths of its slots where they are on this host.

        Without a number the active one, or the newest. Raises SwapError.
        """
        if version is None:
            held = [v.version for v in self.versions.values() if v.state == "ready"]
            version = self.active.version if self.active is not None else max(held, default=0)
        found = self.versions.get(version)
        if found is None or found.state != "ready":
            raise unknown_version(version, found.state if found is not None else None)
        return with_local_slots(found, lambda part: local_slot(part, self.host, self.copies))


@contextlib.contextmanager
def opened(record: VersionRecord) -> Iterator[dict[str, SlotReader]]:
    """The slots of a version with local paths, by part (BASE, "draft", "lora/NAME"), held against reuse meanwhile.

    Raises ManifestError, SlotBusy.
    """
    places = {BASE: (record.slot, record.manifest_digest)}
    places |= {part.name: (part.slot, part.manifest_digest) for part in record.parts}
    with contextlib.ExitStack() as stack:
        yield {
            part: stack.enter_context(SlotReader.open(_path(record, slot), manifest_digest=digest, populate=False))
            for part, (slot, digest) in places.items()
        }


def _path(record: VersionRecord, slot: str) -> Path:
    """Raises ManifestError."""
    path = local_path(slot, "")
    if path is None:
        raise ManifestError(
            f"version {record.version} is on host {host_of(slot)}: ask there (HOTSWAP_HOST={host_of(slot)}), or on a "
            "host whose peer has a copy"
        )
    return path


def label(part: str, name: str) -> str:
    """How a tensor is named to people: its own name, with the part's before it unless it is the base model's."""
    return f"{part}:{name}" if part else name


THREADS = 2
Verdict = Literal["same", "differs", "not told"]


@dataclass(frozen=True)
class Problem:
    """Something that is not as published; `tensor` or `instance` names what is to blame, if one is."""

    code: str
    message: str
    tensor: str | None = None
    instance: str | None = None


@dataclass(frozen=True)
class VerifyReport:
    """The bytes that were read, and the findings. `instances` are those that run the version, `signers` the ids of the
    keys that the signatures of its parts name ("": not signed)."""

    version: int
    tensors: int
    nbytes: int
    seconds: float
    fingerprint: str
    instances: dict[str, Verdict]
    problems: tuple[Problem, ...]
    signers: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(store_url: str, model: str, version: int | None = None, *, trust: Iterable[Path | str] = ()) -> VerifyReport:
    """Check a version that is held on this host; without a number the active one. With `trust`, files of public keys or
    certificates, it must be signed by one of them.

    Raises SwapError, StoreUnavailable, WeightSyncError.
    """
    from weightsync.signing import Trust, signers

    trusted = Trust(trust)
    records = Records.read(store_url, model)
    record = records.ready(version)
    started = time.perf_counter()
    tensors, nbytes, problems = _check_slots(record)
    verdicts = {i.id: _verdict(record, i) for i in records.instances.values() if i.active_version == record.version}
    problems += [_differing(record, records.instances[name]) for name, v in verdicts.items() if v == "differs"]
    try:
        trusted.check(model, record, records.configs.get(record.form))
    except (PublishError, ManifestError, SlotBusy) as error:
        problems.append(Problem(error.code, str(error)))
    seconds = time.perf_counter() - started
    told = (verdicts, tuple(problems), signers(record))
    return VerifyReport(record.version, tensors, nbytes, seconds, record.fingerprint, *told)


def _check_slots(record: VersionRecord) -> tuple[int, int, list[Problem]]:
    try:
        with opened(record) as slots, ThreadPoolExecutor(THREADS) as pool:
            work = [(part, slot, name) for part, slot in slots.items() for name in slot.manifest.tensors]
            found = [problem for problem in pool.map(lambda item: _check_tensor(*item), work) if problem is not None]
            found += _check_fingerprint(record, slots)
            return len(work), sum(slot.nbytes for slot in slots.values()), found
    except (ManifestError, SlotBusy) as error:
        return 0, 0, [Problem(error.code, str(error))]


def _check_tensor(part: str, slot: SlotReader, name: str) -> Problem | None:
    """The digest of the bytes as they now are, and the checksum that the fingerprint is made of."""
    entry = slot.entry(name)
    try:
        slot.verify(name)
        with slot.buffer(name) as data:
            checksum = fingerprint.checksum(data, entry.dtype, entry.shape)
        if checksum != entry.checksum:
            raise checksum_mismatch(name, entry.checksum, checksum)
    except TensorError as error:
        return _problem(error, label(part, name))
    return None


def _check_fingerprint(record: VersionRecord, slots: dict[str, SlotReader]) -> list[Problem]:
    promised = join({part: slot.manifest.fingerprint for part, slot in slots.items()})
    if not record.fingerprint or record.fingerprint == promised:
        return []
    message = (
        f"the record of version {record.version} has fingerprint {record.fingerprint}, its manifests {promised}: "
        "publish the version again"
    )
    return [Problem("fingerprint_mismatch", message)]


def _verdict(record: VersionRecord, instance: InstanceRecord) -> Verdict:
    if not instance.fingerprint or not record.fingerprint:
        return "not told"
    return "same" if instance.fingerprint == record.fingerprint else "differs"


def _differing(record: VersionRecord, instance: InstanceRecord) -> Problem:
    message = (
        f"instance {instance.id} runs weights with fingerprint {instance.fingerprint}, version {record.version} has "
        f"{record.fingerprint}: restart the instance"
    )
    return Problem("fingerprint_mismatch", message, instance=instance.id)


def _problem(error: WeightSyncError, tensor: str) -> Problem:
    return Problem(error.code, str(error), tensor)


BLOCK = 1 << 19  # elements
Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class TensorDiff:
    """One tensor. Sizes of change are of finite values; `max_rel` is over elements that were not zero.

    `state`: "changed", "same", or that it is only in one of the two ("added", "removed", "reshaped": nothing else is
    then compared). `not_finite` counts NaN and infinity in the second version.
    """

    name: str
    dtype: str
    elements: int
    state: str = "changed"
    changed: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    mean_abs: float = 0.0
    not_finite: int = 0


@dataclass(frozen=True)
class VersionDiff:
    """Two versions: every tensor, those that changed most (by `max_abs`) first."""

    a: int
    b: int
    tensors: tuple[TensorDiff, ...]

    @property
    def elements(self) -> int:
        return sum(t.elements for t in self.tensors)

    @property
    def changed(self) -> int:
        return sum(t.changed for t in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """All of it, with the totals `elements` and `changed`."""
        return {**asdict(self), "elements": self.elements, "changed": self.changed}


def diff(store_url: str, model: str, a: int, b: int) -> VersionDiff:
    """Compare two versions held on this host. Raises SwapError, ManifestError, SlotBusy, StoreUnavailable."""
    records = Records.read(store_url, model)
    with opened(records.ready(a)) as old, opened(records.ready(b)) as new:
        found = []
        for part in old.keys() | new.keys():
            found += _diff_part(part, old.get(part), new.get(part))
    found.sort(key=lambda t: (-_rank(t), -t.changed, t.name))
    return VersionDiff(a, b, tuple(found))


def _rank(tensor: TensorDiff) -> float:
    return float("inf") if tensor.state in ("added", "removed", "reshaped") else tensor.max_abs


def _diff_part(part: str, old: SlotReader | None, new: SlotReader | None) -> list[TensorDiff]:
    before, after = (slot.manifest.tensors if slot is not None else {} for slot in (old, new))

    def one(name: str) -> TensorDiff:
        a, b = before.get(name), after.get(name)
        entry = b or a
        assert entry is not None
        shown, elements = label(part, name), entry.nbytes // ITEMSIZE[entry.dtype]
        if a is None or b is None or a.spec != b.spec:
            state = "added" if a is None else "removed" if b is None else "reshaped"
            return TensorDiff(shown, entry.dtype, elements, state)
        if a.digest == b.digest:
            return TensorDiff(shown, entry.dtype, elements, "same")
        assert old is not None
        assert new is not None
        return compare(shown, entry.dtype, old.buffer(name), new.buffer(name))

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(one, sorted(before.keys() | after.keys())))


def compare(name: str, dtype: str, old: memoryview, new: memoryview) -> TensorDiff:
    """Two tensors of one dtype and length, from their bytes."""
    word = WORD[ITEMSIZE[dtype]]
    a, b = np.frombuffer(old, word), np.frombuffer(new, word)
    changed = not_finite = finite = 0
    max_abs = max_rel = total = 0.0
    for start in range(0, len(a), BLOCK):
        x, y = a[start : start + BLOCK], b[start : start + BLOCK]
        changed += int(np.count_nonzero(x != y))
        before, after = as_floats(x, dtype), as_floats(y, dtype)
        not_finite += int(np.count_nonzero(~np.isfinite(after)))
        with np.errstate(invalid="ignore", over="ignore"):
            steps = np.abs(after - before)
        sound = np.isfinite(steps)
        finite += int(np.count_nonzero(sound))
        total += float(np.sum(steps, where=sound, dtype=np.float64))
        max_abs = max(max_abs, float(np.max(steps, initial=0.0, where=sound)))
        max_rel = max(max_rel, _largest_ratio(steps, before, sound))
    mean = total / finite if finite else 0.0
    return TensorDiff(name, dtype, len(a), "changed", changed, max_abs, max_rel, mean, not_finite)


def _largest_ratio(steps: Floats, before: Floats, sound: npt.NDArray[np.bool_]) -> float:
    use = sound & (before != 0)
    with np.errstate(over="ignore"):
        ratios = np.divide(steps, np.abs(before), out=np.zeros(len(steps), np.float64), where=use)
    return float(np.max(ratios, initial=0.0, where=np.isfinite(ratios)))


def as_floats(words: npt.NDArray[Any], dtype: str) -> Floats:
    """The values of unsigned words as float32, or as float64 where that would lose digits."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is a value like others here
        return _as_floats(words, dtype)


def _as_floats(words: npt.NDArray[Any], dtype: str) -> Floats:
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float8_e5m2":
        return (words.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)
    if dtype == "float8_e4m3fn":
        return _e4m3fn()[words]
    values = words.view(np.uint8 if dtype == "bool" else np.dtype(dtype))
    return values.astype(np.float32 if dtype in ("float16", "float32") else np.float64)


@cache
def _e4m3fn() -> npt.NDArray[np.float32]:
    """Every value of OCP's 8-bit float with 4 exponent bits (bias 7), 3 of mantissa, no infinity, NaN at S.1111.111."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -size, size).astype(np.float32)


def main() -> int:
    """The command; returns the exit status."""
    url, model, a, b = sys.argv[1:]
    try:
        told = diff(url, model, int(a), int(b)).to_json()
    except WeightSyncError as error:
        told = {"error": error.to_json()}
    print(orjson.dumps(told).decode())
    return int("error" in told)


if __name__ == "__main__":
    sys.exit(main())
