"""Quantised weights as checkpoints hold them: a trainer makes them from its bf16 export and publishes them.

    quantizer = weightsync.Quantizer.like(publisher.schema())  # the form in which the model is served
    publisher.publish(quantizer.tensors(named_bf16_tensors))

The form is the one of compressed-tensors and DeepSeek checkpoints, which no kernel's layout has entered yet: the server
packs it for its own kernels. Quantise from the bf16 export, never from fp32 master weights: the policy that is trained
is the one in bf16, and the rounding of the masters is not the rounding of what the trainer runs.

Routers, norms, embeddings and the head stay as they are.

    python -m weightsync.publish.quantize SOURCE TARGET --scheme w4a16 --group-size 64

writes a checkpoint for a server to start with whose trainer publishes in that form.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from weightsync.errors import CheckpointError, PublishError, WeightSyncError
from weightsync.format.manifest import Schema, TensorSpec
from weightsync.publish.checkpoint import INDEX, Checkpoint

if TYPE_CHECKING:
    import torch

Scheme = Literal["int8", "fp8", "w4a16"]
FP8_MAX = 448.0  # of float8_e4m3fn
KEPT = ("embed", "lm_head", "norm", ".gate.weight", "shared_expert_gate", "router")
_BLOCKS = (128, 1024, 512, 256, 64, 32, 16)  # sizes that are looked for in a schema
_FP8, _PLAIN = "float8_e4m3fn", ("float32", "bfloat16", "float16")
_TINY = 1e-8
_AT_ONCE = 1 << 24  # elements: bounds the fp32 copies of a large matrix


@dataclass(frozen=True)
class Quantizer:
    """Quantises the linear layers of a model.

    int8: symmetric per output channel, activations per token (W8A8). fp8: e4m3 in blocks of `block` x `block`.
    w4a16: 4 bits, symmetric, groups of `group_size` along the inner dimension. `keep`: parts of the names of tensors
    that stay as they are. `scale_dtype`: of the scales, if not float32 (int8, fp8) or the weight's own (w4a16).
    """

    scheme: Scheme
    group_size: int = 128
    block: int = 128
    keep: tuple[str, ...] = field(default=KEPT)
    scale_dtype: str | None = None

    @classmethod
    def like(cls, schema: Schema | None) -> Quantizer:
        """The quantizer that makes such tensors as a served model has (`Publisher.schema()`).

        Raises PublishError when they are not quantised, or in a form that this class does not make.
        """
        tensors = schema.tensors if schema is not None else {}
        block = _block(tensors)
        found = {form for name in tensors if (form := _form(tensors, name, block))}
        if len(found) != 1:
            has = " and ".join(sorted(map(str, found))) or "no weights in int8 per channel, fp8 blocks or 4-bit groups"
            raise PublishError(
                f"the served model has {has}: publish its tensors as they are", code="quantization_error"
            )
        (quantizer,) = found
        extra = [n for n, s in tensors.items() if s.dtype in _PLAIN and quantizer._covers(n, s.shape)]
        return replace(quantizer, keep=(*KEPT, *extra))

    def __str__(self) -> str:
        """As it is called in messages."""
        size = {"int8": "per channel", "fp8": f"in blocks of {self.block}", "w4a16": f"in groups of {self.group_size}"}
        return f"{self.scheme} {size[self.scheme]}"

    def quantizes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether this tensor is the weight of a linear layer that the scheme covers."""
        return self._covers(name, tensor.shape)

    def tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the checkpoint's tensors, quantised, on the devices of those given, one after the other.

        Raises PublishError where a matrix does not divide into groups.
        """
        import torch

        for name, tensor in tensors:
            if not self.quantizes(name, tensor):
                yield name, tensor
                continue
            self._check(name, tensor)
            rows = max(_AT_ONCE // max(tensor.shape[1], 1) // self.block, 1) * self.block
            parts = [self._quantized(piece) for piece in tensor.split(rows)]
            for suffix in parts[0]:
                yield name + suffix, torch.cat([part[suffix] for part in parts])
            if self.scheme == "w4a16":
                yield f"{name}_shape", torch.tensor(tensor.shape, dtype=torch.int64)

    def schema(self, schema: Schema) -> Schema:
        """The tensors that come of a model's. Raises PublishError."""
        return Schema({n: s for name, spec in schema.tensors.items() for n, s in self._specs(name, spec)})

    def _specs(self, name: str, spec: TensorSpec) -> list[tuple[str, TensorSpec]]:
        if not self._covers(name, spec.shape):
            return [(name, spec)]
        self._check(name, spec)
        return [(name + suffix, made) for suffix, made in _made(replace(self, keep=()), spec)]

    def _covers(self, name: str, shape: Iterable[int]) -> bool:
        return name.endswith(".weight") and len(tuple(shape)) == 2 and not any(part in name for part in self.keep)

    def _check(self, name: str, tensor: TensorSpec | torch.Tensor) -> None:
        columns, group = tensor.shape[1], self.group_size
        if self.scheme == "w4a16" and (columns % group or columns % 8):
            problem = f"its {columns} columns do not divide into groups of {group}"
            message = f"{name}: {problem}; choose another group size"
            raise PublishError(message, code="quantization_error", tensor=name)

    def _quantized(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.scheme == "int8":
            return _int8(weight, self.scale_dtype)
        if self.scheme == "fp8":
            return _fp8(weight, self.block, self.scale_dtype)
        return _w4a16(weight, self.group_size, self.scale_dtype)

    def config(self, tensors: Mapping[str, TensorSpec | torch.Tensor]) -> dict[str, Any]:
        """The `quantization_config` of the model's config.json. `tensors`: the model's before they are quantised; the
        modules whose weights stay as they are, routers among them, are named in it, as vLLM quantises all others."""
        kept = [
            name.removesuffix(".weight")
            for name, tensor in tensors.items()
            if name.endswith(".weight") and len(tensor.shape) == 2 and not self._covers(name, tensor.shape)
        ]
        if self.scheme == "fp8":
            how: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
            return {**how, "weight_block_size": [self.block, self.block], "modules_to_not_convert": kept}
        common = {"type": "int", "symmetric": True, "dynamic": False}
        groups: dict[str, Any] = {"targets": ["Linear"]}
        if self.scheme == "int8":
            groups["weights"] = {"num_bits": 8, "strategy": "channel", **common}
            groups["input_activations"] = {"num_bits": 8, "strategy": "token", **common, "dynamic": True}
        else:
            groups["weights"] = {"num_bits": 4, "strategy": "group", "group_size": self.group_size, **common}
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if self.scheme == "int8" else "pack-quantized",
            "quantization_status": "compressed",
            "ignore": kept,
            "config_groups": {"group_0": groups},
        }


