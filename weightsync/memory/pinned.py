"""Host memory that a CUDA device reads and writes without a copy on the way."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from typing import Any

import torch

from weightsync.memory.arena import prefault


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
    prefault(memoryview(data.numpy()), write=True)
    runtime: Any = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(data.data_ptr(), nbytes, 0))
    if status:
        forget_error()
    else:
        weakref.finalize(data.untyped_storage(), runtime.cudaHostUnregister, data.data_ptr())
    return data, status


def forget_error() -> None:
    """Take a refused call's error from the CUDA runtime, which keeps it for this thread: else the next kernel that
    torch launches raises it."""
    release = (torch.version.cuda or "").partition(".")[0]
    with contextlib.suppress(OSError):  # of a build that has the runtime inside
        ctypes.CDLL(f"libcudart.so.{release}").cudaGetLastError()
