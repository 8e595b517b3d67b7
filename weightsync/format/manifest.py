"""The manifest: dtype, shape, place in the slot and digest of every tensor, by Hugging Face name.

A `Schema` says which tensors a model has; a `Layout` (a pure function of the schema) says where each lies, so that
every trainer rank computes the same offsets without talking; a `Manifest` adds what was written there.

A slot file carries a manifest and its tensors:

0   magic  b"HOTSWAP\\0"           8 bytes
8   format                        u32, little-endian
12  manifest length in bytes      u32
16  digest of the manifest        32 hex characters (xxh3_128)
64  manifest, canonical JSON      as long as the header says
.   tensors                       from the first page after the room for the manifest, 64-byte aligned

A file that has only some chunks of a version, for the ranks of its host, is no slot. It begins with another magic and
no digest at 16, so that nobody takes it for one; the digest is at 48 (16 bytes). A reader that opens it
all the same, with `part`, must check what it reads by the digests of the parts.

All else is zeros, so every byte of a slot follows from its manifest and tensors: copies on all hosts are the same.

Hosts send a slot to each other in chunks of one size, and the manifest alone tells whether a chunk is right: a tensor
that lies within one chunk has its digest, and one that several chunks share has a digest for the part in each of them
(`Cuts`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import math
import mmap
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson
import xxhash

from weightsync.errors import (
    ManifestError,
    TensorError,
    dtype_mismatch,
    missing_tensor,
    shape_mismatch,
    unexpected_tensor,
    unsupported_dtype,
)
from weightsync.format.dtypes import ITEMSIZE
from weightsync.format.naming import advice

FORMAT = 2
ALIGNMENT = 64  # a cache line, and what the widest vector loads like
PAGE = 4096
PREAMBLE = 64  # magic, format, length and digest of the manifest
METADATA_ROOM = 16 << 10
CHUNK = 32 << 20  # bytes of a slot that travel together, unless their digests would take too much of the header
CUTS_SHARE = 4  # of the room in the header they may take one in so many bytes
CUTS = "hotswap.chunks"  # in the metadata, where a reader that does not know it passes over it
DIGEST_NBYTES = 16


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Element type (torch's name) and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


_TABLES = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_MASKS, _MASKED = (".attn.bias", ".attention.bias"), (".attn.masked_bias", ".attention.masked_bias")


def is_derived(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor follows from the configuration, so that no engine reads it from a checkpoint: the tables of
    rotary embeddings (vLLM's AutoWeightsLoader), the causal mask [1, 1, length, length] and its value [] (vLLM's
    gpt2.py and gpt_j.py)."""
    if name.endswith(_MASKS):
        return len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    return name.endswith(_TABLES) or (name.endswith(_MASKED) and shape == ())


@dataclass(frozen=True)
class Schema:
    """The tensors of a model, by name, sorted. Raises TensorError."""

    tensors: Mapping[str, TensorSpec]

    def __post_init__(self) -> None:
        for name, spec in self.tensors.items():
            if spec.dtype not in ITEMSIZE:
                raise unsupported_dtype(name, spec.dtype)
        object.__setattr__(self, "tensors", dict(sorted(self.tensors.items())))

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors.values())

    def to_json(self) -> bytes:
        """`[[name, dtype, shape], ...]`."""
        return orjson.dumps([[name, spec.dtype, spec.shape] for name, spec in self.tensors.items()])

    @classmethod
    def from_json(cls, raw: bytes) -> Schema:
        """Without derived tensors, which the next version need not have. Raises ManifestError."""
        try:
            rows: list[Any] = orjson.loads(raw)
            if not isinstance(rows, list):
                raise TypeError(f"got {type(rows).__name__}")
            specs = {name: TensorSpec(dtype, tuple(shape)) for name, dtype, shape in rows}
            return cls({name: spec for name, spec in specs.items() if not is_derived(name, spec.shape)})
        except (ValueError, TypeError) as error:
            raise ManifestError(f"not a schema ({error}): it must be a list of [name, dtype, shape]") from error

    @cached_property
    def digest(self) -> str:
        return digest_of(self.to_json())


