"""The last version of a part and the next one, in host memory: what a publisher that sends differences keeps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from weightsync.control.parts import ADAPTER_CONFIG, BASE, LORA, Adapter, check_name, content_of
from weightsync.errors import PublishError
from weightsync.format.delta_codec import Bytes
from weightsync.format.manifest import CUTS, Schema, TensorSpec, content_sha256, is_derived
from weightsync.memory.receiver import SlotReader
from weightsync.publish.cast import converted
from weightsync.publish.delta import Base, DeltaHeader, DeltaWriter, is_worthwhile
from weightsync.publish.publisher import NamedTensors
from weightsync.publish.writer import copy_sums, spec_of

if TYPE_CHECKING:
    from weightsync.signing import Signer


class Contents(Protocol):
    """The tensors of one version, by name: spec, digest, bytes."""

    @property
    def rows(self) -> Mapping[str, tuple[TensorSpec, str]]: ...

    def buffer(self, name: str) -> memoryview | Bytes: ...

    def close(self) -> None:
        """The bytes are not read any more."""


class HostModel:
    """Contents that were copied here. The next version's take the same pages."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[TensorSpec, str]] = {}
        self._buffers: dict[str, Bytes] = {}

    def take(self, named_tensors: Iterable[tuple[str, Any]]) -> None:
        """Copy every tensor here but derived ones. Raises TensorError, and PublishError for a name that comes twice."""
        self.rows = {}
        for name, tensor in named_tensors:
            if name in self.rows:
                raise PublishError(f"tensor {name!r} comes twice: publish each once", code="remote_error")
            spec = spec_of(name, tensor)
            if is_derived(name, spec.shape):
                continue
            buffer = self._buffers.get(name)
            if buffer is None or len(buffer) != spec.nbytes:
                buffer = self._buffers[name] = np.empty(spec.nbytes, np.uint8)
            self.rows[name] = (spec, copy_sums(buffer.data, tensor, spec).digest)

    def buffer(self, name: str) -> Bytes:
        return self._buffers[name]

    def close(self) -> None:
        """Its pages stay, for the next version."""


class SlotModel:
    """Contents of a slot, where they are. The slot is locked against reuse until `close`."""

    def __init__(self, reader: SlotReader) -> None:
        self._reader = reader
        specs = reader.manifest.schema.tensors
        self.rows = {name: (specs[name], entry.digest) for name, entry in reader.manifest.tensors.items()}

    def buffer(self, name: str) -> memoryview:
        return self._reader.buffer(name)

    def close(self) -> None:
        self._reader.close()


class Succession:
    """The versions of one part of a model. Take the next one in, send what `writer` gives, then `advance`; a version
    that could not be sent is taken in again."""

    def __init__(self, model: str, part: str = BASE, signer: Signer | None = None) -> None:
        """`signer` signs each version. Raises PublishError."""
        self.model, self.part, self._signer = model, check_name(part, model), signer
        self.base: Base | None = None  # the last version, as the other side knows it
        self.deltas = 0  # versions in a row that were differences
        self._held: Contents = HostModel()
        self._next: Contents = HostModel()

    def take(
        self,
        named_tensors: NamedTensors | Adapter,
        *,
        step: int | None = None,
        metadata: Mapping[str, str] | None = None,
        source: str = "",
        config: Mapping[str, Any] | None = None,
        cast_to: Schema | None = None,
        strip: str = "",
    ) -> DeltaHeader:
        """Copies the tensors here; the header of the version in full. `cast_to`: with floating-point tensors in its
        dtypes. `strip` as in `Publisher.publish`. Raises TensorError, PublishError."""
        pairs, own = content_of(named_tensors, strip)
        more = {**(metadata or {}), **own}
        if not isinstance(self._next, HostModel):
            self._next.close()
            self._next = HostModel()
        wanted: Mapping[str, TensorSpec] = cast_to.tensors if cast_to is not None else {}
        self._next.take((name, converted(tensor, wanted.get(name))) for name, tensor in pairs)
        text = json.dumps(dict(config), sort_keys=True) if config is not None else ""
        return self._header(step, more, source, text)

    def take_slot(self, reader: SlotReader, *, source: str = "") -> DeltaHeader:
        """The same for a slot, which stays open, and is read where it is. Its digests are those of its manifest."""
        self._next.close()
        self._next = SlotModel(reader)
        manifest = reader.manifest
        metadata = {name: text for name, text in manifest.metadata.items() if name != CUTS}
        return self._header(manifest.step, metadata, source, "")

    def _header(self, step: int | None, metadata: Mapping[str, str], source: str, config: str) -> DeltaHeader:
        if self.part.startswith(LORA) and ADAPTER_CONFIG not in metadata:
            raise PublishError(f"{self.part} needs PEFT's configuration: publish an `Adapter`", code="bad_part")
        header = DeltaHeader(self.model, self._next.rows, None, step, metadata, source, config, part=self.part)
        if self._signer is None:
            return header
        digest = content_sha256(header.schema, header.metadata, self._next.buffer)
        signed = self._signer.sign(self.model, self.part, digest, config if self.part == BASE else "")
        return replace(header, signature=signed)

    def pays(self, header: DeltaHeader) -> bool:
        """Whether there is a last version, with the same tensors, and a difference from it is smaller than the
        whole."""
        if self.base is None or header.schema.tensors != {name: spec for name, (spec, _) in self._held.rows.items()}:
            return False
        return is_worthwhile(header, self._next.buffer, self._held.buffer)

    def writer(self, header: DeltaHeader, *, compress: bool, threads: int | None) -> DeltaWriter:
        """Of the next version: a difference from the last one if the header names a base, else in full."""
        old = self._held.buffer if header.base is not None else None
        return DeltaWriter(header, self._next.buffer, old, compress=compress, threads=threads)

    def advance(self, base: Base, *, full: bool) -> None:
        """The next version has become the last one, which the other side knows as `base`."""
        self.base, self.deltas = base, 0 if full else self.deltas + 1
        self._held.close()
        before = self._held if isinstance(self._held, HostModel) else HostModel()
        self._held, self._next = self._next, before

    def close(self) -> None:
        """Lets go of slots."""
        self._held.close()
        self._next.close()
