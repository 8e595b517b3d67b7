"""Quantised weights as checkpoints hold them: a trainer makes them from its bf16 export and publishes them.

The form is the one of compressed-tensors and DeepSeek checkpoints, which no kernel's layout has entered yet: the server
packs it for its own kernels. Quantise from the bf16 export, never from fp32 master weights: the policy that is trained
is the one in bf16, and the rounding of the masters is not the rounding of what the trainer runs.

Routers, norms, embeddings and the head stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Scheme = Literal["int8", "fp8", "w4a16"]
FP8_MAX = 448.0  # of float8_e4m3fn
KEPT = ("embed", "lm_head", "norm", ".gate.weight", "router")
_TINY = 1e-8


@dataclass(frozen=True)
class Quantizer:
    """Quantises the linear layers of a model.

    int8: symmetric per output channel, activations per token (W8A8). fp8: e4m3 in blocks of `block` x `block`.
    w4a16: 4 bits, symmetric, groups of `group_size` along the inner dimension. `keep`: parts of the names of tensors
    that stay as they are.
    """

    scheme: Scheme
    group_size: int = 128
    block: int = 128
    keep: tuple[str, ...] = field(default=KEPT)

    def quantizes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether this tensor is the weight of a linear layer that the scheme covers."""
        return name.endswith(".weight") and tensor.ndim == 2 and not any(part in name for part in self.keep)

    def tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the checkpoint's tensors, quantised. Raises ValueError where a matrix does not divide into groups."""
        for name, tensor in tensors:
            if not self.quantizes(name, tensor):
                yield name, tensor
            elif self.scheme == "int8":
                yield from _int8(name, tensor)
            elif self.scheme == "fp8":
                yield from _fp8(name, tensor, self.block)
            else:
                yield from _w4a16(name, tensor, self.group_size)

    def config(self, ignore: Iterable[str] = ("lm_head", "re:.*mlp.gate$")) -> dict[str, Any]:
        """The `quantization_config` of the model's config.json."""
        if self.scheme == "fp8":
            block = [self.block, self.block]
            return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block, "fmt": "e4m3"}
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
            "ignore": list(ignore),
            "config_groups": {"group_0": groups},
        }


def _int8(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    wide = weight.float()
    scale = (wide.abs().amax(1, keepdim=True) / 127).clamp(min=_TINY)
    yield name, (wide / scale).round().clamp(-127, 127).to(torch.int8)
    yield f"{name}_scale", scale


def _fp8(name: str, weight: torch.Tensor, block: int) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % block, 0, -rows % block))
    blocks = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)
    scale = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp(min=_TINY)
    quantized = (blocks / scale[:, None, :, None]).view(padded.shape)[:rows, :cols]
    yield name, quantized.to(torch.float8_e4m3fn).contiguous()
    yield f"{name}_scale_inv", scale


def _w4a16(name: str, weight: torch.Tensor, group: int) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    rows, cols = weight.shape
    if cols % group or cols % 8:
        raise ValueError(f"{name}: its {cols} columns do not divide into groups of {group}; choose another group size")
    grouped = weight.float().view(rows, cols // group, group)
    scale = (grouped.abs().amax(-1, keepdim=True) / 7).clamp(min=_TINY)
    nibbles = ((grouped / scale).round() + 8).clamp(0, 15).to(torch.int64).view(rows, cols)
    yield f"{name}_packed", pack_nibbles(nibbles)
    yield f"{name}_scale", scale[..., 0].to(weight.dtype)
    yield f"{name}_shape", torch.tensor(weight.shape, dtype=torch.int64)


def pack_nibbles(values: torch.Tensor, order: Iterable[int] = range(8)) -> torch.Tensor:
    """Pack [rows, columns] of 0..15 into int32 [rows, columns / 8], the first of `order` in the lowest bits."""
    import torch

    parts = values.view(values.shape[0], -1, 8)
    packed = torch.zeros(parts.shape[:2], dtype=torch.int64)
    for shift, column in enumerate(order):
        packed |= parts[:, :, column].long() << (4 * shift)
    return torch.where(packed < 2**31, packed, packed - 2**32).to(torch.int32)
