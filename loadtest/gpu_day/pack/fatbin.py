"""Machine code of other GPUs in a shared library, blanked.

A library that nvcc made has a section `.nv_fatbin` of containers, one for each source file, with one entry for each
architecture: ELF (cubin) or PTX. The driver takes the cubin of its own architecture, else the newest PTX that is not
newer than the device. Code that the driver never takes can be zeros: offsets, headers and relocations stay, and zeros
compress to nothing.

Layout, as nvcc 13.0 writes it: container = magic 0xBA55ED50, u16 version, u16 header size, u64 size of the entries
behind it. Entry = u16 kind (1 PTX, 2 ELF), u16, u32 header size, u64 payload size, u32 compressed size, u32, u16 minor,
u16 major, u32 architecture.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

ELF_MAGIC, MAGIC = b"\x7fELF\x02", b"\x50\xed\x55\xba"
PTX, ELF = 1, 2
NOBITS = 8
ARCHITECTURE_AT = 28  # in an entry
FATBINS = (".nv_fatbin", "__nv_relfatbin")
MAINLOOP = re.compile(rb"CollectiveMainloopFwdSm90.{0,120}?ELi(\d+)ENS_\d+(\w+?_t)EfNS_4arch4Sm90E((?:Lb[01]E)+)")


@dataclass(frozen=True)
class Entry:
    """`begin` and `nbytes` are of the payload, `container` is where the container of the entry begins."""

    container: int
    kind: int
    arch: int
    begin: int
    nbytes: int


def entries(data: bytes) -> Iterator[Entry]:
    """Those of a 64-bit ELF file."""
    for name, offset, size in _sections(data):
        at, end = offset, offset + size
        while name in FATBINS and at < end - 16:
            if data[at : at + 4] != MAGIC:
                at += 8
                continue
            header, nbytes = struct.unpack_from("<HQ", data, at + 6)
            entry, last = at + header, at + header + nbytes
            while entry < last:
                kind, head, payload = struct.unpack_from("<H2xIQ", data, entry)
                if head == 0:
                    break
                (arch,) = struct.unpack_from("<I", data, entry + ARCHITECTURE_AT)
                yield Entry(at, kind, arch, entry + head, payload)
                entry += head + payload
            at = last


def _sections(data: bytes) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of each section that has bytes."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    for header in headers:
        begin = headers[names][4] + header[0]
        if header[1] != NOBITS:
            yield data[begin : data.index(b"\0", begin)].decode(), header[4], header[5]


def everything(_payload: bytes) -> bool:
    return True


def pruned(
    data: bytes, arch: int, *, ptx: bool = False, also: Callable[[bytes], bool] = everything
) -> tuple[bytes, dict[str, int]]:
    """The library with what a device of `arch` (90: sm_90) loads, and {"kept", "blanked": bytes, "without": containers
    that have nothing for it}.

    `ptx`: also what the driver would compile where there is no machine code. `also` is asked for each payload that
    would be kept; uncompressed cubins have their kernels' names in them.
    """
    groups: dict[int, list[Entry]] = {}
    for entry in entries(data):
        groups.setdefault(entry.container, []).append(entry)
    out, figures = bytearray(data), Counter[str]()
    for group in groups.values():
        kept = [e for e in _loaded(group, arch, ptx) if also(data[e.begin : e.begin + e.nbytes])]
        figures["without"] += not kept
        for entry in group:
            figures["kept" if entry in kept else "blanked"] += entry.nbytes
            if entry not in kept:
                out[entry.begin : entry.begin + entry.nbytes] = bytes(entry.nbytes)
    return bytes(out), dict(figures)


def _loaded(group: list[Entry], arch: int, ptx: bool) -> list[Entry]:
    own = [e for e in group if e.kind == ELF and e.arch == arch]
    older = [e for e in group if e.kind == PTX and e.arch <= arch]
    return own or ([max(older, key=lambda e: e.arch)] if ptx and older else [])


def flash3(heads: tuple[str, ...]) -> Callable[[bytes], bool]:
    """Of FlashAttention 3: the kernels for bfloat16 and these sizes of heads without softcap, and what all of them
    need."""

    def needed(cubin: bytes) -> bool:
        found = MAINLOOP.findall(cubin)
        return not found or all(
            head.decode() in heads and kind == b"bfloat16_t" and flags.split(b"E")[2] == b"Lb0"
            for head, kind, flags in found
        )

    return needed
