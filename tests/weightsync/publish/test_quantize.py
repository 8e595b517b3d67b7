"""Quantised checkpoints: what they stand for is close to what was quantised, and what stays is untouched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.weightsync.codes import refused
from weightsync.format.manifest import Schema
from weightsync.publish import quantize
from weightsync.publish.checkpoint import Checkpoint
from weightsync.publish.publisher import as_schema
from weightsync.publish.quantize import Quantizer, Scheme, pack_nibbles

NAME = "model.layers.0.mlp.up_proj.weight"


def quantized(quantizer: Quantizer, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(quantizer.tensors([(NAME, weight)]))


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The 0..15 of a packed [rows, columns / 8], lowest bits first."""
    wide = packed.long() & 0xFFFFFFFF
    return torch.stack([(wide >> (4 * i)) & 15 for i in range(8)], dim=-1).flatten(1)


def test_int8_is_within_half_a_step_of_each_channel() -> None:
    weight = torch.randn(16, 64).bfloat16() * torch.logspace(-3, 3, 16)[:, None].bfloat16()
    found = quantized(Quantizer("int8"), weight)
    assert found.keys() == {NAME, f"{NAME}_scale"}
    assert found[NAME].dtype is torch.int8
    scale = found[f"{NAME}_scale"]
    assert scale.shape == (16, 1)
    assert ((found[NAME].float() * scale - weight.float()).abs() <= scale * 0.5001).all()
    assert (found[NAME].abs().amax(1) == 127).all()


@pytest.mark.parametrize("shape", [(128, 256), (130, 200)])
def test_fp8_has_a_scale_per_block(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).bfloat16()
    found = quantized(Quantizer("fp8"), weight)
    assert found.keys() == {NAME, f"{NAME}_scale_inv"}
    scale = found[f"{NAME}_scale_inv"]
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    # e4m3 has three bits of mantissa: within a sixteenth, and within its smallest step near zero
    error = (found[NAME].float() * wide - weight.float()).abs()
    assert (error <= weight.float().abs() / 16 + wide * 2**-9).all()


def test_w4a16_is_within_half_a_step_of_each_group() -> None:
    weight = torch.randn(8, 128).bfloat16()
    found = quantized(Quantizer("w4a16", group_size=32), weight)
    assert found[f"{NAME}_shape"].tolist() == [8, 128]
    scale = found[f"{NAME}_scale"]
    assert scale.shape == (8, 4)
    assert scale.dtype is torch.bfloat16
    wide = scale.float().repeat_interleave(32, 1)
    restored = (nibbles(found[f"{NAME}_packed"]) - 8) * wide
    assert ((restored - weight.float()).abs() <= wide * 0.51 + 8 * wide * 2**-8).all()  # and the scale is rounded


def test_groups_that_do_not_divide_are_refused_by_name() -> None:
    with refused("quantization_error", match=rf"{NAME}: its 96 columns do not divide into groups of 64"):
        quantized(Quantizer("w4a16", group_size=64), torch.randn(8, 96))
    with refused("quantization_error", match=NAME):
        Quantizer("w4a16", group_size=64).schema(as_schema([(NAME, "bfloat16", (8, 96))]))


@pytest.mark.parametrize("scheme", ["int8", "fp8", "w4a16"])
def test_routers_norms_embeddings_and_the_head_stay(scheme: Scheme) -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight"]
    tensors = [(name, torch.randn(128, 128)) for name in names]
    assert [(n, t is own) for (n, t), (_, own) in zip(Quantizer(scheme).tensors(tensors), tensors, strict=True)] == [
        (name, True) for name in names
    ]


def test_a_weight_of_zeros_stays_zero() -> None:
    for scheme in ("int8", "fp8"):
        found = quantized(Quantizer(scheme), torch.zeros(128, 128))  # type: ignore[arg-type]
        assert not found[NAME].float().any()
        assert all(tensor.float().isfinite().all() for tensor in found.values())


def test_nibbles_are_packed_in_the_order_asked_for() -> None:
    values = torch.arange(16).view(2, 8)
    assert torch.equal(nibbles(pack_nibbles(values)), values)
    assert nibbles(pack_nibbles(values, (7, 6, 5, 4, 3, 2, 1, 0))).tolist() == values.flip(1).tolist()


MODEL = {
    "model.embed_tokens.weight": (512, 96),
    "model.layers.0.mlp.gate.weight": (4, 96),
    "model.layers.0.mlp.up_proj.weight": (288, 96),
    "model.layers.0.mlp.down_proj.weight": (96, 288),
    "model.layers.0.self_attn.q_proj.bias": (96,),
    "model.layers.1.mlp.up_proj.weight": (40, 96),
    "model.norm.weight": (96,),
}
FORMS = [
    Quantizer("int8"),
    Quantizer("int8", scale_dtype="bfloat16"),
    Quantizer("fp8"),
    Quantizer("fp8", block=32, scale_dtype="bfloat16"),
    Quantizer("w4a16", group_size=32),
    Quantizer("w4a16", group_size=96, keep=(*quantize.KEPT, "layers.1.")),
]


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in MODEL.items()}


