"""Replayed placements on vLLM's real models: bit for bit what its loaders build, and summed as it was published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from loadtest.models.checkpoints import make_checkpoint
from loadtest.models.equality import bits, publish
from loadtest.models.kinds import make_kind
from loadtest.models.vllm_worker import Worker, worker
from tests.cpu import bf16_only, needs
from tests.weightsync.codes import refused
from weightsync import Publisher, SlotReader
from weightsync.errors import TensorError
from weightsync.format.fingerprint import combine
from weightsync.vllm_engine.device import cpu
from weightsync.vllm_engine.device.pacing import Unpaced
from weightsync.vllm_engine.kernels import CpuKind
from weightsync.vllm_engine.model import placement
from weightsync.vllm_engine.model.linear import pack_into
from weightsync.vllm_engine.model.placement import (
    Box,
    Rect,
    Watch,
    box_of,
    build_skeleton,
    load_group,
    pair_made,
    pair_parameters,
)
from weightsync.vllm_engine.staging.bundle import BASE, PartOrder
from weightsync.vllm_engine.staging.bundle_stager import BundleStager
from weightsync.vllm_engine.staging.stager import Garbage, Rules, joined

pytestmark = pytest.mark.engine
SMALL = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 320, "head_dim": 16}
FAMILIES = {
    "qwen2": {},  # biases on q, k and v
    "qwen2 tied": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 1},  # norms of heads
    "qwen3 tied": {"family": "qwen3", "tie_word_embeddings": True},
    "llama": {"num_hidden_layers": 3},
    "llama padded": {"family": "llama", "vocab_size": 300},  # vLLM pads the vocabulary to 320
    "llama odd": {"family": "llama", "head_dim": 8, "intermediate_size": 176},  # rows that do not fill blocks
}


def checkpoint_of(path: Path, name: str, dtype: str) -> Path:
    shape: dict[str, Any] = {"family": name, **SMALL, **FAMILIES[name]}
    return make_checkpoint(path / f"{name}-{dtype}".replace(" ", "-"), dtype=dtype, **shape)


def tensors_of(checkpoint: Path, version: int = 0) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, or another version of them: random everywhere, biases and norms too."""
    from safetensors.torch import load_file

    found = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(version)
    return {n: torch.randn(t.shape, generator=generator).to(t.dtype) for n, t in found.items()}