@functools.cache
def _made(quantizer: Quantizer, spec: TensorSpec) -> list[tuple[str, TensorSpec]]:
    """(what is added to the name, spec) of each tensor that a weight becomes: quantised without its numbers."""
    import torch

    weight = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
    made = quantizer.tensors([(".weight", weight)])
    return [
        (n.removeprefix(".weight"), TensorSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape))) for n, t in made
    ]


def _form(tensors: Mapping[str, TensorSpec], name: str, block: int) -> Quantizer | None:
    """How a tensor is quantised, if it is the weight of a layer that is."""
    spec, scale = tensors[name], tensors.get(f"{name.removesuffix('_packed')}_scale")
    if name.endswith(".weight_packed") and spec.dtype == "int32" and scale is not None and len(scale.shape) == 2:
        return Quantizer("w4a16", 8 * spec.shape[1] // max(scale.shape[1], 1), scale_dtype=scale.dtype)
    if name.endswith(".weight") and spec.dtype == "int8" and scale is not None:
        return Quantizer("int8", scale_dtype=scale.dtype)
    if name.endswith(".weight") and spec.dtype == _FP8 and (scale := tensors.get(f"{name}_scale_inv")) is not None:
        return Quantizer("fp8", block=block, scale_dtype=scale.dtype)
    return None


def _block(tensors: Mapping[str, TensorSpec]) -> int:
    """The size of the blocks of fp8 weights. If several would do, every weight is one block of any of them.

    Raises PublishError.
    """
    weights = [(name, spec) for name, spec in tensors.items() if spec.dtype == _FP8]
    for block in _BLOCKS:
        counts = {f"{name}_scale_inv": tuple(-(-size // block) for size in spec.shape) for name, spec in weights}
        if all(name in tensors and tensors[name].shape == count for name, count in counts.items()):
            return block
    raise PublishError(
        "the served model's fp8 weights do not have a scale for each square block: publish bf16",
        code="quantization_error",
    )


def _scale(largest: torch.Tensor, levels: float, dtype: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(the scale as it is stored, the same in fp32): weights are divided by what the server multiplies them with."""
    import torch

    scale = (largest / levels).clamp(min=_TINY)
    stored = scale if dtype is None else scale.to(getattr(torch, dtype))
    return stored, stored.float()


def _int8(weight: torch.Tensor, dtype: str | None) -> dict[str, torch.Tensor]:
    import torch

    wide = weight.float()
    stored, scale = _scale(wide.abs().amax(1, keepdim=True), 127, dtype)
    return {"": (wide / scale).round().clamp(-127, 127).to(torch.int8), "_scale": stored}


def _fp8(weight: torch.Tensor, block: int, dtype: str | None) -> dict[str, torch.Tensor]:
    import torch

    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % block, 0, -rows % block))
    blocks = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)
    stored, scale = _scale(blocks.abs().amax((1, 3)), FP8_MAX, dtype)
    quantized = (blocks / scale[:, None, :, None]).view(padded.shape)[:rows, :cols]
    return {"": quantized.to(torch.float8_e4m3fn).contiguous(), "_scale_inv": stored}


def _w4a16(weight: torch.Tensor, group: int, dtype: str | None) -> dict[str, torch.Tensor]:
    rows, cols = weight.shape
    grouped = weight.float().view(rows, cols // group, group)
    own = str(weight.dtype).removeprefix("torch.")
    stored, scale = _scale(grouped.abs().amax(-1), 7, dtype or own)
    nibbles = ((grouped / scale[..., None]).round() + 8).clamp(0, 15).view(rows, cols)
    return {"_packed": pack_nibbles(nibbles), "_scale": stored}


def pack_nibbles(values: torch.Tensor, order: Iterable[int] = range(8)) -> torch.Tensor:
    """Pack [rows, columns] of 0..15 into int32 [rows, columns / 8], the first of `order` in the lowest bits."""
    import torch

    parts = values.view(values.shape[0], -1, 8)
    packed = torch.zeros(parts.shape[:2], dtype=torch.int64, device=values.device)
    for shift, column in enumerate(order):
        packed |= parts[:, :, column].long() << (4 * shift)
    return torch.where(packed < 2**31, packed, packed - 2**32).to(torch.int32)


def quantize_checkpoint(source: Path, target: Path, quantizer: Quantizer) -> None:
    """Write the Hugging Face checkpoint in `source`, cast to bf16, quantised into `target`, one file at a time.

    Raises CheckpointError, PublishError.
    """
    import torch
    from safetensors.torch import load_file, save_file

    checkpoint = Checkpoint(source)  # and every file is whole
    schema = checkpoint.schema
    cast = Schema({name: replace(spec, dtype="bfloat16") for name, spec in schema.tensors.items()})
    total = quantizer.schema(cast).nbytes
    home: dict[str, str] = {}
    config = json.loads((source / "config.json").read_text())
    if "quantization_config" in config:
        raise CheckpointError(str(source), "is quantised already: pass the checkpoint that it was made of")
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(str(target), "is not empty: name another directory")
    target.mkdir(parents=True, exist_ok=True)
    for file, names in checkpoint.files().items():
        read = load_file(file)
        tensors = ((name, read[name].to(torch.bfloat16)) for name in names)
        made = {name: tensor.contiguous() for name, tensor in quantizer.tensors(tensors)}
        save_file(made, target / file.name, metadata={"format": "pt"})
        home |= dict.fromkeys(made, file.name)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX, "config.json"):
            shutil.copyfile(file, target / file.name)
    checkpoint.check()
    if (source / INDEX).exists():
        (target / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": home}, indent=1))
    about = {"dtype": "bfloat16", "quantization_config": quantizer.config(cast.tensors)}
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(config | about, indent=2))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m weightsync.publish.quantize", description="Quantise a checkpoint.")
    parser.add_argument("source", type=Path, help="a Hugging Face checkpoint directory")
    parser.add_argument("target", type=Path, help="an empty or missing directory")
    parser.add_argument("--scheme", required=True, choices=get_args(Scheme))
    parser.add_argument("--group-size", type=int, default=128, help="of w4a16 (128)")
    parser.add_argument("--block", type=int, default=128, help="of fp8 (128)")
    chosen = parser.parse_args()
    try:
        quantizer = Quantizer(chosen.scheme, chosen.group_size, chosen.block)
        quantize_checkpoint(chosen.source, chosen.target, quantizer)
    except (WeightSyncError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
