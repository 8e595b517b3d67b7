"""The file format of a delta: one version of a model as its difference from another, or, without a base, in full.

0   magic  b"HSDELTA\\0"           8 bytes
8   format                        u32, little-endian
12  length of the header          u32
16  digest of the header          32 hex characters (xxh3_128)
48  header, canonical JSON        base, target's tensors with their digests, step, metadata, source, and perhaps config,
                                  part and signature
.   blocks                        of every tensor in name order, BLOCK bytes of tensor each (delta_codec.py)
.   end    b"HSDELEND"            8 bytes, then the digest of everything before it (32 hex characters)

A reader checks every length before it allocates, so what hostile bytes can cost is a header and a few blocks.

Encode a delta from two sets of tensors, and apply one into a slot:

    for piece in DeltaWriter(header, new, old): send(piece)
    apply_delta(DeltaReader(stream), base_slot, draft)

Both ends stream: what they hold at a time is a few blocks a thread, never the model twice. Each block takes the
smallest form that is worth its time (delta_codec.py), down to its plain bytes, so a delta of everything costs no more
than the full version; `is_worthwhile` says beforehand whether a base helps at all.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, BinaryIO, Final, Protocol, TypeVar

import numpy as np
import orjson
import xxhash

from weightsync.control.parts import BASE, check_name
from weightsync.errors import PublishError, delta_error, digest_mismatch, unknown_base
from weightsync.format.delta_codec import (
    BLOCK,
    HEAD,
    WORD,
    BlockHead,
    Bytes,
    Patch,
    decode_block,
    encode_block,
    raw_block,
)
from weightsync.format.dtypes import ITEMSIZE
from weightsync.format.manifest import Schema, TensorSpec, digest_of
from weightsync.memory.receiver import SlotReader
from weightsync.publish.writer import FilledTensor

MAGIC: Final = b"HSDELTA\0"
END: Final = b"HSDELEND"
FORMAT: Final = 1
MAX_HEADER: Final = 64 << 20
MAX_NBYTES: Final = 1 << 50
MAX_SIGNATURE: Final = 16 << 10
_PREAMBLE = struct.Struct("<8sII32s")
_TRAILER_NBYTES = len(END) + 32
_OPTIONAL = {"config", "part", "signature"}
_FIELDS = {"format", "model", "base", "step", "metadata", "source", "tensors"}


@dataclass(frozen=True)
class Base:
    """The version a delta is made against, as its manifest identifies it."""

    version: int
    manifest_digest: str


@dataclass(frozen=True)
class DeltaHeader:
    """The header of a delta, before its blocks: the target's tensors (name: spec, digest), and the base, if it has
    one. `config` is the text of the config.json that an engine needs for these tensors, or nothing. `signature` is that
    of who made them (signing.py), or nothing. `part` is "" for the base model, "draft" or "lora/NAME"."""

    model: str
    tensors: Mapping[str, tuple[TensorSpec, str]]
    base: Base | None = None
    step: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    config: str = ""
    signature: str = ""
    part: str = BASE

    @cached_property
    def schema(self) -> Schema:
        return Schema({name: spec for name, (spec, _) in self.tensors.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of the target's tensors."""
        return sum(spec.nbytes for spec, _ in self.tensors.values())

    @property
    def target_digest(self) -> str:
        """Identifies the target's contents, whatever version number they get."""
        return digest_of(orjson.dumps(self._rows))

    @property
    def _rows(self) -> list[Any]:
        return [[name, spec.dtype, spec.shape, digest] for name, (spec, digest) in sorted(self.tensors.items())]

    def to_json(self) -> bytes:
        """Canonical: sorted keys, tensors in name order, no spaces."""
        document = {
            "format": FORMAT,
            "model": self.model,
            "base": [self.base.version, self.base.manifest_digest] if self.base else None,
            "step": self.step,
            "metadata": dict(self.metadata),
            "source": self.source,
            "tensors": self._rows,
            **{name: text for name in _OPTIONAL if (text := getattr(self, name))},
        }
        return orjson.dumps(document, option=orjson.OPT_SORT_KEYS)

    @classmethod
    def from_json(cls, raw: bytes) -> DeltaHeader:
        """Raises PublishError for anything `to_json` does not write."""
        try:
            document: dict[str, Any] = orjson.loads(raw)
            if not isinstance(document, dict) or document.keys() - _OPTIONAL != _FIELDS:
                raise delta_error("its header has other fields than this release writes: run the same on both sides")
            header = _header(document)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, PublishError) as error:
            if getattr(error, "code", "") == "delta_error":
                raise
            raise delta_error(f"its header cannot be read ({error})") from error
        if header.to_json() != raw:
            raise delta_error("its header is not canonical")
        return header

    def pack(self) -> bytes:
        """Preamble and header. Raises PublishError when the header is too large."""
        raw = self.to_json()
        if len(raw) > MAX_HEADER:
            raise delta_error(f"its header takes {len(raw):,} bytes, {MAX_HEADER:,} are allowed: use less metadata")
        return _PREAMBLE.pack(MAGIC, FORMAT, len(raw), digest_of(raw).encode()) + raw