@dataclass(frozen=True)
class Layout:
    """The offset of each tensor in a slot, in bytes. `room` is what the manifest may take in the header.

    `chunk_nbytes` is what a writer cuts tensors at; a reader finds it in the manifest.
    """

    offsets: Mapping[str, int]
    header_nbytes: int
    total_nbytes: int
    chunk_nbytes: int

    @property
    def room(self) -> int:
        return self.header_nbytes - PREAMBLE

    @classmethod
    def of(cls, schema: Schema) -> Layout:
        """Tensors in name order, 64-byte aligned, the first at a page; room for digests and for a few slices each."""
        manifest_nbytes = 2 * len(schema.to_json()) + 208 * len(schema.tensors) + METADATA_ROOM
        header = _round_up(PREAMBLE + manifest_nbytes, PAGE)
        offsets, end = {}, header
        for name, spec in schema.tensors.items():
            offsets[name] = end = _round_up(end, ALIGNMENT)
            end += spec.nbytes
        places = [(offsets[name], spec.nbytes) for name, spec in schema.tensors.items()]
        chunk = CHUNK
        while _cut_nbytes(places, chunk) > (header - PREAMBLE) // CUTS_SHARE:
            chunk *= 2
        return cls(offsets, header, _round_up(end, PAGE), chunk)


def cut_ends(offset: int, nbytes: int, chunk_nbytes: int) -> list[int]:
    """Where the parts end, counted from the tensor's own start, of a tensor that several chunks share; else nothing."""
    first, last = offset // chunk_nbytes, (offset + nbytes - 1) // chunk_nbytes
    if nbytes == 0 or first == last:
        return []
    return [chunk * chunk_nbytes - offset for chunk in range(first + 1, last + 1)] + [nbytes]


def _cut_nbytes(places: Iterable[tuple[int, int]], chunk_nbytes: int) -> int:
    """The bytes that the digests of all parts take as text."""
    parts = sum(len(cut_ends(offset, nbytes, chunk_nbytes)) for offset, nbytes in places)
    return parts * DIGEST_NBYTES * 4 // 3


@dataclass(frozen=True)
class Cuts:
    """The digests (xxh3_128 in hex) of the parts of all tensors that several chunks share, in name order, part by part.

    As text: the chunk size, a blank, and all digests in base64.
    """

    chunk_nbytes: int
    digests: tuple[str, ...]

    def to_text(self) -> str:
        return f"{self.chunk_nbytes} {base64.b64encode(bytes.fromhex(''.join(self.digests))).decode()}"

    @classmethod
    def from_text(cls, text: str) -> Cuts:
        """Raises ManifestError."""
        size, _, encoded = text.partition(" ")
        try:
            raw = base64.b64decode(encoded, validate=True).hex()
            chunk = int(size)
        except (binascii.Error, ValueError) as error:
            raise ManifestError(f"its chunks cannot be read ({error}): publish the version again") from error
        width = 2 * DIGEST_NBYTES
        if chunk < PAGE or len(raw) % width:
            raise ManifestError(f"its chunks cannot be right ({size} bytes each): publish the version again")
        return cls(chunk, tuple(raw[at : at + width] for at in range(0, len(raw), width)))


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a version. `offset` counts from the start of the slot; `digest` is xxh3_128 in hex.

    `checksum` is its part of the version's fingerprint (`weightsync.format.fingerprint`).
    `slices` lists (rank, first byte, bytes) for tensors that several trainer ranks wrote; none
    in a version whose header has no room for so many.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: str
    checksum: int = 0
    slices: tuple[tuple[int, int, int], ...] = ()

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, self.shape)


