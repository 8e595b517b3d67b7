"""Publishes versions into a bucket, from any training loop: in full at first, then what has changed.

    pub = weightsync.BucketPublisher("s3://models/run", model="demo")
    number = pub.publish(model.named_parameters(), step=10)
    number = pub.publish(Adapter(lora_tensors, adapter_config), part="lora/math")  # the base stays as it is

It keeps the tensors of its last version, and room for the next, in host memory: twice the model, and twice each other
part that it publishes. A version in a slot is read where it is instead (`publish_slot`).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from weightsync.bucket.metrics import PublisherMetrics
from weightsync.bucket.objects import Bucket, StoredPart, StoredVersion, directory_of
from weightsync.control.parts import BASE, Adapter
from weightsync.errors import BucketError, WeightSyncError, publishing
from weightsync.memory.receiver import SlotReader
from weightsync.publish.delta import Base, DeltaHeader
from weightsync.publish.publisher import NamedTensors, signer_of
from weightsync.publish.succession import Succession

log = logging.getLogger("weightsync.bucket")

PART_NBYTES = 64 << 20
AT_ONCE = 4  # parts on their way


class BucketPublisher:
    """The one publisher of `model` at `url`. Each `full_every`th version of a part comes in full, and so does one that
    has other tensors than the one before, or of which a difference would not be smaller. The newest `keep` versions
    stay, with those that they build on and the newest of each part.

    Versions are signed with the private key in the PEM file `sign` (default: HOTSWAP_SIGN_KEY; none: not signed).
    `last` says how the last version went: {"number", "sent" (bytes), "full", "nbytes", "removed" (numbers), "seconds"}.
    `metrics` count all of them.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        keep: int = 3,
        full_every: int = 10,
        compress: bool = True,
        threads: int | None = None,
        part_nbytes: int = PART_NBYTES,
        sign: Path | str | None = None,
    ) -> None:
        """Raises BucketError, WeightSyncError; ValueError for numbers below 1."""
        if min(keep, full_every, part_nbytes) < 1:
            raise ValueError("keep, full_every and part_nbytes must be 1 or more")
        self.model, self.last = model, dict[str, Any]()
        self._keep, self._full_every, self._part_nbytes = keep, full_every, part_nbytes
        self._compress, self._threads, self._signer = compress, threads, signer_of(sign)
        self.bucket = Bucket(url)
        self.metrics = PublisherMetrics()
        self._number = max(self.bucket.numbers(), default=0)
        self._newest = self.bucket.newest_parts()
        self._tried: dict[str, StoredVersion] = {}  # by upload: claims whose answer may have been lost
        self._successions: dict[str, Succession] = {}

    @publishing
    def publish(
        self,
        named_tensors: NamedTensors | Adapter,
        *,
        part: str = BASE,
        step: int | None = None,
        metadata: Mapping[str, str] | None = None,
        source: str = "",
        config: Mapping[str, Any] | None = None,
    ) -> int:
        """Put all tensors there as the next version; returns its number in the bucket. Each fleet gives it one of its
        own. With `part` they are the draft model's ("draft") or an `Adapter` ("lora/NAME"), and the rest stays as it
        is. With `config`, the config.json of such a checkpoint, tensors and configuration may be others
        than before.

        No version is seen before it is whole. Raises PublishError: for good with the code `bucket_taken`; with another
        one of a bucket it can be called again.
        """
        versions = self._of(part)
        about: dict[str, Any] = {"step": step, "metadata": metadata, "source": source, "config": config}
        return self._put(versions, versions.take(named_tensors, **about))

    @publishing
    def publish_slot(self, slot: SlotReader, *, part: str = BASE, source: str = "") -> int:
        """The same for a version in a slot, which stays open, and locked, until the next version of the part is there.
        Raises as `publish`, and TensorError for a slot that is not what its manifest says."""
        slot.verify_all()
        versions = self._of(part)
        return self._put(versions, versions.take_slot(slot, source=source))

    def close(self) -> None:
        """Lets go of slots."""
        for versions in self._successions.values():
            versions.close()

    def _of(self, part: str) -> Succession:
        if (found := self._successions.get(part)) is None:
            found = self._successions[part] = Succession(self.model, part, self._signer)
        return found

    def _put(self, versions: Succession, header: DeltaHeader) -> int:
        """The next version is in the bucket; its number."""
        began = time.perf_counter()
        self.metrics.began(time.monotonic())
        base = versions.base if versions.deltas + 1 < self._full_every and versions.pays(header) else None
        header = replace(header, base=base)
        try:
            version = self._claimed(versions, header)
        except WeightSyncError as error:
            self.metrics.failed(error.code)
            raise
        self._number, self._newest = version.number, version.newest
        versions.advance(Base(version.number, header.target_digest), full=base is None)
        seconds = time.perf_counter() - began
        self.metrics.published(version.number, version.nbytes, seconds, full=base is None)
        removed = self._pruned()
        sent = {"number": version.number, "sent": version.nbytes, "full": base is None, "seconds": round(seconds, 3)}
        self.last = {**sent, "nbytes": header.nbytes, "removed": removed}
        return version.number

    def _claimed(self, versions: Succession, header: DeltaHeader) -> StoredVersion:
        """The next version, in the bucket. Raises BucketError."""
        others = {part: number for part, number in self._newest.items() if part != versions.part}
        version = self._sent(versions, StoredVersion(self._number + 1, uuid.uuid4().hex, header, (), others))
        self._tried[version.upload] = version
        own = self._tried.get(self.bucket.claim(version))
        if own is None:
            advice = "stop one of the two, or give this one a prefix of its own; a new publisher goes on from there"
            message = f"another publisher has published version {version.number} in {self.bucket.told}: {advice}"
            raise BucketError(message, code="bucket_taken")
        self._tried.clear()
        if (own.header, own.others) == (header, others):
            return own  # this upload, or an earlier one of the same whose answer was lost
        self._number, self._newest = own.number, own.newest
        return self._claimed(versions, header)

    def _pruned(self) -> list[int]:
        """The numbers that went. The version is published: what cannot be removed now waits for the next one."""
        try:
            return self.bucket.prune(self._keep)
        except WeightSyncError as error:
            log.warning("nothing is removed from %s: %s", self.bucket.told, error)
            return []

    def _sent(self, versions: Succession, version: StoredVersion) -> StoredVersion:
        """With its parts, which are in the bucket."""
        writer = versions.writer(version.header, compress=self._compress, threads=self._threads)
        self.bucket.begin(version)
        parts: list[StoredPart] = []
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="bucket") as pool:
            running: deque[Future[StoredPart]] = deque()
            for index, data in enumerate(_cut(writer.blocks(), self._part_nbytes)):
                running.append(pool.submit(self.bucket.write_part, directory_of(version), index, data))
                if len(running) > AT_ONCE:
                    parts.append(running.popleft().result())
            parts += [future.result() for future in running]
        return replace(version, parts=tuple(parts))


def _cut(pieces: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of `size`, of which the last may be smaller."""
    waiting = bytearray()
    for piece in pieces:
        waiting += piece
        while len(waiting) >= size:
            yield bytes(waiting[:size])
            del waiting[:size]
    if waiting:
        yield bytes(waiting)
