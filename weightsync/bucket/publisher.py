"""Publishes versions into a bucket, from any training loop: in full at first, then what has changed.

    pub = weightsync.BucketPublisher("s3://models/run", model="demo")
    number = pub.publish(model.named_parameters(), step=10)

It keeps the tensors of its last version, and room for the next, in host memory: twice the model.
"""

from __future__ import annotations

import json
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from weightsync.bucket.objects import Bucket, StoredPart, StoredVersion, directory_of
from weightsync.errors import BucketTaken
from weightsync.format.delta import Base, DeltaHeader, DeltaWriter, is_worthwhile
from weightsync.format.manifest import content_sha256
from weightsync.memory.parts import BASE
from weightsync.publish.publisher import NamedTensors, signer_of
from weightsync.publish.remote import HostModel

PART_NBYTES = 64 << 20
AT_ONCE = 4  # parts on their way


class BucketPublisher:
    """The one publisher of `model` at `url`. Each `full_every`th version comes in full, and so does one that has other
    tensors than the one before, or of which a difference would not be smaller. The newest `keep` versions stay, with
    those that they build on.

    Versions are signed with the private key in the PEM file `sign` (default: HOTSWAP_SIGN_KEY; none: not signed).
    `last` says how the last version went: {"number", "sent" (bytes), "full", "nbytes", "removed" (numbers)}.
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
        """Raises BucketError, BucketUnavailable, SigningKeyError; ValueError for numbers below 1."""
        if min(keep, full_every, part_nbytes) < 1:
            raise ValueError("keep, full_every and part_nbytes must be 1 or more")
        self.model, self.last = model, dict[str, Any]()
        self._keep, self._full_every, self._part_nbytes = keep, full_every, part_nbytes
        self._compress, self._threads, self._signer = compress, threads, signer_of(sign)
        self.bucket = Bucket(url)
        self._number = max(self.bucket.numbers(), default=0)
        self._deltas = 0  # since the last version in full
        self._base: Base | None = None
        self._held, self._next = HostModel(), HostModel()

    def publish(
        self,
        named_tensors: NamedTensors,
        *,
        step: int | None = None,
        metadata: Mapping[str, str] | None = None,
        source: str = "",
        config: Mapping[str, Any] | None = None,
    ) -> int:
        """Put all tensors there as the next version; returns its number in the bucket. Each fleet gives it one of its
        own. With `config`, the config.json of such a checkpoint, they may be other tensors than before.

        Nobody sees a version before it is whole. Raises UnsupportedDtype (nothing was sent), BucketTaken, for good,
        and BucketUnavailable, after which it can be called again.
        """
        self._next.take(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
        text = json.dumps(dict(config), sort_keys=True) if config is not None else ""
        header = DeltaHeader(self.model, self._next.rows, None, step, dict(metadata or {}), source, text)
        if self._signer is not None:
            digest = content_sha256(header.schema, header.metadata, self._next.buffer)
            header = replace(header, signature=self._signer.sign(self.model, BASE, digest))
        base = self._useful_base(header)
        header = replace(header, base=base)
        version = self._sent(StoredVersion(self._number + 1, uuid.uuid4().hex, header, ()))
        if not self.bucket.claim(version):
            raise BucketTaken(self.bucket.told, version.number)
        self._number = version.number
        self._base = Base(version.number, header.target_digest)
        self._held, self._next = self._next, self._held
        self._deltas = self._deltas + 1 if base is not None else 0
        removed = self.bucket.prune(self._keep)
        sent = {"number": version.number, "sent": version.nbytes, "full": base is None}
        self.last = {**sent, "nbytes": header.nbytes, "removed": removed}
        return version.number

    def _useful_base(self, header: DeltaHeader) -> Base | None:
        if self._base is None or self._deltas + 1 >= self._full_every or not self._next.same_schema(self._held):
            return None
        return self._base if is_worthwhile(header, self._next.buffer, self._held.buffer) else None

    def _sent(self, version: StoredVersion) -> StoredVersion:
        """With its parts, which are in the bucket."""
        old = self._held.buffer if version.header.base is not None else None
        how: dict[str, Any] = {"compress": self._compress, "threads": self._threads}
        writer = DeltaWriter(version.header, self._next.buffer, old, **how)
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
