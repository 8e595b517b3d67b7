"""Reads a version again, every byte of it, and looks whether each instance runs what was published.

Found are bytes that changed in a slot (memory faults, a stray writer), a manifest that does not say what the record
says, and instances that built something else. All problems are reported, not the first alone.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from weightsync.digests import fingerprint
from weightsync.errors import ChecksumMismatch, DigestMismatch, ManifestError, SlotBusy, WeightSyncError
from weightsync.parts import join
from weightsync.receiver import SlotReader
from weightsync.records import InstanceRecord, VersionRecord
from weightsync.versions import Records, label, opened

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
    """What was read, and what was found. `instances` are those that run the version."""

    version: int
    tensors: int
    nbytes: int
    seconds: float
    fingerprint: str
    instances: dict[str, Verdict]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(store_url: str, model: str, version: int | None = None) -> VerifyReport:
    """Check a version that is held on this host; without a number the active one.

    Raises UnknownVersion, StoreUnavailable.
    """
    records = Records.read(store_url, model)
    record = records.ready(version)
    started = time.perf_counter()
    tensors, nbytes, problems = _check_slots(record)
    verdicts = {i.id: _verdict(record, i) for i in records.instances.values() if i.active_version == record.version}
    problems += [_differing(record, records.instances[name]) for name, v in verdicts.items() if v == "differs"]
    seconds = time.perf_counter() - started
    return VerifyReport(record.version, tensors, nbytes, seconds, record.fingerprint, verdicts, tuple(problems))


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
            raise ChecksumMismatch(name, entry.checksum, checksum)
    except (DigestMismatch, ChecksumMismatch) as error:
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
