"""Offloading really frees: resident memory is measured in a process of its own, and contents come back bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.errors import MemoryPlanError
from trainer.memory.offload import DiskVault, HostVault, StorageComponent
from weightsync.memory.pinned import pinned

MEASURED = """
import json, sys, torch
from trainer.memory.offload import StorageComponent
from trainer.memory.ledger import private_bytes
from trainer.memory.offload import DiskVault
weights = [torch.randn(1 << 22) for _ in range(6)]           # 16 MiB each
if sys.argv[2] == "pinned":
    [weight.numpy() for weight in weights]                   # can never be resized again
model = torch.nn.Linear(2048, 2048)                          # a view and its base, a parameter
views = [*(weight.view(2048, -1) for weight in weights), *model.parameters()]
gradients = torch.randn(1 << 23)
sums = [view.double().sum().item() for view in views]
component = StorageComponent("model", lambda: [*views, gradients], DiskVault(sys.argv[1]), scratch=lambda: [gradients])
seen = {"bytes": component.bytes, "before": private_bytes()}
component.offload()
seen |= {"during": private_bytes(), "bytes_during": component.bytes}
component.reload()
seen |= {"after": private_bytes(), "bytes_after": component.bytes}
seen["same"] = sums == [view.double().sum().item() for view in views]
seen["zeroed"] = not gradients.any().item()
print(json.dumps(seen))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["plain", "pinned"])
def test_resident_memory_falls_by_what_was_held_and_contents_return(tmp_path: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path), how],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["bytes"] == 4 * (6 * (1 << 22) + 2048 * 2049 + (1 << 23))
    assert seen["bytes"] == seen["bytes_during"] == seen["bytes_after"]
    assert seen["before"] - seen["during"] > 0.95 * seen["bytes"]
    assert seen["after"] - seen["during"] > 0.95 * seen["bytes"]
    assert seen["same"]
    assert seen["zeroed"]
    assert list(tmp_path.iterdir()) == [], "a file outlived the process"


def component(tmp_path: Path, tensors: list[torch.Tensor], expected: int = 0) -> StorageComponent:
    return StorageComponent("model", lambda: tensors, DiskVault(str(tmp_path)), expected=expected)


def test_every_dtype_and_view_is_the_same_storage_afterwards(tmp_path: Path) -> None:
    base = torch.arange(1000, dtype=torch.float64)
    tensors = [base[10:20], base[500:], torch.arange(7, dtype=torch.int8)]
    tensors.append(torch.full((3, 3), 1.5, dtype=torch.bfloat16))
    before = [t.clone() for t in tensors]
    held = component(tmp_path, tensors)
    assert held.bytes == 8000 + 7 + 18, "views of one storage were counted twice"
    for _ in range(3):
        held.offload()
        assert [t.untyped_storage().nbytes() for t in tensors] == [0] * 4
        held.reload()
        assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    base[15] = -1.0
    assert tensors[0][5] == -1.0


def test_states_that_appear_later_are_offloaded_too(tmp_path: Path) -> None:
    """Adam's states are there after the first step; the plan counts them from the beginning."""
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.Adam([weight])

    def tensors() -> list[torch.Tensor]:
        return [weight.data, *(t for state in optimizer.state.values() for t in state.values())]

    held = StorageComponent("actor_optimizer", tensors, DiskVault(str(tmp_path)), expected=12000)
    assert held.bytes == 12000
    weight.sum().backward()
    optimizer.step()
    expected = [t.clone() for t in tensors()]
    assert held.bytes == 12004  # Adam counts its steps, too
    held.offload()
    assert sum(t.untyped_storage().nbytes() for t in tensors()) == 0
    held.reload()
    assert all(torch.equal(a, b) for a, b in zip(expected, tensors(), strict=True))


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    tensor = torch.arange(100.0)
    held = component(tmp_path, [tensor])
    with pytest.raises(MemoryPlanError, match=r"No space left.*memory\.directory"):
        held.offload()
    assert held.state == "instantiated"
    assert tensor.sum() == 4950


