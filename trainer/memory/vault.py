"""Where offloaded bytes lie: in a file without a name, or in pinned host memory.

On CPU bytes go between a storage and the file without a copy in between: neither a mapping nor a NumPy view, which
would pin the storage (a storage that was seen through `Tensor.numpy()` can never be resized again).
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from typing import Protocol

import torch

from trainer.errors import OffloadError

PIECE = 64 << 20  # bytes a call: Linux moves at most 2 GiB at once, and a signal is heard between two


class Vault(Protocol):
    """Keeps the bytes of one component's storages while their memory is given away."""

    def save(self, storages: list[torch.UntypedStorage]) -> None:
        """Raises OffloadError; the storages are untouched either way."""
        ...

    def restore(self, storages: list[torch.UntypedStorage]) -> None:
        """Into storages of the same sizes, in the same order, then forget. Raises OffloadError."""
        ...

    def forget(self) -> None:
        """Give back what is kept."""
        ...


class DiskVault:
    """A file in `directory` that has no name: it is gone with the process, however that ends."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._fd: int | None = None

    def save(self, storages: list[torch.UntypedStorage]) -> None:
        total = sum(storage.nbytes() for storage in storages)
        try:
            with tempfile.TemporaryFile(dir=self._directory) as file:
                if total:
                    os.posix_fallocate(file.fileno(), 0, total)  # a full disk is found before anything is given up
                offset = 0
                for storage in storages:
                    on_host = storage if storage.device.type == "cpu" else storage.cpu()
                    _write(file.fileno(), _view(on_host), offset)
                    offset += storage.nbytes()
                self._fd = os.dup(file.fileno())
        except OSError as error:
            problem = f"cannot write {total / 2**30:.2f} GiB below {self._directory} ({error.strerror})"
            raise OffloadError(f"{problem}. Set memory.directory to a disk with room for it.") from error

    def restore(self, storages: list[torch.UntypedStorage]) -> None:
        assert self._fd is not None
        offset = 0
        for storage in storages:
            if storage.device.type == "cpu":
                _read(self._fd, _view(storage), offset)
            else:
                staged = torch.UntypedStorage(storage.nbytes())
                _read(self._fd, _view(staged), offset)
                storage.copy_(staged)
            offset += storage.nbytes()
        self.forget()

    def forget(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class HostVault:
    """Pinned host memory, from where a GPU takes it back at the speed of the bus."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def save(self, storages: list[torch.UntypedStorage]) -> None:
        kept = []
        try:
            for storage in storages:
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=True)
                host.copy_(_as_tensor(storage), non_blocking=True)
                kept.append(host)
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise OffloadError(f"no pinned host memory ({error}). Set memory.offload to disk.") from error
        self._kept = kept

    def restore(self, storages: list[torch.UntypedStorage]) -> None:
        for storage, host in zip(storages, self._kept, strict=True):
            _as_tensor(storage).copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        self.forget()

    def forget(self) -> None:
        self._kept = []


def _as_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(storage: torch.UntypedStorage) -> memoryview:
    """The storage's own memory; alive only as long as the storage is."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _write(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + PIECE], offset + done)


def _read(fd: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < len(into):
        try:
            count = os.preadv(fd, [into[done : done + PIECE]], offset + done)
        except OSError as error:
            raise OffloadError(f"cannot read offloaded memory back ({error.strerror}). Resume the run.") from error
        if count == 0:
            raise OffloadError("the file of offloaded memory has been cut short. Resume the run from its checkpoint.")
        done += count
