"""Components made of tensors: offloading empties their storages, reloading fills the same storages again.

Views, parameters, optimizer states and Megatron's flat buffers all keep their storage, so nothing that refers to a
tensor notices. Any access to one meanwhile ends the process, so `guard` has modules refuse to run. Gradients need no
keeping: every step begins by zeroing them.

A vault keeps the bytes, in a file without a name or in pinned host memory. On CPU bytes go between a storage and the
file without a copy in between: neither a mapping nor a NumPy view, which would pin the storage (a storage that was seen
through `Tensor.numpy()` can never be resized again).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from trainer.errors import MemoryPlanError
from trainer.memory.ledger import Base, Component
from weightsync.memory.pinned import pinned

Tensors = Callable[[], Iterable[torch.Tensor]]
_libc = ctypes.CDLL(None, use_errno=True)
_MADV_DONTNEED = 4
PIECE = 64 << 20  # bytes a call: Linux moves at most 2 GiB at once, and a signal is heard between two


class StorageComponent(Base):
    """The storages behind `tensors()`, asked for anew at every offload: an optimizer gets its states in its first step.

    `scratch()` are those of them whose content is worth nothing between phases: zeroed, not kept. `expected` is what
    it will hold once it has everything, if that is more than it holds now.
    """

    def __init__(self, name: str, tensors: Tensors, vault: Vault, scratch: Tensors = tuple, expected: int = 0) -> None:
        super().__init__(name)
        self._tensors, self._scratch, self._vault, self._expected = tensors, scratch, vault, expected
        self._kept: list[torch.UntypedStorage] = []
        self._zeroed: list[torch.UntypedStorage] = []
        self._sizes: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        if self.state == "instantiated":
            return max(self._expected, sum(storage.nbytes() for storage in _storages(self._tensors())))
        return max(self._expected, sum(self._sizes.values()))

    def _offload(self) -> None:
        zeroed = _storages(self._scratch())
        scratch = {storage._cdata for storage in zeroed}
        everything = _storages(self._tensors())
        self._kept = [storage for storage in everything if storage._cdata not in scratch]
        self._zeroed = [storage for storage in everything if storage._cdata in scratch]
        self._sizes = {storage._cdata: storage.nbytes() for storage in everything}
        # Of memory on a GPU torch says that it is shared, always.
        if any(storage.device.type == "cpu" and storage.is_shared() for storage in everything):
            raise MemoryPlanError(f"{self.name} lies in shared memory, which others may use. Leave it where it is.")
        self._vault.save(self._kept)
        for storage in everything:
            _empty(storage)
        release()

    def _reload(self) -> None:
        for storage in [*self._kept, *self._zeroed]:
            if storage.nbytes() != self._sizes[storage._cdata]:
                storage.resize_(self._sizes[storage._cdata])
        self._vault.restore(self._kept)
        for storage in self._zeroed:
            _as_tensor(storage).zero_()
        self._kept, self._zeroed = [], []

    def _destroy(self) -> None:
        self._vault.forget()
        if self.state == "instantiated":
            everything = _storages(self._tensors())
            self._sizes = {storage._cdata: storage.nbytes() for storage in everything}
            for storage in everything:
                _empty(storage)
            release()


def guard(module: torch.nn.Module, component: Component) -> None:
    """Have `module` raise MemoryPlanError instead of running while `component`, which holds its weights, is away."""

    def check(*_: object) -> None:
        if component.state != "instantiated":
            raise MemoryPlanError(f"{component.name} is {component.state}. Enter a phase that needs it first.")

    module.register_forward_pre_hook(check)


def release() -> None:
    """Return what allocators hold on to: the C library's to the kernel, CUDA's to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(_libc, "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each storage of the device once, those without bytes left out, and on a GPU what lies in host memory anyway."""
    found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [storage for storage in found.values() if storage.nbytes() and storage.device.type == device]


def _empty(storage: torch.UntypedStorage) -> None:
    if storage.resizable():
        storage.resize_(0)
    elif storage.device.type == "cpu":
        _drop_pages(storage)


def _drop_pages(storage: torch.UntypedStorage) -> None:
    """For a storage that something has pinned: the kernel takes its whole pages, which read as zeros until reloaded."""
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_DONTNEED)


class Vault(Protocol):
    """Keeps the bytes of one component's storages while their memory is given away."""

    def save(self, storages: list[torch.UntypedStorage]) -> None:
        """Raises MemoryPlanError; the storages are untouched either way."""
        ...

    def restore(self, storages: list[torch.UntypedStorage]) -> None:
        """Into storages of the same sizes, in the same order, once. Raises MemoryPlanError."""
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
            raise MemoryPlanError(f"{problem}. Set memory.directory to a disk with room for it.") from error

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
    """Pinned host memory, from where a GPU takes bytes back at the speed of the bus. A page pinned once serves every
    offload until it is forgotten: the kernel takes far longer to find and pin pages than the bus to fill them."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def save(self, storages: list[torch.UntypedStorage]) -> None:
        kept, pinned_by_size = [], defaultdict[int, list[torch.Tensor]](list)
        for host in self._kept:
            pinned_by_size[host.nbytes].append(host)
        self.forget()
        try:
            for storage in storages:
                there = pinned_by_size[storage.nbytes()]
                host = there.pop() if there else _on_host(storage.nbytes(), storage.device)
                host.copy_(_as_tensor(storage), non_blocking=True)
                kept.append(host)
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise MemoryPlanError(f"no pinned host memory ({error}). Set memory.offload to disk.") from error
        self._kept = kept

    def restore(self, storages: list[torch.UntypedStorage]) -> None:
        for storage, host in zip(storages, self._kept, strict=True):
            _as_tensor(storage).copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    def forget(self) -> None:
        self._kept = []


def _on_host(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] in pinned memory. Raises RuntimeError."""
    data, status = pinned(nbytes, device)
    if status:
        raise RuntimeError(f"cudaHostRegister of {nbytes >> 20} MB: status {status}; see `ulimit -l`")
    return data


def _as_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(storage: torch.UntypedStorage) -> memoryview:
    """A view of the storage's own memory, which must not outlive the storage."""
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
            raise MemoryPlanError(f"cannot read offloaded memory back ({error.strerror}). Resume the run.") from error
        if count == 0:
            raise MemoryPlanError("the file of offloaded memory has been cut short. Resume the run.")
        done += count