def schema_of(tensors: dict[str, torch.Tensor]) -> Schema:
    return as_schema([(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()])


@pytest.mark.parametrize("quantizer", FORMS, ids=str)
def test_a_served_models_schema_says_how_it_was_quantised(quantizer: Quantizer) -> None:
    made = dict(quantizer.tensors(model().items()))
    assert quantizer.schema(schema_of(model())) == schema_of(made)
    again = dict(Quantizer.like(schema_of(made)).tensors(model().items()))
    assert schema_of(again) == schema_of(made)
    assert all(torch.equal(again[name].view(torch.uint8), made[name].view(torch.uint8)) for name in made)


@pytest.mark.parametrize("quantizer", FORMS, ids=str)
def test_vllm_leaves_those_modules_as_they_are_that_are_not_quantised(quantizer: Quantizer) -> None:
    """As its own classes read the configuration. vLLM looks for the scales of a router that is not left out."""
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    config = quantizer.config(model())
    read: Any = get_quantization_config(config["quant_method"]).from_config(config)
    for module in ("layers.0.mlp.gate", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj", "layers.1.mlp.up_proj"):
        name = f"model.{module}"
        left = (
            is_layer_skipped(name, read.ignored_layers)
            if quantizer.scheme == "fp8"
            else should_ignore_layer(name, read.ignore)
        )
        assert left != quantizer.quantizes(f"{name}.weight", model()[f"{name}.weight"])


def test_what_is_not_quantised_or_otherwise_says_so() -> None:
    served = schema_of(model())
    per_tensor = served.tensors | as_schema([(NAME, "float8_e4m3fn", (8, 8)), (f"{NAME}_scale", "float32", ())]).tensors
    first, second = (Quantizer("int8", keep=(*quantize.KEPT, f"layers.{i}.")) for i in (0, 1))
    mixed = dict(first.tensors(model().items()))
    mixed |= {
        n: t for n, t in replace(second, scheme="w4a16", group_size=32).tensors(model().items()) if "layers.0" in n
    }
    for schema, problem in (
        (None, "no weights in"),
        (served, "no weights in"),
        (Schema(per_tensor), "each square block"),
        (schema_of(mixed), "int8 per channel and w4a16 in groups of 32"),
    ):
        with refused("quantization_error", match=problem):
            Quantizer.like(schema)


@pytest.mark.parametrize("quantizer", FORMS, ids=str)
def test_a_large_matrix_is_quantised_some_rows_at_a_time(quantizer: Quantizer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dict(quantizer.tensors(model().items()))
    monkeypatch.setattr(quantize, "_AT_ONCE", 96 * 40)
    parts = dict(quantizer.tensors(model().items()))
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name].view(torch.uint8), whole[name].view(torch.uint8)) for name in whole)


def checkpoint(directory: Path) -> Path:
    """Two files with an index, and a tokenizer; the index passes over what is older."""
    directory.mkdir()
    names = list(MODEL)
    files = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    older = {name: torch.zeros_like(tensor) for name, tensor in model().items()}
    save_file(older, directory / "model.safetensors")
    for file, mine in files.items():
        save_file(older | {name: model()[name].float() for name in mine}, directory / file)
    home = {name: file for file, mine in files.items() for name in mine}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    (directory / "config.json").write_text(json.dumps({"hidden_size": 96, "torch_dtype": "float32"}))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_a_checkpoint_is_quantised_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = checkpoint(tmp_path / "source"), tmp_path / "target"
    options = ["--scheme", "w4a16", "--group-size", "32"]
    monkeypatch.setattr("sys.argv", ["quantize", str(source), str(target), *options])
    assert quantize.main() == 0
    quantizer = Quantizer("w4a16", group_size=32)
    expected = dict(quantizer.tensors(model().items()))
    found = {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert Checkpoint(target).schema == schema_of(expected)  # which reads the index
    config = json.loads((target / "config.json").read_text())
    assert config == {"hidden_size": 96, "dtype": "bfloat16", "quantization_config": quantizer.config(model())}
    assert (target / "tokenizer.json").read_text() == "{}"


def test_what_cannot_be_quantised_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, full = checkpoint(tmp_path / "source"), checkpoint(tmp_path / "full")
    quantised = checkpoint(tmp_path / "quantised")
    (quantised / "config.json").write_text('{"quantization_config": {}}')
    for arguments, said in (
        ([source, tmp_path / "new", "--scheme", "w4a16"], "do not divide into groups of 128"),
        ([tmp_path / "none", tmp_path / "new", "--scheme", "int8"], "no such file or directory"),
        ([quantised, tmp_path / "new", "--scheme", "int8"], "is quantised already"),
        ([source, full, "--scheme", "int8"], "is not empty"),
    ):
        monkeypatch.setattr("sys.argv", ["quantize", *map(str, arguments)])
        assert quantize.main() == 1
        assert said in capsys.readouterr().err
        assert not (tmp_path / "new").exists()