class OnDevice:
    """As much of a storage on a GPU as is seen when it is offloaded: the bytes come in a copy of their own, and torch
    says of all memory on a GPU that it is shared."""

    device = torch.device("cuda")

    def __init__(self, value: int, nbytes: int) -> None:
        self._value, self._nbytes = value, nbytes
        self._cdata = id(self)

    def nbytes(self) -> int:
        return self._nbytes

    def is_shared(self) -> bool:
        return True

    def resizable(self) -> bool:
        return True

    def resize_(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def untyped_storage(self) -> OnDevice:
        return self

    def cpu(self) -> torch.UntypedStorage:
        return torch.full((self._nbytes,), self._value, dtype=torch.uint8).untyped_storage()


def test_the_copy_of_a_gpu_s_bytes_is_there_until_they_are_written(tmp_path: Path) -> None:
    vault, sizes = DiskVault(str(tmp_path)), (64 << 20, 1000)  # the first is the kernel's again once it is freed
    vault.save([OnDevice(value, size) for value, size in enumerate(sizes, 1)])  # type: ignore[misc]
    back = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    vault.restore([tensor.untyped_storage() for tensor in back])
    assert [(tensor == value).all().item() for value, tensor in enumerate(back, 1)] == [True, True]


def test_a_file_that_was_cut_short_is_noticed(tmp_path: Path) -> None:
    vault = DiskVault(str(tmp_path))
    held = StorageComponent("model", lambda: [tensor], vault)
    tensor = torch.zeros(1 << 16)
    held.offload()
    assert vault._fd is not None
    os.ftruncate(vault._fd, 1000)
    with pytest.raises(MemoryPlanError, match="cut short"):
        held.reload()
    assert held.state == "offloaded"


def test_what_cannot_be_offloaded_is_said(tmp_path: Path) -> None:
    with pytest.raises(MemoryPlanError, match=r"gone .*memory\.directory"):
        component(tmp_path / "gone", [torch.zeros(3)]).offload()
    with pytest.raises(MemoryPlanError, match="shared memory"):
        component(tmp_path, [torch.zeros(100).share_memory_()]).offload()


def test_memory_on_a_gpu_is_offloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    storage = OnDevice(7, 1000)
    held = component(tmp_path, [storage])  # type: ignore[list-item]
    held.offload()
    assert (held.state, held.bytes, storage.nbytes()) == ("offloaded", 1000, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("vault", ["disk", "host"])
def test_a_gpu_s_memory_is_free_while_it_is_offloaded(tmp_path: Path, vault: str) -> None:
    tensors = [torch.randn(1 << 20, device="cuda"), torch.ones(3, 5, dtype=torch.bfloat16, device="cuda")]
    expected, before = [t.cpu() for t in tensors], torch.cuda.memory_allocated()
    held = StorageComponent("model", lambda: tensors, DiskVault(str(tmp_path)) if vault == "disk" else HostVault())
    for _ in range(2):
        held.offload()
        assert before - torch.cuda.memory_allocated() >= held.bytes
        held.reload()
        assert all(torch.equal(a, b.cpu()) for a, b in zip(expected, tensors, strict=True))


def test_destroying_gives_everything_back(tmp_path: Path) -> None:
    tensor = torch.zeros(1000)
    held = component(tmp_path, [tensor])
    held.destroy()
    assert (held.state, tensor.untyped_storage().nbytes()) == ("destroyed", 0)
    vault = DiskVault(str(tmp_path))
    other = StorageComponent("model", lambda: [torch.zeros(10)], vault)
    other.offload()
    assert vault._fd is not None
    assert os.readlink(f"/proc/self/fd/{vault._fd}").startswith(str(tmp_path))
    other.destroy()
    mine = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    assert not any(str(tmp_path) in os.readlink(link) for link in mine if link.is_symlink())


class Runtime:
    """CUDA's runtime, as far as registering memory goes."""

    def __init__(self, status: int) -> None:
        self.status, self.registered = status, dict[int, int]()

    def cudaHostRegister(self, address: int, nbytes: int, _flags: int) -> int:
        if not self.status:
            self.registered[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        del self.registered[address]


def test_pinned_memory_is_as_large_as_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(status=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    held, status = pinned((1 << 20) + 1, torch.device("cuda"))
    assert status == 0
    assert runtime.registered == {held.data_ptr(): (1 << 20) + 1}
    assert held.untyped_storage().nbytes() == (1 << 20) + 1
    del held
    assert runtime.registered == {}


def test_memory_is_pinned_once_for_all_offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's states come in its second offload, among its weights; what is gone from a component goes then."""
    runtime, vault = Runtime(status=0), HostVault()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("trainer.memory.offload.pinned", lambda n, _: pinned(n, torch.device("cuda")))
    weights, states = [torch.full((n,), float(n)) for n in (3, 5, 3)], torch.full((7,), 7.0)
    known, made = set[int](), []
    for tensors in (weights, [weights[0], states, *weights[1:]], [states, weights[0]]):
        expected = [tensor.clone() for tensor in tensors]
        vault.save([tensor.untyped_storage() for tensor in tensors])
        for tensor in tensors:
            tensor.zero_()
        vault.restore([tensor.untyped_storage() for tensor in tensors])
        assert all(torch.equal(a, b) for a, b in zip(expected, tensors, strict=True))
        assert sorted(runtime.registered.values()) == sorted(tensor.nbytes for tensor in tensors)
        made.append(len(set(runtime.registered) - known))
        known |= set(runtime.registered)
    assert made == [3, 1, 0]
    vault.forget()
    assert runtime.registered == {}


def test_memory_that_cannot_be_pinned_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(status=2))
    monkeypatch.setattr("trainer.memory.offload.pinned", lambda n, _: pinned(n, torch.device("cuda")))
    forgotten: list[None] = []
    monkeypatch.setattr("weightsync.memory.pinned.forget_error", lambda: forgotten.append(None))
    with pytest.raises(MemoryPlanError, match=r"status 2.*memory\.offload to disk"):
        HostVault().save([torch.ones(10).untyped_storage()])
    assert forgotten == [None], "else the next kernel raises it"
