"""Host memory that a CUDA device reads and writes without a copy on the way."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from weightsync.format.fingerprint import Words
from weightsync.memory.arena import READ_MAPPINGS, TOUCHING, prefault

CHUNK_NBYTES = 64 << 20  # pinned in one call, of 5 ms: meanwhile the driver takes no other one
READ_ONLY = 8  # cudaHostRegisterReadOnly: a slot is mapped so


def pinned(nbytes: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """uint8 [nbytes] on the host, pinned for as long as its storage lives; and the status of the CUDA runtime, 0 where
    that went well or `device` is no GPU. With another status the memory can be used all the same, and copies are
    slower.

    Registered by hand: torch's pinned allocator rounds up to powers of two, and keeps what is freed. The pages are
    brought in before: the driver would do it inside of one call, seconds long for 16 GB, while other calls wait.
    """
    data = torch.empty(nbytes, dtype=torch.uint8)
    if device.type != "cuda" or not nbytes:
        return data, 0
    prefault(memoryview(data.numpy()), write=True, threads=TOUCHING)
    if not (status := register(data.data_ptr(), nbytes)):
        weakref.finalize(data.untyped_storage(), _runtime().cudaHostUnregister, data.data_ptr())
    return data, status


def register(address: int, nbytes: int, flags: int = 0) -> int:
    """Pin memory that is there; the status of the CUDA runtime, 0 where that went well.

    The runtime's own answer is an enumeration's member, and each of them is true.
    """
    if status := int(_runtime().cudaHostRegister(address, nbytes, flags)):
        forget_error()
    return status


def _runtime() -> Any:
    return torch.cuda.cudart()


@contextlib.contextmanager
def _giving_way() -> Iterator[None]:
    """Around a call during which the driver takes no other one. A step has dozens, and each would wait for a call of
    its own if these followed each other at once: as long as one took is left to steps."""
    started = time.perf_counter()
    yield
    time.sleep(time.perf_counter() - started)


def forget_error() -> None:
    """Take a refused call's error from the CUDA runtime, which keeps it for this thread: else the next kernel that
    torch launches raises it."""
    release = (torch.version.cuda or "").partition(".")[0]
    with contextlib.suppress(OSError):  # of a build that has the runtime inside
        ctypes.CDLL(f"libcudart.so.{release}").cudaGetLastError()


class PinnedMap:
    """A map of a slot that a device reads without a copy on the way. Its chunks are pinned as they are first read, and
    stay so until the map is forgotten: a slot is written, and read, again and again."""

    def __init__(self, mapping: mmap.mmap, device: torch.device) -> None:
        self._cuda, self._pinned, self._refused = device.type == "cuda", set[int](), False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the map is read-only
            self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()

    def copy(self, target: torch.Tensor, source: Words) -> bool:
        """Queue a copy of words that lie in the map, in one piece. Returns whether they do, and could be pinned."""
        begin = source.ctypes.data - self._address
        if not (source.flags.c_contiguous and target.is_contiguous() and source.nbytes):
            return False
        if not (begin >= 0 and begin + source.nbytes <= self._bytes.numel()):
            return False
        to, end = target.view(-1).view(torch.uint8), begin + source.nbytes
        cuts = [begin, *range(begin - begin % CHUNK_NBYTES + CHUNK_NBYTES, end, CHUNK_NBYTES), end]
        if not all(self._pin(cut // CHUNK_NBYTES) for cut in cuts[:-1]):
            return False
        for first, last in itertools.pairwise(cuts):  # each in what one call has pinned
            to[first - begin : last - begin].copy_(self._bytes[first:last], non_blocking=True)
        return True

    def _pin(self, chunk: int) -> bool:
        if chunk in self._pinned or not self._cuda:
            return True
        if not self._refused:
            begin = chunk * CHUNK_NBYTES
            nbytes = min(CHUNK_NBYTES, self._bytes.numel() - begin)
            with _giving_way():
                self._refused = register(self._address + begin, nbytes, READ_ONLY) != 0
            if not self._refused:
                self._pinned.add(chunk)
        return not self._refused

    def release(self) -> None:
        """The device must not read it any more."""
        while self._pinned:
            with _giving_way():
                _runtime().cudaHostUnregister(self._address + self._pinned.pop() * CHUNK_NBYTES)


class PinnedMaps:
    """Those of one process and device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._maps = device, dict[int, PinnedMap]()

    def of(self, mapping: mmap.mmap) -> PinnedMap:
        """`mapping`: one of READ_MAPPINGS."""
        if (found := self._maps.get(id(mapping))) is None:
            found = self._maps[id(mapping)] = PinnedMap(mapping, self._device)
            READ_MAPPINGS.at_end(mapping, lambda: self._forget(id(mapping)))
        return found

    def _forget(self, mapping: int) -> None:
        self._maps.pop(mapping).release()
