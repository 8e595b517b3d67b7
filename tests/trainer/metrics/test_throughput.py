"""Rates: lengths without padding, and a model's operations counted independently."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from trainer.batch import MASK, TOKENS, Sequence, collate
from trainer.megatron.hf_config import ModelShape, load_shape
from trainer.metrics.throughput import Throughput, flops_per_token, lengths, peak_flops, published_peak
from trainer.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(path, "llama", num_hidden_layers=3)
    return path


@pytest.fixture(scope="module")
def shape(llama: Path) -> ModelShape:
    return load_shape(llama)


def test_lengths_of_padded_rows_are_those_of_their_sequences() -> None:
    sequences = [Sequence((1, 2), (3, 4, 5)), Sequence((1,), (2,)), Sequence((1, 2, 3), (4,), train_on_prompt=True)]
    assert lengths(collate(sequences)).tolist() == [5, 2, 4]


def test_rows_that_only_fill_up_do_not_count() -> None:
    fields = collate([Sequence((1, 2), (3,))])
    padded = {name: torch.cat([t, torch.zeros_like(t)]) for name, t in fields.items()}
    assert lengths(padded).tolist() == [3]


def test_lengths_of_packed_rows_are_counted_by_segment() -> None:
    segments = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    fields = {TOKENS: torch.ones_like(segments), MASK: torch.ones(3, 5), "segments": segments}
    assert lengths(fields).tolist() == [3, 2, 1]


@pytest.mark.parametrize("frozen", [False, True])
def test_operations_are_those_of_the_models_matrix_products(llama: Path, shape: ModelShape, frozen: bool) -> None:
    """Counted by torch on transformers' model: 2 operations a multiply-add forward, three times that with backward. For
    frozen weights there are no gradients of their own, only those of what goes through them."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    length = 24
    model = AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager").requires_grad_(not frozen)
    inputs = torch.zeros(1, length, shape.hidden, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=inputs).logits.sum().backward()
    ours = flops_per_token(shape, length, frozen=frozen) * length
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.03)  # norms count in N, and are no products


def test_tied_embeddings_count_once_as_the_output_layer(shape: ModelShape) -> None:
    tied = dataclasses.replace(shape, tied=True)
    assert tied.parameters == shape.parameters - shape.vocab * shape.hidden
    assert flops_per_token(tied, 10) == flops_per_token(shape, 10)


def test_experts_that_a_token_does_not_take_do_not_count(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "mixtral", num_hidden_layers=2)
    mixture = load_shape(tmp_path)
    assert mixture.experts > mixture.experts_per_token > 0
    taken = dataclasses.replace(mixture, experts=mixture.experts_per_token)
    routers = 6 * mixture.layers * mixture.hidden * (mixture.experts - taken.experts)
    assert flops_per_token(mixture, 10) == flops_per_token(taken, 10) + routers


def test_utilisation_is_operations_by_time_ranks_and_peak(shape: ModelShape) -> None:
    fields = collate([Sequence((1, 2), (3, 4))] * 5)
    found = Throughput(shape, ranks=2, peak=1e12).metrics(fields, train_ms=100.0)
    assert found["train_tokens_per_s"] == 200
    per_s = flops_per_token(shape, 4) * 20 / 0.1
    assert found["mfu"] == pytest.approx(per_s / 2 / 1e12)
    assert found["train_tflops"] == pytest.approx(per_s / 2 / 1e12)
    twice = Throughput(shape, ranks=2, peak=1e12).metrics(fields, train_ms=100.0, passes=2)
    assert twice["mfu"] == pytest.approx(2 * found["mfu"])


def test_nothing_trained_gives_no_rate(shape: ModelShape) -> None:
    empty = {TOKENS: torch.zeros(2, 4, dtype=torch.int64), MASK: torch.zeros(2, 3)}
    assert Throughput(shape, 1, 1e12).metrics(empty, 10.0) == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
    ],
)
def test_a_gpu_is_not_taken_for_one_whose_name_begins_alike(name: str, peak: float | None) -> None:
    assert published_peak(name) == peak


def test_a_peak_is_found_for_this_machine(tmp_path: Path) -> None:
    assert 1e9 < peak_flops() < 1e16
    assert peak_flops() == peak_flops()