def _header(document: dict[str, Any]) -> DeltaHeader:
    if document["format"] != FORMAT:
        raise delta_error(f"format {document['format']}, this release reads {FORMAT}: update the older side")
    tensors: dict[str, tuple[TensorSpec, str]] = {}
    for name, dtype, shape, digest in document["tensors"]:
        tensors[_text(name)] = (_spec(dtype, shape), _digest(digest))
    step, model, source = document["step"], _text(document["model"]), _text(document["source"])
    metadata = {_text(key): _text(value) for key, value in document["metadata"].items()}
    base = None
    if document["base"] is not None:
        version, manifest_digest = document["base"]
        base = Base(_natural(version), _digest(manifest_digest))
    step, config = step if step is None else _natural(step), _text(document.get("config", ""))
    if len(signature := _text(document.get("signature", ""))) > MAX_SIGNATURE:
        raise delta_error(f"its signature takes {len(signature):,} characters, {MAX_SIGNATURE:,} are allowed")
    part = check_name(_text(document.get("part", BASE)))
    header = DeltaHeader(model, tensors, base, step, metadata, source, config, signature, part)
    if header.nbytes > MAX_NBYTES:
        raise delta_error(f"its tensors take {header.nbytes:,} bytes")
    return header


def _spec(dtype: Any, shape: Any) -> TensorSpec:
    if dtype not in ITEMSIZE:
        raise delta_error(f"dtype {dtype!r} cannot be carried")
    return TensorSpec(dtype, tuple(_natural(n) for n in shape))


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise delta_error(f"{value!r} is not a natural number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise delta_error(f"{value!r} is not text")
    return value


def _digest(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 32 or set(value) - set("0123456789abcdef"):
        raise delta_error(f"{value!r} is not a digest")
    return value


def blocks_of(header: DeltaHeader) -> Iterator[tuple[str, int, int, int]]:
    """(name, first byte, bytes, bytes per element) of every block, in the order they are written."""
    for name, (spec, _) in sorted(header.tensors.items()):
        total, itemsize = spec.nbytes, ITEMSIZE[spec.dtype]
        for start in range(0, total, BLOCK):
            yield name, start, min(BLOCK, total - start), itemsize


@dataclass(frozen=True, slots=True)
class RawBlock:
    """One block as it was read: still packed. `start` and `nbytes` say which bytes of the tensor it makes."""

    name: str
    start: int
    nbytes: int
    itemsize: int
    head: BlockHead
    body: memoryview


class DeltaReader:
    """Reads a delta from a stream once, strictly: `header` first, then `blocks()`, which ends with the whole digest.

    The contents of blocks are not to be trusted before `blocks()` has ended. Raises PublishError.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = xxhash.xxh3_128()
        magic, version, length, digest = _PREAMBLE.unpack(self._read(_PREAMBLE.size))
        if magic != MAGIC:
            raise delta_error("wrong magic")
        if version != FORMAT:
            raise delta_error(f"format {version}, this release reads {FORMAT}: update the older side")
        if length > MAX_HEADER:
            raise delta_error(f"its header claims {length:,} bytes")
        raw = self._read(length)
        if (found := digest_of(raw)) != digest.decode("ascii", "replace"):
            raise delta_error(f"its header has digest {found}, not what it says")
        self.header = DeltaHeader.from_json(raw)
        self.nbytes = _PREAMBLE.size + length

    def blocks(self) -> Iterator[RawBlock]:
        """Every block in order; then the end, its digest, and that nothing follows, are checked. Raises
        PublishError."""
        for name, start, nbytes, itemsize in blocks_of(self.header):
            head = BlockHead.parse(self._read(HEAD.size), nbytes, itemsize)
            if self.header.base is None and head.needs_base:
                raise delta_error(f"tensor {name!r} has a difference, but there is no base")
            body = memoryview(self._read(head.nbytes))
            self.nbytes += HEAD.size + head.nbytes
            yield RawBlock(name, start, nbytes, itemsize, head, body)
        expected = self._digest.hexdigest()
        trailer = self._read(_TRAILER_NBYTES)
        self.nbytes += _TRAILER_NBYTES
        if trailer[: len(END)] != END or trailer[len(END) :] != expected.encode():
            raise delta_error(f"its digest is {expected}, its end says otherwise")
        if self._stream.read(1):
            raise delta_error("bytes follow its end")

    def _read(self, nbytes: int) -> bytes:
        data = self._stream.read(nbytes)
        while len(data) < nbytes and (more := self._stream.read(nbytes - len(data))):
            data += more
        if len(data) < nbytes:
            raise delta_error(f"cut off: {nbytes:,} bytes were to follow, {len(data):,} did")
        self._digest.update(data)
        return data


def framed(header: DeltaHeader, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """A delta with this header, of pieces that are its blocks one after the other."""
    hasher = xxhash.xxh3_128()
    for piece in itertools.chain([header.pack()], blocks):
        hasher.update(piece)
        yield piece
    yield end_of(hasher.hexdigest())


def end_of(digest: str) -> bytes:
    """The last bytes of a delta; `digest` is that of everything before them."""
    return END + digest.encode()


assert set(WORD) == set(ITEMSIZE.values())  # every dtype that can be carried has a word


Buffers = Callable[[str], "memoryview | Bytes"]  # the bytes of a tensor, by name
A = TypeVar("A")
B = TypeVar("B")
GROUP = 8  # blocks a task: what handing one to a thread costs is then little beside it
SAMPLES = 16
PAYS_BELOW = 0.9  # of what the full version takes

__all__ = ["Base", "DeltaHeader", "DeltaReader", "DeltaWriter", "apply_delta", "is_worthwhile"]


@dataclass
class DeltaStats:
    """The statistics of a written delta: bytes, elements changed in SPARSE blocks, blocks of each kind (of
    `delta_codec`)."""

    nbytes: int = 0
    changed: int = 0
    kinds: Counter[int] = field(default_factory=Counter)


class DeltaWriter:
    """Iterate over it for the bytes of a delta from `base` to `target`, as often as is needed; both must hold still.

    `target` and `base` give the bytes of a tensor by name. Without `header.base` every block is in full, and with
    `compress` off as it lies in memory, which a link of 10 Gbit/s or more carries faster than a core compresses.
    """

    def __init__(
        self,
        header: DeltaHeader,
        target: Buffers,
        base: Buffers | None = None,
        *,
        compress: bool = True,
        threads: int | None = None,
    ) -> None:
        if (header.base is None) != (base is None):
            raise ValueError("a header that names a base, and the base's bytes, go together")
        self.header, self.stats = header, DeltaStats()
        self._target, self._base, self._compress = target, base, compress
        self._threads = threads or min(4, os.cpu_count() or 1)

    def __iter__(self) -> Iterator[bytes]:
        nbytes = 0
        for piece in framed(self.header, self.blocks()):
            nbytes += len(piece)
            self.stats.nbytes = nbytes
            yield piece

    def blocks(self) -> Iterator[bytes]:
        """The blocks alone: what is between header and end, which do not depend on it."""
        self.stats = DeltaStats()
        for encoded in _in_order(self._encode, _grouped(blocks_of(self.header)), self._threads):
            for head, _ in encoded:
                kind, _, _, changed, _, _ = HEAD.unpack(head)
                self.stats.kinds[kind] += 1
                self.stats.changed += changed
            yield b"".join([part for block in encoded for part in block])

    def _encode(self, group: list[tuple[str, int, int, int]]) -> list[tuple[bytes, bytes | memoryview]]:
        return [self._encode_one(*block) for block in group]

    def _encode_one(self, name: str, start: int, nbytes: int, itemsize: int) -> tuple[bytes, bytes | memoryview]:
        new = _slice(self._target(name), start, nbytes)
        if self._base is None:
            return encode_block(None, new, itemsize) if self._compress else raw_block(new)
        return encode_block(_slice(self._base(name), start, nbytes), new, itemsize)


def is_worthwhile(header: DeltaHeader, target: Buffers, base: Buffers) -> bool:
    """Whether a delta would be clearly smaller than the full version: a look at a few blocks all over the model."""
    blocks = list(blocks_of(header))
    sample = blocks[:: max(1, len(blocks) // SAMPLES)]
    delta = full = 0
    for name, start, nbytes, itemsize in sample:
        new = _slice(target(name), start, nbytes)
        delta += len(encode_block(_slice(base(name), start, nbytes), new, itemsize)[1])
        full += len(encode_block(None, new, itemsize)[1])
    return delta < PAYS_BELOW * full


class Draftlike(Protocol):
    """The part of a `Draft` that is needed here."""

    def write(self, name: str, tensor: Any) -> str: ...


def apply_delta(reader: DeltaReader, base: SlotReader | None, draft: Draftlike, *, threads: int | None = None) -> None:
    """Write the version that `reader` describes into `draft`, checked to the last byte; commit the draft afterwards.

    Doing it again gives the same bytes. Raises PublishError (TensorError: the bytes of the base are not what they were,
    or those of the delta), and what `draft.write` raises; the draft must then be aborted.
    """
    header = reader.header
    if header.base is not None:
        require_base(header, base)
    patches = _patches(reader, threads or min(4, os.cpu_count() or 1))
    for name, (spec, digest) in sorted(header.tensors.items()):
        source = None if header.base is None or base is None else base.buffer(name)
        found = draft.write(name, FilledTensor(spec, _filler(patches, source), BLOCK))
        if found != digest:
            raise digest_mismatch(name, digest, found)
    if next(patches, None) is not None:  # also has the end of the file checked
        raise delta_error("it has more blocks than tensors")


def require_base(header: DeltaHeader, base: SlotReader | None) -> None:
    """Raises PublishError unless `base` is the version the delta was made against."""
    assert header.base is not None
    wanted = header.base
    if base is None or base.manifest_digest != wanted.manifest_digest:
        raise unknown_base(wanted.version, wanted.manifest_digest, base.manifest_digest if base else None)
    schema: Schema = base.manifest.schema
    if schema.tensors != header.schema.tensors:
        raise delta_error("its tensors are not those of its base")


def _patches(reader: DeltaReader, threads: int) -> Iterator[tuple[RawBlock, Patch]]:
    for decoded in _in_order(_decode, _grouped(reader.blocks()), threads):
        yield from decoded


def _decode(group: list[RawBlock]) -> list[tuple[RawBlock, Patch]]:
    return [(raw, decode_block(raw.head, raw.body, raw.nbytes, raw.itemsize)) for raw in group]


def _filler(patches: Iterator[tuple[RawBlock, Patch]], base: memoryview | None) -> Callable[[memoryview, int], None]:
    def fill(target: memoryview, start: int) -> None:
        _, patch = next(patches)
        source = None if base is None else _slice(base, start, len(target))
        patch.apply(np.frombuffer(target, np.uint8), source)

    return fill


def _slice(buffer: memoryview | Bytes, start: int, nbytes: int) -> Bytes:
    return np.frombuffer(buffer, np.uint8, nbytes, start)


def _grouped(items: Iterable[A]) -> Iterator[list[A]]:
    iterator = iter(items)
    while group := list(islice(iterator, GROUP)):
        yield group


def _in_order(work: Callable[[A], B], items: Iterable[A], threads: int) -> Iterator[B]:
    """`work` over `items` on threads; results in order, a few ahead of whoever takes them."""
    if threads == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        running: deque[Future[B]] = deque()
        try:
            for item in items:
                running.append(pool.submit(work, item))
                if len(running) > threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()
