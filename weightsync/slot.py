"""The format of a slot file.

0   magic  b"HOTSWAP\\0"           8 bytes
8   format                        u32, little-endian
12  manifest length in bytes      u32
16  digest of the manifest        32 hex characters (xxh3_128)
64  manifest, canonical JSON      as long as the header says
.   tensors                       from the first page after the room for the manifest, 64-byte aligned

All else is zeros, so every byte of a slot follows from its manifest and tensors: copies on all hosts are the same.
"""

from __future__ import annotations

import mmap
import struct

from weightsync.errors import ManifestError
from weightsync.manifest import PREAMBLE, Layout, Manifest, Schema, digest_of

MAGIC = b"HOTSWAP\0"
FORMAT = 1
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
    """What the slot of the manifest `raw` begins with."""
    return _PREAMBLE.pack(MAGIC, FORMAT, len(raw), digest.encode())


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


def read_header(source: memoryview, where: str) -> tuple[Manifest, str]:
    """The manifest and its digest, verified against each other. Raises ManifestError."""
    if len(source) < PREAMBLE:
        raise ManifestError(f"{where} is too short to be a slot: publish the version again")
    magic, version, length, digest = _PREAMBLE.unpack(source[: _PREAMBLE.size])
    if magic != MAGIC:
        raise ManifestError(f"{where} is not a slot (wrong magic): publish the version again")
    if version != FORMAT:
        raise ManifestError(f"{where} has slot format {version}, this release reads {FORMAT}: update the older side")
    if PREAMBLE + length > len(source):
        raise ManifestError(f"{where} is cut off inside its manifest: publish the version again")
    raw = bytes(source[PREAMBLE : PREAMBLE + length])
    if (found := digest_of(raw)) != digest.decode("ascii", "replace"):
        raise ManifestError(f"the manifest of {where} is damaged (digest {found}): publish the version again")
    return Manifest.from_json(raw), found
