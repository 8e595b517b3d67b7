"""The file format of a delta: one version of a model as its difference from another, or, without a base, in full.

0   magic  b"HSDELTA\\0"           8 bytes
8   format                        u32, little-endian
12  length of the header          u32
16  digest of the header          32 hex characters (xxh3_128)
48  header, canonical JSON        base, target's tensors with their digests, step, metadata, source
.   blocks                        of every tensor in name order, BLOCK bytes of tensor each (codec.py)
.   end    b"HSDELEND"            8 bytes, then the digest of everything before it (32 hex characters)

A reader checks every length before it allocates, so what hostile bytes can cost is a header and a few blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO, Final

import orjson
import xxhash

from weightsync.delta.codec import BLOCK, HEAD, WORD, BlockHead
from weightsync.dtypes import ITEMSIZE
from weightsync.errors import DeltaError, UnsupportedDtype
from weightsync.manifest import Schema, TensorSpec, digest_of

MAGIC: Final = b"HSDELTA\0"
END: Final = b"HSDELEND"
FORMAT: Final = 1
MAX_HEADER: Final = 64 << 20
MAX_NBYTES: Final = 1 << 50
_PREAMBLE = struct.Struct("<8sII32s")
_TRAILER_NBYTES = len(END) + 32
_FIELDS = {"format", "model", "base", "step", "metadata", "source", "tensors"}


@dataclass(frozen=True)
class Base:
    """The version a delta is made against, as its manifest identifies it."""

    version: int
    manifest_digest: str


@dataclass(frozen=True)
class DeltaHeader:
    """What a delta says before its blocks: the target's tensors (name: spec, digest), and the base, if it has one."""

    model: str
    tensors: Mapping[str, tuple[TensorSpec, str]]
    base: Base | None = None
    step: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    source: str = ""

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
        }
        return orjson.dumps(document, option=orjson.OPT_SORT_KEYS)

    @classmethod
    def from_json(cls, raw: bytes) -> DeltaHeader:
        """Raises DeltaError for anything `to_json` does not write."""
        try:
            document: dict[str, Any] = orjson.loads(raw)
            if not isinstance(document, dict) or document.keys() != _FIELDS:
                raise DeltaError("its header has other fields than this release writes: run the same on both sides")
            header = _header(document)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, UnsupportedDtype) as error:
            raise DeltaError(f"its header cannot be read ({error})") from error
        if header.to_json() != raw:
            raise DeltaError("its header is not canonical")
        return header

    def pack(self) -> bytes:
        """Preamble and header. Raises DeltaError when the header is too large."""
        raw = self.to_json()
        if len(raw) > MAX_HEADER:
            raise DeltaError(f"its header takes {len(raw):,} bytes, {MAX_HEADER:,} are allowed: use less metadata")
        return _PREAMBLE.pack(MAGIC, FORMAT, len(raw), digest_of(raw).encode()) + raw


def _header(document: dict[str, Any]) -> DeltaHeader:
    if document["format"] != FORMAT:
        raise DeltaError(f"format {document['format']}, this release reads {FORMAT}: update the older side")
    tensors: dict[str, tuple[TensorSpec, str]] = {}
    for name, dtype, shape, digest in document["tensors"]:
        tensors[_text(name)] = (_spec(dtype, shape), _digest(digest))
    step, model, source = document["step"], _text(document["model"]), _text(document["source"])
    metadata = {_text(key): _text(value) for key, value in document["metadata"].items()}
    base = None
    if document["base"] is not None:
        version, manifest_digest = document["base"]
        base = Base(_natural(version), _digest(manifest_digest))
    header = DeltaHeader(model, tensors, base, step if step is None else _natural(step), metadata, source)
    if header.nbytes > MAX_NBYTES:
        raise DeltaError(f"its tensors take {header.nbytes:,} bytes")
    return header


def _spec(dtype: Any, shape: Any) -> TensorSpec:
    if dtype not in ITEMSIZE:
        raise DeltaError(f"dtype {dtype!r} cannot be carried")
    return TensorSpec(dtype, tuple(_natural(n) for n in shape))


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise DeltaError(f"{value!r} is not a natural number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise DeltaError(f"{value!r} is not text")
    return value


def _digest(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 32 or set(value) - set("0123456789abcdef"):
        raise DeltaError(f"{value!r} is not a digest")
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

    What blocks say is not to be trusted before `blocks()` has ended. Raises DeltaError.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = xxhash.xxh3_128()
        magic, version, length, digest = _PREAMBLE.unpack(self._read(_PREAMBLE.size))
        if magic != MAGIC:
            raise DeltaError("wrong magic")
        if version != FORMAT:
            raise DeltaError(f"format {version}, this release reads {FORMAT}: update the older side")
        if length > MAX_HEADER:
            raise DeltaError(f"its header claims {length:,} bytes")
        raw = self._read(length)
        if (found := digest_of(raw)) != digest.decode("ascii", "replace"):
            raise DeltaError(f"its header has digest {found}, not what it says")
        self.header = DeltaHeader.from_json(raw)
        self.nbytes = _PREAMBLE.size + length

    def blocks(self) -> Iterator[RawBlock]:
        """Every block in order; then the end, its digest, and that nothing follows, are checked. Raises DeltaError."""
        for name, start, nbytes, itemsize in blocks_of(self.header):
            head = BlockHead.parse(self._read(HEAD.size), nbytes, itemsize)
            if self.header.base is None and head.needs_base:
                raise DeltaError(f"tensor {name!r} has a difference, but there is no base")
            body = memoryview(self._read(head.nbytes))
            self.nbytes += HEAD.size + head.nbytes
            yield RawBlock(name, start, nbytes, itemsize, head, body)
        expected = self._digest.hexdigest()
        trailer = self._read(_TRAILER_NBYTES)
        self.nbytes += _TRAILER_NBYTES
        if trailer[: len(END)] != END or trailer[len(END) :] != expected.encode():
            raise DeltaError(f"its digest is {expected}, its end says otherwise")
        if self._stream.read(1):
            raise DeltaError("bytes follow its end")

    def _read(self, nbytes: int) -> bytes:
        data = self._stream.read(nbytes)
        while len(data) < nbytes and (more := self._stream.read(nbytes - len(data))):
            data += more
        if len(data) < nbytes:
            raise DeltaError(f"cut off: {nbytes:,} bytes were to follow, {len(data):,} did")
        self._digest.update(data)
        return data


def end_of(digest: str) -> bytes:
    """The last bytes of a delta; `digest` is that of everything before them."""
    return END + digest.encode()


assert set(WORD) == set(ITEMSIZE.values())  # every dtype that can be carried has a word
