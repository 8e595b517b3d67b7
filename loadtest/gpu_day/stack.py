"""A model of plain layers in the shape of Llama, fused as vLLM fuses it, and the values that a version gives it.

Its values follow from a version's number and a tensor's name, so a version can be made again anywhere and compared byte
by byte, without being kept. There is no attention: keys and values are added to the queries, so that every weight has a
part in every output.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

DTYPE = torch.bfloat16
RMS_EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sizes; `kv` of all key heads together. `tied`: the head is the embedding, and not published."""

    layers: int
    hidden: int
    inner: int
    kv: int
    vocab: int
    tied: bool = False

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in parts(self))

    def fitted(self, nbytes: int, copies: float) -> Shape:
        """This one, or with as many layers as go into `nbytes` so many times."""
        shape = self
        while shape.layers > 1 and shape.nbytes * copies > nbytes:
            shape = replace(shape, layers=shape.layers - 1)
        return shape


LLAMA_8B = Shape(32, 4096, 14336, 1024, 128256)
SMALL = Shape(2, 64, 128, 32, 256)


@dataclass(frozen=True)
class Part:
    """One published tensor: rows of a parameter, or a buffer."""

    name: str
    target: str
    shape: tuple[int, ...]
    row: int = 0
    dtype: torch.dtype = DTYPE

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where it lies in its target."""
        return tensor[self.row : self.row + self.shape[0]]

    def value(self, version: int, device: torch.device) -> torch.Tensor:
        """The tensor's value in `version`: the same on every call, on devices of one kind."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{version}/{self.name}".encode()))
        drawn = torch.randn(self.shape, generator=generator, dtype=self.dtype, device=device)
        if len(self.shape) == 1:
            return drawn.mul_(0.1).add_(1.0)
        return drawn.mul_(self.shape[1] ** -0.5)


def parts(shape: Shape) -> Iterator[Part]:
    """Everything that a version publishes."""
    hidden, inner, kv = shape.hidden, shape.inner, shape.kv
    yield Part("embed", "embed.weight", (shape.vocab, hidden))
    for i in range(shape.layers):
        at = f"layers.{i}."
        yield Part(f"{at}q", f"{at}qkv.weight", (hidden, hidden))
        yield Part(f"{at}k", f"{at}qkv.weight", (kv, hidden), hidden)
        yield Part(f"{at}v", f"{at}qkv.weight", (kv, hidden), hidden + kv)
        yield Part(f"{at}o", f"{at}o.weight", (hidden, hidden))
        yield Part(f"{at}gate", f"{at}gate_up.weight", (inner, hidden))
        yield Part(f"{at}up", f"{at}gate_up.weight", (inner, hidden), inner)
        yield Part(f"{at}down", f"{at}down.weight", (hidden, inner))
        yield Part(f"{at}norm1", f"{at}norm1.weight", (hidden,))
        yield Part(f"{at}norm2", f"{at}norm2.weight", (hidden,))
        yield Part(f"{at}scale", f"{at}scale", (1,), dtype=torch.float32)
    yield Part("norm", "norm.weight", (hidden,))
    if not shape.tied:
        yield Part("head", "head.weight", (shape.vocab, hidden))


class Weight(nn.Module):
    """One parameter."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=DTYPE, device=device), requires_grad=False)


class Layer(nn.Module):
    """`scale` is a buffer that checkpoints fill."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        hidden, inner, kv = shape.hidden, shape.inner, shape.kv
        self._kv = kv
        self.norm1, self.norm2 = Weight((hidden,), device), Weight((hidden,), device)
        self.qkv, self.o = Weight((hidden + 2 * kv, hidden), device), Weight((hidden, hidden), device)
        self.gate_up, self.down = Weight((2 * inner, hidden), device), Weight((hidden, inner), device)
        self.register_buffer("scale", torch.zeros(1, dtype=torch.float32, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.shape[-1]
        q, k, v = functional.linear(_norm(x, self.norm1), self.qkv.weight).split([hidden, self._kv, self._kv], -1)
        x = x + functional.linear(q + (k + v).repeat(1, hidden // self._kv), self.o.weight)
        gate, up = functional.linear(_norm(x, self.norm2), self.gate_up.weight).chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, self.down.weight) * self.scale.to(x.dtype)


class Stack(nn.Module):
    """`table` is a buffer that no checkpoint has. Its weights are zero until a version is loaded or committed."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        self.embed = Weight((shape.vocab, shape.hidden), device)
        self.layers = nn.ModuleList(Layer(shape, device) for _ in range(shape.layers))
        self.norm = Weight((shape.hidden,), device)
        self.head = Weight((shape.vocab if not shape.tied else 0, shape.hidden), device)
        if shape.tied:
            self.head.weight = self.embed.weight
        self.register_buffer("table", torch.ones(3, device=device), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = functional.embedding(tokens, self.embed.weight)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(_norm(x, self.norm), self.head.weight)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that versions fill, by name; a tied one once."""
        return {n: t.data for n, t in [*self.named_parameters(), *self.named_buffers()] if n != "table"}

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As vLLM's models take a checkpoint's tensors; returns what was filled."""
        own, placed = self.tensors(), {part.name: part for part in parts(self.shape)}
        filled = set()
        for name, tensor in tensors:
            part = placed[name]
            part.of(own[part.target]).copy_(tensor)
            filled.add(part.target)
        return filled

    def load(self, version: int) -> None:
        self.load_weights((part.name, part.value(version, self.norm.weight.device)) for part in parts(self.shape))

    def clear(self) -> None:
        for tensor in self.tensors().values():
            tensor.zero_()

    def sums(self) -> torch.Tensor:
        """One exact number for each tensor, int64, on the device: nothing is waited for."""
        return torch.stack([t.view(torch.int16).sum(dtype=torch.int64) for t in self.tensors().values()])

    def wrong(self, version: int) -> list[str]:
        """Names of the published tensors whose bytes are not those of `version`."""
        own, device = self.tensors(), self.norm.weight.device
        return [
            part.name
            for part in parts(self.shape)
            if not torch.equal(
                part.of(own[part.target]).view(torch.int16), part.value(version, device).view(torch.int16)
            )
        ]


def _norm(x: torch.Tensor, norm: Weight) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), norm.weight, RMS_EPS)
