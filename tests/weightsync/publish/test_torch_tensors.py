from __future__ import annotations

import pytest
import torch

from weightsync import Publisher, SlotReader
from weightsync.errors import DtypeMismatch, UnsupportedDtype
from weightsync.format.dtypes import ITEMSIZE


def read_back(publisher: Publisher) -> dict[str, torch.Tensor]:
    record = publisher.versions()[-1]
    found = {}
    with SlotReader.open(record.slot, manifest_digest=record.manifest_digest) as reader:
        reader.verify_all()
        for name, entry in reader.manifest.tensors.items():
            raw = torch.tensor(list(bytes(reader.buffer(name))), dtype=torch.uint8)
            found[name] = raw.view(getattr(torch, entry.dtype)).reshape(entry.shape)
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8))
    )


@pytest.mark.parametrize("name", sorted(ITEMSIZE))
def test_every_dtype(publisher: Publisher, name: str) -> None:
    raw = torch.arange(16 * ITEMSIZE[name], dtype=torch.uint8)
    tensor = (raw % 2 if name == "bool" else raw).view(getattr(torch, name)).reshape(4, 4)
    publisher.publish({"contiguous": tensor, "transposed": tensor.t()}, activate=False)
    found = read_back(publisher)
    assert same_bits(found["contiguous"], tensor)
    assert same_bits(found["transposed"], tensor.t())


def test_odd_tensors(publisher: Publisher) -> None:
    base = torch.randn(6, 4, 8, dtype=torch.float32)
    tensors = {
        "parameter": torch.nn.Parameter(base[0].clone()),
        "grad": base[1].clone().requires_grad_() * 2,
        "permuted": base.permute(2, 0, 1),
        "sliced": base[1:5:2, :, 3],
        "offset": base.flatten()[7:23],
        "expanded": torch.tensor([1.5]).expand(3, 5),
        "scalar": torch.tensor(4, dtype=torch.int64),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "conjugate": torch.randn(4).bfloat16(),
        "large": torch.randn(1 << 19),  # more than one chunk
    }
    publisher.publish(tensors.items(), activate=False)
    found = read_back(publisher)
    for name, tensor in tensors.items():
        assert same_bits(found[name], tensor.detach()), name


def test_publishing_leaves_the_tensor_resizable(publisher: Publisher) -> None:
    tensor = torch.randn(16)
    publisher.publish({"w": tensor}, activate=False)
    tensor.untyped_storage().resize_(0)  # what offloading does; sharing the storage with numpy would forbid it


def offloaded() -> torch.Tensor:
    tensor = torch.zeros(1 << 20)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(2, device="meta"), torch.eye(3).to_sparse(), torch.zeros(2, dtype=torch.complex64), offloaded()],
    ids=["meta", "sparse", "complex", "offloaded"],
)
def test_tensors_without_plain_bytes_are_refused(publisher: Publisher, tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedDtype, match="'w'"):
        publisher.publish({"w": tensor}, activate=False)


def test_a_sharded_tensor_is_refused_with_advice(publisher: Publisher) -> None:
    from torch import distributed as dist
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    there = dist.is_initialized()  # by a test of vLLM's models in this process
    if not there:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.zeros(4, 4), DeviceMesh("cpu", [0]), [Shard(0)])
        with pytest.raises(UnsupportedDtype, match="full_tensor"):
            publisher.publish({"w": sharded}, activate=False)
        publisher.publish({"w": sharded.full_tensor()}, activate=False)
    finally:
        if not there:
            dist.destroy_process_group()


def test_dtypes_of_torch_in_a_schema(publisher: Publisher) -> None:
    with publisher.begin([("w", torch.bfloat16, torch.Size([2, 3]))]) as draft:
        with pytest.raises(DtypeMismatch, match="float32, the served model has bfloat16"):
            draft.write("w", torch.zeros(2, 3))
        draft.write("w", torch.zeros(2, 3, dtype=torch.bfloat16))
        assert draft.commit() == 1


@pytest.mark.gpu
def test_a_tensor_on_a_device(publisher: Publisher) -> None:
    tensor = torch.randn(300, 50, device="cuda", dtype=torch.bfloat16)
    publisher.publish({"w": tensor, "t": tensor.t()}, activate=False)
    found = read_back(publisher)
    assert same_bits(found["w"], tensor.cpu())
    assert same_bits(found["t"], tensor.t().cpu())
