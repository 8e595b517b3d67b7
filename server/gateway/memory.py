"""Settings of Python's and C's memory management, made once, before a gateway serves."""

from __future__ import annotations

import ctypes
import gc

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
KEPT_FREE = 8 << 20
LARGE = 1 << 20


def prepare() -> None:
    """Few collections, and no page faults for every long prompt."""
    _spare_the_collector()
    _keep_freed_pages()


def _spare_the_collector() -> None:
    """What is loaded by now stays, and requests leave no reference cycles: there is little to collect, and a full
    collection of 200,000 objects would hold every stream up for 50 ms each few seconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _keep_freed_pages() -> None:
    """glibc gives a body of 128 KB back to the kernel as soon as it is freed, and the next one faults the same pages
    in again: a third of what a prompt of 220 KB costs. So up to 8 MiB stay. Another C library has no such settings."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE)
        mallopt(M_TRIM_THRESHOLD, KEPT_FREE)
