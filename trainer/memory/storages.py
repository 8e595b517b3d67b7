"""A component made of tensors: offloading empties their storages, reloading fills the same storages again.

Views, parameters, optimizer states and Megatron's flat buffers all keep their storage, so nothing that refers to a
tensor notices. Whoever touches one meanwhile ends the process, so `guard` has modules refuse to run. Gradients need no
keeping: every step begins by zeroing them.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable

import torch

from trainer.errors import MemoryPlanError, OffloadError
from trainer.memory.components import Base, Component
from trainer.memory.vault import Vault, _as_tensor

Tensors = Callable[[], Iterable[torch.Tensor]]
_libc = ctypes.CDLL(None, use_errno=True)
_MADV_DONTNEED = 4


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
        if any(storage.is_shared() for storage in everything):
            raise OffloadError(f"{self.name} lies in shared memory, which others may use. Leave it where it is.")
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
