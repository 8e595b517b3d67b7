"""Processing that only moves words: recognised once, and then replayed without vLLM.

vLLM packs unquantised experts for its kernels, and leaves other weights as they were loaded. Such a layer is filled
like a plain one: each published word goes straight to its place in the layout slot, and is summed there. So the
checksum covers the bytes that the kernels read, and nothing is loaded and processed on the way.

A layer is recognised by what its processing makes of random words. It must be a known order of the words of one
parameter, and the scalars that processing sets must not depend on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightsync.vllm_engine.model.layout import Entry, View
from weightsync.vllm_engine.model.linear import ONEDNN_LANES, WORD, pack_into
from weightsync.vllm_engine.model.placement import as_matrix, matrix
from weightsync.vllm_engine.model.processing import Leaf

SHORT = 2  # bytes that stay together where a kernel reads single 16-bit weights
FINITE = 0x7F00  # 16-bit words below it are no NaN in any type


@dataclass(frozen=True)
class Move:
    """A tensor that has the words of the parameter `source`, in blocks of `lanes` rows; 0: in the same order.

    `word`: the bytes of a row that stay together.
    """

    source: str
    lanes: int
    word: int = WORD

    def entry(self, shape: tuple[int, ...], view: View) -> Entry:
        """Where it lies in the slot, as a matrix. `shape` is the parameter's."""
        return Entry(self.source, self.lanes, view.dtype, matrix(shape), view.offset, view.end - view.offset, self.word)


@dataclass(frozen=True)
class Moved:
    """A layer whose processing only moves words: {path of a running tensor: its move}, and the scalars that are set."""

    moves: dict[str, Move]
    scalars: dict[str, Any]

    def at(self, layer: str, other: str) -> Moved:
        """The same of another layer of this form."""

        def there(path: str) -> str:
            return other + path.removeprefix(layer)

        moves = {there(p): replace(move, source=there(move.source)) for p, move in self.moves.items()}
        return Moved(moves, {there(path): value for path, value in self.scalars.items()})


def random_words(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fill the tensors, and return copies."""
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        words = torch.randint(0, FINITE, (-(-tensor.nbytes // 2),), generator=generator, dtype=torch.int16)
        values = words.view(torch.uint8)[: tensor.nbytes].view(tensor.dtype)
        tensor.copy_(values.view(tensor.shape))
    return {name: tensor.clone() for name, tensor in tensors.items()}


def recognise(loaded: Mapping[str, torch.Tensor], leaves: Iterable[Leaf]) -> dict[str, Move] | None:
    """The move of each leaf, given what lay in the parameters before; None if one of them is something else."""
    found = {}
    for leaf in leaves:
        move = next((m for name, tensor in loaded.items() if (m := _move(name, tensor, leaf.made)) is not None), None)
        if move is None:
            return None
        found[leaf.path] = move
    return found


def _move(name: str, loaded: torch.Tensor, made: torch.Tensor) -> Move | None:
    if (loaded.dtype, loaded.numel()) != (made.dtype, made.numel()) or not made.is_contiguous():
        return None
    words = made.flatten().view(torch.uint8)
    if torch.equal(loaded.contiguous().flatten().view(torch.uint8), words):
        return Move(name, 0)
    rows, cols = matrix(loaded.shape)
    if loaded.device.type != "cpu" or cols * loaded.element_size() % (16 * WORD):
        return None
    per_matrix = loaded.shape[-2] if loaded.ndim > 1 else 1
    packed = torch.empty(rows, cols, dtype=loaded.dtype)
    for lanes, word in itertools.product(ONEDNN_LANES, (WORD, SHORT)):
        if per_matrix % lanes == 0 and SHORT <= loaded.element_size() <= word:
            pack_into(packed, as_matrix(loaded), lanes, word)
            if torch.equal(packed.flatten().view(torch.uint8), words):
                return Move(name, lanes, word)
    return None