def loaded(w: Worker, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every parameter as vLLM's own loader fills it."""
    reference = build_skeleton(w.vllm_config, w.vllm_config.model_config, torch.device("cpu"))
    load_group(reference, tensors.items())
    return {name: parameter.data for name, parameter in reference.named_parameters(remove_duplicate=False)}


def assert_built(w: Worker, data: torch.Tensor, raw: dict[str, torch.Tensor]) -> None:
    for entry in w.stager._builder.layout.entries:
        if entry.packed:
            expected = torch.empty_like(raw[entry.source])
            pack_into(expected, raw[entry.source], entry.lanes)
        else:
            expected = raw[entry.source].to(getattr(torch, entry.dtype))
        assert torch.equal(bits(entry.view(data)), bits(expected)), entry


# oneDNN multiplies bf16 with AVX-512.
KERNELS = [pytest.param("packed", marks=bf16_only), pytest.param("private", marks=needs(CpuKind.AVX512)), "plain"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_replay_builds_what_the_loader_builds(
    name: str, kernel: str, tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSWAP_LINEAR_KERNEL", kernel)
    checkpoint = checkpoint_of(tmp_path, name, "bfloat16")
    with worker(checkpoint) as w:
        for version in range(2):  # the second is a replay of what the first one learnt
            tensors = tensors_of(checkpoint, version)
            record = publish(publisher, tensors)
            generation = w.stage(record)
            assert kernel in w.stager._builder.layout.kernels.values()
            assert_built(w, generation.slot.data, loaded(w, tensors))
            assert combine([w.stager.report.sums]) == record.fingerprint
            generation.release()


@pytest.mark.parametrize(
    ("stored", "served"),
    [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")],
)
def test_other_types(stored: str, served: str, tmp_path: Path, publisher: Publisher) -> None:
    checkpoint = checkpoint_of(tmp_path, "qwen2", stored)
    tensors = tensors_of(checkpoint)
    record = publish(publisher, tensors)
    with worker(checkpoint, dtype=served) as w:
        generation = w.stage(record)
        assert_built(w, generation.slot.data, loaded(w, tensors))
        assert combine([w.stager.report.sums]) == record.fingerprint
        generation.release()


def test_not_a_number_keeps_its_bits(tmp_path: Path, publisher: Publisher) -> None:
    checkpoint = checkpoint_of(tmp_path, "qwen2", "bfloat16")
    tensors = tensors_of(checkpoint)
    bias = tensors["model.layers.0.self_attn.q_proj.bias"]
    signalling, with_payload = 0x7F81, 0x7FC1
    bias.view(torch.int16)[:2] = torch.tensor([signalling, with_payload], dtype=torch.int16)
    record = publish(publisher, tensors)
    with worker(checkpoint, rules=Rules(allow_non_finite=True)) as w:
        w.stage(record).release()
        assert combine([w.stager.report.sums]) == record.fingerprint


def fingerprint(w: Worker, reader: SlotReader, data: torch.Tensor) -> str:
    """Of what lies in a layout slot, and of the layers that a kernel keeps to itself."""
    builder = w.stager._builder
    private = builder.build(reader, None, lambda _: None).sums() if builder.has_private else {}
    return combine([joined(builder.check(reader, data), private)])


@pytest.mark.parametrize(
    ("make", "experts"),
    [
        (lambda path: checkpoint_of(path, "qwen2", "bfloat16"), 0),
        (lambda path: make_kind(path, "moe", num_experts=16), 2),
    ],
    ids=["dense", "packed experts"],
)
def test_a_byte_that_flips_in_the_layout_slot_is_found(
    make: Callable[[Path], Path], experts: int, tmp_path: Path, publisher: Publisher
) -> None:
    """`experts`: the views of a layer on all of its experts together."""
    checkpoint = make(tmp_path / "m")
    record = publish(publisher, tensors_of(checkpoint))
    with worker(checkpoint) as w, SlotReader.open(record.slot) as reader:
        generation = w.stage(record)
        data = generation.slot.data

        def sound() -> bool:
            try:
                return fingerprint(w, reader, data) == record.fingerprint
            except TensorError as error:  # of a tensor that lies in two places, one differs
                assert error.code == "checksum_mismatch"  # noqa: PT017
                return False

        layout = w.stager._builder.layout
        middles = {path: (view.offset + view.end) // 2 for path, view in layout.views.items() if "experts" in path}
        assert len(middles) == experts * w.vllm_config.model_config.hf_config.num_hidden_layers
        middles |= {entry.source: entry.offset + entry.nbytes // 2 for entry in layout.entries}
        assert sound()
        for name, middle in middles.items():
            data[middle] ^= 4
            assert not sound(), name
            data[middle] ^= 4
        assert sound()
        generation.release()


def test_a_wrong_copy_is_named(tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The published bytes are sound, what is built from them is not."""
    checkpoint = checkpoint_of(tmp_path, "llama", "bfloat16")
    record = publish(publisher, tensors_of(checkpoint))
    copy = cpu.np.copyto

    def lossy(target: Any, source: Any) -> None:
        copy(target, source)
        target[0, 1] ^= 1

    with worker(checkpoint) as w:
        monkeypatch.setattr(cpu.np, "copyto", lossy)
        with pytest.raises(AssertionError, match="checksum_mismatch"):
            w.stage(record)


# watching loaders of other kinds ----------------------------------------------------------------------------------


class Loader(torch.nn.Module):
    """A model with one parameter, whose loader is the test's."""

    def __init__(self, load: Any) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self._load = load

    def load_weights(self, tensors: Any) -> set[str]:
        for name, tensor in tensors:
            self._load(self.w, name, tensor)
        return {"w"}


def watch(load: Any, **tensors: torch.Tensor) -> placement.Placement:
    twin = Loader(load)
    watching = Watch({"w": twin.w}, tensors)
    with watching.group(list(tensors)):
        watching.filled |= twin.load_weights(watching.feed(tensors))
    assert not twin.w.any() or "w" in watching.placement().opaque
    return watching.placement()


def test_fused_and_sliced_rectangles() -> None:
    def load(w: torch.nn.Parameter, name: str, tensor: torch.Tensor) -> None:
        w.data.narrow(0, 4 if name == "b" else 0, 2 if name == "b" else 4).copy_(tensor.narrow(1, 4, 4))

    found = watch(load, a=torch.ones(4, 8), b=torch.ones(2, 8))
    assert found.rects["w"] == (
        Rect(Box(0, 0, 4, 4), Box(0, 4, 4, 4), "a"),
        Rect(Box(4, 0, 2, 4), Box(0, 4, 2, 4), "b"),
    )
    assert not found.opaque
    assert found.unused == ()


@pytest.mark.parametrize(
    "load",
    [
        lambda w, _, t: w.data.copy_(t * 2),
        lambda w, _, t: w.data.copy_(t).mul_(2),
        lambda w, _, t: w.data.t().copy_(t.t()),
        lambda w, _, t: w.data.copy_(t.flip(0)),
        lambda w, _, t: (w.data[:4].copy_(t[:4]), w.data[2:].copy_(t[2:])),
        lambda w, _, t: (w.data.copy_(t), w.data[0].fill_(3)),
    ],
    ids=["arithmetic", "arithmetic in place", "transposed", "intermediate", "overlapping", "constant over a copy"],
)
def test_what_is_not_a_copy_is_opaque(load: Any) -> None:
    found = watch(load, a=torch.ones(6, 4))
    assert found.opaque == {"w": ("a",)}
    assert found.unused == ("a",)


def test_padding_is_noted() -> None:
    found = watch(lambda w, _, t: (w.data[:5].copy_(t), w.data[5:].fill_(0)), a=torch.ones(5, 4))
    assert found.constants == {"w": ((Box(5, 0, 1, 4), 0.0),)}


def test_a_gap_is_a_missing_tensor() -> None:
    with refused("missing_tensor", match="'w'"):
        watch(lambda w, _, t: w.data[:5].copy_(t), a=torch.ones(5, 4))


def test_a_loader_that_changes_what_it_reads_is_refused() -> None:
    with refused("unsupported_model", "changes the tensor 'a'"):
        watch(lambda w, _, t: w.data.copy_(t.mul_(2)), a=torch.ones(6, 4))


def test_boxes() -> None:
    base = torch.zeros(6, 4)
    assert box_of(base, base) == Box(0, 0, 6, 4)
    assert box_of(base[2:5, 1:3], base) == Box(2, 1, 3, 2)
    assert box_of(base[1], base) == Box(1, 0, 1, 4)
    assert box_of(base[:, 2], base) == Box(0, 2, 6, 1)
    assert box_of(base[3, 1], base) == Box(3, 1, 1, 1)
    assert box_of(base[::2], base) is None
    assert box_of(base.t(), base) is None
    assert box_of(base[:, ::2], base) is None
    cube = torch.zeros(2, 3, 4)
    assert box_of(cube[1], cube) == Box(3, 0, 3, 4)
    assert box_of(cube[:, :, :2], cube) == Box(0, 0, 6, 2)
    assert box_of(torch.zeros(8)[2:5], torch.zeros(8)) is None


def test_a_staging_that_is_stopped_ends_with_the_next_piece_and_can_be_begun_again(
    tmp_path: Path, publisher: Publisher
) -> None:
    checkpoint = checkpoint_of(tmp_path, "qwen2", "bfloat16")
    first, later = (publish(publisher, {n: t * by for n, t in tensors_of(checkpoint).items()}) for by in (1, 2))
    pieces: list[int] = []

    class Told(Unpaced):
        pace: Callable[[int], None]

        def __call__(self, nbytes: int) -> None:
            self.pace(nbytes)

    def never(_: int) -> None:
        pytest.fail("nobody is served before the first version: there is nothing to give way to")

    with worker(checkpoint) as w:
        stager = BundleStager(w.stager, SimpleNamespace(), torch.device("cpu"))

        def stop(nbytes: int) -> None:
            pieces.append(nbytes)
            stager.stop()

        w.stager._pacer = pacer = Told()
        for pacer.pace, record in ((never, first), (stop, later), (pieces.append, later)):
            orders = [PartOrder(BASE, record.version, record.slot, record.manifest_digest)]
            stager.start(record.version, orders, None, [], Garbage([], []))
            stager.wait()
            if pacer.pace is stop:
                assert stager.report.error is not None
                assert (stager.report.error["code"], stager.bundle, len(pieces)) == ("staging_cancelled", None, 1)
            else:
                assert stager.report.error is None
        assert combine([stager.report.to_dict()["sums"]]) == record.fingerprint
        stager.take().pieces[BASE].generation.release()


def test_what_was_built_without_looking_for_nan_is_not_taken_by_who_looks(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two instances of one host share slots, and one of them was started with --allow-non-finite."""
    monkeypatch.setenv("HOTSWAP_LINEAR_KERNEL", "plain")  # nothing is private: a slot that is there is taken as it is
    checkpoint = checkpoint_of(tmp_path, "llama", "float32")
    tensors = tensors_of(checkpoint)
    tensors["model.layers.1.self_attn.v_proj.weight"][3, 3] = torch.nan
    record = publish(publisher, tensors)
    with (
        worker(checkpoint, dtype="float32", rules=Rules(allow_non_finite=True)) as lenient,
        worker(checkpoint, dtype="float32") as strict,
    ):
        assert lenient.stage(record).slot.built
        with pytest.raises(AssertionError, match="not_finite"):
            strict.stage(record)
        assert strict.stager.report.error is not None
        assert strict.stager.report.error["tensor"] == "model.layers.1.self_attn.v_proj.weight"


def test_parameters_that_a_loader_adds_are_found_in_whatever_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.newline = nn.Parameter(torch.zeros(2))
            self.head = nn.Linear(2, 2, bias=False)

    live, twin = Model(), Model()
    pairs = pair_parameters(live, twin)
    assert not pair_made(pairs)
    twin.head.bias = nn.Parameter(torch.zeros(2))
    (made,) = pair_made(pairs)
    assert (made.name, made.live, made.required, made.made) == ("head.bias", live.head, False, True)