@dataclass(frozen=True)
class Manifest:
    """A version: immutable, identified by the digest of its canonical JSON."""

    version: int
    model: str
    tensors: Mapping[str, TensorEntry]
    base: int | None = None
    step: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    @cached_property
    def schema(self) -> Schema:
        return Schema({name: entry.spec for name, entry in self.tensors.items()})

    @cached_property
    def digest(self) -> str:
        return digest_of(self.to_json())

    @property
    def cuts(self) -> Cuts | None:
        """None where nobody has digested the parts. Raises ManifestError."""
        text = self.metadata.get(CUTS)
        return Cuts.from_text(text) if text is not None else None

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint that every instance that runs this version must report."""
        from weightsync.format.fingerprint import fingerprint_of  # numpy: not for those who only read manifests

        return fingerprint_of({name: entry.checksum for name, entry in self.tensors.items()})

    def to_json(self) -> bytes:
        """Canonical: sorted keys, no spaces."""
        return self._json

    @cached_property
    def _json(self) -> bytes:
        tensors = {
            name: [e.dtype, e.shape, e.offset, e.nbytes, e.digest, e.checksum, e.slices]
            for name, e in self.tensors.items()
        }
        document = {
            "format": FORMAT,
            "version": self.version,
            "model": self.model,
            "base": self.base,
            "step": self.step,
            "metadata": dict(self.metadata),
            "tensors": tensors,
        }
        return orjson.dumps(document, option=orjson.OPT_SORT_KEYS)

    @classmethod
    def from_json(cls, raw: bytes | memoryview) -> Manifest:
        """Raises ManifestError."""
        try:
            document: dict[str, Any] = orjson.loads(raw)
            if (found := document.pop("format")) != FORMAT:
                raise ManifestError(f"manifest has format {found}, this release reads {FORMAT}: update the older side")
            document["tensors"] = {name: _entry(*fields) for name, fields in document["tensors"].items()}
            return cls(**document)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ManifestError(f"not a manifest ({error}): publish the version again") from error


def _entry(
    dtype: str, shape: list[int], offset: int, nbytes: int, digest: str, checksum: int, slices: list[list[int]]
) -> TensorEntry:
    if type(checksum) is not int or not 0 <= checksum < 1 << 32:
        raise ValueError(f"a checksum is an unsigned 32-bit number, got {checksum!r}")
    parts = tuple((rank, start, size) for rank, start, size in slices)
    return TensorEntry(dtype, tuple(shape), offset, nbytes, digest, checksum, parts)


def parts_of(manifest: Manifest) -> dict[str, list[tuple[int, int, str]]]:
    """By tensor: first byte, byte after the last, counted from its own start, and digest of each part of it that lies
    in a chunk of its own; all of it where one chunk has it. Raises ManifestError: nobody has digested the parts."""
    cuts = manifest.cuts
    if cuts is None:
        raise ManifestError("it has no digests of parts of tensors: publish it again")
    ends = {name: cut_ends(e.offset, e.nbytes, cuts.chunk_nbytes) for name, e in manifest.tensors.items()}
    if len(cuts.digests) != (wanted := sum(map(len, ends.values()))):
        raise ManifestError(f"it has {len(cuts.digests)} digests of {wanted} parts of tensors: publish it again")
    digests = iter(cuts.digests)
    found = {}
    for name, entry in manifest.tensors.items():
        own = list(itertools.islice(digests, len(ends[name]))) or [entry.digest]
        found[name] = list(zip((0, *ends[name]), ends[name] or (entry.nbytes,), own, strict=False))
    return found


def diff_schema(expected: Schema, got: Schema) -> list[TensorError]:
    """Every difference but for derived tensors, as errors to raise or report: missing and unexpected tensors first,
    then shapes and dtypes."""
    if expected.tensors == got.tensors:
        return []
    want, have = (
        {name: spec for name, spec in schema.tensors.items() if not is_derived(name, spec.shape)}
        for schema in (expected, got)
    )
    missing: list[TensorError] = [missing_tensor(name, want[name]) for name in want if name not in have]
    extra: list[TensorError] = [unexpected_tensor(name, have[name]) for name in have if name not in want]
    other = [error for name in want if name in have and (error := check_spec(name, want[name], have[name]))]
    return missing + extra + other


def check_spec(name: str, expected: TensorSpec, got: TensorSpec) -> TensorError | None:
    """The mismatch of one tensor, or None."""
    if got.shape != expected.shape:
        return shape_mismatch(name, expected.shape, got.shape)
    if got.dtype != expected.dtype:
        return dtype_mismatch(name, expected.dtype, got.dtype)
    return None


def require_same_schema(expected: Schema, got: Schema) -> None:
    """Raises the first mismatch."""
    if mismatches := diff_schema(expected, got):
        require_names(expected, got)
        raise mismatches[0]


def require_names(expected: Schema, got: Schema) -> None:
    """Raises TensorError for tensors under such other names that no engine can have them (`naming.advice`)."""
    if remedy := advice(got.tensors, expected.tensors):
        name = min(got.tensors.keys() - expected.tensors.keys())
        raise unexpected_tensor(name, got.tensors[name], remedy)


def schema_of(specs: Iterable[tuple[str, str, Iterable[int]]]) -> Schema:
    """A schema from (name, dtype, shape) triples. Raises TensorError."""
    return Schema({name: TensorSpec(dtype, tuple(shape)) for name, dtype, shape in specs})


def digest_of(data: bytes | memoryview) -> str:
    """xxh3_128 in hex; releases the interpreter lock for large data."""
    digest: str = xxhash.xxh3_128_hexdigest(data)
    return digest


def content_sha256(schema: Schema, metadata: Mapping[str, str], buffer: Callable[[str], Any]) -> str:
    """SHA-256 in hex of what a version is, for signatures: names, dtypes and shapes, metadata, and the bytes of every
    tensor in name order, which `buffer` gives. It is the same under every version number, on every host."""
    about = {"tensors": orjson.loads(schema.to_json()), "metadata": dict(metadata)}
    hasher = hashlib.sha256(orjson.dumps(about, option=orjson.OPT_SORT_KEYS))
    for name in schema.tensors:
        hasher.update(buffer(name))
    return hasher.hexdigest()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


MAGIC = b"HOTSWAP\0"
PART_MAGIC = b"HOTPART\0"
SLOT_FORMAT = 1
MAX_MANIFEST = 1 << 30
_PREAMBLE = struct.Struct("<8sII32s")


def write_header(target: mmap.mmap | memoryview, manifest: Manifest, layout: Layout) -> None:
    """Put the manifest into the header. Raises ManifestError when it does not fit into the room kept for it."""
    raw = manifest.to_json()
    if len(raw) > layout.room:
        raise ManifestError(
            f"the manifest takes {len(raw):,} bytes, the slot has room for {layout.room:,}: use less metadata"
        )
    # The length goes last: a reader that comes in between sees a digest that does not fit, never half a manifest.
    target[PREAMBLE : PREAMBLE + len(raw)] = raw
    target[PREAMBLE + len(raw) : layout.header_nbytes] = bytes(layout.room - len(raw))
    target[: _PREAMBLE.size] = preamble_of(raw, manifest.digest)


def preamble_of(raw: bytes, digest: str) -> bytes:
    """The first bytes of the slot of the manifest `raw`."""
    return _PREAMBLE.pack(MAGIC, SLOT_FORMAT, len(raw), digest.encode())


def part_preamble_of(raw: bytes, digest: str) -> bytes:
    """The first PREAMBLE bytes of a file that has a part of that slot."""
    return _PREAMBLE.pack(PART_MAGIC, SLOT_FORMAT, len(raw), b"") + bytes.fromhex(digest)


def is_part(source: memoryview) -> bool:
    """Whether the file begins as one that has a part of a slot."""
    return bytes(source[: len(PART_MAGIC)]) == PART_MAGIC


def clear_gaps(target: mmap.mmap | memoryview, schema: Schema, layout: Layout) -> None:
    """Zeros between the tensors and after the last: a version of another shape may have been here before."""
    end = layout.header_nbytes
    for name, spec in schema.tensors.items():
        target[end : layout.offsets[name]] = bytes(layout.offsets[name] - end)
        end = layout.offsets[name] + spec.nbytes
    target[end : layout.total_nbytes] = bytes(layout.total_nbytes - end)


def header_nbytes(preamble: memoryview) -> int:
    """How much of a slot that begins with `preamble` its header is; for `read_header` to judge what it is."""
    if len(preamble) < PREAMBLE:
        return 0
    return PREAMBLE + min(int(_PREAMBLE.unpack(preamble[: _PREAMBLE.size])[2]), MAX_MANIFEST)


def read_header(source: memoryview, where: str, *, part: bool = False) -> tuple[Manifest, str]:
    """The manifest and its digest, verified against each other; with `part` also of a file that has a part of a slot.

    Raises ManifestError.
    """
    if len(source) < PREAMBLE:
        raise ManifestError(f"{where} is too short to be a slot: publish the version again")
    magic, version, length, digest = _PREAMBLE.unpack(source[: _PREAMBLE.size])
    if magic == PART_MAGIC:
        if not part:
            raise ManifestError(f"{where} has only slices of a version: read it on a host that has all of it")
        digest = bytes(source[_PREAMBLE.size : PREAMBLE]).hex().encode()
    elif magic != MAGIC:
        raise ManifestError(f"{where} is not a slot (wrong magic): publish the version again")
    if version != SLOT_FORMAT:
        raise ManifestError(
            f"{where} has slot format {version}, this release reads {SLOT_FORMAT}: update the older side"
        )
    if PREAMBLE + length > len(source):
        raise ManifestError(f"{where} is cut off inside its manifest: publish the version again")
    raw = bytes(source[PREAMBLE : PREAMBLE + length])
    if (found := digest_of(raw)) != digest.decode("ascii", "replace"):
        raise ManifestError(f"the manifest of {where} is damaged (digest {found}): publish the version again")
    return Manifest.from_json(raw), found
