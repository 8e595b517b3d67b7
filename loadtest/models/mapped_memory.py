"""Linux's virtual memory, managed as by CUDA's driver, for `weightsync/vllm_engine/device/mapping.py`.

Reserved addresses are a mapping that nobody may touch, a handle is a memfd, and mapping it is mmap with MAP_FIXED: what
reads an address that is unmapped dies by a signal. Calls that CUDA refuses are refused here.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

NONE, FIXED, NORESERVE = 0, 0x10, 0x4000
FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HostDriver:
    """`reserved`, `mapped`: sizes by address; `handles`: sizes of those that are not released."""

    granularity = mmap.PAGESIZE

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.waits = 0

    def reserve(self, nbytes: int) -> int:
        address = _map(None, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE, -1)
        self.reserved[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        if self.reserved.get(address) != nbytes or self._within(address, nbytes):
            raise RuntimeError(f"{nbytes} bytes at {address:#x} were not reserved so, or are mapped")
        del self.reserved[address]
        _libc.munmap(address, nbytes)

    def create(self, nbytes: int) -> int:
        if nbytes % self.granularity or not nbytes:
            raise RuntimeError(f"{nbytes} bytes are no multiple of the granularity")
        handle = os.memfd_create("hotswap-handle")
        os.ftruncate(handle, nbytes)
        self.handles[handle] = nbytes
        return handle

    def release(self, handle: int) -> None:
        del self.handles[handle]
        os.close(handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        inside = any(a <= address and address + nbytes <= a + size for a, size in self.reserved.items())
        if not inside or self._within(address, nbytes) or self.handles[handle] != nbytes:
            raise RuntimeError(f"the handle does not go to {address:#x}")
        _map(address, nbytes, mmap.MAP_SHARED | FIXED, handle)
        self.mapped[address] = nbytes

    def allow(self, address: int, nbytes: int) -> None:
        if sum(size for a, size in self.mapped.items() if address <= a < address + nbytes) != nbytes:
            raise RuntimeError(f"not all of the {nbytes} bytes at {address:#x} are mapped")
        if _libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE):
            raise RuntimeError(os.strerror(ctypes.get_errno()))

    def unmap(self, address: int, nbytes: int) -> None:
        if self.mapped.get(address) != nbytes:
            raise RuntimeError(f"{nbytes} bytes at {address:#x} were not mapped so")
        del self.mapped[address]
        _map(address, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE | FIXED, -1)

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    def wait(self) -> None:
        """A CPU has done what was asked for."""
        self.waits += 1

    def _within(self, address: int, nbytes: int) -> list[int]:
        return [a for a, size in self.mapped.items() if a < address + nbytes and address < a + size]


def _map(address: int | None, nbytes: int, flags: int, handle: int) -> int:
    """The address of a mapping that must not be touched before it is allowed."""
    found: int | None = _libc.mmap(address, nbytes, NONE, flags, handle, 0)
    if found is None or found == FAILED:
        raise RuntimeError(os.strerror(ctypes.get_errno()))
    return found
